"""outputs="local": each rank gets its own rows of the outputs, and passes back their gradient.

    loss = criterion(model(x_local), y_local)        # a mean over this rank's rows, as in a loop for DDP
    loss.backward()

The mean over all rows is the mean of the ranks' means, weighted by their rows. So the gradient that a rank passes is
scaled by its share of the rows, and the program gets the gradient of the single-device loss. This is not so for a mean
over something else, such as targets that are not ignored, or weighted classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.codegen.local_inputs import Parts
from autopar.graph.graph import Graph, info, type_of
from autopar.letters import Letter, NotServed
from autopar.runtime.agreement import wait_for
from autopar.sharding.placement import part


def outputs_of_rows(
    trace: Callable[[Any], Graph], graph: Graph, meta_inputs: Any, cut: Collection[str]
) -> Mapping[str, bool]:
    """Whether each output, by name, has the rows of the batch as its first dim, and grows with them.

    The model is traced on one row more, as sizes alone do not tell: a weight or a mean over rows may be as long as a
    batch.
    """
    rows = next((type_of(node).shape[0] for name, node in graph.inputs.items() if name in cut), 0)
    if not rows:
        return dict.fromkeys(graph.output_names, False)

    def longer(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[:1] != (rows,):
            return value
        return torch.empty((rows + 1, *value.shape[1:]), dtype=value.dtype, device="meta")

    try:
        other = trace(pytree.tree_map(longer, meta_inputs))
    except Letter as e:
        raise NotServed(
            'outputs="local": which outputs have the rows of the batch is seen by a batch of one row more, and the '
            f"model does not take one: {e.what}",
            at=e.at,
            advice='outputs="full", and labels of all ranks',
        ) from e
    before, after = info(graph.output).outputs, info(other.output).outputs
    if graph.output_names != other.output_names:
        raise NotServed('outputs="local", and the model has other outputs for another batch', advice='outputs="full"')
    return {
        name: one.shape[:1] == (rows,) and two.shape[:1] == (rows + 1,)
        for name, one, two in zip(graph.output_names, before, after, strict=False)
    }


def rows_of_call(graph: Graph, cut: Collection[str]) -> int:
    """Number of rows in the batch of all ranks, by the inputs that have rows; 0 where none has."""
    return next((type_of(node).shape[0] * graph.turns for name, node in graph.inputs.items() if name in cut), 0)


def own_rows(
    named: Mapping[str, Any], gives: Mapping[str, bool], parts: Parts, mesh: Any, rows: int, rank: int
) -> list[Any]:
    """The outputs, with only this rank's rows of those that have the rows of the batch.

    `gives` says for each output of the first call whether it has rows; other outputs raise a letter.
    """
    outputs = list(named.values())
    start = 0
    length = rows
    for axis in parts.axes:
        before, length = part(length, parts.mesh.shape[axis], parts.coordinate(rank)[axis])
        start += before
    if length == rows:
        return outputs
    groups = [mesh.get_group(axis) for axis in parts.axes]

    if unknown := [name for name in named if name not in gives]:
        raise NotServed(
            f'outputs="local", and this call has an output {unknown[0]!r} that the first had not',
            advice='outputs="full"',
        )
    return [_OwnRows.apply(value, start, length, groups) if gives[name] else value for name, value in named.items()]


class _OwnRows(torch.autograd.Function):
    """Takes some rows of a tensor that every rank has; backward sums the ranks' gradients, by their share of rows."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, start: int, length: int, groups: Any) -> Tensor:
        ctx.shape = whole.shape
        ctx.start = start
        ctx.length = length
        ctx.groups = groups
        return whole.narrow(0, start, length).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        whole = gradient.new_zeros(ctx.shape)
        whole.narrow(0, ctx.start, ctx.length).copy_(gradient * (ctx.length / ctx.shape[0]))
        for group in ctx.groups:  # ranks of the other axes have the same rows
            wait_for(dist.all_reduce(whole, group=group, async_op=True))
        return whole, None, None, None
