"""A gelu behind a product with a bias: its backward also sums the gradient of that bias.

The product still adds the bias, but detached, as `prepare` sets it up, and the kernel takes the bias for its gradient
alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels import backend
from autopar.kernels.activations import BY_OPS, GELU_TANH, WARPS, activated, activation, variant_of
from autopar.kernels.backend import jit, tl
from autopar.kernels.custom_ops import backward_of, call_of, custom_op
from autopar.kernels.family import Family, are_alike, through
from autopar.kernels.patterns import Match, Pattern, called, readers
from autopar.kernels.rows import fold

ROWS, COLUMNS, STAGES = 8, 128, 3  # tile of a backward program, and the number of tiles that it prefetches
_PROGRAMS = 8  # backward programs per multiprocessor


class _Beside(torch.autograd.Function):
    """Identity on rows to which a bias was added; backward also sums their gradient as that of the bias."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:
        return dx, dx.reshape(-1, dx.shape[-1]).sum(0)


def reference(x: Tensor, bias: Tensor, kind: int) -> Tensor:
    """The ops of the group, with the gradient of the bias."""
    return BY_OPS[kind](_Beside.apply(x, bias))


@jit
def backward_kernel(DY, X, DX, DB, rows, columns, share, KIND: tl.constexpr, IS_HALF: tl.constexpr, ROWS: tl.constexpr,
                    COLUMNS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Gradients of some columns in a share of the rows, and their sums over those rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    end = min(rows, (part + 1) * share)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(part * share, end, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        inside = (row < end)[:, None] & (column < columns)[None, :]
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        _, slope = activated(tl.load(X + at, mask=inside, other=0.0).to(tl.float32), KIND, IS_HALF)
        dx = dy * slope
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
        sums += dx
    tl.store(DB + part * columns + column, tl.sum(sums, 0), mask=column < columns)


@custom_op("autopar::bias_gelu")
def gelu(x: Tensor, bias: Tensor, kind: int) -> Tensor:
    """The gelu of `x`, to which the bias was added before."""
    return activation(x, kind)


def _gradients_like(dy: Tensor, x: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((x.shape[-1],))


@backward_of(gelu, "x bias", fake=_gradients_like)
def gelu_backward(dy: Tensor, x: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and of the bias."""
    columns = x.shape[-1]
    if not backend.runs(x):
        return through(lambda x, bias: reference(x, bias, kind), dy, x, x.new_empty((columns,)))
    dx, db = (torch.empty(shape, dtype=x.dtype, device=x.device) for shape in (x.shape, (columns,)))
    if not dx.numel():
        return dx, db.zero_()
    rows = dx.numel() // columns
    blocks = -(-columns // COLUMNS)
    parts = max(1, min(-(-rows // ROWS), backend.units(x) * _PROGRAMS // blocks))
    share = -(-rows // (parts * ROWS)) * ROWS
    parts = -(-rows // share)
    sums = torch.empty((parts, columns), dtype=torch.float32, device=x.device)
    given = (dy.contiguous(), x.contiguous(), dx, sums, rows, columns, share)
    tile = {"ROWS": ROWS, "COLUMNS": COLUMNS, "STAGES": STAGES, "num_warps": WARPS}
    backward_kernel[(blocks, parts)](*given, **variant_of(x, kind), **tile)
    fold([sums], [db])
    return dx, db


def _by_ops(x: Tensor, bias: Tensor, kind: int) -> Tensor:
    """The ops where no custom op stands: the product before them gives the gradient of its bias."""
    return BY_OPS[kind](x)


bias_gelu = call_of(gelu, _by_ops)


def linear(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The product before the gelu; its bias is detached where the kernel gives the gradient."""
    bias = bias.detach() if backend.is_traced(input.device.type) else bias
    return torch.nn.functional.linear(input, weight, bias)


def product_of(found: Match) -> fx.Node:
    """The node that the gelu is applied to, past an identity for several readers."""
    node: fx.Node = found["x"]
    return node


def prepare(found: Match) -> None:
    """Let the product leave the gradient of its bias to the kernel."""
    product_of(found).target = linear


def _is_served(found: Match) -> bool:
    """Whether a product with a trained bias precedes, which nothing else reads."""
    product = product_of(found)
    bias = product.kwargs.get("bias") if called(product) == "linear" else None
    if not isinstance(bias, fx.Node) or not type_of(bias).requires_grad:
        return False
    return are_alike([product, bias]) and set(readers(product)) <= set(found.nodes)


FAMILY = Family(
    "bias_gelu",
    (
        Pattern.of("y = gelu(input=x)", kind=1),
        Pattern.of("y = gelu(input=x, approximate='tanh')", kind=2),
        Pattern.of(GELU_TANH.format(x="x"), kind=3),
    ),
    bias_gelu,
    reference,
    _is_served,
    others=lambda found: {"bias": product_of(found).kwargs["bias"]},
    prepare=prepare,
    product=product_of,
)
