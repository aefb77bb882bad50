"""Inverses of views: the tensor that a view was taken of, with another value where the view reads it.

v = select(x, 0)        x' = select_scatter(x, v', 0)
v = transpose(x, 0, 1)  x' = transpose(v', 0, 1)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from autopar.ops.entry import Op


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a tensor was made: an op, its arguments, and which of its outputs it is."""

    op: Op
    arguments: dict[str, Any]
    output: int | None = None  # None: the only one


@dataclass(frozen=True, slots=True)
class WrittenView:
    """A view that stands for a new value, and the tensor that it was taken of."""

    recipe: Recipe
    shape: tuple[int, ...]  # of the tensor that it was taken of
    before: fx.Node  # that tensor before the write
    value: fx.Node  # the view's new value
    emit: Callable[..., fx.Node]  # a node of this op with these arguments, of that tensor's type


def inverse(written: WrittenView) -> fx.Node | None:
    """The node for the whole tensor after the write; None: no inverse is known."""
    found = _INVERSES.get(written.recipe.op.name)
    return found(written) if found is not None else None


def _same(written: WrittenView) -> fx.Node:
    return written.value


def _view(written: WrittenView) -> fx.Node:
    return written.emit("view", input=written.value, size=written.shape)


def _t(written: WrittenView) -> fx.Node:
    return written.emit("t", input=written.value)


def _transpose(written: WrittenView) -> fx.Node:
    how = written.recipe.arguments
    return written.emit("transpose", input=written.value, dim0=how["dim0"], dim1=how["dim1"])


def _permute(written: WrittenView) -> fx.Node:
    rank = len(written.shape)
    turned = [d % rank for d in written.recipe.arguments["dims"]]
    return written.emit("permute", input=written.value, dims=tuple(turned.index(d) for d in range(rank)))


def _narrow(written: WrittenView) -> fx.Node:
    how = written.recipe.arguments
    start = how["start"] % max(1, written.shape[how["dim"]])
    return _slice(written, how["dim"], start, start + how["length"])


def _split(written: WrittenView) -> fx.Node | None:
    how, output = written.recipe.arguments, written.recipe.output
    if output is None:
        return None
    start = sum(how["sections"][:output])
    return _slice(written, how.get("dim", 0), start, start + how["sections"][output])


def _slice(written: WrittenView, dim: int, start: int, end: int) -> fx.Node:
    return written.emit("slice_scatter", input=written.before, src=written.value, dim=dim, start=start, end=end)


def _select(written: WrittenView) -> fx.Node:
    how = written.recipe.arguments
    return written.emit("select_scatter", input=written.before, src=written.value, dim=how["dim"], index=how["index"])


def _unbind(written: WrittenView) -> fx.Node | None:
    dim, output = written.recipe.arguments.get("dim", 0), written.recipe.output
    if output is None:
        return None
    return written.emit("select_scatter", input=written.before, src=written.value, dim=dim, index=output)


def _index(written: WrittenView) -> fx.Node:
    index = written.recipe.arguments["index"]
    return written.emit("setitem", input=written.before, index=index, value=written.value)


def _diagonal(written: WrittenView) -> fx.Node:
    how = {k: v for k, v in written.recipe.arguments.items() if k != "input"}
    return written.emit("diagonal_scatter", input=written.before, src=written.value, **how)


_INVERSES: dict[str, Callable[[WrittenView], fx.Node | None]] = {
    **dict.fromkeys(("identity", "contiguous", "clone", "detach"), _same),
    "to": _same,  # a cast to the dtype that it has
    "view": _view,
    "t": _t,
    "transpose": _transpose,
    "permute": _permute,
    "narrow": _narrow,
    "split": _split,
    "select": _select,
    "unbind": _unbind,
    "index": _index,
    "diagonal": _diagonal,
}
