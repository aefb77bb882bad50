"""`verify` states what a legal graph is."""

from __future__ import annotations

import torch.fx as fx

from autopar.graph import walks
from autopar.graph.graph import Graph, info, op_name
from autopar.ops.entry import OPS


def verify(graph: Graph, after: str) -> None:
    """Assert that a graph is legal, and name the pass after which it is not.

    Operands stand before their users, every node has its entry, every op is canonical with its operands in the order of
    its signature, every key comes once. An identity repeats its operand, gradient included: later stages look past it.
    """
    seen: set[fx.Node] = set()
    keys: set[str] = set()
    for node in graph.fx.nodes:
        about = node.meta["info"]
        assert about.key not in keys, (after, about.key)
        assert seen.issuperset(node.all_input_nodes), (after, node)
        is_op = node.op == "call_function" and about.kind != "part"
        assert not is_op or node.target.signature is None or OPS.get(node.target.name) is node.target, (after, node)
        if about.kind == "op":  # lowering hands operands out in the order of the arguments
            in_order = [n for n in node.target.operands(node.kwargs) if isinstance(n, fx.Node)]
            assert walks.operands(node) == in_order, (after, node, list(node.kwargs))
            if op_name(node) == "identity":
                assert about.outputs == info(in_order[0]).outputs, (after, node)
        keys.add(about.key)
        seen.add(node)
