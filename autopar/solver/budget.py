"""The fastest plan under a memory budget, with overlap of communication and compute, and a lower bound.

    minimise  seconds(x) + sum_w max(0, communication(x, w) - compute(x, w))     such that     bytes(x, t) <= budget
              at every time t

Each time is a row with a price, and so is each window, with a price from 0 (hidden) to 1 (exposed); windows with the
same tables have one. At given prices the problem is a sum of tables again, and elimination gives its least value: less
the price of the budget that is a bound, and its choices are a plan with its bytes. A small linear program over the
plans met so far gives the next prices (a time joins where a plan's peak stands over the budget).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pulp

from autopar.once import Once
from autopar.solver.eliminate import minimise, regions_of
from autopar.solver.limits import LIMITS
from autopar.solver.points import Point, Points
from autopar.solver.tables import Factor, Problem
from autopar.space.space import Space

_LIMITS = LIMITS.prices

_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Prices:
    """Lagrange multipliers: seconds a byte at each time, and the exposed share of each kind of window."""

    of_bytes: dict[int, float]
    exposed: tuple[float, ...]

    def towards(self, other: Prices) -> Prices:
        times = sorted({*self.of_bytes, *other.of_bytes})
        return Prices(
            {t: (self.of_bytes.get(t, 0.0) + other.of_bytes.get(t, 0.0)) / 2 for t in times},
            tuple((a + b) / 2 for a, b in zip(self.exposed, other.exposed, strict=True)),
        )

    @property
    def rounded(self) -> Any:
        return tuple((t, f"{p:.9e}") for t, p in sorted(self.of_bytes.items()) if p > 0), tuple(
            f"{share:.9f}" for share in self.exposed
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best plan that was found within a budget, and a lower bound of any."""

    best: Point | None
    bound: float
    points: list[Point]
    prices: Prices  # the prices that gave the bound
    hopeless: bool = False  # whether it is proven that no plan fits the budget
    is_rough: bool = False  # whether the bound is from single precision, and so proves nothing


