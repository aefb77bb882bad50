"""outputs="local": each rank gets its own rows of what leaves the model, and gives their gradient.

    loss = criterion(model(x_local), y_local)        # a mean over this rank's rows, as in a loop for DDP
    loss.backward()

The mean of all rows is that of the ranks' means, each weighed by its rows; so the gradient that a rank gives counts by
its share of the rows, and what the program gets is the gradient of the single-device loss.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.codegen.parts import Parts
from autopar.graph.graph import Graph, type_of
from autopar.sharding.placement import part


def rows_of_call(graph: Graph, cut: Collection[str]) -> int:
    """The rows of the batch of all ranks, by the inputs that have them; 0 where none has."""
    return next((type_of(node).shape[0] * graph.turns for name, node in graph.inputs.items() if name in cut), 0)


def own_rows(outputs: Any, parts: Parts, mesh: Any, rows: int, rank: int) -> Any:
    """The outputs with this rank's rows in the place of tensors that have all of them; others as they are."""
    start, length = 0, rows
    for axis in parts.axes:
        before, length = part(length, parts.mesh.shape[axis], parts.mesh.coordinate(rank)[axis])
        start += before
    if length == rows:
        return outputs
    groups = [mesh.get_group(axis) for axis in parts.axes]

    def cut(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.shape[:1] == (rows,)
        return _OwnRows.apply(value, start, length, groups) if has_rows else value

    return pytree.tree_map(cut, outputs)


class _OwnRows(torch.autograd.Function):
    """Some rows of a tensor that every rank has; back, the rows of all ranks, each by its share of them."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, start: int, length: int, groups: Any) -> Tensor:
        ctx.shape, ctx.start, ctx.length, ctx.groups = whole.shape, start, length, groups
        return whole.narrow(0, start, length).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        whole = gradient.new_zeros(ctx.shape)
        whole.narrow(0, ctx.start, ctx.length).copy_(gradient * (ctx.length / ctx.shape[0]))
        for group in ctx.groups:  # ranks of the other axes have the same rows
            dist.all_reduce(whole, group=group)
        return whole, None, None, None
