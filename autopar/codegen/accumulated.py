"""Add each gradient that accumulates to its sum where backward makes it.

So each lives only until it is added. A backward that returned all of them would hold a second set beside the sums.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.fx as fx
from torch import Tensor

from autopar.codegen.halves import Joint
from autopar.codegen.joint_graph import BACK


def add_up(total: Tensor | None, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum so far, with the gradient added in place; where there is none, the gradient begins it."""
    return gradient.to(dtype) if total is None else total.add_(gradient)


def waiting_dtypes(joint: Joint) -> list[torch.dtype]:
    """For each gradient that waits, the wider of the dtypes in which it arrives and in which it is stored."""
    held = list(joint.hold.output_node().args[0])
    ends = list(joint.settle.output_node().args[0])
    return [
        torch.promote_types(held[i].meta["val"].dtype, end.meta["val"].dtype)
        for i, end in zip(joint.waits, ends, strict=True)
    ]


def into_sums(hold: fx.Graph, dtypes: Mapping[int, torch.dtype]) -> fx.Graph:
    """Copy of a backward that takes the sums of earlier micro-batches, and returns the new sums.

    `hold` is the program's, or a part of it, or what is left of it for the output gradients that have arrived: a sum
    whose gradient has not stays as it is. `dtypes` are those of the sums, by their places among the results.

    before    def hold(x, t):       g = mm(x, t);  h = mm(t, w);  return g, h
    after     def hold(s, x, t):    g = mm(x, t);  u = add_up(s, g, float32);  h = mm(t, w);  return u, h
    """
    made = fx.Graph()
    results = list(hold.output_node().args[0])
    name = "accumulated"
    while any(node.name.startswith(name) for node in hold.nodes):
        name += "_"
    sums = {i: made.placeholder(f"{name}_{i}") for i in dtypes}
    copies: dict[fx.Node, fx.Node] = {n: made.node_copy(n) for n in hold.find_nodes(op="placeholder")}
    ends = {results[i]: i for i in dtypes if results[i] is not None}
    for node in hold.nodes:
        if node.op == "output" or (node in copies and node.op != "placeholder"):
            continue
        if node.op != "placeholder":
            copies[node] = made.node_copy(node, copies.__getitem__)
        for end in (node, *(n for n in node.users if _is_copy_for_output(n) and n in ends)):
            if end is not node:
                copies[end] = made.node_copy(end, copies.__getitem__)
            if end in ends:
                i = ends[end]
                sums[i] = made.call_function(add_up, (sums[i], copies[end], dtypes[i]))
                if BACK in end.meta:
                    sums[i].meta[BACK] = end.meta[BACK]
    made.output(tuple(sums[i] if i in sums else r and copies[r] for i, r in enumerate(results)))
    return made


def _is_copy_for_output(node: fx.Node) -> bool:
    """Whether the node is a copy that only leaves: it stands at the end, and is made where its operand is."""
    return node.target is torch.ops.aten.clone.default and all(user.op == "output" for user in node.users)
