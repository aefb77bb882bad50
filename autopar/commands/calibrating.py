"""`autopar calibrate`: measure this machine."""

from __future__ import annotations

import argparse
import os

from autopar.calibrate.command import measure
from autopar.runtime.world import start_world
from autopar.testing.ranks import on_processes


def calibrate(asked: argparse.Namespace) -> int:
    """Measure this machine, on local processes or as a rank of a job."""
    given = (asked.mesh, asked.largest, asked.pairs, asked.out, not asked.without_ops, asked.into)
    if asked.ranks is not None and "RANK" not in os.environ:
        text = on_processes(asked.ranks, measure, *given, timeout_s=1800.0)[0]
    else:
        start_world()
        text = measure(int(os.environ.get("RANK", "0")), *given)
    if text:
        print(text)
    return 0
