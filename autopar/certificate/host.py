"""The order of values that wait on the host for backward: each leaves once and returns once, and is read at neither.

forward     begin_to_host takes a value of this half; end_to_host gives what is saved, and nothing else reads that
            memory from there on, or writes to it once the copy has begun
backward    begin_from_host takes what forward has copied, once; nothing else reads it, and what reads the value
            stands behind end_from_host; of a backward in two parts, the first

A parameter that lies on the host is read through begin_up alone, once in a half, and what reads it stands behind
end_from_host; forward saves nothing that shows it on the device. Its gradient leaves backward through begin_to_host and
end_to_host; nothing reads or writes to it behind these.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.fx as fx

from autopar.certificate.views import VIEWS
from autopar.letters import NotCertified
from autopar.runtime.backward_steps import hand_over
from autopar.runtime.host import begin_from_host, begin_to_host, begin_up, end_from_host, end_to_host
from autopar.runtime.private import OpOverload

_BACK = frozenset((begin_from_host, begin_up, end_from_host))
TRAVELLING = _BACK | {begin_to_host, end_to_host}  # each gives the value that it takes

Misplaced = tuple[fx.Node, str]  # a node, and what is wrong there


def check_travels(joint: Any, on_host: frozenset[int] = frozenset()) -> None:
    """Raise a letter about the first node whose place in the travels of a value is wrong.

    `on_host` are the indices of the primals that lie on the host.
    """
    for node, wrong in _misplaced(joint, on_host):
        raise NotCertified(
            f"the emitted program moves a value to the host and back in a wrong order at {node.name}: {wrong}",
            at=str(node.format_node() or node.name)[:200],
            advice="this is an error of autopar, not of your model: please report it with the plan",
        )


def _misplaced(joint: Any, on_host: frozenset[int]) -> Iterator[Misplaced]:
    backwards = [joint.backward, joint.hold, *([joint.parts.inward] if joint.parts else [])]
    rest = (joint.beginning, joint.settle, joint.parts.weights if joint.parts else None)
    others = [graph for graph in rest if graph is not None]
    graphs = [joint.forward, *backwards, *others]
    if not on_host and not any(_travelling(graph, TRAVELLING) for graph in graphs):
        return
    results = joint.forward.output_node().args[0]
    saved = results[joint.outputs :]
    travels = [place for place, node in enumerate(saved) if node.target is end_to_host]
    lying = [node for i, node in enumerate(joint.forward.find_nodes(op="placeholder")) if i in on_host]
    shown = [place for place, node in enumerate(saved) if node in lying]
    yield from _of_forward(joint.forward, saved)
    yield from _brought_up(joint.forward, lying)
    memory = memories(joint.forward)
    up = set(joint.forward.find_nodes(op="call_function", target=end_from_host))
    yield from ((node, "a parameter of the host leaves forward") for node in results[: joint.outputs] if node in lying)
    yield from ((node, "a parameter that came up is saved on the device") for node in saved if memory[node] in up)
    for half in backwards:
        given = half.find_nodes(op="placeholder")
        leaving = _gradients_of(joint, on_host) if half is joint.backward else []
        yield from _of_backward(half, {given[place] for place in travels}, leaving, is_whole=half is joint.backward)
        yield from _brought_up(half, [given[place] for place in shown])
    if joint.beginning is not None:
        given = joint.beginning.find_nodes(op="placeholder")
        yield from _brought_up(joint.beginning, [given[i] for i in sorted(on_host)])
    alone = frozenset((begin_to_host, end_to_host, begin_from_host))
    yield from ((node, "a value travels in no half") for graph in others for node in _travelling(graph, alone))


def _gradients_of(joint: Any, on_host: frozenset[int]) -> list[fx.Node]:
    """The results of backward that are gradients of parameters on the host, where there is one."""
    results = joint.backward.output_node().args[0]
    found = (node for i, node in zip(joint.gradients, results, strict=True) if i in on_host)
    return [node.args[0] if node.target is hand_over else node for node in found if node is not None]


def _brought_up(graph: fx.Graph, lying: Sequence[fx.Node]) -> Iterator[Misplaced]:
    """Errors of a half that reads parameters which lie on the host."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for part in lying:
        comes = [user for user in part.users if user.target is begin_up]
        if len(comes) > 1 or any(user not in comes and user.op != "output" for user in part.users):
            yield part, f"it comes up {len(comes)} times, and is read on the host"
    for begun in graph.find_nodes(op="call_function", target=begin_up):
        ends = list(begun.users)
        if begun.args[0] not in lying:
            yield begun, f"{begun.args[0]} comes up, and does not lie on the host"
        elif len(ends) != 1 or ends[0].target is not end_from_host:
            yield begun, "a copy of a parameter does not end once"
        elif any(place[user] < place[ends[0]] for user in ends[0].users):
            yield ends[0], "a parameter comes up after it is read"


