"""Messages in an emitted half: begun at one place, and finished at another, where their results take over."""

from __future__ import annotations

import operator

import torch.fx as fx

from autopar.codegen.buffers import read_instead
from autopar.runtime.collectives import BEGIN, PACK, finish


def begin(graph: fx.Graph, kind: str, tensors: object, axis: object, *numbers: object) -> fx.Node:
    """Begin one message of these tensors; their memory may be freed once they are packed."""
    packed = graph.call_function(PACK[kind], (tensors, axis, *numbers))
    return graph.call_function(BEGIN[kind], (packed, axis))


def finish_before(graph: fx.Graph, begun: fx.Node, nodes: list[fx.Node], place: fx.Node) -> None:
    """Finish a collective before `place`, and replace these nodes by its results."""
    begun.meta["val"] = [n.meta["val"] for n in nodes]
    with graph.inserting_before(place):
        done = graph.call_function(finish, (begun,))
    hand_out(graph, done, nodes)


def hand_out(graph: fx.Graph, together: fx.Node, nodes: list[fx.Node]) -> None:
    """Replace these nodes by the parts of one result."""
    together.meta["val"] = [n.meta["val"] for n in nodes]
    with graph.inserting_after(together):
        for i, node in reversed(list(enumerate(nodes))):
            part = graph.call_function(operator.getitem, (together, i))
            part.meta["val"] = node.meta["val"]
            read_instead(node, part)
    for node in nodes:
        graph.erase_node(node)
