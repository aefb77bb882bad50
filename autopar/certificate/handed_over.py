"""Gradients that backward hands over: by each of them the host steps a parameter while backward goes on.

Each stands as the gradient of that parameter, once. Behind it nothing reads the parameter, in whatever copy on its way
from the host, and nothing writes to the gradient. No other part of a program hands over anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from autopar.certificate.host import TRAVELLING, Misplaced, check_travels, memories, writes_to
from autopar.letters import NotCertified
from autopar.runtime.backward_steps import hand_over
from autopar.runtime.host import begin_up

HANDING_ON = TRAVELLING | {hand_over}  # each gives the value that it takes


@dataclass(frozen=True, slots=True)
class OnHost:
    """Parameters of a program that the host holds or steps, by their places among the primals."""

    lying: frozenset[int] = frozenset()  # parameters that lie there, with their gradients
    stepped: Mapping[int, str] = field(default_factory=dict)  # names of those that it steps while backward goes on


NOTHING_THERE = OnHost()


def check_order(joint: Any, on_host: OnHost) -> None:
    """Raise a letter about the first node at a wrong place where values travel or are handed over."""
    check_travels(joint, on_host.lying)
    for node, wrong in (*_of_other_graphs(joint), *_of_backward(joint, on_host.stepped)):
        raise NotCertified(
            f"the emitted program hands over a gradient to be stepped at {node.name}: {wrong}",
            at=str(node.format_node() or node.name)[:200],
            advice="this is an error of autopar, not of your model: please report it with the plan",
        )


def _of_other_graphs(joint: Any) -> Iterator[Misplaced]:
    parts = (joint.parts.inward, joint.parts.weights) if joint.parts else ()
    for graph in (joint.forward, joint.hold, joint.settle, joint.beginning, *parts):
        for node in graph.find_nodes(op="call_function", target=hand_over) if graph is not None else ():
            yield node, "that is not final"


def _of_backward(joint: Any, names: Mapping[int, str]) -> Iterator[Misplaced]:
    results = joint.backward.output_node().args[0]
    right = {node: i for i, node in zip(joint.gradients, results, strict=True) if i in names and node is not None}
    for node in joint.backward.find_nodes(op="call_function", target=hand_over):
        if node not in right or node.args[1] != names[right[node]] or len(node.users) != 1:
            yield node, "of another parameter"
    readers = _readers(joint) if right else {}
    memory = memories(joint.backward)
    for node, i in right.items():
        if node.target is hand_over:
            yield from _behind(node, readers.get(i, ()), memory)
        else:
            yield node, "which is not"


def _behind(node: fx.Node, readers: Iterable[fx.Node], memory: Mapping[fx.Node, fx.Node]) -> Iterator[Misplaced]:
    """Errors of what runs after a gradient is handed over: who reads its parameter, and who writes to it."""
    yield from ((reader, f"{node.args[1]} is read behind that") for reader in readers if node < reader)
    for value in (value for value, owner in memory.items() if owner is memory[node.args[0]]):
        for user in value.users:
            if node < user and writes_to(user, value):
                yield user, f"the gradient of {node.args[1]} is written to behind that"


def _readers(joint: Any) -> dict[int, list[fx.Node]]:
    """The nodes of backward that read each primal as it lies, by the primal's place."""
    order = {node: i for i, node in enumerate(joint.forward.find_nodes(op="placeholder"))}
    forward = memories(joint.forward)
    backward = memories(joint.backward)
    saved = joint.forward.output_node().args[0][joint.outputs :]
    given = joint.backward.find_nodes(op="placeholder")
    primal_of = {node: order.get(forward[kept]) for node, kept in zip(given, saved, strict=False)}
    found: dict[int, list[fx.Node]] = {}
    for node in joint.backward.nodes:
        if (i := primal_of.get(backward[node])) is not None:
            found.setdefault(i, []).extend(user for user in node.users if user.op != "output")
    for readers in found.values():
        readers += [end for begun in readers if begun.target is begin_up for end in begun.users]
    return found
