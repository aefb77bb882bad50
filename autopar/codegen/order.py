"""Holds emitted halves to the order that a plan is priced by: forward as the local program, backward in reverse.

What moves parameters or their gradients stands where the schedule puts it, and what is recomputed before what reads it;
copies for chunks carry no mark of their op.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

import torch.fx as fx

from autopar.codegen.buffers import hands_on
from autopar.codegen.half import Half
from autopar.codegen.joint_graph import BACK, OP, RECOMPUTED
from autopar.runtime.collectives import BEGIN, PACK, STEPS, finish

_MOVES = frozenset((*STEPS.values(), *PACK.values(), *BEGIN.values(), finish, operator.getitem))


def check_order(half: Half, places: Mapping[str, int]) -> None:
    """Raise unless the ops of a half begin in their order, by their places in the local program."""
    names = dict.fromkeys(_ops(half, BACK if half.is_backward else OP))  # each where it begins
    order = [name for name in names if name in places]
    said = sorted(order, key=places.__getitem__, reverse=half.is_backward)
    for name, right in zip(order, said, strict=True):
        assert name == right, f"{name} runs where the plan has {right}"


def _ops(half: Half, mark: str) -> Iterator[str]:
    """The ops of a half's nodes in order, without what stands by another rule."""
    moving = {*_of_parameters(half), *_of_leaving_gradients(half)}
    for node in half.graph.nodes:
        if mark in node.meta and node not in moving and not node.meta.get(RECOMPUTED):
            yield node.meta[mark]


def _of_parameters(half: Half) -> set[fx.Node]:
    """The nodes made of parameters alone, whole messages of them included."""
    found = set[fx.Node]()
    for node in half.graph.nodes:
        operands = node.all_input_nodes
        is_made = _moves(node) and bool(operands) and found.issuperset(operands)
        if is_made or (node.op == "placeholder" and node.name in half.reads):
            found.add(node)
    return found


def _of_leaving_gradients(half: Half) -> set[fx.Node]:
    """The nodes through which gradients leave backward, whole messages of them included."""
    end = half.graph.output_node()
    found = {end}
    for node in reversed(half.graph.nodes):
        if half.is_backward and _moves(node) and node.users and found.issuperset(node.users):
            found.add(node)
    return found


def _moves(node: fx.Node) -> bool:
    return node.op == "call_function" and (hands_on(node) or node.target in _MOVES)
