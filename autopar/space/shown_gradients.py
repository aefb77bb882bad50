"""`ShownGradients`: gradients that lie in the memory of another, as the backward of some ops hands on what it is given.

    add, cat, sum       the gradient of an operand is that of the result, a part of it, or a number that is broadcast
    views               hand on the memory as they do in forward

Pieces count a gradient of its own for each value. Here is what that is over or under, for a gradient that nothing
converts: of several operands one carries the memory on in sums of tables, the one that needs it longest, and the pieces
of the others are taken off. What no sum counts, such as a memory that stays for a part of it, a plan adds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch.fx as fx

from autopar.graph.graph import info, op_name, type_of
from autopar.graph.nodes import tensor_operands
from autopar.space.backward_kernels import port_of
from autopar.space.lifetimes import Lifetimes
from autopar.space.local_bytes import EdgeBytes, LocalBytes
from autopar.space.memory import Piece
from autopar.space.wiring import Wiring

Place = Callable[[int], tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """A value whose gradient lies in that of the result of an op that reads it, unless an edge between converts it."""

    value: fx.Node
    of: fx.Node  # the result
    way: tuple[int, ...]  # edges from that op back to the value
    bytes: np.ndarray  # the gradient on the first edge, by [given, taken]; 0 where it is converted
    spans: tuple[tuple[int, int, float], ...]  # times at which the value's own piece is over, by which share of it
    until: int  # the last time at which the memory is needed for it
    end: int  # the last time of the result's piece
    carries: float  # bytes of the memory that sums of tables count for it, relative to its own


@dataclass(eq=False)
class ShownGradients:
    """All such values of a space, the last op of the forward first."""

    shown: list[Shown] = field(default_factory=list)
    # result -> an edge that leaves it, and bytes of its gradient
    result: dict[fx.Node, tuple[int, np.ndarray]] = field(default_factory=dict)
    # edge -> whether it converts gradients, by [given, taken]
    convert: dict[int, np.ndarray] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)

    def missing(self, place: Place, apart: Collection[int] = ()) -> Iterator[tuple[float, int, int]]:
        """Bytes that sums of tables miss (negative: count too often) under a plan, and first and last times.

        Along edges that are `apart`, gradients are copied, as from one stage to another.
        """
        memory: dict[fx.Node, list[float]] = {}  # [bytes, last time counted, last time in use]
        for one in self.shown:
            own = float(one.bytes[place(one.way[0])])
            if not own:
                continue
            is_shown = not any(k in apart or self.convert[k][place(k)] for k in one.way)
            counted = own * (one.carries if is_shown else one.carries - 1)
            for first, last, share in one.spans if counted else ():
                yield -counted * share, first, last
            if is_shown:
                if one.of not in memory:
                    edge, bytes_ = self.result[one.of]
                    memory[one.of] = [float(bytes_[place(edge)]), one.end, one.end]
                held = memory[one.value] = memory[one.of]
                held[2] = max(held[2], one.until)
        for nbytes, end, until in {id(held): held for held in memory.values()}.values():
            if until > end:
                yield nbytes, int(end) + 1, int(until)


def shown_gradients(wiring: Wiring, lifetimes: Lifetimes, bytes_: LocalBytes) -> ShownGradients:
    """The gradients of a graph that lie in the memory of another."""
    return _Builder(wiring, lifetimes, bytes_).built()


class _Builder:
    def __init__(self, wiring: Wiring, lifetimes: Lifetimes, bytes_: LocalBytes) -> None:
        self.wiring = wiring
        self.lifetimes = lifetimes
        self.bytes = bytes_
        self.clock = lifetimes.clock
        self.edge = {(v, t): k for k, (v, t) in enumerate(zip(wiring.values, wiring.takers, strict=True))}
        self.leaving: dict[fx.Node, int] = {}
        for k, value in enumerate(wiring.values):
            self.leaving.setdefault(value, k)

    def built(self) -> ShownGradients:
        found = ShownGradients()
        parts = set[fx.Node]()  # results whose gradient lies in another that is carried on elsewhere
        for op in reversed(self.clock.ops):
            back = self.lifetimes.backward.get(op)
            if (
                back is None
                or not back.shows
                or all(map(self.lifetimes.memories.is_view.__getitem__, self.lifetimes.outputs[op]))
            ):
                continue
            operands, results = tensor_operands(op), {port_of(v): v for v in self.lifetimes.outputs[op]}
            each = list[tuple[fx.Node, tuple[fx.Node, tuple[int, ...], int]]]()
            for operand, port in back.shows.items():
                value, is_read = operands[operand], port in results and results[port] in self.leaving
                way = self._way(value, op) if is_read and operands.count(value) == 1 else None
                if way is not None:
                    each.append((results[port], way))
            longest = max((way[2] for _, way in each), default=0)
            for result, (value, edges, until) in each:
                carries = 0.0
                if until == longest and result not in parts:
                    carries, longest = type_of(result).nbytes / max(1, type_of(value).nbytes), -1
                self._add(found, op, result, value, edges, until, carries)
                if not carries:
                    parts.add(value)
        return found

    def _way(self, value: fx.Node, op: fx.Node) -> tuple[fx.Node, tuple[int, ...], int] | None:
        """The value with its own gradient behind an operand, the edges, and until when it is unchanged.

        None where the gradient is copied on the way, or where another op gave a part of it before.
        """
        lifetimes, clock, taker, edges = self.lifetimes, self.clock, op, list[int]()
        until = None
        while True:
            if value in lifetimes.parameters.owners or info(value).kind not in ("op", "part"):
                return None
            if (value, taker) not in self.edge:
                return None
            if lifetimes.last_use(value) != clock.at[op]:
                apart = lifetimes.added.apart(value, taker) if taker is op else None
                return None if apart is None else (value, (self.edge[value, taker],), apart)
            if until is None:
                edges.append(self.edge[value, taker])
            maker = value if info(value).kind == "op" else value.args[0]
            if lifetimes.has_own_gradient(value):
                break
            if op_name(maker) == "identity":
                if until is None and lifetimes.has_several_uses(value):  # there another is added to it
                    until = next((last for _, last in lifetimes.added.sums(value)), None)
            elif maker not in lifetimes.backward or len(lifetimes.outputs[maker]) > 1:
                return None
            value, taker = maker.all_input_nodes[0], maker
        return value, tuple(edges), clock.back(maker) if until is None else until

    def _add(
        self,
        found: ShownGradients,
        op: fx.Node,
        result: fx.Node,
        value: fx.Node,
        way: tuple[int, ...],
        until: int,
        carries: float,
    ) -> None:
        for k in way:
            found.convert[k] = self._tables(k).unreduced > 0
        leaving = self.leaving[result]
        found.result[result] = leaving, self._tables(leaving).reduced
        tables, end = self._tables(way[0]), self.clock.back(op)
        own = self.bytes.once("shown", (tables,), lambda: np.where(tables.unreduced > 0, 0.0, tables.reduced))
        maker = value if info(value).kind == "op" else value.args[0]
        relief = 0.0  # Where another gradient is added to it, the value's own piece is the sum.
        if until == self.clock.back(maker) and op_name(maker) != "identity" and maker in self.lifetimes.backward:
            relief = self.lifetimes.backward[maker].relief
        spans = tuple(s for s in ((end + 1, until - 1, 1.0), (until, until, relief)) if s[0] <= s[1] and s[2])
        found.shown.append(Shown(value, result, way, own, spans, until, end, carries))
        for first, last, share in spans if carries != 1 else ():
            taken = self.bytes.scaled(own, share * (carries - 1))
            found.pieces.append(Piece("gradients of activations", way[0], True, taken, first, last))

    def _tables(self, edge: int) -> EdgeBytes:
        return self.bytes.by_flows(self.wiring.edges[edge], type_of(self.wiring.values[edge]))
