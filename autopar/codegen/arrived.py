"""A backward for the gradients that have arrived.

Where none has, nothing is computed, reduced or handed out, as in eager.

What leads from no gradient that has arrived is zero by the linearity of a backward, but its ops are not run: a
derivative that is infinite, times a zero, would be NaN, and parameters that no loss reaches would have a gradient of
zeros, which optimizers decay by.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.fx as fx

from autopar.codegen.buffers import own
from autopar.runtime.collectives import PACK, STEPS

_BUCKETS = [step for name, step in STEPS.items() if name.endswith("_bucket")]
_MESSAGES = frozenset((*PACK.values(), *_BUCKETS))  # of several tensors


def for_arrived(backward: fx.Graph, arrived: Sequence[bool]) -> fx.Graph:
    """The part of a backward that depends on gradients that have arrived.

    `arrived` speaks of its last placeholders.

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
    """Follows gradients through a backward, op by op, and takes out what comes from none that has arrived."""

    def __init__(self, graph: fx.Graph, given: Sequence[fx.Node], missing: Sequence[fx.Node]) -> None:
        self.graph = graph
        self.led_to = set(given)  # values computed from gradients,
        self.empty = set(missing)  # and those of them computed from none that has arrived
        self.places: dict[fx.Node, dict[int, int]] = {}  # messages that lose parts: where the others stand now

    def op(self, node: fx.Node) -> None:
        """Decide what becomes of one op, whose operands have been decided."""
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
            node.replace_all_uses_with(next(a for a in operands if a not in self.empty))
        elif missing:
            with self.graph.inserting_before(node):
                zeros = {a: _zeros(self.graph, a) for a in missing}
            node.args = fx.map_arg(node.args, lambda a: zeros.get(a, a))
            node.kwargs = fx.map_arg(node.kwargs, lambda a: zeros.get(a, a))

    def _after_message(self, node: fx.Node, message: fx.Node) -> None:
        """A step of a message that has lost parts, or one of its parts."""
        places = self.places[message]
        if node.target is not operator.getitem:  # the message on its way
            self.places[node] = places
        elif node.args[1] in places:
            node.args = (node.args[0], places[node.args[1]])
        else:
            self.empty.add(node)


def _without_parts(message: fx.Node, empty: Collection[fx.Node]) -> dict[int, int]:
    """Take the empty parts out of a message of several tensors; where the others now stand."""
    parts, axis, *numbers = message.args
    kept = [k for k, part in enumerate(parts) if part not in empty]

    def left(row: Sequence[Any]) -> list[Any]:
        return [row[k] for k in kept]

    message.args = (left(parts), axis, *map(left, numbers))
    return {k: place for place, k in enumerate(kept)}


def _is_a_sum_of_two(node: fx.Node) -> bool:
    """Is it a sum of two gradients of one type, which is one of them where the other is missing?"""
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
