"""The nodes of a local program that backward makes again: what the plan names, and the views of it."""

from __future__ import annotations

import torch.fx as fx

from autopar.codegen.local import LocalProgram
from autopar.graph import walks
from autopar.graph.graph import Graph, info
from autopar.solver.plan import Plan
from autopar.space.saved import memories


def recomputed_nodes(graph: Graph, plan: Plan, program: LocalProgram) -> list[str]:
    """The names of the nodes that make the values which the plan recomputes.

    An op that shows its operand's memory follows it: a kernel may lay out that operand so that showing it takes a copy.
    """
    if not plan.recomputed:
        return []
    views = _views(graph)
    found: dict[fx.Node, None] = {}
    for node in program.fx.nodes:
        about = info(node) if node.op == "call_function" else None
        if about is None:
            continue
        is_named = not plan.recomputed.isdisjoint((about.key, *about.names))
        follows = about.kind == "part" or about.key in views
        if is_named or (follows and any(operand in found for operand in node.all_input_nodes)):
            found[node] = None
    return [node.name for node in found]


def _views(graph: Graph) -> set[str]:
    """The ops all of whose results lie on the memory of an operand."""
    memory = memories(graph)
    ops = [n for n in graph.nodes if info(n).kind == "op"]
    return {
        info(op).key
        for op in ops
        if all(any(memory[value] == memory[a] for a in op._input_nodes) for value in walks.results(op))
    }
