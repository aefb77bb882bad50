"""The order of values that wait on the host for backward: each leaves once and returns once, and is read at neither.

forward     begin_to_host takes a value of this half; end_to_host gives what is saved, and nothing else reads that
            memory from there on, or writes to it once the copy has begun
backward    begin_from_host takes what forward has copied, once; nothing else reads it, and what reads the value
            stands behind end_from_host
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.fx as fx

from autopar.certificate.views import VIEWS
from autopar.letters import NotCertified
from autopar.runtime.host import begin_from_host, begin_to_host, end_from_host, end_to_host
from autopar.runtime.private import OpOverload

_BACK = frozenset((begin_from_host, end_from_host))
TRAVELLING = _BACK | {begin_to_host, end_to_host}  # each gives the value that it takes

Misplaced = tuple[fx.Node, str]  # a node, and what is wrong there


def check_travels(joint: Any) -> None:
    """Raise a letter about the first node whose place in the travels of a value is wrong."""
    for node, wrong in _misplaced(joint):
        raise NotCertified(
            f"the emitted program moves a value to the host and back in a wrong order at {node.name}: {wrong}",
            at=str(node.format_node() or node.name)[:200],
            advice="this is an error of autopar, not of your model: please report it with the plan",
        )


def _misplaced(joint: Any) -> Iterator[Misplaced]:
    parts = (joint.parts.inward, joint.parts.weights) if joint.parts else ()
    others = [graph for graph in (joint.beginning, joint.settle, *parts) if graph is not None]
    graphs = [joint.forward, joint.backward, joint.hold, *others]
    if not any(_travelling(graph, TRAVELLING) for graph in graphs):
        return
    saved = joint.forward.output_node().args[0][joint.outputs :]
    travels = [place for place, node in enumerate(saved) if node.target is end_to_host]
    yield from _of_forward(joint.forward, saved)
    for half in (joint.backward, joint.hold):
        given = half.find_nodes(op="placeholder")
        yield from _of_backward(half, {given[place] for place in travels}, is_whole=half is joint.backward)
    yield from ((node, "a value travels in no half") for graph in others for node in _travelling(graph, TRAVELLING))


def _travelling(graph: fx.Graph, calls: frozenset[Any]) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in calls]


def _of_forward(graph: fx.Graph, saved: Sequence[fx.Node]) -> Iterator[Misplaced]:
    place = {node: i for i, node in enumerate(graph.nodes)}
    memory = _memories(graph)
    reads: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}  # memory -> its readers, and the value that each reads
    for node in graph.nodes:
        reads.setdefault(memory[node], []).extend((user, node) for user in node.users)
    for node in _travelling(graph, _BACK):
        yield node, "a value returns in forward"
    for begun in graph.find_nodes(op="call_function", target=begin_to_host):
        own = memory[begun.args[0]]
        if own.op == "placeholder":
            yield begun, "a value leaves that forward has not made"
        ends = list(begun.users)
        if len(ends) != 1 or ends[0].target is not end_to_host or saved.count(ends[0]) != 1 or len(ends[0].users) != 1:
            yield begun, "a copy to the host does not end as one value that is saved"
            continue
        (end,) = ends
        for reader, value in reads[own]:
            if place[reader] > place[begun] and _writes_to(reader, value):
                yield reader, f"the memory of {own} is written to after its copy has begun"
            elif place[reader] > place[end]:
                yield reader, f"the memory of {own} is read after its copy has ended"
            elif reader.target is begin_to_host and reader is not begun:
                yield reader, f"the memory of {own} leaves twice"


def _of_backward(graph: fx.Graph, arrived: set[fx.Node], is_whole: bool) -> Iterator[Misplaced]:
    """Errors of a backward; the whole one reads every value, and another may leave some on the host."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in _travelling(graph, TRAVELLING):
        if node.target not in _BACK:
            yield node, "a value leaves in backward"
        elif node.target is begin_from_host:
            ends = [user for user in node.users if user.target is end_from_host]
            if node.args[0] not in arrived:
                yield node, f"{node.args[0]} returns, and has not left"
            elif len(node.users) != 1 or len(ends) != 1:
                yield node, "a copy from the host does not end once"
        else:
            begun = node.args[0]
            is_begun = isinstance(begun, fx.Node) and begun.target is begin_from_host and place[begun] < place[node]
            if not is_begun or any(place[user] < place[node] for user in node.users):
                yield node, "a value returns after it is read"
    for value in arrived:
        returns = [user for user in value.users if user.target is begin_from_host]
        if len(returns) > 1 or len(returns) != len(value.users) or (is_whole and not returns):
            yield value, f"it returns {len(returns)} times, and is read on the host {len(value.users)} times"


def _memories(graph: fx.Graph) -> Mapping[fx.Node, fx.Node]:
    """The node that has made the memory of each, by the schemas of views."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        of = node.all_input_nodes[0] if node.op == "call_function" and node.all_input_nodes else None
        shows = of is not None and (_is_view(node) or (node.target is operator.getitem and _is_view(of)))
        found[node] = found[of] if shows and of is not None else node
    return found


def _is_view(node: fx.Node) -> bool:
    if str(node.target) in VIEWS:
        return True
    return isinstance(node.target, OpOverload) and any(r.alias_info is not None for r in node.target._schema.returns)


def _writes_to(node: fx.Node, value: fx.Node) -> bool:
    """Whether a call writes to the memory of this operand."""
    if not isinstance(node.target, OpOverload):
        return False
    written = zip(node.target._schema.arguments, node.args, strict=False)
    return any(given is value and a.alias_info is not None and a.alias_info.is_write for a, given in written)
