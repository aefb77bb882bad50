"""Walks over the nodes of a graph: from a value back to what it is made of, and on to what reads it.

    ancestors        the nodes that some nodes are made of
    origin           back through single operands, while a condition holds
    made_of_one      values that are one source in another form
    uses             the ops that read a value, itself or in another form
    parts            the results of an op that gives several
    results          the values that any node gives
    hand_readers     what read a value reads another one

A condition such as `hands_on` says which ops give their operand in another form: views, casts, copies, steps.
They serve the graph of the model and the emitted ones alike.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator

import torch.fx as fx

Condition = Callable[[fx.Node], bool]


def ancestors(of: Iterable[fx.Node], stops: Condition | None = None) -> set[fx.Node]:
    """Some nodes and all nodes they are made of, up to those at which the walk stops, which are left out.

    `stops` is asked before operands are looked at, last operands first.
    """
    found: set[fx.Node] = set()
    pending = list(of)
    while pending:
        node = pending.pop()
        if node not in found and not (stops is not None and stops(node)):
            found.add(node)
            pending += node.all_input_nodes
    return found


def origin(value: fx.Node, hands_on: Condition) -> fx.Node:
    """The value that is handed on, found by walking back through first operands while `hands_on` holds."""
    while hands_on(value):
        value = value.all_input_nodes[0]
    return value


def made_of_one(nodes: Iterable[fx.Node], is_source: Condition, hands_on: Condition) -> dict[fx.Node, fx.Node]:
    """The source of each value that is one source in another form; a source is its own."""
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if is_source(node):
            found[node] = node
        elif hands_on(node) and node.all_input_nodes and all(a in found for a in node.all_input_nodes):
            found[node] = found[node.all_input_nodes[0]]
    return found


def uses(value: fx.Node, hands_on: Condition) -> Iterator[fx.Node]:
    """The nodes that read a value, each once, and past those that hand it on the nodes that read these."""
    seen: set[fx.Node] = set()
    pending = list(reversed(value.users))
    while pending:
        user = pending.pop()
        if user not in seen:
            seen.add(user)
            yield user
            if hands_on(user):
                pending += reversed(user.users)


def parts(node: fx.Node) -> list[fx.Node]:
    """The getitem nodes that take the results of an op with several; none for any other op."""
    return [user for user in node.users if user.target is operator.getitem and user.args[0] is node]


def results(node: fx.Node) -> list[fx.Node]:
    """The values that a node gives: the parts of an op with several results, else the node itself."""
    return parts(node) or [node]


def operands(node: fx.Node) -> list[fx.Node]:
    """The values that a node reads, in order; one that is read twice comes twice."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def hand_readers(node: fx.Node, by: fx.Node, except_for: Container[fx.Node] = ()) -> None:
    """Let all that read `node` read `by`, but for some; whether they may is for the caller to know."""
    node.replace_all_uses_with(by, delete_user_cb=lambda user: user not in except_for)
