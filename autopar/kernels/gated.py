"""A gate: an activation of one tensor, times another."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels import backend
from autopar.kernels.activations import BLOCK, BY_OPS, GELU_TANH, WARPS, activated, variant_of
from autopar.kernels.backend import jit, tl
from autopar.kernels.custom_ops import backward_of, call_of, custom_op
from autopar.kernels.family import Family, are_alike, are_of_one_shape, through
from autopar.kernels.patterns import Match, Pattern


def reference(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    """The ops of the group."""
    return BY_OPS[kind](gate) * up


@jit
def forward_kernel(G, U, Y, columns, g_row, u_row, KIND: tl.constexpr, IS_HALF: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """Compute Y = activation(G) * U, a block of a row per program.

    The activation is rounded before the product, as it is where it stands alone. Rows may be further apart than their
    columns, as halves of one tensor are.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * columns + column
    inside = column < columns
    g = tl.load(G + row * g_row + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(U + row * u_row + column, mask=inside, other=0.0).to(tl.float32)
    a, _ = activated(g, KIND, IS_HALF)
    tl.store(Y + at, (a.to(Y.dtype.element_ty).to(tl.float32) * u).to(Y.dtype.element_ty), mask=inside)


@jit
def backward_kernel(DY, G, U, DG, DU, columns, g_row, u_row, KIND: tl.constexpr, IS_HALF: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """Gradients of gate and up; the activation is recomputed, as only gate and up are saved."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * columns + column
    inside = column < columns
    dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(G + row * g_row + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(U + row * u_row + column, mask=inside, other=0.0).to(tl.float32)
    a, slope = activated(g, KIND, IS_HALF)
    tl.store(DG + at, (dy * u * slope).to(DG.dtype.element_ty), mask=inside)
    tl.store(DU + at, (dy * a).to(DU.dtype.element_ty), mask=inside)


def _grid(x: Tensor) -> tuple[int, int]:
    """The grid of programs: rows, and blocks of a row."""
    return x.numel() // x.shape[-1], -(-x.shape[-1] // BLOCK)


@custom_op("autopar::gated")
def product(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    """The activation of the gate, times `up`."""
    if not backend.runs(gate):
        return reference(gate, up, kind).contiguous()
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel():
        (g, g_row), (u, u_row) = backend.as_rows(gate), backend.as_rows(up)
        given = (g, u, y, gate.shape[-1], g_row, u_row)
        forward_kernel[_grid(gate)](*given, **variant_of(gate, kind), BLOCK=BLOCK, num_warps=WARPS)
    return y


@backward_of(product, "gate up")
def product_backward(dy: Tensor, gate: Tensor, up: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    if not backend.runs(gate):
        return through(lambda g, u: reference(g, u, kind), dy, gate, up)
    dg, du = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    if dg.numel():
        (g, g_row), (u, u_row) = backend.as_rows(gate), backend.as_rows(up)
        given = (dy.contiguous(), g, u, dg, du, gate.shape[-1], g_row, u_row)
        backward_kernel[_grid(gate)](*given, **variant_of(gate, kind), BLOCK=BLOCK, num_warps=WARPS)
    return dg, du


gated = call_of(product, reference)


def _is_served(found: Match) -> bool:
    """Whether gate and up have one shape and dtype."""
    nodes = [found["gate"], found["up"]]
    return are_alike(nodes) and are_of_one_shape(nodes) and len(type_of(found["up"]).shape) > 0


_TIMES = "y = mul(input=a, other=up)"
FAMILY = Family(
    "gated",
    (
        Pattern.of(f"a = silu(input=gate)\n{_TIMES}", kind=0),
        Pattern.of(f"a = gelu(input=gate)\n{_TIMES}", kind=1),
        Pattern.of(f"a = gelu(input=gate, approximate='tanh')\n{_TIMES}", kind=2),
        Pattern.of(GELU_TANH.format(x="gate") + _TIMES, kind=3),
    ),
    gated,
    reference,
    _is_served,
)
