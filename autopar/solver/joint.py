"""Sharding and recompute in one search, under one bound.

    minimise   seconds(x) + sum_u f_u(x) A_u + sum_e c_e(x) A_e + price * (bytes(x, K) - budget)
    such that  r_v <= K_v + A_v           v is there when backward wants it: it was saved, or its op runs again
               R_e <= r_v or K_e + A_e    what arrives over edge e: the value, or its conversion, saved or repeated
               A_e <= r_v,  A_u <= R_e    what runs again needs what it reads

for one priced time of the step. Prices of the constraints (`leaving` of R_e and A_e <= r_v, `arriving` of A_u <= R_e)
let every state be chosen where it stands: A_u and K_v in the table of a site, A_e and K_e in that of an edge. No table
grows, and any prices give a bound for all schedules: whatever backward wants after the priced time is held then, or
made from what is. Good ones are the flows of the minimum cut that gives the states of one sharding (`states.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.solver.budget import Budgeted
from autopar.solver.eliminate import minimise
from autopar.solver.polish import numbered
from autopar.solver.states import CutFlow, cut
from autopar.solver.tables import Factor, Problem
from autopar.space.memory import Piece
from autopar.space.space import Space
from autopar.space.timeline import OWN, SMALL, Passage, Passages, Run, Timeline

_NOWHERE = 1e30


@dataclass(frozen=True, slots=True, eq=False)
class Availability:
    """Seconds that availability is worth, by edge: of the value that leaves, and of what arrives."""

    leaving: np.ndarray
    arriving: np.ndarray


class JointTables:
    """The tables of a space in which states are chosen where they stand, at one priced time."""

    def __init__(self, counted: Budgeted, time: int, exposed: Sequence[float]) -> None:
        assert counted.memory is not None
        self.counted = counted
        self.memory = counted.memory
        self.passages: Passages = counted.memory.passages
        self.time = time
        self.base = counted.priced({}, exposed=exposed)
        self.kinds = numbered(self.space)
        self.steps = self.space.setting.accumulation
        last = 2 * len(self.passages.ops) - 1
        # is the backward of this op still to come, or there?
        self.wants = [last - t >= time for t in range(len(self.passages.ops))]
        self.kept = [self._kept(op, last - t) for t, op in enumerate(self.passages.ops)]  # of each edge of an op
        self.leaving_edges: dict[tuple[int, int], list[int]] = {}  # of each value the edges over which it leaves
        inside = {k for op in self.passages.ops for k in op.edges}
        for k, source in enumerate(self.passages.sources):
            if source[0] >= 0 and k in inside and k not in self.passages.gathered:
                self.leaving_edges.setdefault(source, []).append(k)
        self.fixed_sites, self.fixed_edges = self._fixed()
        self._flow = CutFlow(frozenset(), {}, {})  # of the line that was cut last, at which price
        self._last: tuple[int, float] = (0, 0.0)
        self._line: Timeline | None = None  # it is held, so that its id stays its

    @property
    def space(self) -> Space:
        return self.counted.space

    def _kept(self, op: Passage, back: int) -> tuple[bool, ...]:
        """Which of an op's operands wait at the priced time for its backward, which comes `back` then?"""
        pairs = zip(op.kept, op.first, strict=True)
        return tuple(kept and back - is_first >= self.time for kept, is_first in pairs)

    def _wanted(self, run: Run) -> Sequence[int]:
        """The values that wait at the priced time for the backward of a run."""
        if not self.wants[run.time]:
            return ()
        is_there = 2 * len(self.passages.ops) - 1 - run.time == self.time
        return [v for v in run.keeps if v not in run.first] if is_there else run.keeps

    def _fixed(self) -> tuple[dict[int, list[np.ndarray]], dict[int, list[np.ndarray]]]:
        """Bytes at the priced time of what has no state."""
        sites: dict[int, list[np.ndarray]] = {}
        edges: dict[int, list[np.ndarray]] = {}
        for piece in self.memory.pieces:
            if piece.first <= self.time <= piece.last and not self._has_state(piece):
                (edges if piece.is_edge else sites).setdefault(piece.place, []).append(piece.bytes)
        return sites, edges

    def _has_state(self, piece: Piece) -> bool:
        if piece.kind != "saved activations":
            return False
        if not piece.is_edge:
            return True
        return self.space.sites[self.space.edges[piece.place].target].kind == "op"

    def fewest_bytes(self) -> float:
        """Bytes at the priced time that no sharding goes under, whatever it recomputes."""
        memo: dict[Any, np.ndarray] = {}
        costs = [_for_nothing(memo, cost) for cost in self.base.costs]
        factors = [_of(factor, _for_nothing(memo, factor.table)) for factor in self.base.factors]
        for i, held in self.fixed_sites.items():
            costs[i] = _plus(memo, costs[i], held, 1.0)
        for k, held in self.fixed_edges.items():
            factors[k] = _of(factors[k], _plus(memo, factors[k].table, held, 1.0))
        return minimise(Problem(costs, factors, self.counted.regions), tries=1).bound

    def problem(self, price: float, worth: Availability) -> Problem:
        """Seconds and priced bytes as tables."""
        memo: dict[Any, np.ndarray] = {}
        alive: list[Any] = [self.base, worth]  # what ids are of
        costs = list(self.base.costs)
        factors = list(self.base.factors)
        for i, held in self.fixed_sites.items():
            costs[i] = _plus(memo, costs[i], held, price)
        for k, held in self.fixed_edges.items():
            factors[k] = _of(factors[k], _plus(memo, factors[k].table, held, price))
        for time, op in enumerate(self.passages.ops):
            costs[op.site] = self._site(memo, time, costs[op.site], price, worth)
            for k, kept in zip(op.edges, self.kept[time], strict=True):
                if self.passages.sources[k][0] >= 0 and k not in self.passages.gathered:
                    table = self._edge(memo, k, kept, factors[k].table, price, worth)
                    factors[k] = _of(factors[k], table)
        del alive
        return Problem(costs, factors, self.counted.regions)

    def _site(
        self, memo: dict[Any, np.ndarray], time: int, cost: np.ndarray, price: float, worth: Availability
    ) -> np.ndarray:
        """The cost of an op's choices, with the cheapest states of what it makes."""
        op = self.passages.ops[time]
        site = self.space.sites[op.site]
        asked = sum(float(worth.arriving[k]) for k in op.edges if k not in self.passages.gathered)
        gains = [
            sum(float(worth.leaving[k]) for k in self.leaving_edges.get((time, i), ())) for i in range(len(op.made))
        ]
        wants = self.wants[time]
        key = (
            "site",
            id(cost),
            id(site.choices),
            asked,
            tuple(gains),
            tuple((id(m.bytes), m.shows == OWN, m.is_kept and wants) for m in op.made),
            id(op.besides) if wants else 0,
        )
        if key not in memo:
            again: np.ndarray = asked + (site.compute[0] * self.steps if site.compute else np.zeros(len(site.choices)))
            saved: np.ndarray = np.zeros(len(site.choices))
            for made, gain in zip(op.made, gains, strict=True):
                is_kept = made.is_kept and wants
                again = again - gain
                held = made.bytes * price if made.shows == OWN else np.full(len(saved), _NOWHERE)
                small = (made.bytes <= SMALL) & (made.shows == OWN)
                held = np.where(small, made.bytes * price, held)
                saved = saved + (held - gain if is_kept else np.minimum(0.0, held - gain))
            if op.besides is not None and wants:
                saved = saved + op.besides * price
            memo[key] = cost + np.minimum(again, saved)
        return memo[key]

    def _edge(
        self, memo: dict[Any, np.ndarray], k: int, kept: bool, table: np.ndarray, price: float, worth: Availability
    ) -> np.ndarray:
        """The table of an edge, with the cheapest state of what arrives."""
        leaving, arriving = float(worth.leaving[k]), float(worth.arriving[k])
        edge, made = self.space.edges[k], self.passages.converted[k]
        key = ("edge", id(table), id(made), id(edge.forward), kept, leaving, arriving)
        if key not in memo:
            moved = np.minimum(made * price, edge.forward * self.steps + leaving) - arriving
            there = np.where(made > 0, moved, leaving - arriving)
            memo[key] = table + (there if kept else np.minimum(0.0, there))
        return memo[key]

    # -- prices of availability

    def worth(self, line: Timeline, price: float) -> Availability:
        """The worth of availability under one sharding, the same for edges that are alike."""
        leaving, arriving = self._shared_out(line, self._cut(line, price))
        return Availability(self._alike(leaving), self._alike(arriving))

    def cheapest(self, line: Timeline, price: float) -> frozenset[int]:
        """The runs of one sharding to repeat at a price."""
        return self._cut(line, price).again

    def _cut(self, line: Timeline, price: float) -> CutFlow:
        if (id(line), price) != self._last:
            wanted = {v for run in line.runs if run.is_op for v in self._wanted(run)}
            self._flow = cut(line, wanted, {v: price * float(line.bytes[v]) for v in range(len(line.bytes))})
            self._last, self._line = (id(line), price), line
        return self._flow

    def _shared_out(self, line: Timeline, flow: CutFlow) -> tuple[np.ndarray, np.ndarray]:
        """The flows of a cut by edge: what passes from an op to what it reads, and on to what made that."""
        edges = len(self.space.edges)
        leaving, arriving = np.zeros(edges), np.zeros(edges)
        keepers: dict[int, int] = {}  # of each value the edges whose takers keep it
        users: dict[int, int] = {}  # of each conversion the edges that take it
        for time, op in enumerate(self.passages.ops):
            for k, kept in zip(op.edges, self.kept[time], strict=True):
                if k in line.travels:
                    given, arrived = line.travels[k]
                    if kept:
                        keepers[arrived] = keepers.get(arrived, 0) + 1
                    if given != arrived:
                        users[arrived] = users.get(arrived, 0) + 1
        for time in range(len(self.passages.ops) - 1, -1, -1):
            op, run = self.passages.ops[time], line.run_of[time]
            shown = {m.shows: i for i, m in enumerate(op.made) if m.shows != OWN}
            same: dict[int, int] = {}
            for k in op.edges:
                if k in line.travels:
                    same[line.travels[k][1]] = same.get(line.travels[k][1], 0) + 1
            for k, kept in zip(op.edges, self.kept[time], strict=True):
                if k not in line.travels:
                    continue
                given, arrived = line.travels[k]
                through = flow.into.get((run, arrived), 0.0) / same[arrived]
                for i in (i for edge, i in shown.items() if edge == k):
                    through += sum(float(leaving[j]) for j in self.leaving_edges.get((time, i), ()))
                arriving[k] = through
                direct = 0.0
                if kept:
                    direct = flow.wanted.get(arrived, 0.0) / keepers[arrived]
                if given == arrived:
                    leaving[k] = through + direct
                else:
                    leaving[k] = flow.into.get((line.made_by[arrived], given), 0.0) / users[arrived]
        return leaving, arriving

    def _alike(self, amounts: np.ndarray) -> np.ndarray:
        """The mean over edges that are alike: their tables are the same then."""
        groups: dict[tuple[int, int, int], list[int]] = {}
        for k, e in enumerate(self.space.edges):
            groups.setdefault((self.kinds[e.source], self.kinds[e.target], e.operand), []).append(k)
        found = np.zeros(len(amounts))
        for alike in groups.values():
            found[alike] = float(amounts[alike].mean())
        return found


def _plus(memo: dict[Any, np.ndarray], base: np.ndarray, held: Sequence[np.ndarray], price: float) -> np.ndarray:
    """A table and priced bytes."""
    key = ("fixed", id(base), *map(id, held))
    if key not in memo:
        memo[key] = base + sum(price * h for h in held)
    return memo[key]


def _for_nothing(memo: dict[Any, np.ndarray], table: np.ndarray) -> np.ndarray:
    """A table in which everything that leads anywhere costs nothing."""
    if ("nothing", id(table)) not in memo:
        memo["nothing", id(table)] = np.where(np.isfinite(table), 0.0, np.inf)
    return memo["nothing", id(table)]


def _of(factor: Factor, table: np.ndarray) -> Factor:
    return Factor(factor.scope, factor.classes, table)
