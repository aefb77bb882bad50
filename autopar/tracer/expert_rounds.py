"""One round of a loop over experts, read back from the ops that capture has made of it.

    out = out + where(ids == e, w * f(where(any(ids == e), x, 0); W_e), 0).sum(slots)

A round is read as it is where its mask is true: `where` of the mask is its first operand there, and layouts are names
of dims. What is left is a tree of leaves (rows and weights, before they are chosen), products with the expert's
matrices, and elementwise ops. Trees leave out the matrices alone, so that rounds with equal trees compute the same but
for these.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.fx as fx

from autopar.graph.graph import info, op_name, stops_gradients, type_of
from autopar.graph.nodes import is_value
from autopar.tracer.alike import Numbers
from autopar.tracer.choices import Masks
from autopar.tracer.expert_values import Matrix, Place, Value, in_both_orders
from autopar.tracer.named_dims import LAYOUTS, Atom, Dims, Unread, aligned, beside, flat, laid_out, without

ELEMENTWISE = frozenset(
    "add sub rsub mul div pow neg abs maximum minimum clamp to exp sqrt rsqrt tanh sigmoid reciprocal log cos sin "
    "square erf log1p expm1 gelu relu silu hardswish hardsigmoid mish relu6 selu logsigmoid softsign leaky_relu elu "
    "celu hardtanh softplus hardshrink softshrink threshold".split()
)


class Reading:
    """Reads the values of one round; `before` is the value to which the round adds."""

    deepest = 150  # Ops in a row: a body has a few, and a walk into the rest of a model ends here.

    def __init__(self, masks: Masks, numbers: Numbers, before: fx.Node | None) -> None:
        self.masks = masks
        self.numbers = numbers
        self.before = before
        self.matrices: list[tuple[int, int | None]] = []
        self._read: dict[fx.Node, Value] = {}
        self._depth = 0

    def value(self, node: fx.Node) -> Value:
        """The value of a node; raises `Unread` where it is not one of the round."""
        if node not in self._read:
            if not is_value(node) or node < self.masks.start or node is self.before or self._depth > self.deepest:
                raise Unread("not of this round")
            if stops_gradients(node):
                raise Unread("a gradient stops")
            self._depth += 1
            try:
                self._read[node] = self._made(node)
            finally:
                self._depth -= 1
        return self._read[node]

    def _made(self, node: fx.Node) -> Value:
        name = op_name(node)
        how: Any = node.kwargs
        if info(node).kind == "part":
            return self._part(node)
        if name in LAYOUTS:
            given = self.value(how["input"])
            return replace(given, dims=laid_out(node, given.dims))
        by_name: dict[str, Callable[[fx.Node], Value]] = {
            "where": self._where,
            "linear": self._linear,
            "matmul": self._linear,
            "sum": functools.partial(_slots, reading=self),
            "narrow": self._narrow,
        }
        if name in by_name:
            return by_name[name](node)
        if name == "index_select":
            return _looked_up(node, self.value(how["index"]), self.numbers)
        if name in ELEMENTWISE:
            return self._elementwise(node)
        raise Unread(name)

    def _where(self, node: fx.Node) -> Value:
        """The first operand: the condition is true. A value from before the round is a leaf."""
        how: Any = node.kwargs
        condition = self.masks.dims(how["condition"])
        given = how["input"]
        if not is_value(given):
            raise Unread("a number")
        try:
            found = self.value(given)
        except Unread:
            at = beside(condition, type_of(given).shape)
            found = Value("leaf", at, said=(self.numbers[given], at), node=given)
        return replace(found, dims=aligned(condition, found.dims))

    def _linear(self, node: fx.Node) -> Value:
        how: Any = node.kwargs
        is_linear = op_name(node) == "linear"
        weight = how["weight"] if is_linear else how["other"]
        given = self.value(how["input"])
        bias = how.get("bias")
        if not is_value(weight) or len(type_of(weight).shape) != 2 or not _is_one_atom(given.dims[-1:]):
            raise Unread("a product of something else")
        return self._product(node, given, Matrix(weight, not is_linear, bias))

    def _product(self, node: fx.Node, given: Value, matrix: Matrix) -> Value:
        key = self.numbers[matrix.weight], None if matrix.bias is None else self.numbers[matrix.bias]
        if key not in self.matrices:
            self.matrices.append(key)
        is_first = given.op == "leaf"
        width = type_of(node).shape[-1]
        if width == 1:
            raise Unread("a column alone")
        form = type_of(matrix.weight), matrix.transposed, matrix.bias is not None and type_of(matrix.bias)
        dims = (*given.dims[:-1], (Atom("i" if is_first else "o", width),))
        return Value("linear", dims, (given,), (self.matrices.index(key), form), node, matrix=matrix)

    def _biased(self, node: fx.Node) -> Value | None:
        """A product to which a bias is added by itself."""
        for product, bias in in_both_orders(node):
            if not (is_value(product) and is_value(bias)) or "alpha" in node.kwargs:
                continue
            if len(type_of(bias).shape) == 1 and op_name(product) in ("matmul", "linear", "view"):
                found = self.value(product)
                is_free = found.op == "linear" and found.matrix is not None and found.matrix.bias is None
                if is_free and found.matrix and type_of(bias).shape == type_of(product).shape[-1:]:
                    with_bias = self._product(node, found.given[0], replace(found.matrix, bias=bias))
                    return replace(with_bias, dims=found.dims)
        return None

    def _onto(self, node: fx.Node) -> Value | None:
        """An addition to the rows that the round began with."""
        for before, added in in_both_orders(node):
            if is_value(before) and is_value(added) and self._is_before(before) and "alpha" not in node.kwargs:
                given = self.value(added)
                shape = type_of(before).shape
                if len(shape) == len(given.dims):
                    met = tuple(atom for dim, size in zip(given.dims, shape, strict=True) if size > 1 for atom in dim)
                    return Value("onto", given.dims, (given,), met, node)
        return None

    def _is_before(self, node: fx.Node) -> bool:
        """Whether a value is what the round adds to, where the mask is true; views may put in dims of size 1."""
        if self.before is None:
            return False
        sizes = [size for size in type_of(self.before).shape if size > 1]
        while node is not self.before:
            if op_name(node) == "where" and is_value(node.kwargs["input"]):
                self.masks.dims(node.kwargs["condition"])
            elif op_name(node) != "view" and op_name(node) != "identity":
                return False
            node = node.kwargs["input"]
            if [size for size in type_of(node).shape if size > 1] != sizes:
                return False
        return True

    def _narrow(self, node: fx.Node) -> Value:
        how: Any = node.kwargs
        return _range(node, self.value(how["input"]), self.masks, how["dim"], how["start"], how["length"])

    def _part(self, node: fx.Node) -> Value:
        split: Any = node.args[0]
        if node.target is not operator.getitem or op_name(split) != "split":
            raise Unread("a part")
        how: Any = split.kwargs
        sections = how["sections"]
        place: Any = node.args[1]
        given = self.value(how["input"])
        return _range(node, given, self.masks, how.get("dim", 0), sum(sections[:place]), sections[place])

    def _elementwise(self, node: fx.Node) -> Value:
        if op_name(node) == "add" and (found := self._biased(node) or self._onto(node)):
            return found
        given: list[Value] = []
        arguments = {}
        for name, argument in node.kwargs.items():
            if is_value(argument):
                arguments[name] = Place(len(given))
                given.append(self.value(argument))
            else:
                arguments[name] = argument
        said = tuple((name, type(argument).__name__, repr(argument)) for name, argument in arguments.items())
        dims = functools.reduce(aligned, (one.dims for one in given))
        return Value(op_name(node), dims, tuple(given), (said, type_of(node).dtype), node, arguments)


def _looked_up(node: fx.Node, places: Value, numbers: Numbers) -> Value:
    """Rows at their own places."""
    how: Any = node.kwargs
    given: fx.Node = how["input"]
    counted = places.node
    while counted is not None and op_name(counted) == "view":
        counted = counted.kwargs["input"]
    size = type_of(given).shape[how["dim"]]
    is_count = counted is not None and op_name(counted) == "arange" and places.op == "leaf"
    bounds = {"start": 0, "step": 1, **counted.kwargs} if is_count and counted is not None else {}
    if (bounds.get("start"), bounds.get("end"), bounds.get("step")) != (0, size, 1):
        raise Unread("rows at other places")
    atoms = flat(places.said[1])
    dim = how["dim"] % len(type_of(given).shape)
    names: list[tuple[Atom, ...]] = [()] * (len(type_of(given).shape) - dim)
    at = beside((atoms, *names[1:]), type_of(given).shape)
    if at[dim] != atoms or flat(places.dims) != atoms:
        raise Unread("rows at other places")
    return Value("leaf", at, said=(numbers[given], at), node=given)


def _slots(node: fx.Node, reading: Reading) -> Value:
    """A sum over slots of what is zero where the mask is not true."""
    how: Any = node.kwargs
    chosen = how["input"]
    if op_name(chosen) != "where" or chosen.kwargs["other"] != 0 or is_value(chosen.kwargs["other"]):
        raise Unread("a sum of something else")
    whole = flat(reading.masks.choice.dims)
    if set(flat(reading.masks.dims(chosen.kwargs["condition"]))) != set(whole):
        raise Unread("a sum of what is chosen in some slot")
    given = reading.value(chosen)
    dims = without(given.dims, how)
    removed = set(flat(given.dims)) - set(flat(dims))
    if not removed <= set(whole) or any(one.op == "slots" for one in given.walk()):
        raise Unread("a sum over columns")
    return Value("slots", dims, (given,), tuple(sorted(removed)), node)


def _range(node: fx.Node, given: Value, masks: Masks, dim: int, start: int, length: int) -> Value:
    """A half of a product's columns, or a column of a leaf."""
    dim %= len(given.dims)
    if not _is_one_atom(given.dims[dim : dim + 1]):
        raise Unread("a part of several dims")
    atom = given.dims[dim][0]
    if given.op == "linear" and dim == len(given.dims) - 1 and 2 * length == atom.size and start in (0, length):
        return Value("half", (*given.dims[:-1], (Atom(atom.name, length),)), (given,), start // length, node)
    if given.op == "leaf" and length == 1 and atom not in flat(masks.choice.dims):
        return Value("column", (*given.dims[:dim], (), *given.dims[dim + 1 :]), (given,), (atom, start), node)
    raise Unread("a part of columns")


def _is_one_atom(dims: Dims) -> bool:
    return len(dims) == 1 and len(dims[0]) == 1
