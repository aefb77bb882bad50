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


# imports inside functions below are for start-up time: help and mistakes need no torch


def _calibrate(asked: argparse.Namespace) -> int:
    if asked.ranks is not None and "RANK" not in os.environ:
        from autopar.testing.ranks import on_processes

        text = on_processes(
            asked.ranks,
            measure,
            asked.mesh,
            asked.largest,
            asked.pairs,
            asked.out,
            not asked.without_ops,
            timeout_s=1800.0,
        )[0]
    else:
        from autopar.runtime.world import start_world

        start_world()
        text = measure(
            int(os.environ.get("RANK", "0")), asked.mesh, asked.largest, asked.pairs, asked.out, not asked.without_ops
        )
    if text:
        print(text)
    return 0


def measure(rank: int, shape: str | None, largest: int, with_pairs: bool, out: str, with_ops: bool = True) -> str:
    """Calibrate as one rank, and return the text that rank 0 prints."""
    import torch.distributed as dist

    from autopar.calibrate.calibration import SIZES, calibrate, pairs
    from autopar.calibrate.workloads import WORKLOADS
    from autopar.sharding.mesh import DeviceMesh
    from autopar.sharding.topology import logical_mesh

    try:
        mesh = DeviceMesh(tuple(map(int, shape.split(","))) if shape else dist.get_world_size())
    except ValueError:
        raise BadSharding(f"--mesh {shape} is not a shape", advice="--mesh 2,4") from None
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    cluster = calibrate(
        mesh,
        device,
        os.path.splitext(os.path.basename(out))[0],
        [s for s in SIZES if s <= largest] or SIZES[:2],
        workloads=WORKLOADS if with_ops else (),
    )
    tables = pairs(device) if with_pairs and mesh.size > 1 else None
    if rank:
        return ""
    cluster.save(out)
    lines = [
        f"{cluster.device.name}: "
        + ", ".join(f"{dtype} {rate:.3g} FLOP/s" for dtype, rate in cluster.device.flops_per_s)
        + f"; memory {cluster.device.memory_bytes_per_s:.3g} B/s; launch {cluster.device.launch_s:.2g} s"
    ]
    lines += [
        f"{m.kind:<15} of {m.size} ranks, {m.stride} apart: {m.latency_s:.3g} s + bytes / {m.bytes_per_s:.3g} B/s"
        for m in cluster.measured
    ]
    lines += [
        f"{len(cluster.timed)} ops and optimizers measured by size; compute hides {cluster.hidden:.0%} of a "
        "collective beside it"
    ]
    if tables:
        best = logical_mesh(*tables)
        lines.append(f"fastest links innermost: mesh {best.shape}, ranks {list(best.ranks) or 'in their order'}")
    return "\n".join([*lines, f'written to {out}: cluster="{out}"'])
