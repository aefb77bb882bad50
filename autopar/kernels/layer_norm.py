"""A normalisation of rows by their mean and variance, times a weight, plus a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels import backend
from autopar.kernels.backend import jit, tl
from autopar.kernels.family import Family, are_alike, through
from autopar.kernels.patterns import Found, Pattern
from autopar.kernels.rows import MOST_COLUMNS, back_on_rows, on_rows


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The op that the kernel stands for."""
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@jit
def forward_kernel(X, R, W, B, S, Y, columns, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """One row a program; the variance is of what is left when the mean is gone, a sum is rounded before."""
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(X + row + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(R + row + at, mask=inside, other=0.0).to(tl.float32)
        sum_ = x.to(S.dtype.element_ty)
        tl.store(S + row + at, sum_, mask=inside)
        x = sum_.to(tl.float32)
    x = tl.where(inside, x - tl.sum(x) / columns, 0.0)
    even = x * tl.rsqrt(tl.sum(x * x) / columns + eps)
    w = tl.load(W + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(B + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row + at, (even * w + b).to(Y.dtype.element_ty), mask=inside)


@jit
def backward_kernel(DY, DS, X, W, DX, DW, DB, MEAN, ROOT, rows, columns, eps, programs,
                    ADDS: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Some of the rows, and what these give to the gradients of weight and bias, or mean and root of each row."""
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, programs):
        start = tl.cast(row, tl.int64) * columns
        x = tl.load(X + start + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(DY + start + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(x) / columns
        x = tl.where(inside, x - mean, 0.0)
        root = tl.rsqrt(tl.sum(x * x) / columns + eps)
        even = x * root
        if SUMS:
            dw += dy * even
            db += dy
        else:
            tl.store(MEAN + row, mean)
            tl.store(ROOT + row, root)
        dy *= tl.load(W + at, mask=inside, other=0.0).to(tl.float32)  # not held from row to row: registers
        dx = (dy - tl.sum(dy) / columns - even * (tl.sum(dy * even) / columns)) * root
        if ADDS:
            dx += tl.load(DS + start + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + start + at, dx.to(DX.dtype.element_ty), mask=inside)
    if SUMS:
        tl.store(DW + program * columns + at, dw, mask=inside)
        tl.store(DB + program * columns + at, db, mask=inside)


@torch.library.custom_op("autopar::layer_norm", mutates_args=())
def normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Rows by their mean and variance."""
    if not backend.runs(x):
        return reference(x, weight, bias, eps).contiguous()
    return on_rows(forward_kernel, None, x, (weight, bias), eps)[1]


@normalised.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("autopar::layer_norm_backward", mutates_args=())
def normalised_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `x`, of the weight and of the bias."""
    if not backend.runs(x):
        dx, dw, db = through(lambda x, w, b: reference(x, w, b, eps), dy, x, weight, bias)
        return dx, dw, db
    dx, (dw, db) = back_on_rows(backward_kernel, None, dy, x, weight, eps, sums=2)
    return dx, dw, db


@normalised_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return *normalised_backward(dy, *ctx.saved_tensors, ctx.eps), None


normalised.register_autograd(_gradients, setup_context=_remember)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """One kernel in the place of the op."""
    return normalised(x, weight, bias, eps) if backend.is_traced(x.device.type) else reference(x, weight, bias, eps)


def arguments(found: Found) -> Mapping[str, Any] | None:
    """Those of the call, where rows are along the last dim alone."""
    x, weight, bias = found["x"], found["weight"], found["bias"]
    width = type_of(x).shape[-1]
    is_row = tuple(found["SHAPE"]) == (width,) and width <= MOST_COLUMNS
    eps = found["EPS"] if "EPS" in found.bound else 1e-5
    return {"x": x, "weight": weight, "bias": bias, "eps": eps} if is_row and are_alike([x, weight, bias]) else None


_CALL = "y = layer_norm(input=x, normalized_shape=SHAPE, weight=weight, bias=bias"
WRITTEN = (f"{_CALL}, eps=EPS)", f"{_CALL})")  # of rows x
FAMILY = Family("layer_norm", tuple(map(Pattern.of, WRITTEN)), layer_norm, reference, arguments)
