"""The matrices of all experts as one operand: slices of a parameter are that parameter, others are stacked.

    before    w0 = select(w, 0, 0);  w1 = select(w, 0, 1)           after    w
    before    experts.0.up.weight, experts.1.up.weight              after    stack([experts.0.up.weight, ...])

A stack is a copy of the weights. Matrices of a gate stand before those that it multiplies.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from autopar.graph.graph import op_name, stops_gradients, type_of
from autopar.tracer.alike import Numbers
from autopar.tracer.expert_values import Matrix, Value
from autopar.tracer.named_dims import Unread
from autopar.tracer.rewriting import emit


@dataclass(frozen=True, slots=True)
class _Source:
    """What a matrix is made of: the value itself, whether it is turned on its way, and to what it is cast."""

    node: fx.Node
    is_turned: bool = False
    cast: torch.dtype | None = None

    @staticmethod
    def of(node: fx.Node) -> _Source:
        is_turned = False
        cast = None
        while True:
            name = op_name(node)
            how: Any = node.kwargs
            is_turn = name in ("t", "transpose", "permute") and len(type_of(node).shape) == 2
            if (name not in ("identity", "contiguous", "to") and not is_turn) or stops_gradients(node):
                return _Source(node, is_turned, cast)
            if name == "to" and cast is None:
                cast = how["dtype"]
            elif name == "to":  # Rounded twice, to two dtypes.
                return _Source(node, is_turned, cast)
            is_turned ^= is_turn and type_of(node).shape != () and _turns(node)
            node = how["input"]


def _turns(node: fx.Node) -> bool:
    """Whether a layout op of a matrix changes its dims."""
    how: Any = node.kwargs
    if op_name(node) == "permute":
        return bool(how["dims"][0] % 2)
    return op_name(node) == "t" or how["dim0"] % 2 != how["dim1"] % 2


def matrices_of(near: fx.Node, downs: Sequence[Value], numbers: Numbers) -> dict[str, Any]:
    """The matrices `up` and `down` of all experts, their biases, and whether they are transposed."""
    each = [_by_place(down) for down in downs]
    places = sorted(each[0])
    firsts = {one.said[0] for one in downs[0].walk() if one.op == "linear" and one.given[0].op == "leaf"}
    if firsts != set(places[:-1]) or downs[0].said[0] != places[-1]:
        raise Unread("the last matrix is one of the first")
    *ups, down = (_Stacked.of(near, list(map(operator.itemgetter(place), each)), numbers) for place in places)
    dtype = type_of(downs[0].leaf).dtype
    operands = [*(one.weight for one in (*ups, down)), *(one.bias for one in (*ups, down) if one.bias is not None)]
    if any(type_of(node).dtype != dtype for node in operands):
        raise Unread("matrices of several dtypes")
    transposed = all(one.transposed for one in (*ups, down))
    weights = [one.lying(near, transposed) for one in ups]
    return dict(
        up=weights[0] if len(ups) == 1 else emit(near, "cat", tensors=weights, dim=2 if transposed else 1),
        down=down.lying(near, transposed),
        up_bias=_biases(near, ups),
        down_bias=down.bias,
        transposed=transposed,
    )


def _by_place(down: Value) -> dict[int, Matrix]:
    """The matrices of an expert, by the order in which its products are computed."""
    return {one.said[0]: one.matrix for one in down.walk() if one.matrix is not None}


def _biases(near: fx.Node, ups: Sequence[_Stacked]) -> fx.Node | None:
    """The biases of the first matrices; zeros for one that has none beside one that has."""
    known = next((one.bias for one in ups if one.bias is not None), None)
    if known is None or len(ups) == 1:
        return known
    biases = [one.bias if one.bias is not None else emit(near, "zeros_like", input=known) for one in ups]
    return emit(near, "cat", tensors=biases, dim=1)


@dataclass(frozen=True, slots=True)
class _Stacked:
    """A matrix of every expert."""

    weight: fx.Node
    transposed: bool
    bias: fx.Node | None

    @staticmethod
    def of(near: fx.Node, matrices: Sequence[Matrix], numbers: Numbers) -> _Stacked:
        sources = [_Source.of(one.weight) for one in matrices]
        if len({(one.is_turned, one.cast) for one in sources}) > 1:
            raise Unread("matrices that lie unlike")
        weight = _together(near, sources, numbers)
        biases = [_Source.of(one.bias) for one in matrices if one.bias is not None]
        bias = _together(near, biases, numbers) if biases else None
        return _Stacked(weight, matrices[0].transposed ^ sources[0].is_turned, bias)

    def lying(self, near: fx.Node, transposed: bool) -> fx.Node:
        """The matrices, in the layout of the others."""
        if self.transposed == transposed:
            return self.weight
        return emit(near, "transpose", input=self.weight, dim0=1, dim1=2)


def _together(near: fx.Node, sources: Sequence[_Source], numbers: Numbers) -> fx.Node:
    """One value of which all are slices, in their order; or a stack of them."""
    if len({type_of(one.node) for one in sources}) > 1 or len({one.cast for one in sources}) > 1:
        raise Unread("matrices of several forms")
    cast = sources[0].cast
    nodes = [one.node for one in sources]
    found = _sliced(near, nodes, numbers)
    if found is not None:
        return found if cast is None else emit(near, "to", input=found, dtype=cast)
    if cast is not None:  # A copy of casts is smaller than a cast of a copy.
        nodes = [emit(near, "to", input=node, dtype=cast) for node in nodes]
    return emit(near, "stack", tensors=nodes, dim=0)


def _sliced(near: fx.Node, nodes: Sequence[fx.Node], numbers: Numbers) -> fx.Node | None:
    """The value of which all nodes are slices, one after the other; None where there is none."""
    hows: list[Any] = [node.kwargs for node in nodes]
    if any(op_name(node) != "select" or stops_gradients(node) or node.kwargs["dim"] != 0 for node in nodes):
        return None
    if len({numbers[how["input"]] for how in hows}) > 1:
        return None
    whole = hows[0]["input"]
    size = type_of(whole).shape[0]
    first = hows[0]["index"] % size
    if [how["index"] % size for how in hows] != list(range(first, first + len(hows))):
        return None
    if len(hows) == size:
        found: fx.Node = whole
        return found
    return emit(near, "narrow", input=whole, dim=0, start=first, length=len(hows))
