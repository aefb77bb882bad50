"""The table of measured kernels, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.kernels.timing import Row


def table(rows: Sequence[Row], device: str) -> str:
    """The rows as Markdown, under what they were measured on."""
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU, where the ops of each family run"
    head = (
        f"{name}, torch {torch.__version__}; us of forward and backward in the median\n\n"
        "| family | dtype | shape | kernel | ops | torch.compile | Liger | spread | of a copy's bandwidth | gain "
        "| MiB |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|"
    )
    return "\n".join([head, *map(line, rows)])


def line(row: Row) -> str:
    """A row of the table."""
    shape = "x".join(map(str, row.shape))
    all_ = row.kernel_s, row.ops_s, row.compiled_s, row.liger_s
    times = " | ".join(f"{s * 1e6:.1f}" if math.isfinite(s) else "-" for s in all_)
    found = f"{row.spread:.1%} | {row.share:.2f} | {row.gain:.2f} | {row.peak_bytes / 2**20:.0f}"
    return f"| {row.family} | {row.dtype} | {shape} | {times} | {found} |"
