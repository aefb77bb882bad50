"""Helpers to rewrite a graph: find the nodes of some ops, emit new nodes beside them, and forward values past nodes.

Passes change the readers of a value by `forward_past` alone: it refuses where shape, dtype or gradient would change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from autopar.graph import walks
from autopar.graph.graph import Graph, Info, TensorType, fresh_key, info, run, type_of
from autopar.ops.entry import OPS


def emit(near: fx.Node, op: str, out: TensorType | None = None, **arguments: Any) -> fx.Node:
    """Add an op node before `near`, with the same place in the source.

    Its type is `out`, or else found by running it on meta tensors.
    """
    about = info(near)
    graph = near.graph
    name = f"{about.module}_{op}".replace(".", "_").strip("_") or op
    node = graph.create_node("call_function", OPS[op], (), arguments, name=name)
    if out is None:
        types = {n: type_of(n) for n in node.all_input_nodes}
        on_meta = {n: torch.empty(t.shape, dtype=t.torch_dtype, device="meta") for n, t in types.items()}
        out = TensorType.of(run(node, on_meta))
    had_gradient = about.kind != "op" or about.outputs[0].requires_grad or op == "identity"
    is_read_with_gradient = any(type_of(n).requires_grad for n in node.all_input_nodes)
    flows = out.may_have_gradient and had_gradient and is_read_with_gradient
    node.meta["info"] = Info(
        fresh_key(graph, f"{about.module}/{op}"),
        "op",
        (replace(out, requires_grad=flows),),
        about.module,
        about.source,
        checkpoint=about.checkpoint,
    )
    return node


def forward_past(node: fx.Node, by: fx.Node, except_for: Collection[fx.Node] = ()) -> bool:
    """Let the readers of `node` read `by`, and return whether they do.

    Refused where the two differ in shape, dtype or gradient: `by` may have a gradient that stops at `node`.
    """
    if info(node).outputs != info(by).outputs:
        return False
    walks.hand_readers(node, by, except_for)
    return True


def stopped_like(node: fx.Node, value: fx.Node) -> fx.Node:
    """The value, behind a detach where it has a gradient that stops at `node`."""
    has_gradient = type_of(value).requires_grad and not type_of(node).requires_grad
    return emit(node, "detach", input=value) if has_gradient else value


@contextlib.contextmanager
def rewriting(graph: Graph, *ops: str) -> Iterator[list[fx.Node]]:
    """Yield the nodes of these ops, in order; those without users are erased after the block."""
    nodes: list[fx.Node] = []
    for op in ops:
        if op in OPS:
            nodes += graph.fx.find_nodes(op="call_function", target=OPS[op], sort=len(ops) == 1)
    if len(ops) > 1:
        nodes.sort()  # nodes compare by their place
    yield nodes
    for node in reversed(nodes):
        if not node.users and info(node).random < 0:
            graph.fx.erase_node(node)
