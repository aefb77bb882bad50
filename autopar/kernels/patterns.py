"""Find a piece of a program, written as a pattern, in another program.

A pattern is written as local programs print. Names that are assigned are its ops or local forms, the last of them its
result; other names are operands, names in capitals are constants of any value.

    wide = to(input=x, dtype=torch.float32)
    square = pow(input=wide, exponent=2)

Sums and products match either way round. Only the result may be read from outside; of several results, a last line
names them all. An op at which a gradient stops matches nothing: a kernel would hand it on.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from autopar.graph.graph import info, op_name, stops_gradients
from autopar.ops.entry import Op
from autopar.runtime import forms

_EITHER_WAY = ("add", "mul")
_DRAWN = ("dropout", "dropout_by_position")  # the only random ops that may match
_NEAR = 3  # nodes of an op that are looked at for a result beside the last one
_Bound = Mapping[str, Any]  # name in a pattern -> the node or constant that it stands for


@dataclass(frozen=True, slots=True)
class Member:
    """An op of a pattern; an argument is the name of a value or constant, a list of names, or a literal."""

    op: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Name:
    """A name in a pattern."""

    text: str


@dataclass(frozen=True, slots=True)
class Pattern:
    """Ops by the names of their values, in order."""

    steps: Mapping[str, Member]
    results: tuple[str, ...]  # the last of them is that of the last step
    variant: Mapping[str, Any]  # properties of this spelling that its family reads

    @staticmethod
    def of(text: str, **variant: Any) -> Pattern:
        """Parse a pattern."""
        steps = dict[str, Member]()
        results: tuple[str, ...] = ()
        for line in ast.parse(text).body:
            if isinstance(line, ast.Expr) and isinstance(line.value, ast.Tuple):
                results = tuple(e.id for e in line.value.elts if isinstance(e, ast.Name))
                continue
            assert isinstance(line, ast.Assign) and isinstance(line.value, ast.Call), "name = op(argument=value, ...)"
            assert isinstance(line.targets[0], ast.Name) and isinstance(line.value.func, ast.Name)
            arguments = {str(k.arg): _argument(k.value) for k in line.value.keywords}
            steps[line.targets[0].id] = Member(line.value.func.id, arguments)
        results = results or (next(reversed(steps)),)
        assert results[-1] == next(reversed(steps)), "the last step makes the last result"
        return Pattern(steps, results, variant)


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A match of a pattern: what its names stand for."""

    pattern: Pattern
    bound: _Bound

    @property
    def nodes(self) -> list[fx.Node]:
        """The matched ops, in the order of the pattern."""
        return [self.bound[name] for name in self.pattern.steps]

    @property
    def result(self) -> fx.Node:
        return self.results[-1]

    @property
    def results(self) -> list[fx.Node]:
        """The values that may be read from outside."""
        return [self.bound[name] for name in self.pattern.results]

    @property
    def named(self) -> Mapping[str, Any]:
        """Values, constants by their names in small letters, and properties of the spelling."""
        return {**self.pattern.variant, **{name.lower(): value for name, value in self.bound.items()}}

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]


def matches(pattern: Pattern, node: fx.Node) -> Iterator[Match]:
    """The matches of a pattern whose last result is this node."""
    for bound in _all_results(pattern, node):
        found = Match(pattern, bound)
        nodes = set(found.nodes)
        results = found.results
        others = {user for result in results[:-1] for user in readers(result)} - nodes
        is_late = all(user > node for user in others)  # all results are made where the last is
        is_whole = len(nodes) == len(pattern.steps)
        if is_late and is_whole and all(nodes.issuperset(readers(n)) for n in nodes.difference(results)):
            yield found


