"""Cut a program into stages at the borders of its blocks: a stage for every op, or none.

    an op of a block             the stage of its block, or a later one that makes what it reads
    an op of no block            the first stage that reads it: an embedding stands with the first block, a head last
    of inputs alone, or of       no stage: each that reads it makes its own, so that masks, positions and gathered
    parameters alone             parameters never travel

A block is what a module path names up to its first number, in the order in which blocks first run.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.fx as fx

from autopar.graph import layers
from autopar.graph.graph import Graph, info, op_name
from autopar.letters import NotServed
from autopar.ops.entry import facts_of
from autopar.stages.blocks import Units


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """The stage of each op that has one, and the ops that every reader makes for itself."""

    stages: int
    stage: Mapping[fx.Node, int]
    anywhere: frozenset[fx.Node]


def blocks_of(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """Names of the blocks of a program, in the order in which they first run."""
    paths = dict.fromkeys(info(n).module for n in nodes if _is_work(n))
    found = dict.fromkeys(filter(None, map(_block, paths)))
    return tuple(found or dict.fromkeys(path.partition(".")[0] for path in paths if path))


def labels_of(nodes: Sequence[fx.Node], firsts: Sequence[str]) -> Labels:
    """The stages of a program; each but the first begins with one of the blocks `firsts`."""
    blocks = blocks_of(nodes)
    if unknown := [name for name in firsts if name not in blocks]:
        raise NotServed(
            f"a stage is to begin at {unknown[0]!r}, and the model has no such block",
            seen=f"blocks: {', '.join(blocks) or 'none'}",
            advice="cuts at blocks, or pipeline=2, which finds them",
        )
    starts = [blocks.index(name) for name in firsts]
    if starts != sorted(set(starts)) or 0 in starts:
        raise NotServed(
            f"stages are to begin at {', '.join(firsts)}, in an order in which the model does not run them",
            seen=f"blocks: {', '.join(blocks)}",
            advice="cuts in the order of the blocks, the first block left out: it begins the first stage",
        )
    of_block = {name: bisect.bisect_right(starts, at) for at, name in enumerate(blocks)}
    anywhere = _anywhere(nodes)
    earliest = _earliest(nodes, of_block, anywhere)
    stage: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        if node not in earliest:
            continue
        if _is_work(node) and _block_among(info(node).module, of_block):
            stage[node] = earliest[node]
        elif node.target is operator.getitem and node.args[0] not in anywhere:
            continue  # the parts of an op live with it
        else:
            readers = [u for n in (node, *_parts(node)) for u in n.users if u in stage]
            stage[node] = min((stage[u] for u in readers), default=len(starts))
        for part in _parts(node):
            stage[part] = stage[node]
    return Labels(len(starts) + 1, stage, anywhere)


def _is_work(node: fx.Node) -> bool:
    """Whether a node is an op of the model, and not a conversion that a plan puts before one."""
    return node.op == "call_function" and info(node).kind == "op"


def _block(path: str) -> str:
    """The path up to its first number, or up to its first part that ends in one."""
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return layers.block(path) if at is None else ".".join(parts[: at + 1])


def _block_among(path: str, blocks: Mapping[str, int]) -> str:
    name = _block(path) or path.partition(".")[0]
    return name if name in blocks else ""


def _parts(node: fx.Node) -> list[fx.Node]:
    return [u for u in node.users if u.target is operator.getitem]


def _anywhere(nodes: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """The ops that depend on inputs and constants alone, or on parameters alone."""
    of_parameters: dict[fx.Node, bool] = {}
    of_data: dict[fx.Node, bool] = {}
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            of_parameters[node] = info(node).kind == "parameter"
            of_data[node] = not of_parameters[node]
        else:
            read = node.all_input_nodes
            of_parameters[node] = any(of_parameters[n] for n in read)
            of_data[node] = any(of_data[n] for n in read)  # constants go with what they meet
    calls = (n for n in nodes if n.op == "call_function")
    return frozenset(n for n in calls if not (of_parameters[n] and of_data[n]))


def _earliest(
    nodes: Sequence[fx.Node], of_block: Mapping[str, int], anywhere: frozenset[fx.Node]
) -> Mapping[fx.Node, int]:
    """The first stage in which each op can run: of its block, or of what it reads, if that is later.

    So a module that is called again behind other blocks runs there, with its parameters stored in both stages.
    """
    found: dict[fx.Node, int] = {}
    for node in nodes:
        if node.op == "call_function" and node not in anywhere:
            own = of_block.get(_block_among(info(node).module, of_block), 0) if _is_work(node) else 0
            found[node] = max([own, *(found.get(read, 0) for read in node.all_input_nodes)])
    return found


def units_of(graph: Graph) -> Units:
    """The blocks of a graph, and what stands in each: what stands nowhere is with its first reader."""
    nodes = list(graph.nodes)
    names = blocks_of(nodes)
    labels = labels_of(nodes, names[1:])
    unit: dict[fx.Node, int] = dict(labels.stage)
    for node in reversed(nodes):
        if node not in unit:
            unit[node] = min((unit[u] for u in node.users if u in unit), default=labels.stages - 1)
    reads = _of_parameters_alone(nodes)
    share = {info(n).key: _share_of_weights(n, reads) for n in nodes if _is_work(n)}
    readers = [(n, unit[u]) for n in labels.stage for u in n.users]
    last: dict[fx.Node, int] = {}
    for node, reader in readers:
        last[node] = max(last.get(node, 0), reader)
    crossing = tuple((n.name, unit[n], last[n]) for n in nodes if n in last and last[n] > unit[n])
    parameters = [n for n in nodes if info(n).kind == "parameter"]
    of_parameters = {info(n).key: tuple(sorted(_blocks_that_read(n, labels.stage))) for n in parameters}
    shared = {name: blocks for name, blocks in of_parameters.items() if len(blocks) > 1}
    trained = [unit[n] for n in parameters if _wants_gradient(n)]
    anywhere = frozenset(info(n).key for n in labels.anywhere)
    of = {info(n).key: unit[n] for n in nodes}
    return Units(names, of, share, crossing, min(trained, default=0), shared, anywhere)


def _blocks_that_read(parameter: fx.Node, block: Mapping[fx.Node, int]) -> set[int]:
    """The blocks that read a parameter, or what ops in no block make of it."""
    found = set[int]()
    pending = list(parameter.users)
    while pending:
        node = pending.pop()
        if node in block:
            found.add(block[node])
        else:
            pending += node.users
    return found


def _of_parameters_alone(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in nodes:
        read = node.all_input_nodes
        if info(node).kind == "parameter" or (read and found.issuperset(read)):
            found.add(node)
    return found


def _share_of_weights(node: fx.Node, of_parameters: set[fx.Node]) -> float:
    """The share of an op's backward that makes gradients of parameters alone.

    Products have a kernel for the gradient of each operand; other ops have one for all.
    """
    wants = [n for n in node.all_input_nodes if _wants_gradient(n)]
    own = [n for n in wants if n in of_parameters]
    if not own:
        return 0.0
    if len(own) == len(wants):
        return 1.0
    return 0.5 if facts_of(op_name(node)).flops else 0.0


def _wants_gradient(node: fx.Node) -> bool:
    return any(type_.requires_grad for type_ in info(node).outputs)
