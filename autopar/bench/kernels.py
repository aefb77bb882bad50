"""Format measured kernels as a Markdown table."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.kernels.timing import FamilyTimes, Times


def table(rows: Sequence[FamilyTimes], device: str) -> str:
    """The rows as Markdown, with the device and versions they were measured on."""
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU, where the ops of each family run"
    head = (
        f"{name}, torch {torch.__version__}; us in the median, forward + backward\n\n"
        "| family | dtype | shape | kernel | ops | torch.compile | Liger | spread | of a copy's bandwidth "
        "| of a copy of as much | gain "
        "| MiB |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    return "\n".join([head, *map(line, rows)])


def line(row: FamilyTimes) -> str:
    """A row of the table."""
    shape = "x".join(map(str, row.shape))
    times = " | ".join(_told(t) for t in (row.kernel, row.ops, row.compiled, row.liger))
    shares = " | ".join(f"{forward:.2f}, {backward:.2f}" for forward, backward in (row.shares, row.of_copies))
    found = f"{row.kernel.spread:.1%} | {shares} | {row.gain:.2f} | {row.peak_bytes / 2**20:.0f}"
    return f"| {row.family} | {row.dtype} | {shape} | {times} | {found} |"


def _told(times: Times) -> str:
    if not math.isfinite(times.both):
        return "-"
    return f"{times.forward * 1e6:.1f}" + (f" + {times.backward * 1e6:.1f}" if times.backward else "")
