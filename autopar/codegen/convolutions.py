"""Backward of convolutions in two ops, where the two run at different times."""

from __future__ import annotations

import torch
import torch.fx as fx

from autopar.codegen.joint_graph import JointGraph
from autopar.graph import walks

_BACKWARD = torch.ops.aten.convolution_backward.default


def part_convolutions(joint: JointGraph) -> None:
    """Compute the gradients of a convolution's operand and of its parameters in two ops.

    This pass runs only where backward is in parts.

    before    b = convolution_backward(g, x, w, ..., [True, True, True]);  u = b[0];  v = b[1]
    after     b = convolution_backward(g, x, w, ..., [True, False, False]);  u = b[0]
              c = convolution_backward(g, x, w, ..., [False, True, True]);  v = c[1]
    """
    for node in joint.graph.find_nodes(op="call_function", target=_BACKWARD):
        of_operand, *of_parameters = node.args[-1]
        if not of_operand or not any(of_parameters):
            continue
        with joint.graph.inserting_after(node):
            other = joint.graph.node_copy(node)
        _compute(node, [True, False, False])
        _compute(other, [False, *of_parameters])
        for part in walks.parts(node):
            if part.args[1]:
                part.replace_input_with(node, other)
    joint.graph.lint()


def _compute(node: fx.Node, mask: list[bool]) -> None:
    """Let an op compute only the gradients of a mask."""
    node.args = (*node.args[:-1], mask)
    node.meta["val"] = tuple(value if wanted else None for value, wanted in zip(node.meta["val"], mask, strict=True))