@dataclass
class Budgeted:
    """A space with its memory rows, searched by prices."""

    space: Space
    rival: float = math.inf  # seconds of a plan of another space: a bound that is as high is high enough
    rows: dict[int, tuple[dict[int, np.ndarray], dict[int, np.ndarray]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = self.space.memory
        self._alike: dict[bytes, np.ndarray] = {}
        self._smallest: tuple[list[Point], float] | None = None
        self.regions = regions_of(self.space)
        self.shapes = Once()
        self.points = Points(self.space)
        self.kinds = self.points.kinds
        entries = sum({id(e.seconds): e.seconds.size for e in self.space.edges}.values())
        self.rounds = max(_LIMITS.rounds, min(_LIMITS.most_rounds, _LIMITS.work // max(1, entries)))
        self.is_large = entries > _LIMITS.large

    # -- a plan at prices

    def at(
        self,
        prices: Mapping[int, float],
        of_time: float = 1.0,
        exposed: Sequence[float] | None = None,
        is_rough: bool = False,
    ) -> tuple[Point, float]:
        """The plan of least seconds (times `of_time`) and priced bytes, and a lower bound of their sum."""
        found = minimise(self.priced(prices, of_time, exposed), tries=1, is_rough=is_rough)
        return self.point(found.picked), found.bound

    def closest(self, prices: Prices) -> Point:
        """The plan of least priced cost that many agreements of split variables lead to."""
        found = minimise(self.priced(prices.of_bytes, exposed=prices.exposed), is_rough=self.is_large)
        return self.point(found.picked)

    def with_fewer_conversions(self, prices: Prices) -> list[Point]:
        """The plans of least priced cost if converting what ops made were dearer, by one factor and another.

        They convert less, as data parallelism does. Where elimination has to split variables its plan is not the best
        at its prices, and one of these is often better.
        """
        points = list[Point]()
        for times in _LIMITS.dearer:
            problem = self.priced(prices.of_bytes, exposed=prices.exposed, converted=times)
            points.append(self.point(minimise(problem, tries=1, is_rough=self.is_large).picked))
        return [p for p in points if math.isfinite(p.seconds)]

    def priced(
        self,
        prices: Mapping[int, float],
        of_time: float = 1.0,
        exposed: Sequence[float] | None = None,
        converted: float = 1.0,
    ) -> Problem:
        """Seconds (times `of_time`) and priced bytes as tables to be minimised.

        `exposed` has, for each kind of window, the share that counts as exposed; without it all communication does.
        Conversions of what ops make count `converted` times.
        """
        once = Once()

        def priced(base: np.ndarray, extras: list[tuple[float, np.ndarray]]) -> np.ndarray:
            by, tables = zip(*extras, strict=True) if extras else ((), ())
            return once(by, (base, *tables), lambda: _times(base, of_time) + sum(p * b for p, b in extras))

        rows = [(price, self.row(t)) for t, price in sorted(prices.items()) if price > 0]
        on_sites: dict[int, list[tuple[float, np.ndarray]]] = {}
        on_edges: dict[int, list[tuple[float, np.ndarray]]] = {}
        shares = [1.0] * len(self.space.windows) if exposed is None else [exposed[kind] for kind in self.points.kind_of]
        for w, share in zip(self.space.windows, shares, strict=True):
            for k, table in w.communication if share < 1 else ():
                on_edges.setdefault(k, []).append((-(1 - share) * w.times * of_time, table))
            for i, run in w.compute if share > 0 and exposed is not None else ():
                on_sites.setdefault(i, []).append((-share * w.times * of_time, run))
        for price, (held_by_sites, held_by_edges) in rows:
            for i, held in held_by_sites.items():
                on_sites.setdefault(i, []).append((price, held))
            for k, held in held_by_edges.items():
                on_edges.setdefault(k, []).append((price, held))
        for k, e in enumerate(self.space.edges) if converted > 1 else ():
            if e.ahead is None:
                on_edges.setdefault(k, []).append((converted - 1, e.seconds))
        costs = [priced(s.seconds, on_sites.get(i, [])) for i, s in enumerate(self.space.sites)]
        tables = [priced(e.seconds, on_edges.get(k, [])) for k, e in enumerate(self.space.edges)]
        factors = [
            Factor((e.source, e.target), (e.given_by, e.taken_by), table)
            for e, table in zip(self.space.edges, tables, strict=True)
        ]
        return Problem(costs, factors, self.regions, shapes=self.shapes)

    def point(self, picked: Sequence[int]) -> Point:
        """The plan that picks these choices, with its exact seconds and bytes."""
        return self.points.of(picked)

    def row(self, time: int) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        assert self.memory is not None
        if time not in self.rows:
            sites, edges = self.memory.row(time)
            self.rows[time] = self._shared(sites), self._shared(edges)
        return self.rows[time]

    def _shared(self, tables: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """The tables with equal ones replaced by one object, so that results for it serve all."""
        return {i: self._alike.setdefault(t.tobytes() + repr(t.shape).encode(), t) for i, t in tables.items()}

    # -- the search

    def fastest(
        self,
        budget: float,
        gap: float,
        incumbents: Iterable[Point] = (),
        until: float = math.inf,
        little: float = _LIMITS.little,
        proves: bool = True,
    ) -> Outcome:
        """The fastest plan within a budget that prices lead to, and a lower bound.

        Prices are raised until plan and bound meet within the gap, or no price raises the bound, or, once there is a
        plan, until the time `until`. They begin with those that `incumbents`, plans met before, lead to. Where tables
        are large, the bound is in single precision unless it `proves` it.
        """
        points = list(incumbents)
        times = list[int]()
        at = Prices({}, (0.0,) * self.kinds)
        if points:
            times = sorted({t for p in points for t in self._overfull(p, budget)})
            at, _ = prices_of(points, times, budget, self.kinds)
        centre = at
        bound = -math.inf
        tried = set[Any]()
        asked = 0
        enough = max(gap, _LIMITS.worth if self.rounds == _LIMITS.rounds else LIMITS.rounding.same)
        for _ in range(self.rounds):
            point, worth = self._worth(at, budget, self.is_large)
            tried.add(at.rounded)
            is_known = any(point.picked == p.picked for p in points)
            if math.isfinite(point.seconds) and not is_known:
                points.append(point)
            if worth > bound:
                centre = at
                bound = worth
            best = _fastest_within(points, budget)
            if bound >= self.rival:
                break
            if best is not None and (best.seconds - bound <= enough * best.seconds or time.monotonic() > until):
                break
            slowest = max((p.seconds for p in points), default=math.inf)
            if best is None and worth > _LIMITS.absurd * slowest and asked < _LIMITS.proofs:
                asked += 1
                if self.none_within(budget, at.of_bytes):
                    return Outcome(None, bound, points, centre, hopeless=True)
            times = sorted({*times, *self._overfull(point, budget)})
            ahead, most = prices_of(points, times, budget, self.kinds)
            left = 0.0 if best is None else little * (best.seconds - bound)
            if points and most - bound <= max(_LIMITS.worth * abs(bound), left):
                break  # The best prices ahead raise the bound too little.
            # Whole steps find the range of prices soonest while no plan fits and the bound rises. They also lead
            # away from known plans. Otherwise half steps are steadier.
            leaps = is_known or (best is None and centre is at)
            steps = (ahead,) if leaps else (ahead.towards(centre), ahead)
            step = next((step for step in steps if step.rounded not in tried), None)
            if step is None:
                break
            at = step
        outcome = Outcome(best, bound, points, centre, is_rough=self.is_large)
        return self.proven(outcome, budget) if proves else outcome

    def proven(self, outcome: Outcome, budget: float) -> Outcome:
        """The outcome with a bound in double precision."""
        if not outcome.is_rough:
            return outcome
        point, bound = self._worth(outcome.prices, budget)
        points = [*outcome.points, point] if math.isfinite(point.seconds) else outcome.points
        return Outcome(_fastest_within(points, budget), bound, points, outcome.prices)

    def _worth(self, at: Prices, budget: float, is_rough: bool = False) -> tuple[Point, float]:
        """The plan that prices lead to, and the bound that they give."""
        point, least = self.at(at.of_bytes, exposed=at.exposed, is_rough=is_rough)
        return point, least - sum(at.of_bytes.values()) * (budget if at.of_bytes else 0.0)

    def none_within(self, budget: float, prices: Mapping[int, float]) -> bool:
        """Whether these prices prove that no plan fits, as every plan's weighted bytes exceed the budget."""
        whole = sum(prices.values())
        weights = {t: p / whole for t, p in prices.items() if p > 0}
        return self.at(weights, 0.0)[1] > budget * (1 + LIMITS.rounding.over)

    def smallest(self) -> tuple[Point, float]:
        """The plan of the lowest peak that was found, and a lower bound of any peak; searched for once."""
        points = self.small()
        assert self._smallest is not None
        best = min(points, key=lambda p: (p.peak, p.seconds))
        return best, min(self._smallest[1], best.peak)

    def smallest_within(self, budget: float, like: Point) -> Point | None:
        """The smallest plan if it fits a budget; None without a search where a proof says that none does.

        The proofs look at the times at which the plan `like` is fullest: at each, and at all together.
        """
        times = self._peaks(like)
        for proof in ([*({t: 1.0} for t in times), dict.fromkeys(times, 1.0)]) if self._smallest is None else ():
            if self.none_within(budget, proof):
                return None
        best, _ = self.smallest()
        return best if best.peak <= budget else None

    def small(self) -> list[Point]:
        """The plans that are met on the way to the lowest peak, the same under any budget."""
        if self._smallest is None:
            self._smallest = self._search_smallest()
        return self._smallest[0]

    def _search_smallest(self) -> tuple[list[Point], float]:
        first, _ = self.at({})
        points = [first]
        times = self._peaks(first)
        bound = 0.0
        # The weights see only bytes in tables, so progress is measured in them.
        counted = [self.points.by_tables(first)]
        weights = dict.fromkeys(times, 1.0 / len(times))
        done = list[dict[int, float]]()
        # A small weight on seconds decides the choices that no memory row mentions.
        a_little = _LIMITS.seconds_weight * first.peak / max(_TINY, first.seconds)
        for _ in range(_LIMITS.rounds):
            point, _ = self.at(weights, a_little, is_rough=self.is_large)
            if math.isfinite(point.seconds):
                points.append(point)
                counted.append(self.points.by_tables(point))
            times = sorted({*times, *self._peaks(counted[-1])})
            before = weights
            weights, guess = _weights(counted, times)
            done.append(before)
            if min(p.peak for p in counted) <= guess * (1 + _LIMITS.near) or weights in done:
                break
        for w in (before, weights):
            # Rounding in the linear program may make weights sum to more than 1, and the bound too high.
            least = self.at(w, 0.0)[1] / max(1.0, sum(w.values()))
            bound = max(bound, least * (1 - LIMITS.rounding.same))
        points = [p for p in points if math.isfinite(p.seconds)] or [first]
        best = min(points, key=lambda p: (p.peak, p.seconds))
        for share in _LIMITS.between:  # Searches for budgets between bound and best often meet smaller plans.
            if min(p.peak for p in counted) <= bound * (1 + _LIMITS.near):
                break
            between = bound + (best.peak - bound) * share
            points = self.fastest(between, _LIMITS.rough_gap, points, proves=False).points
            best = min(points, key=lambda p: (p.peak, p.seconds))
        return points, bound

    def _overfull(self, point: Point, budget: float) -> list[int]:
        """The fullest times (see `_peaks`) at which a plan exceeds a budget."""
        return [t for t in self._peaks(point) if point.held[t] > budget]

    def _peaks(self, point: Point) -> list[int]:
        """The fullest time of the forward, of each half of the backward, and of the optimizer's step."""
        if self.memory is None:
            return []
        n = len(self.memory.ops)
        edges = [0, n, n + n // 2, 2 * n, 2 * n + 1]
        return [low + int(point.held[low:high].argmax()) for low, high in itertools.pairwise(edges) if high > low]


def _fastest_within(points: Sequence[Point], budget: float) -> Point | None:
    """The fastest plan whose peak is within a budget, or None."""
    return min((p for p in points if p.peak <= budget), key=lambda p: p.seconds, default=None)


def _times(seconds: np.ndarray, of_time: float) -> np.ndarray:
    """Seconds multiplied by `of_time`; infinite ones stay infinite, even times 0."""
    if of_time == 1.0:
        return seconds
    return np.where(np.isfinite(seconds), np.nan_to_num(seconds, posinf=0.0) * of_time, math.inf)


def _backend() -> Any:
    return pulp.PULP_CBC_CMD(msg=False, threads=1, options=[f"maxIterations {_LIMITS.pivots}"])


def prices_of(points: Sequence[Point], times: Sequence[int], budget: float, kinds: int) -> tuple[Prices, float]:
    """The prices that maximise the least priced cost of the plans met so far, and that cost.

    No bound exceeds that cost. The prices solve the linear program  max theta,  theta <= seconds in line + sum of share
    * over + sum of price * (bytes - budget).
    """
    if not points:
        return Prices(dict.fromkeys(times, 1.0), (0.0,) * kinds), math.inf
    program = pulp.LpProblem("prices", pulp.LpMaximize)
    most = max(p.seconds for p in points) or 1.0
    worth = max(1.0, budget)  # A budget of 0 counts as one byte, which can be divided by.
    unit = worth / most  # The program counts budgets and the slowest plan's seconds, so that numbers are near 1.
    theta = pulp.LpVariable("theta")
    price = {t: pulp.LpVariable(f"p_{t}", lowBound=0, upBound=1e4) for t in times}
    share = [pulp.LpVariable(f"e_{k}", lowBound=0, upBound=1) for k in range(kinds)]
    program.setObjective(theta + 0)
    for p in points:
        rows = [(v, float((p.held[t] - budget) / worth)) for t, v in price.items()] + [
            (v, o / most) for v, o in zip(share, p.over, strict=True)
        ]
        program.addConstraint(theta - pulp.LpAffineExpression(rows) <= p.in_line / most)
    if program.solve(_backend()) != pulp.LpStatusOptimal:  # A program that was stopped gives no prices.
        return Prices({}, (0.0,) * kinds), -math.inf
    found = Prices(
        {t: max(0.0, float(v.value() or 0.0)) / unit for t, v in price.items()},
        tuple(min(1.0, max(0.0, float(v.value() or 0.0))) for v in share),
    )
    return found, float(theta.value() or 0.0) * most


def _weights(points: Sequence[Point], times: Sequence[int]) -> tuple[dict[int, float], float]:
    """The weights of times that maximise the least weighted mean of bytes of plans met, and that mean."""
    program = pulp.LpProblem("weights", pulp.LpMaximize)
    unit = max(_TINY, *(p.peak for p in points))
    theta = pulp.LpVariable("theta")
    weight = {t: pulp.LpVariable(f"w_{t}", lowBound=0) for t in times}
    program.setObjective(theta + 0)
    program.addConstraint(pulp.lpSum(weight.values()) == 1)
    for p in points:
        program.addConstraint(theta - pulp.lpSum(v * float(p.held[t] / unit) for t, v in weight.items()) <= 0)
    if program.solve(_backend()) != pulp.LpStatusOptimal:
        return dict.fromkeys(times, 1.0 / len(times)), math.inf
    return {t: max(0.0, float(v.value() or 0.0)) for t, v in weight.items()}, float(theta.value() or 0.0) * unit
