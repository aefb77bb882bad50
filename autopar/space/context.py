"""Sequences that a preset cuts by context: the inputs of which the queries of attentions are made."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import torch.fx as fx

from autopar.graph.graph import Graph, info, op_name, type_of
from autopar.letters import BadPreset
from autopar.sharding.attention_ways import ATTENTIONS
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import every_part_holds_something

_WRITTEN_OUT = ("softmax",)  # an attention whose scores are a tensor of queries by keys


def cuts_of_sequences(graph: Graph, mesh: DeviceMesh, axes: Sequence[int]) -> dict[str, str]:
    """Placements that cut the sequence of inputs along axes, as text by the name of the input."""
    found = sequences_of(graph)
    inputs = graph.inputs
    sizes = [mesh.shape[a] for a in axes]
    parts = math.prod(sizes)
    if not found:
        raise BadPreset(
            f"parallel cuts a sequence by context={parts}, and no input has the positions of an attention",
            seen=", ".join(f"{name} {list(type_of(node).shape)}" for name, node in inputs.items()),
            advice='parallel="zero3", which cuts rows of the batch, or no preset',
        )
    for name, dim in found.items():
        positions = type_of(inputs[name]).shape[dim]
        if not every_part_holds_something(positions, sizes):
            raise BadPreset(
                f"{parts} devices cannot share the {positions} positions of input {name}",
                seen=f"mesh {mesh}",
                advice="longer sequences, or fewer devices for context",
            )
    return {name: _cut(dim, mesh, axes) for name, dim in found.items()}


def _cut(dim: int, mesh: DeviceMesh, axes: Sequence[int]) -> str:
    return ", ".join(f"S({dim})@{mesh.axes[a]}" for a in axes)


def sequences_of(graph: Graph) -> dict[str, int]:
    """The inputs of which queries of attentions are made, each with its dim of positions."""
    calls = [node for node in graph.nodes if info(node).kind == "op"]
    ends = {node for node in calls if op_name(node) in ATTENTIONS}
    ends = ends or {node for node in calls if op_name(node) in _WRITTEN_OUT and len(type_of(node).shape) > 2}
    found: dict[str, int] = {}
    seen: set[tuple[fx.Node, int]] = set()
    for node in calls:
        if node in ends:
            queries = node.kwargs.get("query", node.kwargs.get("input"))
            assert isinstance(queries, fx.Node)
            positions = type_of(queries).shape[-2]
            for source in _inputs_behind(queries, positions, ends, seen):
                if (dim := _dim_of(type_of(source).shape, positions)) >= 0:
                    found.setdefault(info(source).key, dim)
    return found


def _inputs_behind(
    value: fx.Node, positions: int, ends: Collection[fx.Node], seen: set[tuple[fx.Node, int]]
) -> Iterator[fx.Node]:
    """The inputs of which a value is made without an attention between."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if (node, positions) in seen or node in ends:
            continue
        seen.add((node, positions))
        if info(node).kind == "input":
            yield node
        waiting += node.all_input_nodes


def _dim_of(shape: Sequence[int], positions: int) -> int:
    """The dim with so many positions, the first behind the batch's if there is one; -1 without any."""
    return next((d for d in (*range(1, len(shape)), 0) if d < len(shape) and shape[d] == positions), -1)
