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

Where a policy names the states (`policy_states.py`), the least is taken over those that it leaves. An op that it never
repeats has A_u = 0. One that it repeats wherever backward needs it has K_v = 0, unless it may be repeated before the
priced time: then K_v = 1 is allowed, at the seconds of the op. Where the policy saves it if one of some edges converts,
K_v <= the number of these that do, and that has a price too (`saving`). Every plan that keeps to the policy has such
states and meets the constraints, so that any prices give a bound for all of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autopar.once import Once
from autopar.solver.availability import Availability, AvailabilityPrices, Laid
from autopar.solver.budget import Budgeted
from autopar.solver.eliminate import Found, minimise
from autopar.solver.limits import LIMITS
from autopar.solver.policy_states import PolicyStates
from autopar.solver.tables import NOWHERE, Factor, Problem
from autopar.space import timeline
from autopar.space.memory import Piece
from autopar.space.passage import OWN, Passages
from autopar.space.space import Space
from autopar.space.timeline import Timeline

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


def _fixed(counted: Budgeted, time: int) -> tuple[dict[int, list[np.ndarray]], dict[int, list[np.ndarray]]]:
    """Bytes at a time that do not depend on states, by site and by edge."""
    assert counted.memory is not None
    sites: dict[int, list[np.ndarray]] = {}
    edges: dict[int, list[np.ndarray]] = {}
    for piece in counted.memory.pieces:
        if piece.first <= time <= piece.last and not has_state(counted.space, piece):
            alike = counted.tables.alike(piece.bytes)
            (edges if piece.is_edge else sites).setdefault(piece.place, []).append(alike)
    return sites, edges


