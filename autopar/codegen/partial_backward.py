"""Cut a backward down to the output gradients that a caller passes: all others are None, as in eager.

A gradient that is missing counts as zero, and a backward is linear in its gradients. But ops that depend on missing
gradients alone are removed rather than run on zeros: an infinite derivative times zero is NaN, and a parameter that no
loss reaches would get a gradient of zeros, by which an optimizer applies weight decay.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.fx as fx

from autopar.codegen.buffers import own, read_instead
from autopar.runtime.collectives import PACK, STEPS

_BUCKETS = [step for name, step in STEPS.items() if name.endswith("_bucket")]
_MESSAGES = frozenset((*PACK.values(), *_BUCKETS))  # collectives that carry several tensors


def for_arrived(backward: fx.Graph, arrived: Sequence[bool]) -> fx.Graph:
    """Copy of a backward graph without the ops that depend only on output gradients that are missing.

    `arrived` says of each of the last placeholders, the output gradients, whether it is passed. A result that depends
    on no passed gradient becomes None; collectives of buckets keep the tensors that remain.

    before    a = mul(t0, u);  b = mul(t1, v);  c = add(a, b);  d = all_reduce_bucket([b, c], "dp");  return a, d[0],
              d[1]      # t1 has not arrived
    after     a = mul(t0, u);  d = all_reduce_bucket([a], "dp");  return a, None, d[0]
    """
    graph = copy.deepcopy(backward)
    placeholders = graph.find_nodes(op="placeholder")
    given = placeholders[len(placeholders) - len(arrived) :]
    cut = _Cut(graph, given, [node for node, has in zip(given, arrived, strict=True) if not has])
    for node in [n for n in graph.nodes if n.op == "call_function"]:
        cut.op(node)
    output = graph.output_node()
    values = [None if value in cut.empty else value for value in output.args[0]]
    output.args = (tuple(own(graph, values, placeholders)),)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    graph.lint()
    return graph


class _Cut:
    """Walks a backward in order and removes the ops whose gradients are all missing."""

    def __init__(self, graph: fx.Graph, given: Sequence[fx.Node], missing: Sequence[fx.Node]) -> None:
        self.graph = graph
        self.led_to = set(given)  # values computed from output gradients
        self.empty = set(missing)  # values computed from missing output gradients alone
        self.places: dict[fx.Node, dict[int, int]] = {}  # new places by old places, per bucket that lost tensors

    def op(self, node: fx.Node) -> None:
        """Keep, drop or rewrite one op, after all its operands."""
        operands = [a for a in node.all_input_nodes if a in self.led_to]
        if not operands:
            return
        self.led_to.add(node)
        missing = [a for a in operands if a in self.empty]
        if operands[0] in self.places:
            self._after_message(node, operands[0])
        elif len(missing) == len(operands):
            self.empty.add(node)
        elif missing and node.target in _MESSAGES:
            self.places[node] = _without_parts(node, self.empty)
        elif missing and _is_a_sum_of_two(node):
            read_instead(node, next(a for a in operands if a not in self.empty))
        elif missing:
            with self.graph.inserting_before(node):
                zeros = {a: _zeros(self.graph, a) for a in missing}
            node.args = fx.map_arg(node.args, lambda a: zeros.get(a, a))
            node.kwargs = fx.map_arg(node.kwargs, lambda a: zeros.get(a, a))

    def _after_message(self, node: fx.Node, message: fx.Node) -> None:
        """Renumber a node that reads a bucket after tensors left it: a later step, or one of its tensors."""
        places = self.places[message]
        if node.target is not operator.getitem:  # a later step of the same message
            self.places[node] = places
        elif node.args[1] in places:
            node.args = (node.args[0], places[node.args[1]])
        else:
            self.empty.add(node)


def _without_parts(message: fx.Node, empty: Collection[fx.Node]) -> dict[int, int]:
    """Remove the empty tensors from a bucket; returns the new places of the kept ones by the old places."""
    parts, axis, *numbers = message.args
    kept = [k for k, part in enumerate(parts) if part not in empty]

    def left(row: Sequence[Any]) -> list[Any]:
        return [row[k] for k in kept]

    message.args = (left(parts), axis, *map(left, numbers))
    return {k: place for place, k in enumerate(kept)}


def _is_a_sum_of_two(node: fx.Node) -> bool:
    """Whether the node is a sum of two gradients of the node's own shape and dtype.

    Where one of the two is missing, the sum equals the other.
    """
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs:
        return False
    values = [n.meta["val"] for n in (node, *node.all_input_nodes)]
    types = [(v.shape, v.dtype) for v in values]
    return len(types) == 3 and types.count(types[0]) == 3


def _zeros(graph: fx.Graph, like: fx.Node) -> fx.Node:
    value = like.meta["val"]
    how = {"dtype": value.dtype, "device": torch.device(value.device.type)}
    made = graph.call_function(torch.ops.aten.full.default, (list(value.shape), 0), how)
    made.meta["val"] = value
    return made
