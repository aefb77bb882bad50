"""What repeats: calls that are alike, and blocks of them.

Layers `h.0`, `h.1`, ... that run the same ops on the same shapes, wired the same way.

A block is what runs under one numbered module path. Two are alike if their ops, arguments, types, relative module paths
and parameters agree, and every operand comes from the same place: the same op of the block, the same parameter of the
block, or the same one of its inputs, in order. Names are only where to look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.fx as fx

from autopar.graph.graph import info, op_name, type_of

if TYPE_CHECKING:
    from autopar.graph.graph import Graph


SMALLEST = 4  # ops: two norms alike are no block


@dataclass(frozen=True, slots=True)
class Repeat:
    """Blocks that are alike, in the order of the program."""

    paths: tuple[str, ...]  # "transformer.h.0", "transformer.h.1", ...
    nodes: tuple[tuple[fx.Node, ...], ...]  # of each, in the same order

    def __str__(self) -> str:
        return f"{len(self.paths)} x {len(self.nodes[0])} ops: {', '.join(self.paths)}"


def repeated_blocks(graph: Graph) -> tuple[Repeat, ...]:
    """The classes of two and more blocks that are alike.

    Where outer blocks are not, the blocks inside them are looked at.
    """
    found: list[Repeat] = []
    open_nodes = [n for n in graph.nodes if info(n).kind in ("op", "part") and op_name(n) != "identity"]
    depth = 0
    while open_nodes:
        blocks: dict[str, list[fx.Node]] = {}
        for node in open_nodes:
            if path := _block_of(info(node).module, depth):
                blocks.setdefault(path, []).append(node)
        alike: dict[Any, list[str]] = {}
        for path, nodes in blocks.items():
            alike.setdefault((path.rpartition(".")[0], _signature(path, nodes)), []).append(path)
        repeats = [paths for paths in alike.values() if len(paths) > 1 and len(blocks[paths[0]]) >= SMALLEST]
        found += [Repeat(tuple(paths), tuple(tuple(blocks[p]) for p in paths)) for paths in repeats]
        done = {path for paths in repeats for path in paths}
        open_nodes = [n for path, nodes in blocks.items() if path not in done for n in nodes]
        depth += 1
    return tuple(found)


def calls(graph: Graph) -> dict[fx.Node, int]:
    """Of each op's node a number: the same for nodes that call the same op with equal arguments on operands of equal
    types. What holds of one call holds of all that are alike.
    """
    numbers: dict[Any, int] = {}
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        about = info(node)
        if about.kind == "op":
            met: dict[fx.Node, int] = {}
            target: Any = node.target
            key = (
                target.name,
                target.call,
                tuple((k, _given(v, met)) for k, v in node.kwargs.items()),
                about.outputs,
                about.random >= 0,
            )
            found[node] = numbers.setdefault(key, len(numbers))
    return found


def _given(value: Any, met: dict[fx.Node, int]) -> Any:
    """An argument as something to compare: a tensor is its type, and which of the call's tensors it is."""
    if isinstance(value, fx.Node):
        return met.setdefault(value, len(met)), info(value).outputs[0]
    if isinstance(value, (tuple, list)):
        return tuple([_given(v, met) for v in value])
    return type(value), repr(value) if isinstance(value, (float, slice)) or value.__hash__ is None else value


def innermost_block(module: str) -> str:
    """The path up to its last number, `model.layers.3` of `model.layers.3.mlp.up`.

    Or up to a name that ends with one, `encoder_layer_0`.
    """
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()] or [
        i for i, part in enumerate(parts) if part[-1:].isdigit()
    ][:1]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else ""


def _block_of(module: str, depth: int) -> str:
    """The path up to its first number, or to a later one: `layers.0`, `layers.0.blocks.1`, `encoder_layer_0`."""
    parts = module.split(".")
    numbered = [i for i, part in enumerate(parts) if part[-1:].isdigit()]
    return ".".join(parts[: numbered[depth] + 1]) if depth < len(numbered) else ""


def _signature(path: str, nodes: list[fx.Node]) -> Any:
    place = {node: i for i, node in enumerate(nodes)}
    entering: dict[fx.Node, int] = {}

    def where(operand: fx.Node) -> Any:
        while op_name(operand) == "identity":  # a fan-out is told by its uses
            operand = operand.kwargs["input"]
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
        return any(u not in place and (op_name(u) != "identity" or leaves(u)) for u in node.users)

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