class JointTables:
    """The tables of a space that include the choice of states, at one priced time and one of the optimizer's step."""

    def __init__(self, counted: Budgeted, time: int, step: int, policy: PolicyStates | None = None) -> None:
        assert counted.memory is not None
        self.counted = counted
        self.memory = counted.memory
        self.passages: Passages = counted.memory.passages
        self.time = time
        self.step = step
        self.policy = policy  # the states that are allowed; None: all
        self.bases: dict[tuple[float, ...] | None, Problem] = {}  # exposed shares of the last call -> its tables
        self.steps = self.space.setting.passes
        self.prices = AvailabilityPrices(self.space, self.passages, time, counted.points.kind_of)
        self.fixed_sites, self.fixed_edges = _fixed(counted, time)
        self.at_step = self._at_step()
        # Ops that a policy may repeat until the priced time: what they make may be held then, and be paid for.
        self.early = frozenset[int]() if policy is None else policy.until(self.passages, time)
        self.unless: dict[int, list[int]] = {}  # edge -> ops whose results are saved where its value is converted
        for op, edges in ({} if policy is None else policy.unless).items():
            for k in sorted(edges):
                self.unless.setdefault(k, []).append(op)

    @property
    def space(self) -> Space:
        return self.counted.space

    def repeated_for_themselves(self, line: Timeline) -> frozenset[int]:
        """The runs of a line that the policy always repeats from the priced time on, for their own backward."""
        if self.policy is None:
            return frozenset()
        sure = [time for time, is_repeated in enumerate(self.policy.repeats) if is_repeated]
        left = self.early | self.policy.unless.keys()
        return frozenset(line.run_of[time] for time in sure if time not in left and self._is_own(line, time))

    def _is_own(self, line: Timeline, time: int) -> bool:
        """Whether the backward of an op, after the priced time, reads what the op makes."""
        run = line.runs[line.run_of[time]]
        kept = [v for v in run.makes if v in run.keeps and not line.fixed[v]]
        return self.prices.wants[time] and any(line.bytes[v] > timeline.SMALL for v in kept)

    def base(self, exposed: tuple[float, ...] | None) -> Problem:
        """Seconds as tables, with these exposed shares of windows."""
        if exposed not in self.bases:
            self.bases = {exposed: self.counted.tables.problem({}, exposed=exposed)}
        return self.bases[exposed]

    def _at_step(self) -> tuple[dict[int, list[np.ndarray]], dict[int, list[np.ndarray]]]:
        """Bytes at the optimizer's step; at a time of backward, those that do not depend on states."""
        if self.step < 2 * len(self.passages.ops):
            return _fixed(self.counted, self.step)
        by_sites, by_edges = map(_each_alone, self.counted.tables.row(self.step))
        return by_sites, by_edges

    def least_bytes(self, away: float = 0.0) -> float:
        """Bytes that no plan goes under at one of both times, under any sharding with any recompute.

        Values of so many bytes may be `away` at the priced time.
        """
        _, at_step = self.counted.at({self.step: 1.0}, 0.0)
        return max(at_step, self._fewest_bytes() - away)

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

    def least(self, at: JointPrices, laid: Sequence[Laid]) -> tuple[Availability, Found]:
        """Availability prices under some shardings, and the sharding that costs least at them."""
        worth = self.prices.worth(laid, at.of_byte, at.exposed)
        return worth, minimise(self.problem(at, worth), tries=1, is_rough=self.counted.is_large)

    def problem(self, at: JointPrices, worth: Availability, of_time: float = 1.0) -> Problem:
        """Seconds and priced bytes as tables to be minimised, under these availability prices.

        Seconds count `of_time` times: 1, or 0 where bytes alone matter.
        """
        once = Once()
        price = at.of_byte
        base = self.base(at.exposed)
        costs = list(base.costs) if of_time else [_for_nothing(once, cost) for cost in base.costs]
        factors = list(base.factors)
        if not of_time:
            factors = [_of(factor, _for_nothing(once, factor.table)) for factor in factors]
        rows = (price, (self.fixed_sites, self.fixed_edges)), (at.at_step, self.at_step)
        for of_byte, (by_sites, by_edges) in rows:
            for i, held in by_sites.items() if of_byte else ():
                costs[i] = _plus(once, costs[i], held, of_byte)
            for k, held in by_edges.items() if of_byte else ():
                factors[k] = _of(factors[k], _plus(once, factors[k].table, held, of_byte))
        adds = self.prices.adds(at.exposed)
        for time, op in enumerate(self.passages.ops):
            costs[op.site] = self._site(once, time, costs[op.site], price, worth, of_time * adds[time])
            for k, kept in zip(op.edges, self.prices.kept[time], strict=True):
                if self.passages.sources[k][0] >= 0 and k not in self.passages.gathered:
                    table = self._edge(once, k, kept, factors[k].table, price, worth, of_time)
                    factors[k] = _of(factors[k], table)
        for k, ops in self.unless.items():
            converted = self.passages.converted[k]
            less = sum(float(worth.saving[time]) for time in ops)
            table = factors[k].table
            make = functools.partial(_less, table, converted, less)
            factors[k] = _of(factors[k], once(("unless", less), (table, converted), make))
        return replace(base, costs=costs, factors=factors, once=Once())

    def _site(
        self, once: Once, time: int, cost: np.ndarray, price: float, worth: Availability, adds: float
    ) -> np.ndarray:
        """The cost of an op's choices, each with the cheapest states of what the op makes.

        Recomputing it adds the share `adds` of its seconds.
        """
        op = self.passages.ops[time]
        site = self.space.sites[op.site]
        edges = self.space.edges
        count = len(site.choices)
        arrive = [(worth.arriving[k], edges[k].taken_by) for k in op.edges if k not in self.passages.gathered]
        # Seconds that each value is worth to the edges over which it leaves the op.
        leave = [self._leaving(worth, time, port) for port in range(len(op.made))]
        wants = self.prices.wants[time]
        repeats = None if self.policy is None else self.policy.repeats[time]
        is_early = time in self.early
        saving = float(worth.saving[time]) if self.policy is not None and time in self.policy.unless else None

        def kept_best(helds: Sequence[np.ndarray], gains: Sequence[np.ndarray]) -> np.ndarray:
            """The cost of holding what is wanted at the priced time, at these costs and gains of each value."""
            held: np.ndarray = np.zeros(count)
            for made, gain, value in zip(op.made, gains, helds, strict=False):
                is_kept = made.is_kept and wants
                held = held + (value - gain if is_kept else np.minimum(0.0, value - gain))
            return held + helds[-1] if op.besides is not None and wants else held

        def made_best() -> np.ndarray:
            seconds: np.ndarray = np.zeros(count)
            if site.compute:
                seconds = seconds + site.compute[0] * (self.steps * adds)
            gains = [_by_choice(of, count) for of in leave]
            nowhere = np.full(count, NOWHERE)
            bytes_ = [made.bytes for made in op.made] + ([] if op.besides is None else [op.besides])
            helds = [made.bytes * price if made.shows == OWN else nowhere for made in op.made]
            helds += [] if op.besides is None else [op.besides * price]
            again: np.ndarray = _by_choice(arrive, count) + seconds
            for gain in gains:
                again = again - gain
            saved = kept_best(helds, gains)
            if repeats is None:
                return cost + np.minimum(again, saved)
            if not repeats:
                return cost + saved
            if is_early:
                again = np.minimum(again, seconds + saved)
            if saving is not None:
                again = np.minimum(again, saving + saved)
            # Whatever is repeated, a line saves what it calls small.
            small = [np.where(b > timeline.SMALL, np.inf, held) for b, held in zip(bytes_, helds, strict=True)]
            return cost + np.minimum(again, kept_best(small, gains))

        how = tuple((m.shows == OWN, m.is_kept and wants) for m in op.made)
        worths = itertools.chain.from_iterable(itertools.chain(arrive, *leave))
        objects = (cost, site.choices, *(m.bytes for m in op.made), op.besides if wants else None, *worths)
        what = ("site", len(arrive), tuple(map(len, leave)), how, adds, repeats, is_early, saving)
        return once(what, objects, made_best)

    def _leaving(self, worth: Availability, time: int, port: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Seconds by flow, and the flow of each choice, for all edges over which a value leaves its op."""
        edges = self.prices.leaving_edges.get((time, port), ())
        return [(worth.leaving[k], self.space.edges[k].given_by) for k in edges]

    def _edge(
        self, once: Once, k: int, kept: bool, table: np.ndarray, price: float, worth: Availability, of_time: float
    ) -> np.ndarray:
        """The table of an edge, with the cheapest state of what arrives."""
        edge = self.space.edges[k]
        leaving = worth.leaving[k][:, None]
        arriving = worth.arriving[k]
        made = self.passages.converted[k]
        may_repeat = self.policy is None or k in self.policy.converts

        def arrived_best() -> np.ndarray:
            saved = made * price
            repeated = edge.forward * (self.steps * of_time) + leaving
            moved = (np.minimum(saved, repeated) if may_repeat else saved) - arriving
            there = np.where(made > 0, moved, leaving - arriving)
            return table + (there if kept else np.minimum(0.0, there))

        objects = table, made, edge.forward, worth.leaving[k], arriving
        return once(("edge", kept, may_repeat), objects, arrived_best)


def _plus(once: Once, base: np.ndarray, held: Sequence[np.ndarray], price: float) -> np.ndarray:
    """A table plus bytes times a price."""
    return once("fixed", (base, *held), lambda: base + sum(price * h for h in held))


def _each_alone(tables: dict[int, np.ndarray]) -> dict[int, list[np.ndarray]]:
    """Lists of one table each."""
    return {k: [table] for k, table in tables.items()}


def _for_nothing(once: Once, table: np.ndarray) -> np.ndarray:
    """A table with zeros in the place of all finite entries."""
    return once("nothing", (table,), lambda: np.where(np.isfinite(table), 0.0, np.inf))


def _less(table: np.ndarray, converted: np.ndarray, less: float) -> np.ndarray:
    """A table less a number of seconds wherever a conversion makes something."""
    return table - np.where(converted > 0, less, 0.0)


def _by_choice(worths: Iterable[tuple[np.ndarray, np.ndarray]], count: int) -> np.ndarray:
    """Seconds by choice, from pairs of seconds by flow and the flow of each choice."""
    return sum((seconds[flows] for seconds, flows in worths), np.zeros(count))


def _of(factor: Factor, table: np.ndarray) -> Factor:
    return Factor(factor.scope, factor.classes, table)
