"""`Bindings`: the rule of every op of a graph, fitted to its call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from autopar.graph.blocks import calls
from autopar.graph.graph import Graph, info, op_name, type_of, typed
from autopar.graph.nodes import WrittenCall, is_value
from autopar.letters import BadRule, NoRule
from autopar.ops.declare import users_rule
from autopar.ops.entry import rule_of
from autopar.sharding.notation import Binding
from autopar.space.user_rules import untried


@dataclass(frozen=True, slots=True, eq=False)
class Bindings:
    """The ops of a graph with their bound rules; calls that are alike are of one kind and share a binding."""

    kinds: Mapping[fx.Node, int]
    rules: Mapping[fx.Node, Binding | None]  # None: the op has no rule
    tensors: Mapping[fx.Node, tuple[fx.Node, ...]]  # operands to which the rule gives dims, in order
    believed: Mapping[str, str]  # op with a user's rule that could not be fully tried -> the reason

    @staticmethod
    def of(graph: Graph, strict: bool) -> Bindings:
        """Bind the rules of all calls of a graph; if `strict`, a call without a rule is an error."""
        kinds = calls(graph)
        rules: dict[fx.Node, Binding | None] = {}
        tensors: dict[fx.Node, tuple[fx.Node, ...]] = {}
        known: dict[int, tuple[Binding | None, list[int]]] = {}
        believed: dict[str, str] = {}
        for node, kind in kinds.items():
            given = node.target.operands(node.kwargs)
            if kind not in known:
                known[kind] = _bind(node, given, strict), [i for i, n in enumerate(given) if is_value(n)]
                if users_rule(op_name(node)) and (why := _untried(node, given, known[kind][0])):
                    believed[op_name(node)] = why
            rules[node], places = known[kind]
            tensors[node] = tuple([given[i] for i in places])
        return Bindings(kinds, rules, tensors, believed)

    def warnings(self) -> Iterator[str]:
        """A line about each rule that is believed though it could not be tried."""
        for op, why in self.believed.items():
            yield f"{users_rule(op)} is believed where it could not be tried: {why}"


def without_numbers(binding: Binding, given: Sequence[Any]) -> Binding:
    """A call's binding, restricted to its operands that are tensors.

    A number is R on every device: it takes part in no joint linearity, and needs no flow.
    """
    return binding.without({i for i, n in enumerate(given) if n is not None and not is_value(n)})


def _bind(node: fx.Node, given: Sequence[Any], strict: bool) -> Binding | None:
    about = info(node)
    name = op_name(node)
    rule = rule_of(name, {**typed(node.kwargs), "outputs": about.outputs})
    if rule is None:
        tensors = [n for n in given if is_value(n)]
        if strict and tensors:
            raise NoRule(
                f"autopar has no sharding rule for {name}",
                at=about.source,
                seen=", ".join(f"{n.name}: {type_of(n)}" for n in tensors),
                advice=f'autopar.rule("{name}", LINE), whose LINE says which dims may be cut: docs/rules.md',
            )
        return None
    try:
        binding = without_numbers(rule.bind(tuple(_shape(n) for n in given), [t.shape for t in about.outputs]), given)
    except BadRule as e:
        raise BadRule(f"{name}: {e.what}", at=about.source, seen=e.seen) from e
    # A sum of truth values is an or, and whole numbers wrap, so such outputs cannot be partial sums.
    return binding if all("float" in t.dtype for t in about.outputs) else replace(binding, groups=())


def _untried(node: fx.Node, given: Sequence[Any], binding: Binding | None) -> str:
    """Try a user's rule on calls like this one; returns what could not be tried, as text.

    A false rule is an error.
    """
    if binding is None:
        return ""
    arguments = typed(node.kwargs)
    about = info(node)
    operands = tuple(type_of(n) for n in given if is_value(n))
    call = WrittenCall(node.target, arguments, repr(arguments), operands, about.outputs)
    kinds = tuple("absent" if n is None else "tensor" if is_value(n) else "number" for n in given)
    rule = rule_of(op_name(node), {**arguments, "outputs": about.outputs})
    assert rule is not None
    return untried(call, kinds, rule, binding, about.source)


def _shape(argument: Any) -> tuple[int, ...] | None:
    """The shape of an argument: () for a number, None for an absent one."""
    if argument is None:
        return None
    return type_of(argument).shape if is_value(argument) else ()
