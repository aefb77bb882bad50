"""Values of a round of a loop over experts, as trees, and the parts of what it adds to its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from autopar.graph.graph import type_of
from autopar.tracer.named_dims import Atom, Dims, Unread, flat


@dataclass(frozen=True, slots=True)
class Matrix:
    """What an expert multiplies rows with: rows @ weight.T + bias, or rows @ weight where it is transposed."""

    weight: fx.Node
    transposed: bool
    bias: fx.Node | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a round where its mask is true; equal for rounds that compute it alike."""

    op: str  # "leaf", "linear", "half", "slots" (a sum over slots), or an elementwise op
    dims: Dims
    given: tuple[Value, ...] = ()
    said: Any = ()  # A leaf's number and dims, the form of a matrix, or other arguments tell values apart.
    node: fx.Node | None = field(default=None, compare=False)
    arguments: Any = field(default=None, compare=False)  # An elementwise op has `Place`s in them.
    matrix: Matrix | None = field(default=None, compare=False)

    @property
    def leaf(self) -> fx.Node:
        assert self.node is not None
        return self.node

    def walk(self) -> Iterator[Value]:
        """This value and all it is made of."""
        yield self
        for one in self.given:
            yield from one.walk()


@dataclass(frozen=True, slots=True)
class Place:
    """Stands for an operand in the arguments of an elementwise op."""

    index: int


@dataclass(frozen=True, slots=True)
class Parts:
    """What a round adds to its rows: the product of weights and of what its last matrix makes."""

    weights: tuple[Value, ...]
    down: Value
    per_slot: bool  # summed over slots, or one for a row


def parts_of(value: Value, rows: frozenset[Atom], slots: frozenset[Atom]) -> Parts:
    """The parts of a value; raises where it is not such a product."""
    if value.op == "slots":
        found = parts_of(value.given[0], rows, slots)
        return replace(found, per_slot=True)
    factors = list(_factors(value))
    downs = [one for one in factors if one.op == "linear"]
    if len(downs) != 1:
        raise Unread("no product of weights and rows")
    weights = []
    per_slot = False
    for one in factors:
        if one is downs[0]:
            continue
        if one.op == "slots":
            one = one.given[0]
            if per_slot:
                raise Unread("two sums over slots")
            per_slot = True
        if any(part.op in ("linear", "slots") for part in one.walk()) or not set(flat(one.dims)) <= rows | slots:
            raise Unread("weights that depend on columns")
        weights.append(one)
    if per_slot and any(slots & set(flat(one.dims)) for one in weights) and len(weights) > 1:
        raise Unread("weights beside a sum over slots")
    return Parts(tuple(weights), downs[0], per_slot)


def _factors(value: Value) -> Iterator[Value]:
    """The factors of a product; casts to wider numbers count nothing."""
    has_rows = any(one.op == "linear" for one in value.walk())
    if has_rows and value.op == "mul" and len(value.given) == 2:
        for one in value.given:
            yield from _factors(one)
    elif has_rows and value.op == "to" and _keeps(value):
        yield from _factors(value.given[0])
    else:
        yield value


def _keeps(cast: Value) -> bool:
    """Whether a cast loses no more than rows have."""
    down = next(one for one in cast.walk() if one.op == "linear")
    dtype = type_of(cast.leaf).torch_dtype
    return dtype.is_floating_point and torch.promote_types(dtype, type_of(down.leaf).torch_dtype) == dtype


def in_both_orders(node: fx.Node) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The operands of an op that may have them in either order."""
    one: Any = node.kwargs["input"]
    other: Any = node.kwargs["other"]
    return (one, other), (other, one)
