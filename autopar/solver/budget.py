"""The fastest plan under a memory budget, with overlap of communication and compute, and a lower bound.

    minimise  seconds(x) + sum_w max(0, communication(x, w) - compute(x, w))     such that     bytes(x, t) <= budget
              at every time t

Each time is a row with a price, and so is each window, with a price from 0 (hidden) to 1 (exposed); windows with the
same tables have one. At given prices the problem is a sum of tables again, and elimination gives its least value: less
the price of the budget that is a bound, and its choices are a plan with its bytes. A small linear program over the
plans met so far gives the next prices (a time joins where a plan's peak stands over the budget).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.solver.eliminate import Found, minimise
from autopar.solver.limits import LIMITS
from autopar.solver.lowest_peak import LowestPeak, lowest_peak
from autopar.solver.points import Point, Points
from autopar.solver.priced_tables import PricedTables
from autopar.solver.prices import Prices, prices_of
from autopar.space.space import Space

_LIMITS = LIMITS.prices


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

    def __post_init__(self) -> None:
        self.memory = self.space.memory
        self.points = Points(self.space)
        self.kinds = self.points.kinds
        self.tables = PricedTables(self.space, self.points.kind_of)
        self._lowest: LowestPeak | None = None  # None until it is searched for
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

        def least() -> Found:
            return minimise(self.tables.problem(prices, of_time, exposed), tries=1, is_rough=is_rough)

        space = self.space
        what = "least", of_time, None if exposed is None else tuple(exposed), is_rough
        has_prices = any(price > 0 for price in prices.values())
        found = least() if has_prices else space.known(what, (space.sites, space.edges, space.windows), least)
        return self.point(found.picked), found.bound

    def closest(self, prices: Prices) -> Point:
        """The plan of least priced cost that many agreements of split variables lead to."""
        found = minimise(self.tables.problem(prices.of_bytes, exposed=prices.exposed), is_rough=self.is_large)
        return self.point(found.picked)

    def with_fewer_conversions(self, prices: Prices) -> list[Point]:
        """The plans of least priced cost if converting what ops made were dearer, by one factor and another.

        They convert less, as data parallelism does. Where elimination has to split variables its plan is not the best
        at its prices, and one of these is often better.
        """
        points = list[Point]()
        for times in _LIMITS.dearer:
            problem = self.tables.problem(prices.of_bytes, exposed=prices.exposed, converted=times)
            points.append(self.point(minimise(problem, tries=1, is_rough=self.is_large).picked))
        return [p for p in points if math.isfinite(p.seconds)]

    def point(self, picked: Sequence[int]) -> Point:
        """The plan that picks these choices, with its exact seconds and bytes."""
        return self.points.of(picked)

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
            at, _ = prices_of(points, dict.fromkeys(times, budget), self.kinds)
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
            ahead, most = prices_of(points, dict.fromkeys(times, budget), self.kinds)
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

    def small(self) -> LowestPeak:
        """The plan of the lowest peak, with those that are met on the way to it; searched for once."""
        if self._lowest is None:
            self._lowest = lowest_peak(self)
        return self._lowest

    def smallest(self) -> tuple[Point, float]:
        """The plan of the lowest peak that was found, and a lower bound of any peak."""
        best = self.small().best
        return best, min(self.small().bound, best.peak)

    def smallest_within(self, budget: float, like: Point) -> Point | None:
        """The smallest plan if it fits a budget; None without a search where a proof says that none does.

        The proofs look at the times at which the plan `like` is fullest: at each, and at all together.
        """
        times = self.points.fullest(like)
        for proof in ([*({t: 1.0} for t in times), dict.fromkeys(times, 1.0)]) if self._lowest is None else ():
            if self.none_within(budget, proof):
                return None
        best, _ = self.smallest()
        return best if best.peak <= budget else None

    def _overfull(self, point: Point, budget: float) -> list[int]:
        """The fullest times (see `Points.fullest`) at which a plan exceeds a budget."""
        return [t for t in self.points.fullest(point) if point.held[t] > budget]


def _fastest_within(points: Sequence[Point], budget: float) -> Point | None:
    """The fastest plan whose peak is within a budget, or None."""
    return min((p for p in points if p.peak <= budget), key=lambda p: p.seconds, default=None)
