"""Operands of the op that replaces a loop over experts: rows, their ids and weights, and the body as text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from autopar.graph.graph import stops_gradients, type_of
from autopar.graph.walks import origin
from autopar.runtime.bodies import HALVES, ONE, WHOLE, NotABody, read_body
from autopar.tracer.choices import Choice, Kept
from autopar.tracer.expert_values import Place, Value
from autopar.tracer.named_dims import Atom, Dims, Unread, flat, size_of, without
from autopar.tracer.rewriting import emit


@dataclass(frozen=True, slots=True)
class Rows:
    """Values of rows as the op takes them: [rows, slots] and [rows, columns]; nodes are put beside `near`."""

    near: fx.Node
    rows: tuple[Atom, ...]
    slots: tuple[Atom, ...]

    def columns(self, leaf: Value) -> fx.Node:
        """The rows themselves."""
        at: Dims = leaf.said[1]
        return self._arranged(leaf.leaf, at, (self.rows, at[-1]))

    def ids(self, choice: Choice, first: int) -> fx.Node:
        """Ids that count from 0; those that count nothing are negative or too large."""
        ids = self._arranged(choice.ids, choice.at, (self.rows, self.slots))
        for kept in choice.kept:
            ids = emit(self.near, "where", condition=self._keeps(ids, kept), input=ids, other=-1)
        return emit(self.near, "sub", input=ids, other=first) if first else ids

    def _keeps(self, ids: fx.Node, kept: Kept) -> fx.Node:
        """Whether each id counts."""
        truth = kept.node
        if type_of(truth).dtype != "bool":
            truth = emit(self.near, "ne", input=truth, other=0)
        places = [i for i, dim in enumerate(kept.dims) if dim and dim[0].name == "classes"]
        if len(places) != 1 or len(kept.dims[places[0]]) != 1:
            raise Unread("classes lie with something else")
        if len(kept.dims) > 1:
            dims = without(kept.dims, {"dim": places[0]})
            return self._arranged(emit(self.near, "any", input=truth, dim=places[0]), dims, (self.rows, self.slots))
        count = type_of(truth).shape[0]
        classes = emit(self.near, "arange", start=0, end=count, dtype=type_of(ids).torch_dtype)
        wide = emit(self.near, "view", input=ids, size=(*type_of(ids).shape, 1))
        each = emit(self.near, "eq", input=wide, other=classes)
        both = emit(self.near, "bitwise_and", input=each, other=truth)
        return emit(self.near, "any", input=both, dim=2)

    def weights(self, factors: Sequence[Value], dtype: torch.dtype) -> fx.Node:
        """The product of all weights; ones where there are none."""
        shape = (size_of(self.rows), size_of(self.slots))
        if not factors:
            return emit(self.near, "ones", size=shape, dtype=dtype)
        made = functools.reduce(
            lambda one, other: emit(self.near, "mul", input=one, other=other), map(self._weight, factors)
        )
        if not type_of(made).torch_dtype.is_floating_point:
            raise Unread("weights are whole numbers")
        return made if type_of(made).shape == shape else emit(self.near, "expand", input=made, size=shape)

    def _weight(self, value: Value) -> fx.Node:
        if value.op == "leaf":
            return self._arranged(value.leaf, value.said[1], (self.rows, self.slots))
        if value.op == "column":
            leaf = value.given[0]
            atom, start = value.said
            at: Dims = leaf.said[1]
            dim = at.index((atom,))
            narrow = emit(self.near, "narrow", input=leaf.leaf, dim=dim, start=start, length=1)
            return self._arranged(narrow, (*at[:dim], (), *at[dim + 1 :]), (self.rows, self.slots))
        if not value.arguments:
            raise Unread("weights of another kind")
        given = [self._weight(one) for one in value.given]
        arguments = {k: given[v.index] if isinstance(v, Place) else v for k, v in value.arguments.items()}
        return emit(self.near, value.op, **arguments)

    def _arranged(self, node: fx.Node, at: Dims, dims: Sequence[Sequence[Atom]]) -> fx.Node:
        """A value with its dims in this order; dims that it has not are of size 1."""
        own = flat(at)
        wanted = [list(filter(own.__contains__, dim)) for dim in dims]
        if any(found and found != list(dim) for found, dim in zip(wanted, dims, strict=True)):
            raise Unread("a part of rows")
        order = [atom for dim in wanted for atom in dim]
        if len(order) != len(own):
            raise Unread("dims of something else")
        shape = tuple(map(size_of, wanted))
        if order != list(own):
            node = self._viewed(node, tuple(atom.size for atom in own))
            node = self._permuted(node, tuple(own.index(atom) for atom in order))
        return self._viewed(node, shape)

    def _viewed(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """A view, of what others are views of; the value itself where it has this shape."""
        base = origin(node, lambda one: one.target is not None and _is_view(one) and type_of(one).shape != shape)
        if type_of(base).shape == shape and type_of(base).requires_grad == type_of(node).requires_grad:
            return base
        return emit(self.near, "view", input=node, size=shape)

    def _permuted(self, node: fx.Node, dims: tuple[int, ...]) -> fx.Node:
        """A permutation; what has been permuted the other way round is taken as it was."""
        given: Any = node.kwargs
        is_permuted = getattr(node.target, "name", "") == "permute" and not stops_gradients(node)
        if is_permuted and [given["dims"][d] for d in dims] == [*range(len(dims))]:
            before: fx.Node = given["input"]
            return before
        return emit(self.near, "permute", input=node, dims=dims)

    def as_before(self, made: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """The result of the op in the shape of the loop's."""
        return self._viewed(made, shape)

    def chosen(self, ids: fx.Node, experts: int, shape: tuple[int, ...]) -> fx.Node:
        """Whether each row has an expert."""
        not_before = emit(self.near, "ge", input=ids, other=0)
        not_behind = emit(self.near, "lt", input=ids, other=experts)
        both = emit(self.near, "bitwise_and", input=not_before, other=not_behind)
        return self._viewed(both, (*shape[:-1], 1))


