"""Launches of kernels that take a row a program: forward, and a backward that adds up what all rows give to weights.

A row of up to MOST_COLUMNS is held in registers. One of up to ONE_PASS is, with what its backward adds up for a weight;
the gradients of wider weights are a second pass over columns, in `weights_kernel`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.kernels import backend
from autopar.kernels.backend import jit, tl

MOST_COLUMNS, ONE_PASS = 8192, 4096
COLUMNS, ROWS, WARPS = 128, 32, 4  # of a program of the second pass
_PARTS = 64  # into which the rows are divided there


@jit
def weights_kernel(
    DY, X, MEAN, ROOT, DW, DB, rows, columns, share, BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """What a share of the rows gives to some columns of the gradients of a weight and a bias."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    part = tl.program_id(1)
    dw = tl.zeros((COLUMNS,), tl.float32)
    db = tl.zeros((COLUMNS,), tl.float32)
    for start in range(part * share, min(rows, (part + 1) * share), ROWS):
        row = start + tl.arange(0, ROWS)
        there = row < min(rows, (part + 1) * share)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        both = there[:, None] & inside[None, :]
        x = tl.load(X + at, mask=both, other=0.0).to(tl.float32)
        dy = tl.load(DY + at, mask=both, other=0.0).to(tl.float32)
        if BIASED:
            x -= tl.load(MEAN + row, mask=there, other=0.0)[:, None]
            db += tl.sum(dy, 0)
        dw += tl.sum(dy * x * tl.load(ROOT + row, mask=there, other=0.0)[:, None], 0)
    tl.store(DW + part * columns + column, dw, mask=inside)
    if BIASED:
        tl.store(DB + part * columns + column, db, mask=inside)


def on_rows(
    kernel: Any, added: Tensor | None, x: Tensor, weights: tuple[Tensor, ...], eps: float, **constants: Any
) -> tuple[Tensor, Tensor]:
    """The results of a kernel of (x, added, weights, sum, result, columns, eps) on rows: `x` and what is added, summed;
    and what is made of that.

    Where nothing is added the sum is `x`.
    """
    columns = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sum_ = x if added is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        block, warps = backend.block_of(columns)
        rows = x.contiguous()
        other = rows if added is None else added.contiguous()
        given = (rows, other, *(w.contiguous() for w in weights), y if added is None else sum_, y, columns, eps)
        kernel[(y.numel() // columns,)](*given, **constants, ADDS=added is not None, BLOCK=block, num_warps=warps)
    return sum_, y


def back_on_rows(
    kernel: Any, beside: Tensor | None, dy: Tensor, x: Tensor, weight: Tensor, eps: float, sums: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The gradients of `x`, with one that it has `beside`, and of a weight and, of two sums, a bias.

    By a kernel of (dy, beside, x, weight, dx, dw, db, mean, root, rows, columns, eps, programs): each program adds up
    some of the rows; what all have is added up here, in one order.
    """
    columns = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = dx.numel() // columns
    is_one = columns <= ONE_PASS
    programs = backend.programs_of(rows, x) if is_one else max(1, rows)
    parts = [
        torch.zeros((programs if is_one else _PARTS, columns), dtype=torch.float32, device=x.device)
        for _ in range(sums)
    ]
    if rows:
        dw, db = parts[0], parts[-1]
        dy, x = dy.contiguous(), x.contiguous()
        block, warps = backend.block_of(columns)
        of_rows = [torch.empty((1 if is_one else rows,), dtype=torch.float32, device=x.device) for _ in range(2)]
        given = (dy, dy if beside is None else beside.contiguous(), x, weight.contiguous(), dx, dw, db, *of_rows)
        kernel[(programs,)](
            *given, rows, columns, eps, programs, ADDS=beside is not None, SUMS=is_one, BLOCK=block, num_warps=warps
        )
        if not is_one:
            grid, share = (-(-columns // COLUMNS), _PARTS), -(-rows // _PARTS)
            how = {"BIASED": sums > 1, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
            weights_kernel[grid](dy, x, *of_rows, dw, db, rows, columns, share, **how)
    return dx, tuple(part.sum(0).to(weight.dtype) for part in parts)
