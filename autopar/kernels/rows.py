"""Launches of kernels that take a row a program: forward, and a backward that adds up what all rows give to weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.kernels import backend


def on_rows(kernel: Any, x: Tensor, weights: tuple[Tensor, ...], eps: float, **constants: Any) -> Tensor:
    """The result of a kernel of (x, weights, result, columns, eps) on the rows of `x`."""
    columns = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        block, warps = backend.block_of(columns)
        given = (x.contiguous(), *(w.contiguous() for w in weights), y, columns, eps)
        kernel[(y.numel() // columns,)](*given, **constants, BLOCK=block, num_warps=warps)
    return y


def back_on_rows(
    kernel: Any, dy: Tensor, x: Tensor, weight: Tensor, eps: float, sums: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The gradients of `x` and of `sums` weights, by a kernel of (dy, x, weight, dx, sums, rows, columns, eps).

    Each program adds up some of the rows; what all have is added up here, in one order.
    """
    columns = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = dx.numel() // columns
    programs = backend.programs_of(rows, x)
    parts = [torch.zeros((programs, columns), dtype=torch.float32, device=x.device) for _ in range(sums)]
    if rows:
        block, warps = backend.block_of(columns)
        given = (dy.contiguous(), x.contiguous(), weight.contiguous(), dx, *parts, rows, columns, eps)
        kernel[(programs,)](*given, PROGRAMS=programs, BLOCK=block, num_warps=warps)
    return dx, tuple(part.sum(0).to(weight.dtype) for part in parts)
