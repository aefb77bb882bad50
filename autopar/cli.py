"""The command line.

autopar calibrate --ranks 4 --mesh 2,2 -o profile.json        measure this machine on four processes of this command
torchrun --nproc-per-node 8 -m autopar calibrate ...           measure it in the job that torchrun starts
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from autopar.letters import BadCluster, BadSharding, Letter


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="autopar", description="An automatic-parallelism compiler for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    calibrate = commands.add_parser(
        "calibrate", help="measure devices and links while all ranks run, and write a profile for cluster="
    )
    calibrate.add_argument(
        "--ranks",
        type=int,
        help="start so many local processes; without it, be a rank of the job (torchrun), or a world of one",
    )
    calibrate.add_argument(
        "--mesh", help="the shape whose axes are measured, as 2,4; the world on one axis where it is left out"
    )
    calibrate.add_argument(
        "--pairs",
        action="store_true",
        help="measure every pair of ranks too, and print the mesh that has the fastest links innermost",
    )
    calibrate.add_argument("--largest", type=int, default=2**24, help="bytes of the largest message")
    calibrate.add_argument(
        "--without-ops",
        action="store_true",
        help=(
            "leave out the tables of ops and optimizers, which take a minute or two: ops are then priced by the "
            "device's rates"
        ),
    )
    calibrate.add_argument(
        "--into", default="", help="a cluster, by name or path, into which what is measured is put: h100-8x4"
    )
    calibrate.add_argument("-o", "--out", default="profile.json", help="where the profile goes")
    asked = parser.parse_args(arguments)
    try:
        if asked.ranks is not None and asked.ranks < 1:
            raise BadSharding(f"--ranks {asked.ranks} is no number of ranks")
        if not os.path.isdir(os.path.dirname(asked.out) or "."):
            raise BadCluster(f"there is no folder for {asked.out}")
        return _calibrate(asked)
    except Letter as e:
        print(e, file=sys.stderr)
        return 1


def _calibrate(asked: argparse.Namespace) -> int:
    # here, for start-up time: help and mistakes need no torch
    from autopar.calibrate.command import measure
    from autopar.runtime.world import start_world
    from autopar.testing.ranks import on_processes

    given = (asked.mesh, asked.largest, asked.pairs, asked.out, not asked.without_ops, asked.into)
    if asked.ranks is not None and "RANK" not in os.environ:
        text = on_processes(asked.ranks, measure, *given, timeout_s=1800.0)[0]
    else:
        start_world()
        text = measure(int(os.environ.get("RANK", "0")), *given)
    if text:
        print(text)
    return 0
