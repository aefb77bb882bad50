"""A gelu by a tanh that a model writes out: eight elementwise ops in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.kernels import backend
from autopar.kernels.activations import BLOCK, GELU_TANH, WARPS, activated, activation
from autopar.kernels.activations import gelu_tanh_by_ops as reference
from autopar.kernels.backend import jit, tl
from autopar.kernels.custom_ops import backward_of, call_of, custom_op
from autopar.kernels.family import Family, are_alike, through
from autopar.kernels.patterns import Pattern


@jit
def backward_kernel(DY, X, DX, count, BLOCK: tl.constexpr):
    """The gradient of the result times the derivative at `x`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
    _, slope = activated(tl.load(X + at, mask=inside, other=0.0).to(tl.float32), 3, False)
    tl.store(DX + at, (dy * slope).to(DX.dtype.element_ty), mask=inside)


@custom_op("autopar::gelu_tanh")
def gelu(x: Tensor) -> Tensor:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + .044715 x^3)))"""
    return activation(x, 3)


@backward_of(gelu, "x")
def gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of `x`."""
    if not backend.runs(x):
        return through(reference, dy, x)[0]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel():
        backward_kernel[(-(-dx.numel() // BLOCK),)](
            dy.contiguous(), x.contiguous(), dx, dx.numel(), BLOCK=BLOCK, num_warps=WARPS
        )
    return dx


gelu_tanh = call_of(gelu, reference)
FAMILY = Family(
    "gelu_tanh",
    (Pattern.of(GELU_TANH.format(x="x")),),
    gelu_tanh,
    reference,
    lambda found: are_alike([found["x"]]),
)
