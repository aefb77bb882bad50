"""`JointSearch`: the joint search of one space, which serves one budget after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.availability import Availability
from autopar.solver.budget import Outcome
from autopar.solver.eliminate import minimise
from autopar.solver.joint import JointPrices, JointTables
from autopar.solver.limits import LIMITS
from autopar.solver.lined import Lined, lowest_of, seconds_and_bytes
from autopar.solver.offload import most_before
from autopar.solver.points import Point
from autopar.solver.polish import polished
from autopar.solver.prices import prices_of
from autopar.solver.searches import Task
from autopar.solver.small_shardings import SmallShardings

_LIMITS = LIMITS.joint


@dataclass(slots=True, eq=False)
class JointSearch:
    """The joint search of one space; what it has met and proven serves one budget after the other."""

    task: Task
    free: Outcome  # the search without a budget
    tables: JointTables
    met: dict[tuple[int, ...], Lined]  # shardings by their choices; the first is the fastest
    stopped: list[str]
    small: SmallShardings
    # Bounds at the prices that were tried; in a large space first in single precision, which proves nothing.
    bounds: dict[JointPrices, float] = field(default_factory=dict)
    rough: dict[JointPrices, float] = field(default_factory=dict)
    beside_link: dict[JointPrices, float] = field(default_factory=dict)  # the least costs of `link_bound.py`
    worths: dict[JointPrices, Availability] = field(default_factory=dict)  # prices -> the availability prices

    @staticmethod
    def of(task: Task) -> JointSearch | None:
        """A new search of a space; None where the fastest plan has nothing that could be dropped."""
        stopped: list[str] = []
        gap = max(task.gap, _LIMITS.free_gap) if task.is_long else task.gap
        free = task.counted.fastest(math.inf, gap, until=task.until, little=_LIMITS.rough, proves=False)
        fastest = polished(task.counted, free, math.inf, task.gap, task.solver, stopped)
        first = Lined.of(task, fastest) if fastest is not None else None
        if first is None or not first.line.names:
            return None
        held = first.point.held
        backward = 2 * first.line.ops
        tables = JointTables(task.counted, int(held[:backward].argmax()), backward + int(held[backward:].argmax()))
        met = {tuple(first.point.picked): first}
        small = SmallShardings(task, tables, free.prices.exposed, met)
        return JointSearch(task, free, tables, met, stopped, small)

    @property
    def first(self) -> Lined:
        """The fastest sharding where memory costs nothing."""
        return next(iter(self.met.values()))

    @property
    def own_gap(self) -> float:
        """The gap of the fastest sharding without a budget: under a budget, a smaller gap is unlikely."""
        return (self.first.point.seconds - self.free.bound) / self.first.point.seconds

    def bound(self, budget: float, away: float | None = None) -> float:
        """A proven lower bound of seconds under a budget, with so many bytes of values `away`."""
        free = 0.0 if self.free.is_rough else self.free.bound
        return max([free, *(self._less_budget(at, least, budget, away) for at, least in self.bounds.items())])

    @property
    def carried(self) -> float:
        """The most bytes of the fastest sharding that wait on the host."""
        return 0.0 if self.first.packing is None else self.first.packing.carried

    def _less_budget(self, at: JointPrices, least: float, budget: float, away: float | None = None) -> float:
        """The least priced cost less what a budget is worth.

        Values wait on the host at the priced time, never at the optimizer's step.
        """
        return least - at.of_budget * budget - at.of_byte * (self.carried if away is None else away)

    def bound_beside_host(self, budget: float, best_s: float) -> float:
        """A proven lower bound of plans that take no longer than `best_s`, with values on the host or without."""
        room = self.task.room
        if room is None:
            return self.bound(budget)
        in_step = self.bound(budget, room.carried(most_before(self.task.space, best_s, self.tables.time)))
        return max([in_step, *(least - at.of_budget * budget for at, least in self.beside_link.items())])

    def about(self, budget: float) -> float:
        """The lower bound under a budget, with those in single precision that are not proven yet."""
        rough = (self._less_budget(at, least, budget) for at, least in self.rough.items())
        return max([self.bound(budget), self.free.bound, *rough])

    def best_prices(self, budget: float) -> JointPrices:
        """The prices that give the best bound so far under a budget."""
        tried = self.bounds | self.rough
        best = max(tried, key=lambda at: self._less_budget(at, tried[at], budget), default=None)
        at_first = JointPrices(0.0, self.free.prices.exposed)
        if best is None or self._less_budget(best, tried[best], budget) < self.free.bound:
            return at_first
        return best

    def look(self, at: JointPrices, lined: Lined) -> Lined:
        """Find the sharding of least cost at some prices, given availability prices under another sharding.

        The one that was met last says what values are worth, too. The new one and its bound are added to what is known.
        The other sharding is returned where choices do not go together.
        """
        is_large = self.task.counted.is_large
        others = [other for other in self.met.values() if other is not lined]
        self.worths[at], least = self.tables.least(at, [of.laid for of in (*others[-1:], lined)])
        (self.rough if is_large else self.bounds)[at] = least.bound
        point = self.task.counted.point(least.picked)
        if not math.isfinite(point.seconds):
            return lined
        key = tuple(point.picked)
        found = self.met.get(key) or self.met.setdefault(key, Lined.of(self.task, point))
        found.states.of(self.tables.prices.cheapest(found.line, at.of_byte, at.exposed))
        return found

    def ahead(self, budget: float) -> tuple[JointPrices, float]:
        """Prices that maximise the least priced cost of plans met so far under a budget, and that cost.

        No bound is higher. Where all plans are over the budget, prices of a byte are raised, and the cost is infinite.
        """
        budgets = {self.tables.time: budget + self.carried, self.tables.step: budget}
        met = self._plans()
        over = np.array([plan.held[list(budgets)] for plan in met]) - np.array(list(budgets.values()))
        if (over <= 0).all(1).any():
            prices, most = prices_of(met, budgets, self.task.counted.kinds)
            of_byte, at_step = (prices.of_bytes.get(t, 0.0) for t in budgets)
            return JointPrices(of_byte, prices.exposed, at_step), most
        best = self.best_prices(budget)
        tried = [(at.of_byte, at.at_step) for at in (*self.bounds, *self.rough)]
        usual = self.first.states.usual_price(self.tables.time) / _LIMITS.dearer
        are_over = over.min(0) > 0
        dearest = np.max([(0.0, 0.0), *tried], 0) * _LIMITS.dearer
        raised = np.where(dearest > 0, dearest, usual)
        of_byte, at_step = np.where(are_over | ~are_over.any(), raised, (best.of_byte, best.at_step)).tolist()
        return JointPrices(of_byte, best.exposed, at_step), math.inf

    def ahead_alone(self, budget: float) -> JointPrices:
        """Prices that differ from the best bound's in that of a byte, which is the best within a factor.

        Without this limit, a price from only a few plans would go too far. The first one is at most the usual price.
        """
        best = self.best_prices(budget)
        time = self.tables.time
        met = self._plans()
        shares = np.array(best.exposed)
        at_step = best.at_step * np.array([plan.held[self.tables.step] - budget for plan in met])
        seconds = at_step + [plan.in_line + shares @ np.array(plan.over) for plan in met]
        price, _ = dearest(seconds, np.array([plan.held[time] for plan in met]) - budget - self.carried)
        usual = self.first.states.usual_price(time)
        low, high = (best.of_byte / _LIMITS.step, best.of_byte * _LIMITS.step) if best.of_byte else (0.0, usual)
        return JointPrices(min(max(price, low), high), best.exposed, best.at_step)

    def _plans(self) -> list[Point]:
        """The plans met so far: with states, and from the search without a budget."""
        met = [plan for lined in self.met.values() for plan in lined.frontier(self.tables.time)]
        return met + [point for point in self.free.points if tuple(point.picked) not in self.met]

    def best_at(self, price: float) -> Lined:
        """The sharding that costs least at a price of a byte, with the best of its known states."""

        def cost(lined: Lined) -> float:
            seconds, held = seconds_and_bytes(lined, self.tables.time)
            return float((seconds + price * held).min())

        return min(self.met.values(), key=cost)

    def met_lowest(self) -> Point:
        """The plan of the lowest peak that was met."""
        return min((lowest_of(lined) for lined in self.met.values()), key=lambda p: (p.peak, p.seconds))

    def look_closely(self, budget: float) -> None:
        """Prove, in double precision, the best bound that was found in single precision."""
        if self.about(budget) <= self.bound(budget):
            return
        if self.about(budget) == self.free.bound:
            self.free = self.task.counted.proven(self.free, math.inf)
        else:
            at = max(self.rough, key=lambda at: self._less_budget(at, self.rough[at], budget))
            least = minimise(self.tables.problem(at, self.worths[at]), tries=1)
            self.bounds[at] = least.bound
            del self.rough[at]

    def promising(self, budget: float, all_: Iterable[Lined]) -> tuple[float, float]:
        """The price of a byte that maximises the least cost of shardings' plans under a budget, and that cost.

        No bound is higher. The price is 0 where all plans are over the budget.
        """
        met = [seconds_and_bytes(lined, self.tables.time) for lined in all_]
        seconds, held = np.concatenate(met, axis=1)
        return dearest(seconds, held - budget - self.carried)


def dearest(seconds: np.ndarray, over: np.ndarray) -> tuple[float, float]:
    """The price that maximises the least cost of plans, by seconds and bytes over budget; and that cost.

    The price is 0 where all plans are over the budget.
    """
    if not (over <= 0).any():
        return 0.0, math.inf
    low, high = _LIMITS.lowest_price, max(_LIMITS.lowest_price, float(seconds.max()))
    for _ in range(_LIMITS.halvings):
        price = math.sqrt(low * high)
        if over[int((seconds + price * over).argmin())] > 0:
            low = price
        else:
            high = price
    return high, float((seconds + high * over).min())
