"""Calls of ops on types, and the table of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from autopar.certificate.readings import Wholes
from autopar.certificate.types import Type, free, is_free, plain


@dataclass(frozen=True, slots=True)
class TypedCall:
    """A call of an op: arguments with types in place of tensors, and the shapes of the results."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    axes: frozenset[str]  # all axes of the mesh
    wholes: Wholes | None = None  # given for a view that may be read in several ways
    cuts_constants: bool = False  # see `Interface.cuts_constants`

    @property
    def types(self) -> list[Type]:
        return list(types_in([self.args, self.kwargs]))

    def at(self, place: int, otherwise: Any = None) -> Any:
        return self.args[place] if place < len(self.args) else otherwise


Rule = Callable[[TypedCall], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Add a rule to the table for these ATen ops, or for ops of autopar where names begin with "autopar."."""

    def add(made: Rule) -> Rule:
        RULES.update(dict.fromkeys((name if name.startswith("autopar.") else f"aten.{name}" for name in names), made))
        return made

    return add


def unknown(call: TypedCall) -> Any:
    """Result types of an op without a rule: unknown along the axes on which some operand is not whole."""
    types = call.types
    lost = frozenset(a for t in types for a in t.known)
    are_constants = bool(types) and all(is_constant(t) for t in types)
    if not are_constants and any(is_free(dim) for t in types for dim in t.dims):
        lost = call.axes  # constants of a part beside values
    made = [Type(free(s) if are_constants or not types else plain(s), open=lost) for s in call.shapes]
    return made if len(made) != 1 else made[0]


def types_in(value: Any) -> Iterable[Type]:
    """All types inside arguments or results, also in containers."""
    if isinstance(value, Type):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from types_in(one)
    elif isinstance(value, dict):
        yield from types_in(list(value.values()))


def lost_in(value: Any) -> set[str]:
    """The axes along which something is unknown of a value, beside where its part begins."""
    return {axis for t in types_in(value) if not t.is_start for axis in t.open}


def is_constant(t: Type) -> bool:
    """Whether a value is a constant, as good a part as a whole: all its dims are free or of size one."""
    return bool(t.dims) and all(is_free(dim) or not dim for dim in t.dims) and any(map(is_free, t.dims))