def _all_results(pattern: Pattern, last: fx.Node) -> Iterator[_Bound]:
    """The possible matches of a pattern whose last result is this node.

    A result that the last one does not depend on is searched among the nodes before.
    """
    ways = list(_value(pattern, pattern.results[-1], last, {}))
    for name in reversed(pattern.results[:-1]):
        further = list[_Bound]()
        for bound in ways:
            if name in bound:
                further.append(bound)
                continue
            before = itertools.islice(_before(last, pattern.steps[name].op), _NEAR)
            further += (way for node in before for way in _value(pattern, name, node, bound))
        ways = further
    yield from ways


def _before(node: fx.Node, op: str) -> Iterator[fx.Node]:
    """The nodes before one that call an op, the nearest first."""
    while (node := node.prev).op != "root":
        if node.op == "call_function" and called(node) == op:
            yield node


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a value, directly or through an identity for several readers."""
    for user in node.users:
        if _is_identity(user):
            yield from readers(user)
        else:
            yield user


def _is_identity(node: fx.Node) -> bool:
    return isinstance(node.target, Op) and op_name(node) == "identity"


def _argument(written: ast.expr) -> Any:
    if isinstance(written, ast.Name):
        return Name(written.id)
    if isinstance(written, ast.Attribute):
        return getattr(torch, written.attr)
    if isinstance(written, ast.List):
        return [_argument(e) for e in written.elts]
    return ast.literal_eval(written)


def _value(pattern: Pattern, name: str, given: Any, bound: _Bound) -> Iterator[_Bound]:
    """The bindings by which a name may stand for a node or constant, beside those that exist."""
    while isinstance(given, fx.Node) and _is_identity(given):
        given = given.kwargs["input"]
    if name in bound:
        if bound[name] is given or (name.isupper() and bound[name] == given):
            yield bound
    elif name.isupper():
        if not isinstance(given, fx.Node):
            yield {**bound, name: given}
    elif isinstance(given, fx.Node):
        step = pattern.steps.get(name)
        if step is None:
            yield {**bound, name: given}
        elif called(given) == step.op and _may_match(given, step):
            for arguments in _orders(step):
                yield from _arguments(pattern, list(arguments.items()), given.kwargs, {**bound, name: given})


def _may_match(node: fx.Node, step: Member) -> bool:
    return not stops_gradients(node) and (info(node).random < 0 or step.op in _DRAWN)


def called(node: fx.Node) -> str:
    """The op that a node calls, or the local form that stands for one; "" where it is neither."""
    return name_of(node.target)


def name_of(function: Any) -> str:
    """The name of an op, or of a local form; "" for any other function."""
    is_form = getattr(function, "__module__", "") == forms.__name__
    return str(getattr(function, "__name__", "")) if is_form or isinstance(function, Op) else ""


def _orders(step: Member) -> Iterator[Mapping[str, Any]]:
    yield step.arguments
    if step.op in _EITHER_WAY and set(step.arguments) == {"input", "other"}:
        yield {"input": step.arguments["other"], "other": step.arguments["input"]}


def _arguments(
    pattern: Pattern, wanted: Sequence[tuple[str, Any]], given: Mapping[str, Any], bound: _Bound
) -> Iterator[_Bound]:
    """The bindings by which all arguments match; arguments that are not in the pattern must be absent."""
    if len(wanted) != len(given):
        return
    ways: list[_Bound] = [bound]
    for key, argument in wanted:
        if key not in given:
            return
        ways = [further for way in ways for further in _one(pattern, argument, given[key], way)]
    yield from ways


def _one(pattern: Pattern, argument: Any, given: Any, bound: _Bound) -> Iterator[_Bound]:
    if isinstance(argument, Name):
        yield from _value(pattern, argument.text, given, bound)
    elif isinstance(argument, list):
        if isinstance(given, (list, tuple)) and len(given) == len(argument):
            ways: list[_Bound] = [bound]
            for a, g in zip(argument, given, strict=True):
                ways = [further for way in ways for further in _one(pattern, a, g, way)]
            yield from ways
    elif not isinstance(given, fx.Node) and isinstance(given, bool) == isinstance(argument, bool) and argument == given:
        yield bound
