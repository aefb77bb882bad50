"""What chooses the rows of one expert: a mask that is true where the id of a row and slot is the expert's number.

eq(ids, e)                                  ids as they are
select(one_hot(ids), dim, e) != 0           the same, in any layout, and ids of one slot
select(one_hot(ids) * fits, dim, e) != 0    ids that have been dropped count nothing
eq(ids, e) & select(hit, 0, e)              experts that are not hit count nothing
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx

from autopar.graph.graph import info, op_name, type_of
from autopar.tracer.alike import Numbers
from autopar.tracer.named_dims import LAYOUTS, Atom, Dims, Unread, laid_out, of_shape, without


@dataclass(frozen=True, slots=True)
class Kept:
    """What says of experts whether ids of them count; `dims` has the atom of classes."""

    number: int
    dims: Dims
    node: fx.Node = field(compare=False)


@dataclass(frozen=True, slots=True)
class Choice:
    """A mask, or the masks of all experts where `expert` is None."""

    ids: fx.Node = field(compare=False)
    number: int  # The number of ids tells choices apart.
    at: Dims  # dims of ids
    dims: Dims
    expert: int | None = field(default=None, compare=False)
    classes: Atom | None = None
    kept: tuple[Kept, ...] = ()


def choice_of(node: fx.Node, numbers: Numbers) -> Choice:
    """The choice that a boolean mask makes; raises where it is another."""
    name = op_name(node)
    how: Any = node.kwargs
    if type_of(node).dtype != "bool":
        raise Unread("no mask")
    if name == "eq" and isinstance(how["other"], int) and isinstance(how["input"], fx.Node):
        ids = how["input"]
        if type_of(ids).dtype not in ("int64", "int32"):
            raise Unread("ids are whole numbers")
        dims = of_shape(type_of(ids).shape, "r")
        return Choice(ids, numbers[ids], dims, dims, how["other"])
    if name in ("bitwise_and", "logical_and"):
        for one, other in ((how["input"], how["other"]), (how["other"], how["input"])):
            if type_of(other).shape == ():
                found = choice_of(one, numbers)
                return replace(found, kept=(*found.kept, _condition(other, found, numbers)))
    found = _classes(node, numbers)
    if found.expert is None:
        raise Unread("a mask of all experts")
    return found


def _condition(node: fx.Node, choice: Choice, numbers: Numbers) -> Kept:
    """The value of which a condition on one expert is an element."""
    how: Any = node.kwargs
    if op_name(node) != "select" or how["index"] != choice.expert or len(type_of(how["input"]).shape) != 1:
        raise Unread("a condition on something else")
    given = how["input"]
    return Kept(numbers[given], ((Atom("classes", type_of(given).shape[0]),),), given)


def _classes(node: fx.Node, numbers: Numbers) -> Choice:
    """One-hot ids, or those of one expert, in any layout; elements that are not zero are the true ones."""
    name = op_name(node)
    how: Any = node.kwargs
    if name == "one_hot":
        ids = how["input"]
        at = of_shape(type_of(ids).shape, "r")
        classes = Atom("classes", type_of(node).shape[-1])
        if classes.size == 1:
            raise Unread("one class")
        return Choice(ids, numbers[ids], at, (*at, (classes,)), None, classes)
    if name in ("ne", "gt") and type(how["other"]) in (int, bool) and how["other"] == 0:
        return _classes(how["input"], numbers)
    if name in LAYOUTS or name == "to":
        found = _classes(how["input"], numbers)
        return found if name == "to" else replace(found, dims=laid_out(node, found.dims))
    if name in ("select", "narrow"):
        return _picked(node, _classes(how["input"], numbers))
    if name in ("mul", "bitwise_and", "logical_and"):
        return _product(node, numbers)
    raise Unread("no mask of ids")


def _picked(node: fx.Node, of: Choice) -> Choice:
    """The mask of one expert among those of all."""
    how: Any = node.kwargs
    dim = how["dim"] % len(of.dims)
    if of.expert is not None or of.dims[dim] != (of.classes,):
        raise Unread("a part of a mask")
    if op_name(node) == "narrow":
        if how["length"] != 1:
            raise Unread("several experts")
        return replace(of, expert=how["start"], dims=(*of.dims[:dim], (), *of.dims[dim + 1 :]))
    assert of.classes is not None
    return replace(of, expert=how["index"] % of.classes.size, dims=(*of.dims[:dim], *of.dims[dim + 1 :]))


def _product(node: fx.Node, numbers: Numbers) -> Choice:
    """One-hot ids of which some are dropped."""
    for operand in (node.kwargs["input"], node.kwargs["other"]):
        if isinstance(operand, fx.Node) and type_of(operand).shape == type_of(node).shape:
            try:
                found = _classes(operand, numbers)
            except Unread:
                continue
            if found.expert is None and not type_of(node).may_have_gradient:
                return replace(found, kept=(Kept(numbers[node], found.dims, node),))
    raise Unread("no mask of ids")


@dataclass(slots=True)
class Masks:
    """Masks of one choice: those of its rows and slots, and of rows that it chooses in some slot."""

    root: int  # the number of the mask itself
    choice: Choice
    numbers: Numbers

    @staticmethod
    def of(condition: fx.Node, numbers: Numbers) -> Masks:
        """The masks of which `condition` is one."""
        node = condition
        while op_name(node) in LAYOUTS or op_name(node) == "any":
            node = node.kwargs["input"]
        return Masks(numbers[node], choice_of(node, numbers), numbers)

    @property
    def start(self) -> fx.Node:
        """The first node of the mask: nothing before it depends on it."""
        return self.numbers.first[self.root]

    def dims(self, condition: fx.Node) -> Dims:
        """The dims of a condition that is true wherever the mask is; raises for others."""
        if self.numbers[condition] == self.root:
            return self.choice.dims
        name = op_name(condition)
        if info(condition).kind == "op" and (name in LAYOUTS or name == "any"):
            given: Any = condition.kwargs["input"]
            dims = self.dims(given)
            return without(dims, condition.kwargs) if name == "any" else laid_out(condition, dims)
        raise Unread("another condition")
