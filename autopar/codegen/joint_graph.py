"""The joint graph: forward and backward of one device in one graph, as passes rewrite it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.fx as fx

CONVERT = torch.ops.autopar.convert.default
# entries of a node's `meta`: name of the op of the local program that it computes, or whose backward it is; whether
# that op is a conversion; whether backward recomputes it, and the place in forward that wants it then
OP, BACK, CONVERTED, RECOMPUTED, WANTED = "op", "backward", "converted", "recomputed", "wanted"
# of the sum that ends a chunked region: the ops of the local program that run once per chunk; of a gradient: forward
# makes it, and backward scales it by the gradient that arrives
REGION, EARLY = "region", "early"


@dataclass(slots=True, eq=False)
class JointGraph:
    """Forward and backward in one graph, with its inputs and results by what they are."""

    graph: fx.Graph
    primals: list[fx.Node]
    tangents: list[fx.Node]
    outputs: list[fx.Node]
    gradients: list[fx.Node | None]  # one for each of `wanted`; None where no output depends on it
    wanted: list[int]  # primals that want a gradient
    differentiable: tuple[int, ...]
    inputs: int  # number of primals that are inputs; their gradients go to the caller only
    whole: dict[fx.Node, int] = field(default_factory=dict)  # of each parameter the bytes of all its parts
    alone: set[fx.Node] = field(default_factory=set)  # parameters whose gradients share no bucket
    # of each parameter the conversions and views through which all its readers get it, by their names
    ways: dict[fx.Node, frozenset[str]] = field(default_factory=dict)
    reduced_at_once: set[fx.Node] = field(default_factory=set)  # parameters whose gradients never wait
    held: list[fx.Node | None] = field(
        default_factory=list
    )  # for each gradient of a parameter, the value that micro-batches accumulate,
    cuts: list[fx.Node | None] = field(default_factory=list)  # and the node of it that leads on to that gradient

    def write_output(self) -> None:
        """Write outputs and gradients into the graph's output node, after a pass has changed these lists."""
        node = self.graph.output_node()
        node.args = ((*self.outputs, *self.gradients, *self.held),)

    def read_output(self) -> None:
        """Read outputs and gradients back from the graph's output node, after a pass has replaced nodes."""
        values = list(self.graph.output_node().args[0])
        first, last = len(self.outputs), len(self.outputs) + len(self.gradients)
        self.outputs, self.gradients, self.held = values[:first], values[first:last], values[last:]

    def text(self) -> str:
        """The graph as readable Python."""
        return str(self.graph.python_code("self").src)


def verify(joint: JointGraph, after: str) -> None:
    """Raise unless the joint graph is well-formed, with outputs and gradients where they are said to be."""
    joint.graph.lint()
    assert not joint.graph.find_nodes(op="call_function", target=CONVERT), after
    assert tuple(joint.graph.output_node().args[0]) == (*joint.outputs, *joint.gradients, *joint.held), after
    assert len(joint.gradients) == len(joint.wanted), after
