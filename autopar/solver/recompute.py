"""The search for shardings and for what backward recomputes, in one.

    free         the fastest plans where memory is nothing
    joint        at one price of a byte after the other, at the fullest time: the sharding for which the cheapest states
                 are cheapest, and a bound for every sharding with every schedule (`joint.py`)
    within       of each sharding that was met, the states that fit in the budget (`states.py`)
    without      where that leaves more than a little open, shardings that fit without recompute, or hold less

A policy by name, or a user's own, takes the place of `within`; its shardings are the fastest under which it fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.solver.budget import Outcome
from autopar.solver.eliminate import minimise
from autopar.solver.joint import Availability, JointTables
from autopar.solver.points import Point
from autopar.solver.policies import POLICIES, Policy, named
from autopar.solver.polish import polished
from autopar.solver.searches import Findings, Task
from autopar.solver.states import StateSearch, StepStates
from autopar.space.timeline import Timeline

_ROUNDS = 9  # of prices
_DEARER = 8.0  # times the last price, while all that was met is over the budget
_LITTLE = 0.03  # of what is open: a bound that can rise by less is left as it is
_ROUGHLY = 0.08  # the same where memory is nothing yet: the joint search goes on from there
_IN_VAIN = 2  # rounds that lead nowhere, after which it is left too
_CHEAP, _HALVINGS = 1e-24, 48  # seconds a byte, and how often the range of prices is halved
_NEAR = 1.05  # of two prices: nothing is looked for between them
_OPEN = 0.05  # a gap, beside that of the free plan, from which on shardings without recompute are looked at too
_MOST = 8  # of those: so many
_MET = 1 + 1e-9  # of a budget, for rounding

Without = Callable[[], Findings]


@dataclass(slots=True, eq=False)
class Lined:
    """A sharding with its line, and the search for its states."""

    point: Point
    line: Timeline
    states: StateSearch

    @staticmethod
    def of(task: Task, point: Point) -> Lined:
        line = Timeline.of(task.space, point.picked, point.held)
        return Lined(point, line, StateSearch(line))

    def under(self, states: StepStates) -> Point:
        """The plan with these states."""
        names = frozenset(self.line.runs[i].name for i in states.again - self.line.forced)
        return replace(
            self.point,
            seconds=self.point.seconds + states.seconds,
            held=states.held,
            recomputed=names,
            recompute_s=states.seconds,
        )

    def within(self, budget: float, price: float = 0.0) -> Point | None:
        """The fastest plan found within a budget, from a price that may be near."""
        states = self.states.within(budget, price)
        return None if states is None else self.under(states)

    def polished(self, budget: float) -> Point | None:
        """The fastest plan of all that are known, and of policies with a name, without what need not be repeated."""
        for policy in POLICIES.values():
            self.states.of(self.line.again(set(policy(self.line, budget))))
        self.states.within(budget)
        best = self.states.fastest(budget)
        return None if best is None else self.under(self.states.filled(best, budget))


def recompute(task: Task, policy: str | Policy, without: Without) -> Findings:
    """The fastest plan with recompute, by a policy or by the joint search; `without` finds plans that have none."""
    if policy == "auto":
        return _Auto(task, without).run()
    free = task.counted.fastest(math.inf, task.gap, until=task.until)
    for point in _chain(free, without):
        lined = Lined.of(task, point)
        states = lined.states.of(lined.line.again(named(policy, lined.line, task.budget)))
        if states.peak <= task.budget:
            return Findings(lined.under(states), free.bound, free)
    return Findings(None, free.bound, free)


def _chain(free: Outcome, without: Without) -> Iterator[Point]:
    """The shardings met where memory is nothing, then those met under the budget; faster ones first."""
    yield from frontier(free.points)
    found = without()
    yield from frontier(found.outcome.points if found.outcome else [])


@dataclass(slots=True, eq=False)
class _Auto:
    """The joint search."""

    task: Task
    without: Without
    best: Point | None = None
    lined: Lined | None = None  # of the best
    bound: float = -math.inf
    tried: set[tuple[int, ...]] = field(default_factory=set)
    stopped: list[str] = field(default_factory=list)

    def run(self) -> Findings:
        """The best plan and bound of all ways to look for them."""
        task = self.task
        free = task.counted.fastest(math.inf, task.gap, until=task.until, little=_ROUGHLY)
        fastest = polished(task.counted, free, math.inf, task.gap, task.solver, self.stopped)
        if fastest is None:
            return self.without()
        first = Lined.of(task, fastest)
        if not first.line.names:  # nothing could be dropped
            return self.without()
        self.bound = free.bound
        tables = JointTables(task.counted, int(first.point.held.argmax()), free.prices.exposed)
        if tables.fewest_bytes() > task.budget * _MET:
            return Findings(None, free.bound, free, hopeless=True)
        self._take(first)
        self.lined = self.lined or first
        if self._is_open(task.gap):
            self._price(first, tables)
        self._polish()
        found = Findings(self.best, self.bound, free, tuple(self.stopped))
        if self._is_open(max(task.gap, _OPEN + (fastest.seconds - free.bound) / fastest.seconds)):
            found = self._sharded()
        return replace(found, best=self.best, bound=self.bound, outcome=free)

    def _polish(self) -> None:
        """Look closer at the states of the best sharding."""
        assert self.lined is not None
        plan = self.lined.polished(self.task.budget) if self._is_open(self.task.gap) else None
        if plan is not None and (self.best is None or plan.seconds < self.best.seconds):
            self.best = plan

    def _is_open(self, gap: float) -> bool:
        return self.best is None or self.best.seconds - self.bound > gap * self.best.seconds

    def _take(self, lined: Lined, price: float = 0.0) -> None:
        """Look for the states of a sharding, once."""
        self.tried.add(tuple(lined.point.picked))
        if self.best is not None and lined.point.seconds >= self.best.seconds:
            return
        plan = lined.within(self.task.budget, price)
        if plan is not None and (self.best is None or plan.seconds < self.best.seconds):
            self.best, self.lined = plan, lined

    def _price(self, first: Lined, tables: JointTables) -> None:
        """Let the price of a byte at the fullest time lead to shardings, and raise the bound."""
        task, lined, time = self.task, first, tables.time
        met = [_seconds_and_bytes(first, time)]
        price = self._promising(met)[0] or first.states.usual_price(time) / _DEARER
        bounds: dict[float, float] = {}  # at each price that was tried,
        worths: dict[float, Availability] = {}  # and what availability was worth
        highest, in_vain = self.bound, 0  # rounds that led nowhere, one after the other
        for _ in range(_ROUNDS):
            before = self.best.seconds if self.best is not None else math.inf, highest
            worths[price] = tables.worth(lined.line, price)
            point, bounds[price] = self._joint(tables, price, worths[price], task.counted.is_large)
            highest = max(highest, bounds[price])
            if math.isfinite(point.seconds):
                lined = Lined.of(task, point)
                if tuple(point.picked) not in self.tried:
                    self._take(lined, price)
                lined.states.of(tables.cheapest(lined.line, price))
                met.append(_seconds_and_bytes(lined, time))
            if self.best is not None and self.best.seconds - highest <= task.gap * self.best.seconds:
                break
            ahead, most = self._promising(met)
            little = _LITTLE * (self.best.seconds - highest) if self.best is not None else -math.inf
            faster = before[0] - self.best.seconds if self.best is not None else 0.0
            in_vain = in_vain + 1 if max(faster, highest - before[1]) <= little else 0
            price = _between(bounds, ahead)
            if not price or most - highest <= little or in_vain == _IN_VAIN:
                break
        if task.counted.is_large and highest > self.bound:
            price = max(bounds, key=lambda price: bounds[price])
            _, highest = self._joint(tables, price, worths[price])
        self.bound = max(self.bound, highest)

    def _joint(
        self, tables: JointTables, price: float, worth: Availability, is_rough: bool = False
    ) -> tuple[Point, float]:
        """The sharding that prices lead to, and the bound that they give."""
        least = minimise(tables.problem(price, worth), tries=1, is_rough=is_rough)
        return self.task.counted.point(least.picked), least.bound - price * self.task.budget

    def _promising(self, met: Sequence[np.ndarray]) -> tuple[float, float]:
        """The price at which the plans that were met are worth most, and what they are then.

        No bound is more than that. The price is 0 where all plans are over the budget: none is dear enough.
        """
        seconds, over = np.concatenate(met, axis=1)
        over = over - self.task.budget
        if not (over <= 0).any():
            return 0.0, math.inf
        low, high = _CHEAP, max(_CHEAP, float(seconds.max()))
        for _ in range(_HALVINGS):
            price = math.sqrt(low * high)
            if over[int((seconds + price * over).argmin())] > 0:
                low = price
            else:
                high = price
        return high, float((seconds + high * over).min())

    def _sharded(self) -> Findings:
        """Shardings that were met while looking for one that fits without recompute."""
        found = self.without()
        self.stopped += found.stopped
        if found.best is not None and (self.best is None or found.best.seconds < self.best.seconds):
            self.best = found.best
        for point in frontier(found.outcome.points if found.outcome else []):
            if tuple(point.picked) not in self.tried:
                self._take(Lined.of(self.task, point))
        self._polish()
        return replace(found, stopped=tuple(self.stopped))


def _between(bounds: Mapping[float, float], ahead: float) -> float:
    """The next price to try; 0 where it would be near one that was.

    That is the one `ahead`, where it lies nearer to the price of the best bound than others that were tried: bounds
    rise up to a price and fall from there on. Or else it lies in the middle of the wider side.
    """
    best = max(bounds, key=lambda price: bounds[price])
    below = max((p for p in bounds if p < best), default=0.0)
    above = min((p for p in bounds if p > best), default=math.inf)
    if below < ahead < above and not any(1 / _NEAR < ahead / p < _NEAR for p in bounds):
        return ahead
    low, high = below or best / _DEARER**2, above if math.isfinite(above) else best * _DEARER**2
    price = math.sqrt(low * best) if best / low > high / best else math.sqrt(best * high)
    return price if max(price / best, best / price) > _NEAR else 0.0


def _seconds_and_bytes(lined: Lined, time: int) -> np.ndarray:
    """The seconds of the plan and its bytes at a time, for all states that were looked at."""
    return np.array([(lined.point.seconds + s.seconds, s.held[time]) for s in lined.states.known.values()]).T


def frontier(points: Sequence[Point]) -> list[Point]:
    """The plans that hold less than every faster one, the fastest first."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.seconds, p.peak)):
        if math.isfinite(point.seconds) and (not found or point.peak < found[-1].peak):
            found.append(point)
    return found[:_MOST]


def lowest(task: Task) -> Point:
    """The plan of the lowest peak that is known, with what it recomputes."""
    smallest, _ = task.counted.smallest()
    free = task.counted.fastest(math.inf, task.gap, until=task.until)
    points = [smallest, *([free.best] if free.best is not None else [])]
    return min((_lowest_of(Lined.of(task, p)) for p in points), key=lambda p: (p.peak, p.seconds))


def _lowest_of(lined: Lined) -> Point:
    lined.within(0.0)
    return lined.under(min(lined.states.known.values(), key=lambda s: (s.peak, s.seconds)))
