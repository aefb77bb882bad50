"""Aliasing in emitted graphs: which nodes share a buffer, and which only pass a value on."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence

import torch
import torch.fx as fx

from autopar.graph import walks
from autopar.runtime.collectives import STEPS
from autopar.runtime.private import TO_COPY, UNSAFE_VIEW, OpOverload

COPIES = frozenset({TO_COPY, torch.ops.aten.clone.default})


def is_view(node: fx.Node) -> bool:
    """Whether the node is a view, so that its result shares memory with its operand."""
    target = node.target
    if target is UNSAFE_VIEW:  # the schema says fresh, but it shows its operand's memory
        return True
    return isinstance(target, OpOverload) and any(r.alias_info is not None for r in target._schema.returns)


def shows(node: fx.Node) -> bool:
    """Whether the node is a view of its operand, or takes one result of an op that has several."""
    return node.op == "call_function" and (node.target is operator.getitem or is_view(node))


def hands_on(node: fx.Node) -> bool:
    """Whether the node is a collective step, cast, copy or view of one tensor.

    A chain of such nodes that begins at a parameter holds that parameter in another form.
    """
    return (
        node.op == "call_function"
        and (node.target in STEPS.values() or node.target in COPIES or is_view(node))
        and len(node.all_input_nodes) == 1
    )


def buffer_of(node: fx.Node) -> fx.Node:
    """The node that owns the memory of this one: views are followed back to what they view."""
    return walks.origin(node, _shows_an_operand)


def views_of(node: fx.Node) -> list[fx.Node]:
    """The views through which this node shows its buffer, the first taken first; none for an owner."""
    found = []
    while _shows_an_operand(node):
        found.append(node)
        node = node.all_input_nodes[0]
    return found[::-1]


def _shows_an_operand(node: fx.Node) -> bool:
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if node.target is operator.getitem:  # a part of an op with several results is a buffer of its own
        return is_view(node.all_input_nodes[0])
    return is_view(node)


def own(graph: fx.Graph, gradients: Sequence[fx.Node | None], others: Iterable[fx.Node]) -> list[fx.Node | None]:
    """The gradients, with copies of those that share a buffer with an earlier one or with `others`.

    Gradients that are not contiguous are copied as well. None stays None.
    """
    seen = {buffer_of(n) for n in others}
    found = list[fx.Node | None]()
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


def read_instead(node: fx.Node, by: fx.Node, except_for: Container[fx.Node] = ()) -> None:
    """Let the readers of an emitted node read `by`, which must have its shape and dtype."""
    was, now = node.meta.get("val"), by.meta.get("val")
    if isinstance(was, torch.Tensor) and isinstance(now, torch.Tensor):
        assert (was.shape, was.dtype) == (now.shape, now.dtype), (node, by)
    walks.hand_readers(node, by, except_for)


def numbers_of(steps: Sequence[fx.Node]) -> list[list[object]]:
    """Lists of the dims, sizes and blocks of steps of one kind, as a bucket's collective takes them."""

    def column(k: int) -> list[object]:
        return [n.args[k] if len(n.args) > k else () for n in steps]

    count = {STEPS["all_reduce"]: 0, STEPS["all_to_all"]: 6}.get(steps[0].target, 3)
    return [column(k) for k in range(2, 2 + count)]
