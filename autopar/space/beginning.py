"""What a step makes once, before its first micro-batch: it is made of parameters alone, and all turns read it.

    copies      of a parameter that its plan keeps: gathered, cast or turned, in the form that ops read
    computed    what ops compute of parameters and constants alone, such as T5's bias of positions

A parameter whose plan drops its copies is gathered in every turn, for that is what keeps memory low. Constants that no
such op reads are made in every turn: they cost no message, and a mask over all positions would be held by all turns.
"""

from __future__ import annotations

from collections.abc import Container

import torch.fx as fx

from autopar.graph import walks
from autopar.graph.graph import Graph, info, op_name

# Ops whose result is another one in each turn.
_ON_TIME = frozenset({"turn", "once", "total", "chunk", "added_up"})


def computed_once(graph: Graph, owners: Container[fx.Node]) -> frozenset[fx.Node]:
    """The ops that compute something of parameters alone, with their parts and the constants they read.

    There are none without micro-batches. `owners` holds parameters and their copies, which follow the policies of
    a plan.
    """
    if graph.turns == 1:
        return frozenset()
    written = {name for kind, name in graph.updates if kind == "buffer"}
    still = set[fx.Node]()  # values that are the same in every turn
    of_parameters = set[fx.Node]()
    for node in graph.nodes:
        about = info(node)
        is_held = about.kind == "parameter" or (about.kind == "buffer" and about.key not in written)
        is_made = node.op == "call_function" and still.issuperset(node.all_input_nodes) and not _changes(node)
        if is_held or is_made:
            still.add(node)
        if node in still and (about.kind == "parameter" or not of_parameters.isdisjoint(node.all_input_nodes)):
            of_parameters.add(node)
    made = [node for node in of_parameters if node not in owners]
    return frozenset(n for n in walks.ancestors(made) if n.op == "call_function" and n not in owners)


def _changes(node: fx.Node) -> bool:
    """Whether the op draws, or belongs to one turn."""
    about = info(node)
    return about.random >= 0 or about.chunks > 1 or (about.kind == "op" and op_name(node) in _ON_TIME)