def _travelling(graph: fx.Graph, calls: frozenset[Any]) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in calls]


def _of_forward(graph: fx.Graph, saved: Sequence[fx.Node]) -> Iterator[Misplaced]:
    place = {node: i for i, node in enumerate(graph.nodes)}
    memory = memories(graph)
    reads: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}  # memory -> its readers, and the value that each reads
    for node in graph.nodes:
        reads.setdefault(memory[node], []).extend((user, node) for user in node.users)
    for node in _travelling(graph, frozenset((begin_from_host,))):
        yield node, "a value returns in forward"
    for begun in graph.find_nodes(op="call_function", target=begin_to_host):
        own = memory[begun.args[0]]
        if own.op == "placeholder":
            yield begun, "a value leaves that forward has not made"
        ends = list(begun.users)
        if len(ends) != 1 or ends[0].target is not end_to_host or saved.count(ends[0]) != 1 or len(ends[0].users) != 1:
            yield begun, "a copy to the host does not end as one value that is saved"
            continue
        yield from _left(begun, ends[0], reads[own], place)


def _left(
    begun: fx.Node, end: fx.Node, reads: Sequence[tuple[fx.Node, fx.Node]], place: Mapping[fx.Node, int]
) -> Iterator[Misplaced]:
    """Errors of who reads a memory, given with the value by which each does, around its copy to the host."""
    for reader, value in reads:
        if place[reader] > place[begun] and writes_to(reader, value):
            yield reader, f"the memory of {value} is written to after its copy has begun"
        elif place[reader] > place[end]:
            yield reader, f"the memory of {value} is read after its copy has ended"
        elif reader.target is begin_to_host and reader is not begun:
            yield reader, f"the memory of {value} leaves twice"


def _gone_down(graph: fx.Graph, leaving: Sequence[fx.Node]) -> Iterator[Misplaced]:
    """Errors of gradients that leave backward for the host."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    begun = graph.find_nodes(op="call_function", target=begin_to_host)
    for copy in begun:
        ends = list(copy.users)
        if len(ends) != 1 or ends[0].target is not end_to_host or leaving.count(ends[0]) != 1 or len(ends[0].users) > 1:
            yield copy, "a value leaves in backward, and not as the gradient of a parameter that lies on the host"
            continue
        reads = [(user, copy.args[0]) for user in copy.args[0].users]
        yield from _left(copy, ends[0], reads, place)
    for gradient in leaving:
        if gradient.target is not end_to_host:
            yield gradient, "a gradient stays on the device, and its parameter lies on the host"


def _of_backward(
    graph: fx.Graph, arrived: set[fx.Node], leaving: Sequence[fx.Node], is_whole: bool
) -> Iterator[Misplaced]:
    """Errors of a backward; the whole one reads every value, and another may leave some on the host."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    yield from _gone_down(graph, leaving)
    for node in _travelling(graph, _BACK):
        if node.target is begin_up:
            continue
        if node.target is begin_from_host:
            ends = [user for user in node.users if user.target is end_from_host]
            if node.args[0] not in arrived:
                yield node, f"{node.args[0]} returns, and has not left"
            elif len(node.users) != 1 or len(ends) != 1:
                yield node, "a copy from the host does not end once"
        else:
            begun = node.args[0]
            is_coming = isinstance(begun, fx.Node) and begun.target in (begin_from_host, begin_up)
            is_begun = is_coming and place[begun] < place[node]
            if not is_begun or any(place[user] < place[node] for user in node.users):
                yield node, "a value returns after it is read"
    for value in arrived:
        returns = [user for user in value.users if user.target is begin_from_host]
        if len(returns) > 1 or len(returns) != len(value.users) or (is_whole and not returns):
            yield value, f"it returns {len(returns)} times, and is read on the host {len(value.users)} times"


def memories(graph: fx.Graph) -> Mapping[fx.Node, fx.Node]:
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


def writes_to(node: fx.Node, value: fx.Node) -> bool:
    """Whether a call writes to the memory of this operand."""
    if not isinstance(node.target, OpOverload):
        return False
    written = zip(node.target._schema.arguments, node.args, strict=False)
    return any(given is value and a.alias_info is not None and a.alias_info.is_write for a, given in written)
