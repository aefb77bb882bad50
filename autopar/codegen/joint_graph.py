"""The joint graph: forward and backward of one device in one graph, as passes rewrite it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.fx as fx

if TYPE_CHECKING:
    from autopar.codegen.half import Read

CONVERT = torch.ops.autopar.convert.default

# Keys of a node's `meta`. Names of ops are those of the local program.
OP = "op"  # name of the op that the node computes
BACK = "backward"  # name of the op whose backward the node belongs to
MEMBERS = "members"  # the names of the ops whose backward the reductions of a bucket belong to
CONVERTED = "converted"  # whether that op is a conversion
RECOMPUTED = "recomputed"  # whether backward recomputes the node
WANTED = "wanted"  # place in forward whose backward wants the recomputed node
REGION = "region"  # names of the ops that run once per chunk, on the sum that ends their region
ADDS = "adds"  # whether the node adds up two gradients of one value
EARLY = "early"  # whether forward makes this gradient, so that backward only scales it by the arriving one


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
    reads: dict[fx.Node, Read] = field(default_factory=dict)  # each parameter's first read in forward
    # Names of the conversions and views through which all readers of a parameter get it.
    ways: dict[fx.Node, frozenset[str]] = field(default_factory=dict)
    held: list[fx.Node | None] = field(default_factory=list)  # values that micro-batches accumulate, one per gradient
    cuts: list[fx.Node | None] = field(default_factory=list)  # the same values before `own_gradients` copies any

    def write_output(self) -> None:
        """Write outputs and gradients into the graph's output node, after a pass has changed these lists."""
        node = self.graph.output_node()
        node.args = ((*self.outputs, *self.gradients, *self.held),)

    def read_output(self) -> None:
        """Read outputs and gradients back from the graph's output node, after a pass has replaced nodes."""
        values = list(self.graph.output_node().args[0])
        first = len(self.outputs)
        last = first + len(self.gradients)
        self.outputs = values[:first]
        self.gradients = values[first:last]
        self.held = values[last:]

    def text(self) -> str:
        """The graph as readable Python."""
        return str(self.graph.python_code("self").src)


def verify(joint: JointGraph, after: str) -> None:
    """Raise unless the joint graph is well-formed, with outputs and gradients where they are said to be."""
    joint.graph.lint()
    assert not joint.graph.find_nodes(op="call_function", target=CONVERT), after
    assert tuple(joint.graph.output_node().args[0]) == (*joint.outputs, *joint.gradients, *joint.held), after
    assert len(joint.gradients) == len(joint.wanted), after
