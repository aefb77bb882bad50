"""Repetition in a graph: calls that are alike, and blocks of ops that are alike, such as layers `h.0`, `h.1`.

A block is what runs under one numbered module path. Two are alike if their ops, arguments, types, relative module paths
and parameters agree, and every operand comes from the same place: the same op of the block, the same parameter of the
block, or the same one of its inputs, in order. Names are only where to look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.fx as fx

from autopar.graph import layers, walks
from autopar.graph.nodes import info, op_name, type_of

if TYPE_CHECKING:
    from autopar.graph.graph import Graph


SMALLEST = 4  # ops; two norms that are alike do not make a block


@dataclass(frozen=True, slots=True)
class Repeat:
    """Blocks that are alike, in the order of the program."""

    paths: tuple[str, ...]  # "transformer.h.0", "transformer.h.1", ...
    nodes: tuple[tuple[fx.Node, ...], ...]  # the nodes of each block, in the same order

    def __str__(self) -> str:
        return f"{len(self.paths)} x {len(self.nodes[0])} ops: {', '.join(self.paths)}"


def repeated_blocks(graph: Graph) -> tuple[Repeat, ...]:
    """The groups of two or more blocks that are alike.

    Where outer blocks are not alike, the blocks inside them are compared.
    """
    found: list[Repeat] = []
    open_nodes = [n for n in graph.nodes if info(n).kind in ("op", "part") and op_name(n) != "identity"]
    depth = 0
    while open_nodes:
        blocks: dict[str, list[fx.Node]] = {}
        for node in open_nodes:
            if path := layers.block(info(node).module, depth):
                blocks.setdefault(path, []).append(node)
        alike: dict[Any, list[str]] = {}
        for path, nodes in blocks.items():
            alike.setdefault((path.rpartition(".")[0], _signature(path, nodes)), []).append(path)
        repeats = [paths for paths in alike.values() if len(paths) > 1 and len(blocks[paths[0]]) >= SMALLEST]
        for paths in repeats:
            found.append(Repeat(tuple(paths), tuple(tuple(blocks[p]) for p in paths)))
        done = {path for paths in repeats for path in paths}
        open_nodes = [n for path, nodes in blocks.items() if path not in done for n in nodes]
        depth += 1
    return tuple(found)


def calls(graph: Graph) -> dict[fx.Node, int]:
    """A number per op node, equal for calls of one op with equal arguments on operands of equal types.

    What is found out about one of these calls holds for all.
    """
    numbers: dict[Any, int] = {}
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        about = info(node)
        if about.kind == "op":
            met: dict[fx.Node, int] = {}
            key = (
                node.target,
                tuple((k, _given(v, met)) for k, v in node.kwargs.items()),
                about.outputs,
                about.random >= 0,
            )
            found[node] = numbers.setdefault(key, len(numbers))
    return found


def _given(value: Any, met: dict[fx.Node, int]) -> Any:
    """An argument in a form to compare; a tensor is its type, and its index among the tensors of the call."""
    if isinstance(value, fx.Node):
        return met.setdefault(value, len(met)), info(value).outputs[0]
    if isinstance(value, (tuple, list)):
        return tuple([_given(v, met) for v in value])
    return type(value), repr(value) if isinstance(value, (float, slice)) or value.__hash__ is None else value


def is_fan_out(node: fx.Node) -> bool:
    """Whether a node is the identity through which a value with several uses passes.

    Such a node is told by these uses.
    """
    return op_name(node) == "identity"


def _signature(path: str, nodes: list[fx.Node]) -> Any:
    place = {node: i for i, node in enumerate(nodes)}
    entering: dict[fx.Node, int] = {}

    def where(operand: fx.Node) -> Any:
        operand = walks.origin(operand, is_fan_out)
        if operand in place:
            return ("op", place[operand])
        name = info(operand).key
        if info(operand).kind in ("parameter", "buffer") and name.startswith(path + "."):
            return ("own", name[len(path) :], type_of(operand))
        return (
            "in",
            entering.setdefault(operand, len(entering)),
            info(operand).kind in ("parameter", "buffer"),
            type_of(operand),
        )

    def wired(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return where(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(wired, value))
        if isinstance(value, slice):
            return ("slice", wired(value.start), wired(value.stop), wired(value.step))
        return (type(value).__name__, repr(value))

    def leaves(node: fx.Node) -> bool:
        return any(not is_fan_out(user) and user not in place for user in walks.uses(node, is_shared_outside))

    def is_shared_outside(node: fx.Node) -> bool:
        return is_fan_out(node) and node not in place

    lines = []
    for node in nodes:
        about = info(node)
        lines.append(
            (
                op_name(node),
                node.target if about.kind == "part" else "",
                tuple((k, wired(v)) for k, v in node.kwargs.items()),
                wired(node.args),
                about.outputs,
                about.module[len(path) :],
                len(about.checkpoint),
                about.random >= 0,
                leaves(node),
            )
        )
    return tuple(lines)
