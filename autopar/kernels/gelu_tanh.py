"""A gelu by a tanh that a model writes out: eight elementwise ops in one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.kernels import backend
from autopar.kernels.activations import GELU_TANH, activated
from autopar.kernels.activations import gelu_tanh_by_ops as reference
from autopar.kernels.backend import jit, tl
from autopar.kernels.family import Family, are_alike, through
from autopar.kernels.patterns import Match, Pattern

BLOCK, WARPS = 2048, 4


@jit
def forward_kernel(X, Y, count, BLOCK: tl.constexpr):
    """A block of elements per program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    a, _ = activated(tl.load(X + at, mask=inside, other=0.0).to(tl.float32), 3, False)
    tl.store(Y + at, a.to(Y.dtype.element_ty), mask=inside)


@jit
def backward_kernel(DY, X, DX, count, BLOCK: tl.constexpr):
    """The gradient of the result times the derivative at `x`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
    _, slope = activated(tl.load(X + at, mask=inside, other=0.0).to(tl.float32), 3, False)
    tl.store(DX + at, (dy * slope).to(DX.dtype.element_ty), mask=inside)


@torch.library.custom_op("autopar::gelu_tanh", mutates_args=())
def activation(x: Tensor) -> Tensor:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + .044715 x^3)))"""
    if not backend.runs(x):
        return reference(x).contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        forward_kernel[(-(-y.numel() // BLOCK),)](x.contiguous(), y, y.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return y


@activation.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("autopar::gelu_tanh_backward", mutates_args=())
def activation_backward(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of `x`."""
    if not backend.runs(x):
        return through(reference, dy, x)[0]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel():
        backward_kernel[(-(-dx.numel() // BLOCK),)](
            dy.contiguous(), x.contiguous(), dx, dx.numel(), BLOCK=BLOCK, num_warps=WARPS
        )
    return dx


@activation_backward.register_fake
def _(dy: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _remember(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


activation.register_autograd(lambda ctx, dy: activation_backward(dy, *ctx.saved_tensors), setup_context=_remember)


def gelu_tanh(x: Tensor) -> Tensor:
    """The group by its kernel, or by its ops where a program holds no custom ops."""
    return activation(x) if backend.is_traced(x.device.type) else reference(x)


def _arguments(found: Match) -> Mapping[str, Any] | None:
    return {"x": found["x"]} if are_alike([found["x"]]) else None


FAMILY = Family("gelu_tanh", (Pattern.of(GELU_TANH.format(x="x")),), gelu_tanh, reference, _arguments)
