"""Rows of letters, of which the rules are made that depend on a call.

    row = Row.of(input)                                                  a0 a1 a2
    rule_from([row.whole(1)], [row.without(1)])                          a0 a1! a2 -> a0 a2
    rule_from([row], [row.insert(1, "new!")])                            a0 a1 a2 -> a0 new! a1 a2
    rule_from([row.resized(1, "in")], [row.resized(1, "out")])           a0 in1! a2 -> a0 out1! a2
    rule_from([row.replaced(1, "p|q")], [row.replaced(1, x) for x in "pq"])
                                                                         a0 p|q a2 -> a0 p a2, a0 q a2

Most calls name the dims that an op runs along. An entry says what becomes of these dims, and nothing else:

    rule=along(linear="x")         they stay whole                       a0 a1! a2 -> a0 a1! a2
    rule=resized(linear="x")       they get another size                 a0 in1! a2 -> a0 out1! a2
    rule=removed("^")              the output lacks them                 a0 a1^ a2 -> a0 a2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from autopar.sharding.notation import NAMES, Rule, parse

__all__ = ["NAMES", "Row", "along", "dims_of", "parse", "removed", "resized", "rule_from", "whole_dims"]

CallRule: TypeAlias = Callable[[Mapping[str, Any]], Rule]  # the rule of each call, by its arguments
Dims: TypeAlias = int | Iterable[int] | None  # one, several, or all; negative ones count from the end


class Row(tuple[str, ...]):
    """The letters of a tensor's dims; its methods return a changed row."""

    __slots__ = ()

    @staticmethod
    def of(tensor: Any) -> Row:
        """A letter for each dim of a tensor: a0, a1, ..."""
        return Row(f"a{i}" for i in range(len(tensor.shape)))

    def __str__(self) -> str:
        return " ".join(self)

    def places(self, dims: Dims) -> set[int]:
        """The places of dims in the row; a row of no dims has none."""
        if dims is None:
            return set(range(len(self)))
        return {d % len(self) for d in ([dims] if isinstance(dims, int) else dims)} if self else set()

    def marked(self, dims: Dims, mark: str) -> Row:
        """The row with a mark on some dims."""
        places = self.places(dims)
        return Row(f"{a}{mark}" if i in places else a for i, a in enumerate(self))

    def whole(self, dims: Dims = None) -> Row:
        """The row, of which some dims stay whole."""
        return self.marked(dims, "!")

    def resized(self, dims: Dims, name: str) -> Row:
        """The row, of which some dims stay whole and have a size that other tensors lack there."""
        places = self.places(dims)
        return Row(f"{name}{i}!" if i in places else a for i, a in enumerate(self))

    def replaced(self, dims: Dims, letter: str) -> Row:
        """The row with another letter for some dims."""
        places = self.places(dims)
        return Row(letter if i in places else a for i, a in enumerate(self))

    def without(self, dims: Dims) -> Row:
        """The row without some dims."""
        places = self.places(dims)
        return Row(a for i, a in enumerate(self) if i not in places)

    def insert(self, dim: int, letter: str) -> Row:
        """The row with a new dim, which is then at this place."""
        place = dim % (len(self) + 1)
        return Row([*self[:place], letter, *self[place:]])

    def last(self, tensor: Any) -> Row:
        """The last letters, as many as a tensor has dims that is broadcast to the row."""
        return Row(self[len(self) - len(tensor.shape) :])


def rule_from(operands: Iterable[Sequence[str]], outputs: Iterable[Sequence[str]], linear: str = "") -> Rule:
    """The rule of these rows; an empty one is a tensor without dims."""
    left, right = (", ".join(map(" ".join, rows)) for rows in (operands, outputs))
    return parse(f"{left} -> {right}", linear)


def whole_dims(prefix: str, count: int) -> list[str]:
    """Letters of `count` dims that stay whole."""
    return [f"{prefix}{i}!" for i in range(count)]


def dims_of(arguments: Mapping[str, Any], default: Dims = None) -> Dims:
    """The dims that a call names; `default` where it names none."""
    named = arguments.get("dim", arguments.get("dims"))
    return default if named is None else named


def along(default: Dims = None, linear: str = "") -> CallRule:
    """Rules of an op that keeps its operand's shape: the dims that a call names stay whole."""

    def rule(arguments: Mapping[str, Any]) -> Rule:
        row = Row.of(arguments["input"]).whole(dims_of(arguments, default))
        return rule_from([row], [row] * len(arguments["outputs"]), linear)

    return rule


def resized(default: Dims = None, linear: str = "") -> CallRule:
    """Rules of an op that gives the dims that a call names another size: they stay whole."""

    def rule(arguments: Mapping[str, Any]) -> Rule:
        row = Row.of(arguments["input"])
        dims = dims_of(arguments, default)
        return rule_from([row.resized(dims, "in")], [row.resized(dims, "out")] * len(arguments["outputs"]), linear)

    return rule


def removed(mark: str = "!", default: Dims = None, linear: str = "") -> CallRule:
    """Rules of an op whose output lacks the dims that a call names; with `keepdim` they have size one."""

    def rule(arguments: Mapping[str, Any]) -> Rule:
        row = Row.of(arguments["input"])
        dims = dims_of(arguments, default)
        left = row.replaced(dims, "1") if arguments.get("keepdim") else row.without(dims)
        return rule_from([row.marked(dims, mark)], [left] * len(arguments["outputs"]), linear)

    return rule
