"""Dropout, with the sum that follows it where there is one; backward makes the mask, by position, again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels import backend
from autopar.kernels.backend import jit, tl
from autopar.kernels.custom_ops import custom_op
from autopar.kernels.draws import bits_of, given_places, grid, held
from autopar.kernels.family import Family, are_alike, are_of_one_shape
from autopar.kernels.patterns import Match, Pattern
from autopar.runtime import forms, random
from autopar.runtime.random import Cuts


def reference(
    x: Tensor, added: Tensor | None, key: Tensor, op: int, shape: Sequence[int], cuts: Sequence[Cuts], p: float
) -> Tensor:
    """The ops of the group."""
    dropped = forms.dropout_by_position(x, key, op, shape, cuts, p)
    return dropped if added is None else dropped + added


@jit
def kernel(KEY, COLUMN, FIRST, SECOND, THIRD, op, X, ADDED, Y, rows, columns, least, factor, of_second, of_third,
           second, third, DIMS: tl.constexpr, ADDS: tl.constexpr, ROWS: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """A tile of elements per program.

    The result of dropout is rounded before the sum, as it is where it stands alone.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (at < columns)
    bits = bits_of(
        KEY, COLUMN, FIRST, SECOND, THIRD, op, row, at, rows, columns, of_second, of_third, second, third, DIMS
    )
    place = row.to(tl.int64) * columns + at
    x = tl.load(X + place, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(bits >= least, x * factor, 0.0).to(Y.dtype.element_ty)
    if ADDS:
        added = tl.load(ADDED + place, mask=inside, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) + added).to(Y.dtype.element_ty)
    tl.store(Y + place, y, mask=inside)


def _launched(
    x: Tensor, added: Tensor | None, key: Tensor, op: int, p: float, shape: list[int], places: list[Tensor]
) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        x = x.contiguous()
        columns = x.shape[-1]
        rows = y.numel() // columns
        pointers, dims = given_places(key, op, shape, places)
        given = (*pointers, x, x if added is None else added.contiguous(), y, rows, columns)
        drawn = (random.threshold(p), 1.0 / (1.0 - p))
        kernel[grid(rows, columns)](*given, *drawn, **dims, ADDS=added is not None, **held(columns))
    return y


@custom_op("autopar::dropout")
def dropped(
    x: Tensor, added: Tensor | None, key: Tensor, op: int, p: float, shape: list[int], places: list[Tensor]
) -> Tensor:
    """The elements that dropout keeps at these indices of each dim, scaled, plus `added`."""
    if backend.runs(x):
        return _launched(x, added, key, op, p, shape, places)
    left = torch.where(random.kept_at(key, op, p, shape, places), x * (1.0 / (1.0 - p)), 0)
    return left.contiguous() if added is None else (left + added).contiguous()


@custom_op("autopar::dropout_backward")
def dropped_backward(dy: Tensor, key: Tensor, op: int, p: float, shape: list[int], places: list[Tensor]) -> Tensor:
    """The gradient of `x`; that of `added` is `dy` itself."""
    if backend.runs(dy):
        return _launched(dy, None, key, op, p, shape, places)
    return (torch.where(random.kept_at(key, op, p, shape, places), dy, 0) * (1.0 / (1.0 - p))).contiguous()


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, added, key, ctx.op, ctx.p, ctx.whole, places = inputs
    ctx.adds = added is not None
    ctx.save_for_backward(key, *places)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    key, *places = ctx.saved_tensors
    dx = dropped_backward(dy, key, ctx.op, ctx.p, ctx.whole, places)
    return dx, dy if ctx.adds else None, None, None, None, None, [None] * len(places)


dropped.register_autograd(_gradients, setup_context=_remember)


def dropout(
    x: Tensor, added: Tensor | None, key: Tensor, op: int, shape: Sequence[int], cuts: Sequence[Cuts], p: float
) -> Tensor:
    """The group by its kernel, or by its ops where a program holds no custom ops."""
    if not backend.is_traced(x.device.type):
        return reference(x, added, key, op, shape, cuts, p)
    return dropped(x, added, key, op, p, list(shape), random.places_of(key, cuts, x.shape))


def _is_served(found: Match) -> bool:
    """Whether 0 <= p < 1 and `added` has the shape of `x`."""
    named = found.named
    operands = [found[name] for name in ("x", "added") if name in named]
    is_like_x = are_alike(operands) and are_of_one_shape(operands) and type_of(found["x"]).shape != ()
    return is_like_x and 0 <= named["p"] < 1


_OF_GRAPHS = ("d = dropout(input=x, p=P)", "d = dropout(input=x)")
_OF_PROGRAMS = tuple(
    f"d = dropout_by_position(input=x, key=key, op=OP, shape=SHAPE, cuts=CUTS{p})" for p in (", p=P", "")
)


def _with_sums(texts: tuple[str, ...]) -> tuple[Pattern, ...]:
    """Patterns of a dropout with the sum behind it, then of it alone."""
    return tuple(Pattern.of(text + more, p=0.5) for more in ("\ny = add(input=d, other=added)", "") for text in texts)


FAMILY = Family(
    "dropout",
    _with_sums(_OF_PROGRAMS),
    dropout,
    reference,
    _is_served,
    of_graphs=_with_sums(_OF_GRAPHS),
    forms={"dropout": "dropout_by_position"},
)
