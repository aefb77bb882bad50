"""`passages_of`: which values of a graph share memory, and which of them backward reads (see `timeline.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch.fx as fx

from autopar.graph import walks
from autopar.graph.graph import info, op_name, type_of
from autopar.once import Once
from autopar.ops.entry import facts_of
from autopar.sharding.attention_ways import ATTENTIONS
from autopar.space.lifetimes import Lifetimes
from autopar.space.local_bytes import LocalBytes, Tensors
from autopar.space.op_bytes import OpBytes
from autopar.space.passage import OWN, Made, Passage, Passages
from autopar.space.space import Flows
from autopar.space.wiring import Wiring, source_of


def passages_of(wiring: Wiring, lifetimes: Lifetimes, bytes_: LocalBytes, op_bytes: OpBytes) -> Passages:
    """The ops of a graph as passages, and the edges over which their operands arrive."""
    at = lifetimes.clock.at
    entering: dict[int, list[int]] = {}
    for k, edge in enumerate(wiring.edges):
        entering.setdefault(edge.target, []).append(k)
    builder = _Builder(wiring, lifetimes, bytes_, op_bytes, entering)
    sources = []
    for value in wiring.values:
        op, _ = source_of(value)
        port = lifetimes.outputs[op].index(value) if op in at else 0
        sources.append((at.get(op, -1), port))
    return Passages(
        tuple(builder.passage(op) for op in lifetimes.clock.ops),
        tuple(sources),
        tuple(builder.numbered(edge.taken) for edge in wiring.edges),
        tuple(builder.converted(k) for k in range(len(wiring.edges))),
        frozenset(k for k, value in enumerate(wiring.values) if value in lifetimes.parameters.owners),
        tuple(k for k, taker in enumerate(wiring.takers) if taker not in at),
    )


class _Builder:
    """Builds the passages of ops one by one."""

    def __init__(
        self,
        wiring: Wiring,
        lifetimes: Lifetimes,
        bytes_: LocalBytes,
        op_bytes: OpBytes,
        entering: Mapping[int, Sequence[int]],
    ) -> None:
        self.wiring = wiring
        self.lifetimes = lifetimes
        self.bytes = bytes_
        self.op_bytes = op_bytes
        self.entering = entering
        self.cores = _cores(lifetimes.clock.ops)
        self.routes = routes_of(lifetimes.clock.ops)
        self._known: dict[Flows, int] = {}
        self.once = Once()

    def passage(self, op: fx.Node) -> Passage:
        """The passage of one op."""
        lifetimes = self.lifetimes
        index = self.wiring.index[op]
        edges = tuple(self.entering.get(index, ()))
        keeps = lifetimes.kept[op].values
        made = []
        for value in lifetimes.outputs[op]:
            port = value.args[1] if info(value).kind == "part" else 0
            lies = self._local(op, value, Tensors(port))
            made.append(Made(lies, self._shown(op, value, edges), value in keeps))
        work = self.op_bytes.work(op)[0] if op not in lifetimes.inner else None
        return Passage(
            index,
            edges,
            tuple(self.wiring.values[k] in keeps for k in edges),
            tuple(self.wiring.values[k] in lifetimes.kept[op].freed_first for k in edges),
            tuple(made),
            str(info(op).checkpoint[0]) if info(op).checkpoint else "",
            op in self.cores,
            self.op_bytes.besides(op),
            work if work is not None and self.bytes.is_any(work) else None,
            info(op).chunks > 1,
            op in lifetimes.inner,
            lifetimes.clock.at[lifetimes.runs_with[op]] if op in lifetimes.runs_with else OWN,
            op in self.routes,
        )

    def _shown(self, op: fx.Node, value: fx.Node, edges: Sequence[int]) -> int:
        """The edge of the operand whose memory a value shares; OWN for a value with its own."""
        memory = self.lifetimes.memories.memory
        if op_name(op) == "identity" or self.lifetimes.memories.is_view[value]:
            for k in edges:
                if op_name(op) == "identity" or memory[self.wiring.values[k]] == memory[value]:
                    return k
        return OWN

    def _local(self, op: fx.Node, value: fx.Node, tensors: Tensors) -> np.ndarray:
        return self.bytes.by_choice(self.wiring.site(op).choices, type_of(value), tensors)

    def numbered(self, taken: tuple[Flows, ...]) -> np.ndarray:
        """An index for each of these flows, equal for equal flows."""

        def numbers() -> np.ndarray:
            return np.array([self._known.setdefault(flows, len(self._known)) for flows in taken], int)

        return self.once("numbers", (taken,), numbers)

    def converted(self, edge: int) -> np.ndarray:
        """Bytes that a conversion on an edge makes, by [given, taken], as `EdgePieces` counts them."""
        value = self.wiring.values[edge]
        bytes_ = self.bytes.by_flows(self.wiring.edges[edge], type_of(value))
        if value in self.lifetimes.memories.turned and type_of(value).requires_grad:
            bytes_ = self.bytes.copied(bytes_)
        return bytes_.made


def routes_of(ops: Iterable[fx.Node]) -> set[fx.Node]:
    """The ops that make the ids of experts, back to those that choose them by other numbers."""
    found = set[fx.Node]()
    waiting: list[Any] = [op.kwargs["ids"] for op in ops if op_name(op) == "experts"]
    while waiting:
        value = waiting.pop()
        if info(value).kind == "part":
            found.add(value.args[0])
        elif info(value).kind == "op" and value not in found:
            found.add(value)
            waiting += [n for n in value.all_input_nodes if "int" in info(n).outputs[0].dtype]
    return found


def _cores(ops: Sequence[fx.Node]) -> set[fx.Node]:
    """The ops in the cores of attentions: the fused op, or all around a softmax from the product before.

    The product before belongs to the core, the one behind does not.
    """
    found = {op for op in ops if op_name(op) in ATTENTIONS}
    for op in ops:
        if op_name(op) != "softmax":
            continue
        before = walks.ancestors([op], lambda n: info(n).kind != "op" or info(n).module != info(op).module)
        scores = [n for n in before if _is_product(n)]
        if not scores:
            continue
        last = max(scores)  # nodes compare by their place
        behind = list(walks.uses(op, lambda n: info(n).kind == "op" and not _is_product(n)))
        found |= {n for n in before if not n < last}
        found |= {n for n in behind if info(n).module == info(op).module and not _is_product(n)}
    return found


def _is_product(node: fx.Node) -> bool:
    return info(node).kind == "op" and facts_of(op_name(node)).flops is not None
