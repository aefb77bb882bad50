"""Ops on the axis of time: the rows of one turn, and numbers that turns add up.

    turn, once, total    of the micro-batches of a call, which are turns of a whole program
    chunk, added_up      of a region of it, which runs on some rows at a time

No model calls them: passes write them into a graph (`autopar/turns`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autopar.ops.entry import op
from autopar.ops.local import Form, Here, OpCall
from autopar.ops.rows import Row, rule_from
from autopar.runtime import forms
from autopar.runtime.chunks import added_up, chunk
from autopar.sharding.notation import Rule


def turn(input: Tensor, dim: int, turns: int, size: int) -> Tensor:
    """The rows of the first turn along a dim, out of each block of `size` rows."""
    return some_rows(input, dim, turns, size).clone()


def once(input: Tensor, turns: int) -> Tensor:
    """The value in the first turn, as here; its local form gives zeros in the others."""
    return input.clone()


def total(input: Tensor) -> Tensor:
    """The sum over turns, here of one turn."""
    return input.clone()


def rows_now(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of `turn`: the rows of the current turn."""
    return forms.rows_of_turn, kwargs


def in_first_turn(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of `once`: the value in the first turn, zeros in the others."""
    return forms.value_of_first_turn, kwargs


def some_rows(input: Tensor, dim: int, chunks: int, size: int) -> Tensor:
    """A copy of the rows of the first chunk along a dim, out of each block of `size` rows."""
    shape = [n // chunks if d == dim else n for d, n in enumerate(input.shape)]
    return input.unflatten(dim, (-1, size)).narrow(dim + 1, 0, size // chunks).reshape(shape).clone()


def sum_of_chunks(input: Tensor) -> Tensor:
    """The sum over chunks, here of one chunk."""
    return input.clone()


def rows_of_blocks(arguments: Mapping[str, Any]) -> Rule:
    """The rows of a block stay whole; blocks of rows and all other dims may be cut."""
    row = Row.of(arguments["input"])
    dim = arguments["dim"]
    blocks = arguments["input"].shape[dim] // arguments["size"]
    before, after = (f"(b:{blocks} {rows}!)" if blocks > 1 else f"{rows}!" for rows in ("all", "some"))
    return rule_from([row.replaced(dim, before)], [row.replaced(dim, after)], linear="x")


def as_one_chunk(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of `chunk`: the one chunk that tracing sees."""
    return chunk, {"x": kwargs["input"], **{k: kwargs[k] for k in ("dim", "chunks", "size")}}


def as_a_sum(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of `added_up`: the sum of all chunks, of which tracing sees one."""
    return added_up, {"x": kwargs["input"]}


op("once", once, "input:T, turns", rule="... -> ...", linear="x", form=in_first_turn, keeps="")
op("turn", turn, "input:T, dim, turns, size", rule=rows_of_blocks, form=rows_now, keeps="")
op("chunk", some_rows, "input:T, dim, chunks, size", rule=rows_of_blocks, form=as_one_chunk, keeps="")
op("added_up", sum_of_chunks, "input:T", rule="... -> ...", linear="x", one_gradient=True, form=as_a_sum, keeps="")
op("total", total, "input:T", rule="... -> ...", linear="x", one_gradient=True, keeps="")
