"""Sharding and recompute in one search, under one bound.

    minimise   seconds(x) + sum_u (1 - h_u) f_u(x) A_u + sum_e c_e(x) A_e + price * (bytes(x, K) - budget)
               + price at the step * (bytes at the step(x) - budget)
    such that  r_v <= K_v + A_v           v is there when backward wants it: it was saved, or its op runs again
               R_e <= r_v or K_e + A_e    what arrives over edge e: the value, or its conversion, saved or repeated
               A_e <= r_v,  A_u <= R_e    what runs again needs what it reads

for one priced time, and one of the optimizer's step, whose bytes no states change; h_u is the most that any window in
which op u may be repeated counts as exposed: there it hides communication. Prices of the constraints (`leaving` of R_e
and A_e <= r_v, `arriving` of A_u <= R_e) let every state be chosen where it stands: A_u and K_v in the table of a site,
A_e and K_e in that of an edge. No table grows, and any prices give a bound for all schedules: whatever backward wants
after the priced time is held then, or made from what is. Good ones are the flows of the minimum cut that gives the
states of one sharding (`states.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autopar.once import Once
from autopar.solver.availability import Availability, AvailabilityPrices
from autopar.solver.budget import Budgeted
from autopar.solver.eliminate import minimise
from autopar.solver.limits import LIMITS
from autopar.solver.tables import NOWHERE, Factor, Problem
from autopar.space.memory import Piece
from autopar.space.space import Space
from autopar.space.timeline import OWN, Passages

_LIMITS = LIMITS.joint


class JointPrices(NamedTuple):
    """Seconds for a byte at the priced time and at the optimizer's step, and the exposed share of each kind of window.

    Where `exposed` is None, all communication is in line.
    """

    of_byte: float
    exposed: tuple[float, ...] | None
    at_step: float = 0.0

    @property
    def of_budget(self) -> float:
        """Seconds that a byte of the budget is worth."""
        return self.of_byte + self.at_step

    def towards(self, other: JointPrices) -> JointPrices:
        """The prices halfway to others."""
        pairs = zip(self.exposed or (), other.exposed or (), strict=True)
        shares = tuple((a + b) / 2 for a, b in pairs)
        return JointPrices((self.of_byte + other.of_byte) / 2, shares, (self.at_step + other.at_step) / 2)

    def is_near(self, other: JointPrices) -> bool:
        """Whether two prices are so close that they would lead to the same plan."""
        pairs = zip(self.exposed or (), other.exposed or (), strict=True)
        near = _LIMITS.same_price * max(self.of_budget, other.of_budget)
        of_bytes = abs(self.of_byte - other.of_byte) + abs(self.at_step - other.at_step)
        return all(abs(a - b) <= _LIMITS.same_share for a, b in pairs) and of_bytes <= near


def has_state(space: Space, piece: Piece) -> bool:
    """Whether a piece is of a value that backward may make again."""
    if piece.kind != "saved activations":
        return False
    return not piece.is_edge or space.sites[space.edges[piece.place].target].kind == "op"


def without_states(space: Space) -> Space:
    """The space with only the bytes that no states change, without temporary bytes of recomputation."""
    assert space.memory is not None
    pieces = tuple(piece for piece in space.memory.pieces if not has_state(space, piece))
    return replace(space, memory=replace(space.memory, pieces=pieces, readers=()))


class JointTables:
    """The tables of a space that include the choice of states, at one priced time and one of the optimizer's step."""

    def __init__(self, counted: Budgeted, time: int, step: int) -> None:
        assert counted.memory is not None
        self.counted = counted
        self.memory = counted.memory
        self.passages: Passages = counted.memory.passages
        self.time = time
        self.step = step
        self.bases: dict[tuple[float, ...] | None, Problem] = {}  # exposed shares of the last call -> its tables
        self.steps = self.space.setting.passes
        self.prices = AvailabilityPrices(self.space, self.passages, time, counted.points.kind_of)
        self.fixed_sites, self.fixed_edges = self._fixed()

    @property
    def space(self) -> Space:
        return self.counted.space

    def base(self, exposed: tuple[float, ...] | None) -> Problem:
        """Seconds as tables, with these exposed shares of windows."""
        if exposed not in self.bases:
            self.bases = {exposed: self.counted.priced({}, exposed=exposed)}
        return self.bases[exposed]

    def _fixed(self) -> tuple[dict[int, list[np.ndarray]], dict[int, list[np.ndarray]]]:
        """Bytes at the priced time that do not depend on states, by site and by edge."""
        sites: dict[int, list[np.ndarray]] = {}
        edges: dict[int, list[np.ndarray]] = {}
        for piece in self.memory.pieces:
            if piece.first <= self.time <= piece.last and not has_state(self.space, piece):
                (edges if piece.is_edge else sites).setdefault(piece.place, []).append(piece.bytes)
        return sites, edges

    def least_bytes(self) -> float:
        """Bytes that no plan goes under at one of both times, under any sharding with any recompute."""
        _, at_step = self.counted.at({self.step: 1.0}, 0.0)
        return max(at_step, self._fewest_bytes())

    def _fewest_bytes(self) -> float:
        """A lower bound of bytes at the priced time, for any sharding with any recompute."""
        once = Once()
        base = self.base((0.0,) * self.counted.kinds)
        costs = [_for_nothing(once, cost) for cost in base.costs]
        factors = [_of(factor, _for_nothing(once, factor.table)) for factor in base.factors]
        for i, held in self.fixed_sites.items():
            costs[i] = _plus(once, costs[i], held, 1.0)
        for k, held in self.fixed_edges.items():
            factors[k] = _of(factors[k], _plus(once, factors[k].table, held, 1.0))
        return minimise(replace(base, costs=costs, factors=factors, once=Once()), tries=1).bound

    def problem(self, at: JointPrices, worth: Availability) -> Problem:
        """Seconds and priced bytes as tables to be minimised, under these availability prices."""
        once = Once()
        price = at.of_byte
        base = self.base(at.exposed)
        costs = list(base.costs)
        factors = list(base.factors)
        at_step = tuple({i: [held] for i, held in held_by.items()} for held_by in self.counted.row(self.step))
        for of_byte, (by_sites, by_edges) in ((price, (self.fixed_sites, self.fixed_edges)), (at.at_step, at_step)):
            for i, held in by_sites.items() if of_byte else ():
                costs[i] = _plus(once, costs[i], held, of_byte)
            for k, held in by_edges.items() if of_byte else ():
                factors[k] = _of(factors[k], _plus(once, factors[k].table, held, of_byte))
        adds = self.prices.adds(at.exposed)
        for time, op in enumerate(self.passages.ops):
            costs[op.site] = self._site(once, time, costs[op.site], price, worth, adds[time])
            for k, kept in zip(op.edges, self.prices.kept[time], strict=True):
                if self.passages.sources[k][0] >= 0 and k not in self.passages.gathered:
                    table = self._edge(once, k, kept, factors[k].table, price, worth)
                    factors[k] = _of(factors[k], table)
        return replace(base, costs=costs, factors=factors, once=Once())

    def _site(
        self, once: Once, time: int, cost: np.ndarray, price: float, worth: Availability, adds: float
    ) -> np.ndarray:
        """The cost of an op's choices, each with the cheapest states of what the op makes.

        Recomputing it adds the share `adds` of its seconds.
        """
        op = self.passages.ops[time]
        site = self.space.sites[op.site]
        asked = sum(float(worth.arriving[k]) for k in op.edges if k not in self.passages.gathered)
        gains = [
            sum(float(worth.leaving[k]) for k in self.prices.leaving_edges.get((time, i), ()))
            for i in range(len(op.made))
        ]
        wants = self.prices.wants[time]

        def made_best() -> np.ndarray:
            again: np.ndarray = np.full(len(site.choices), asked)
            if site.compute:
                again = again + site.compute[0] * (self.steps * adds)
            saved: np.ndarray = np.zeros(len(site.choices))
            for made, gain in zip(op.made, gains, strict=True):
                is_kept = made.is_kept and wants
                again = again - gain
                held = made.bytes * price if made.shows == OWN else np.full(len(saved), NOWHERE)
                saved = saved + (held - gain if is_kept else np.minimum(0.0, held - gain))
            if op.besides is not None and wants:
                saved = saved + op.besides * price
            return cost + np.minimum(again, saved)

        how = tuple((m.shows == OWN, m.is_kept and wants) for m in op.made)
        objects = (cost, site.choices, *(m.bytes for m in op.made), op.besides if wants else None)
        return once(("site", asked, tuple(gains), how, adds), objects, made_best)

    def _edge(self, once: Once, k: int, kept: bool, table: np.ndarray, price: float, worth: Availability) -> np.ndarray:
        """The table of an edge, with the cheapest state of what arrives."""
        leaving, arriving = float(worth.leaving[k]), float(worth.arriving[k])
        edge = self.space.edges[k]
        made = self.passages.converted[k]

        def arrived_best() -> np.ndarray:
            moved = np.minimum(made * price, edge.forward * self.steps + leaving) - arriving
            there = np.where(made > 0, moved, leaving - arriving)
            return table + (there if kept else np.minimum(0.0, there))

        return once(("edge", kept, leaving, arriving), (table, made, edge.forward), arrived_best)


def _plus(once: Once, base: np.ndarray, held: Sequence[np.ndarray], price: float) -> np.ndarray:
    """A table plus bytes times a price."""
    return once("fixed", (base, *held), lambda: base + sum(price * h for h in held))


def _for_nothing(once: Once, table: np.ndarray) -> np.ndarray:
    """A table with zeros in the place of all finite entries."""
    return once("nothing", (table,), lambda: np.where(np.isfinite(table), 0.0, np.inf))


def _of(factor: Factor, table: np.ndarray) -> Factor:
    return Factor(factor.scope, factor.classes, table)
