"""Inverses of views: the base tensor, with another value where a view reads it.

For example, for a view v of x that is written:

    v = select(x, 0)        x' = select_scatter(x, v', 0)
    v = transpose(x, 0, 1)  x' = transpose(v', 0, 1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WrittenView:
    """A view with a new value, and the tensor that it was taken of."""

    arguments: Mapping[str, Any]  # arguments of the view's op
    output: int | None  # index of the view among the op's outputs; None: the only one
    shape: tuple[int, ...]  # the base's shape
    before: Any  # the base before the write
    value: Any  # the view's new value
    emit: Callable[..., Any]  # emits the op of a name with these arguments, whose result has the base's type


def same(written: WrittenView) -> Any:
    return written.value


def view(written: WrittenView) -> Any:
    return written.emit("view", input=written.value, size=written.shape)


def t(written: WrittenView) -> Any:
    return written.emit("t", input=written.value)


def transpose(written: WrittenView) -> Any:
    how = written.arguments
    return written.emit("transpose", input=written.value, dim0=how["dim0"], dim1=how["dim1"])


def permute(written: WrittenView) -> Any:
    rank = len(written.shape)
    turned = [d % rank for d in written.arguments["dims"]]
    return written.emit("permute", input=written.value, dims=tuple(turned.index(d) for d in range(rank)))


def narrow(written: WrittenView) -> Any:
    how = written.arguments
    start = how["start"] % max(1, written.shape[how["dim"]])
    return _slice(written, how["dim"], start, start + how["length"])


def split(written: WrittenView) -> Any:
    how = written.arguments
    output = written.output
    if output is None:
        return None
    start = sum(how["sections"][:output])
    return _slice(written, how.get("dim", 0), start, start + how["sections"][output])


def _slice(written: WrittenView, dim: int, start: int, end: int) -> Any:
    return written.emit("slice_scatter", input=written.before, src=written.value, dim=dim, start=start, end=end)


def select(written: WrittenView) -> Any:
    how = written.arguments
    return written.emit("select_scatter", input=written.before, src=written.value, dim=how["dim"], index=how["index"])


def unbind(written: WrittenView) -> Any:
    dim = written.arguments.get("dim", 0)
    output = written.output
    if output is None:
        return None
    return written.emit("select_scatter", input=written.before, src=written.value, dim=dim, index=output)


def index(written: WrittenView) -> Any:
    index = written.arguments["index"]
    return written.emit("setitem", input=written.before, index=index, value=written.value)


def diagonal(written: WrittenView) -> Any:
    how = {k: v for k, v in written.arguments.items() if k != "input"}
    return written.emit("diagonal_scatter", input=written.before, src=written.value, **how)
