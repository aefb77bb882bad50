"""A gate: an activation of one tensor, times another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels import backend
from autopar.kernels.activations import GELU_TANH, activated, gelu_tanh_by_ops
from autopar.kernels.backend import jit, tl
from autopar.kernels.family import Family, are_alike, through
from autopar.kernels.patterns import Match, Pattern

BLOCK, WARPS = 2048, 4
KINDS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (  # the kernels know them by their places
    ("silu", torch.nn.functional.silu),
    ("gelu", torch.nn.functional.gelu),
    ("gelu tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ("gelu by ops", gelu_tanh_by_ops),
)


def reference(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    """The ops of the group."""
    return KINDS[kind][1](gate) * up


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


def _constants(x: Tensor, kind: int) -> dict[str, Any]:
    """Constants of a launch."""
    return {"KIND": kind, "IS_HALF": x.dtype.itemsize == 2, "BLOCK": BLOCK, "num_warps": WARPS}


@torch.library.custom_op("autopar::gated", mutates_args=())
def product(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    """The activation of the gate, times `up`."""
    if not backend.runs(gate):
        return reference(gate, up, kind).contiguous()
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel():
        (g, g_row), (u, u_row) = backend.as_rows(gate), backend.as_rows(up)
        given = (g, u, y, gate.shape[-1], g_row, u_row)
        forward_kernel[_grid(gate)](*given, **_constants(gate, kind))
    return y


@product.register_fake
def _(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("autopar::gated_backward", mutates_args=())
def product_backward(dy: Tensor, gate: Tensor, up: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    if not backend.runs(gate):
        dg, du = through(lambda g, u: reference(g, u, kind), dy, gate, up)
        return dg, du
    dg, du = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    if dg.numel():
        (g, g_row), (u, u_row) = backend.as_rows(gate), backend.as_rows(up)
        given = (dy.contiguous(), g, u, dg, du, gate.shape[-1], g_row, u_row)
        backward_kernel[_grid(gate)](*given, **_constants(gate, kind))
    return dg, du


@product_backward.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    return *product_backward(dy, *ctx.saved_tensors, ctx.kind), None


product.register_autograd(_gradients, setup_context=_remember)


def gated(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    """The group by its kernel, or by its ops where a program holds no custom ops."""
    return product(gate, up, kind) if backend.is_traced(gate.device.type) else reference(gate, up, kind)


def _arguments(found: Match) -> Mapping[str, Any] | None:
    """Arguments of the call, or None unless gate and up have one shape and dtype."""
    gate, up = found["gate"], found["up"]
    is_served = are_alike([gate, up]) and len(type_of(gate).shape) > 0 and type_of(gate).shape == type_of(up).shape
    return {"gate": gate, "up": up, "kind": found.pattern.variant["kind"]} if is_served else None


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
    _arguments,
)
