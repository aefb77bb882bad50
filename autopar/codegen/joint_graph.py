"""The joint graph: forward and backward of one device in one graph, while passes rewrite it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.fx as fx

CONVERT = torch.ops.autopar.convert.default
# entries of a node's `meta`: the op of the local program that it comes of, or that whose backward it is; whether that
# is a conversion between ops; whether backward makes it again, and the place that wants it then
OP, BACK, CONVERTED, RECOMPUTED, WANTED = "op", "backward", "converted", "recomputed", "wanted"
# of the sum that ends a region: the ops of the local program that run once a chunk; of a gradient that forward makes,
# for what arrives to scale, that it does
REGION, EARLY = "region", "early"


@dataclass(slots=True, eq=False)
class JointGraph:
    """Forward and backward in one graph, while passes rewrite it."""

    graph: fx.Graph
    primals: list[fx.Node]
    tangents: list[fx.Node]
    outputs: list[fx.Node]
    gradients: list[fx.Node | None]  # of `wanted`, None where the outputs do not depend on it
    wanted: list[int]  # primals that want a gradient
    differentiable: tuple[int, ...]
    inputs: int  # so many primals are inputs: their gradients are nobody's but the caller's
    whole: dict[fx.Node, int] = field(default_factory=dict)  # of each parameter the bytes of all its parts
    alone: set[fx.Node] = field(default_factory=set)  # parameters whose gradients share no bucket
    reduced_at_once: set[fx.Node] = field(default_factory=set)  # parameters whose gradients never wait
    held: list[fx.Node | None] = field(
        default_factory=list
    )  # of each gradient of a parameter: what waits while micro-batches accumulate,
    cuts: list[fx.Node | None] = field(default_factory=list)  # and where it stands in the way to that gradient

    def write_output(self) -> None:
        """Put outputs and gradients back as the graph's output, after a pass has changed them."""
        node = self.graph.output_node()
        node.args = ((*self.outputs, *self.gradients, *self.held),)

    def read_output(self) -> None:
        """Take outputs and gradients from the graph's output, after a pass has replaced nodes."""
        values = list(self.graph.output_node().args[0])
        first, last = len(self.outputs), len(self.outputs) + len(self.gradients)
        self.outputs, self.gradients, self.held = values[:first], values[first:last], values[last:]

    def text(self) -> str:
        """The graph as Python that a person can read."""
        return str(self.graph.python_code("self").src)


def verify(joint: JointGraph, after: str) -> None:
    """Raise unless the joint graph is well-formed, with outputs and gradients where they are said to be."""
    joint.graph.lint()
    assert not joint.graph.find_nodes(op="call_function", target=CONVERT), after
    assert tuple(joint.graph.output_node().args[0]) == (*joint.outputs, *joint.gradients, *joint.held), after
    assert len(joint.gradients) == len(joint.wanted), after