def _is_view(node: fx.Node) -> bool:
    return getattr(node.target, "name", "") == "view"


def body_of(value: Value) -> tuple[str, str]:
    """The function between the matrices as text, and the layout of its columns."""
    products: list[int] = []
    has_halves = False
    for one in value.walk():
        has_halves = has_halves or one.op == "half"
        if one.op == "linear" and one.given[0].op == "leaf":
            products.append(one.said[0])
    numbers = sorted(set(products))
    if not numbers or len(numbers) > 2 or (has_halves and len(numbers) == 2):
        raise Unread("a body of other products")
    layout = HALVES if has_halves or len(numbers) == 2 else ONE

    def function(rows: Tensor) -> Any:
        return _computed(value, numbers, rows)

    try:
        found = read_body(function, layout)
    except NotABody as e:
        raise Unread(str(e)) from e
    if not found.is_by_rows:
        raise Unread("a body that looks at several rows")
    return found.text, layout if found.is_by_columns else WHOLE


def _computed(value: Value, products: Sequence[int], rows: Any) -> Any:
    """A body's value of a symbol."""
    if value.op == "linear" and value.given[0].op == "leaf":
        return rows if len(products) == 1 else rows.chunk(2, -1)[products.index(value.said[0])]
    if value.op == "half":
        return _computed(value.given[0], products, rows).chunk(2, -1)[value.said]
    if not value.arguments:
        raise NotABody(f"it has a {value.op}")
    given = [_computed(one, products, rows) for one in value.given]
    arguments = {k: given[v.index] if isinstance(v, Place) else v for k, v in value.arguments.items()}
    if value.op == "to":
        return arguments["input"].to(arguments["dtype"])
    function = getattr(torch, value.op, None) or getattr(F, value.op)
    return function(**arguments)
