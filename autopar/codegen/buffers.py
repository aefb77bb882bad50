"""Emitted nodes one by one: whose memory a node shows, and whether it only hands a value on."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
import torch.fx as fx

from autopar.graph import walks
from autopar.runtime.collectives import STEPS
from autopar.runtime.private import TO_COPY, UNSAFE_VIEW, OpOverload

COPIES = frozenset({TO_COPY, torch.ops.aten.clone.default})


def is_view(node: fx.Node) -> bool:
    """Does it show its operand's memory?"""
    target = node.target
    if target is UNSAFE_VIEW:  # its schema says fresh; it shows its operand's memory
        return True
    return isinstance(target, OpOverload) and any(r.alias_info is not None for r in target._schema.returns)


def shows(node: fx.Node) -> bool:
    """Is it a view of its operand, or a part of an op's results?"""
    return node.op == "call_function" and (node.target is operator.getitem or is_view(node))


def hands_on(node: fx.Node) -> bool:
    """A step, cast, copy or view of one tensor: of a parameter alone, it is the parameter in another form."""
    return (
        node.op == "call_function"
        and (node.target in STEPS.values() or node.target in COPIES or is_view(node))
        and len(node.all_input_nodes) == 1
    )


def buffer_of(node: fx.Node) -> fx.Node:
    """The node whose memory this one shows: views are followed to what they view."""
    return walks.origin(node, _shows_an_operand)


def _shows_an_operand(node: fx.Node) -> bool:
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if node.target is operator.getitem:  # a part of an op with several results is a buffer of its own
        return is_view(node.all_input_nodes[0])
    return is_view(node)


def own(graph: fx.Graph, gradients: Sequence[fx.Node | None], others: Iterable[fx.Node]) -> list[fx.Node | None]:
    """Copy each gradient whose buffer is another's: of a gradient before it, or of `others`."""
    seen, found = {buffer_of(n) for n in others}, list[fx.Node | None]()
    for value in gradients:
        if value is not None:
            fake = value.meta["val"]
            if buffer_of(value) in seen or not fake.is_contiguous():
                how = {"memory_format": torch.contiguous_format}
                with graph.inserting_before(graph.output_node()):
                    value = graph.call_function(torch.ops.aten.clone.default, (value,), how)
                value.meta["val"] = fake if fake.is_contiguous() else fake.contiguous()
            seen.add(buffer_of(value))
        found.append(value)
    return found


def numbers_of(steps: Sequence[fx.Node]) -> list[list[object]]:
    """Dims, sizes and blocks of several gathers or scatters, as their common message takes them."""

    def column(k: int) -> list[object]:
        return [n.args[k] if len(n.args) > k else () for n in steps]

    return [column(k) for k in (2, 3, 4)]
