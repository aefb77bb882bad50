"""The joint search for shardings and for what backward recomputes.

    free         the fastest plans where memory is nothing
    joint        at one price of a byte after the other, at the fullest time: the sharding for which the cheapest states
                 are cheapest, and a bound for every sharding with every schedule (`joint.py`)
    within       of each sharding that was met, the states that fit in the budget (`states.py`)
    without      where that leaves more than a little open, shardings that fit without recompute, or hold less

A policy by name, or a user's own, takes the place of `within`; its shardings are the fastest under which it fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.solver.availability import Availability
from autopar.solver.budget import Outcome, prices_of
from autopar.solver.eliminate import Found, minimise
from autopar.solver.joint import JointPrices, JointTables
from autopar.solver.points import Point
from autopar.solver.policies import IN_ONE_LOOK, Policy, in_segments, named, repeated
from autopar.solver.polish import polished, with_equal_layers
from autopar.solver.refine import refined
from autopar.solver.searches import Findings, Task
from autopar.solver.states import StateSearch, StepStates
from autopar.space.timeline import Timeline

_ROUNDS = 12  # of prices
_AT_FIRST, _WORTH = 2, 0.01  # rounds, after which a space is left that can gain so little on a plan of another
_DEARER = 8.0  # times the last price, while all that was met is over the budget
_DEAR = (1.0, 30.0, 1000.0)  # times the usual price of a byte, where the smallest plans are looked for
_LOWER = 0.95  # of the smallest plan's bytes: the next budget for which one is looked for
_FAR = 1.25  # of a budget: no search has come to fit where the smallest of those plans holds more
_STEP = 3.0  # times the price of the best bound: no price of a byte alone is further from it
_LITTLE = 0.05  # of what is open: a bound that can rise by less is left as it is
_ROUGHLY = 0.08  # the same where memory is nothing yet: the joint search goes on from there
_IN_VAIN = 5  # rounds that lead nowhere, after which it is left too
_CHEAP, _HALVINGS = 1e-24, 48  # seconds a byte, and how often the range of prices is halved
_OPEN = 0.05  # a gap, beside that of the free plan, from which on shardings without recompute are looked at too
_MOST = 8  # of those: so many
_SEGMENTS = (1, 2, 3, 4, 6, 8)  # blocks in one
_KNOWN = 3  # shardings of budgets before that are looked at first
_MET = 1 + 1e-9  # of a budget, for rounding
_MIXED, _AGAIN = 8, 6  # shardings whose choices are mixed, and how often

Without = Callable[[], Findings]


@dataclass(slots=True, eq=False)
class Lined:
    """A sharding with its timeline, and the search for its states."""

    point: Point
    line: Timeline
    states: StateSearch

    @staticmethod
    def of(task: Task, point: Point) -> Lined:
        line = Timeline.of(task.space, point.picked, point.held, point.momentary)
        return Lined(point, line, StateSearch(line))

    def under(self, states: StepStates) -> Point:
        """The plan of this sharding with these states."""
        what = repeated(self.line, states)
        return replace(
            self.point,
            seconds=self.point.seconds + states.seconds,
            held=states.held,
            recomputed=what.names,
            recompute_s=states.seconds + states.hidden,
            recompute_hidden_s=states.hidden,
            passing=what.passing,
        )

    def named(self, policy: str | Policy, budget: float) -> StepStates:
        """The states that a policy names for this sharding."""
        what, line = named(policy, self.line, budget), self.line
        return self.states.of(line.again(what.names), line.passing(what.passing))

    def within(self, budget: float, price: float = 0.0) -> Point | None:
        """The fastest plan found within a budget, starting at a price that may be near; None where none was."""
        states = self.states.within(budget, price)
        return None if states is None else self.under(states)

    def look_at_segments(self) -> None:
        """Try states in which only the ends of segments of blocks are saved."""
        for length in _SEGMENTS:
            self.states.of(self.line.again(in_segments(self.line, length)))

    def frontier(self, time: int) -> list[Point]:
        """The plans of all known states on the Pareto front of seconds and bytes at a time, the fastest first."""
        found: list[Point] = []
        for states in sorted(self.states.known.values(), key=lambda s: (s.seconds, s.held[time])):
            if not found or states.held[time] < found[-1].held[time]:
                more, point = states.seconds, self.point
                in_line = point.in_line + more
                found.append(replace(point, seconds=point.seconds + more, in_line=in_line, held=states.held))
        return found

    @property
    def lowest(self) -> float:
        """The lowest peak of all known states."""
        return min(states.peak for states in self.states.known.values())

    def polished(self, budget: float) -> Point | None:
        """The fastest plan within a budget after refining known states and those of named policies, or None."""
        for policy in IN_ONE_LOOK:
            self.states.of(self.line.again(named(policy, self.line, budget).names))
        best = refined(self.states, budget)
        return None if best is None else self.under(best)


def recompute(task: Task, policy: str | Policy, without: Without) -> Findings:
    """The findings with recompute, by a policy or by the joint search; `without` searches without it."""
    if policy == "auto":
        return _auto(task, without)
    free = task.counted.fastest(math.inf, task.gap, until=task.until)
    lowest: Point | None = None
    for point, is_always in _chain(task, free, without):
        lined = Lined.of(task, point)
        states = lined.named(policy, task.budget)
        if states.peak <= task.budget:
            return Findings(lined.under(states), free.bound, free)
        if is_always and (lowest is None or states.peak < lowest.peak):
            lowest = lined.under(states)
    return Findings(None, free.bound, free, lowest=lowest)


def _chain(task: Task, free: Outcome, without: Without) -> Iterator[tuple[Point, bool]]:
    """Shardings met without a budget and under it, each list from the fastest on, then small ones.

    With each whether it is met under any budget: only such a one may be named as what would fit.
    """
    yield from ((point, True) for point in frontier(free.points))
    found = without()
    yield from ((point, False) for point in frontier(found.outcome.points if found.outcome else []))
    small = dict.fromkeys([*frontier(task.counted.small()), task.counted.smallest()[0]])
    yield from ((point, True) for point in small)


@dataclass(slots=True, eq=False)
class JointSearch:
    """The joint search of one space; what it has met and proven serves one budget after the other."""

    task: Task
    free: Outcome  # where memory is nothing
    tables: JointTables
    met: dict[tuple[int, ...], Lined]  # shardings by their choices; the first is the fastest
    stopped: list[str]
    # at prices that were tried: bounds of seconds and priced bytes, and where a space is large what they are about
    bounds: dict[JointPrices, float] = field(default_factory=dict)
    rough: dict[JointPrices, float] = field(default_factory=dict)
    worths: dict[JointPrices, Availability] = field(default_factory=dict)  # of availability
    small: list[Lined] = field(default_factory=list)  # as far as `_small` has come
    smallest: Point | None = None  # once it was searched for

    @staticmethod
    def of(task: Task) -> JointSearch | None:
        """A new search of a space; None where the fastest plan has nothing that could be dropped."""
        stopped: list[str] = []
        free = task.counted.fastest(math.inf, task.gap, until=task.until, little=_ROUGHLY, proves=False)
        fastest = polished(task.counted, free, math.inf, task.gap, task.solver, stopped)
        first = Lined.of(task, fastest) if fastest is not None else None
        if first is None or not first.line.names:
            return None
        tables = JointTables(task.counted, int(first.point.held.argmax()))
        return JointSearch(task, free, tables, {tuple(first.point.picked): first}, stopped)

    @property
    def first(self) -> Lined:
        """The fastest sharding where memory costs nothing."""
        return next(iter(self.met.values()))

    @property
    def own_gap(self) -> float:
        """The gap of the fastest sharding without a budget: under a budget, a smaller gap is unlikely."""
        return (self.first.point.seconds - self.free.bound) / self.first.point.seconds

    def bound(self, budget: float) -> float:
        """A proven lower bound of seconds under a budget."""
        free = 0.0 if self.free.is_rough else self.free.bound
        return max([free, *(least - at.of_byte * budget for at, least in self.bounds.items())])

    def about(self, budget: float) -> float:
        """The lower bound under a budget, with those in single precision that are not proven yet."""
        rough = (least - at.of_byte * budget for at, least in self.rough.items())
        return max([self.bound(budget), self.free.bound, *rough])

    def best_prices(self, budget: float) -> JointPrices:
        """The prices that give the best bound so far under a budget."""
        tried = self.bounds | self.rough
        best = max(tried, key=lambda at: tried[at] - at.of_byte * budget, default=None)
        at_first = JointPrices(0.0, self.free.prices.exposed)
        if best is None or tried[best] - best.of_byte * budget < self.free.bound:
            return at_first
        return best

    def look(self, at: JointPrices, lined: Lined) -> Lined:
        """Find the sharding of least cost at some prices, given availability prices under another sharding.

        It and its bound are added to what is known. The other sharding is returned where choices do not go together.
        """
        is_large = self.task.counted.is_large
        self.worths[at], least = self._least(at, lined)
        (self.rough if is_large else self.bounds)[at] = least.bound
        point = self.task.counted.point(least.picked)
        if not math.isfinite(point.seconds):
            return lined
        key = tuple(point.picked)
        found = self.met.get(key) or self.met.setdefault(key, Lined.of(self.task, point))
        found.states.of(self.tables.prices.cheapest(found.line, at.of_byte, at.exposed))
        return found

    def _least(self, at: JointPrices, lined: Lined) -> tuple[Availability, Found]:
        """Availability prices under a sharding, and the sharding that costs least at them."""
        worth = self.tables.prices.worth(lined.line, at.of_byte, at.exposed)
        return worth, minimise(self.tables.problem(at, worth), tries=1, is_rough=self.task.counted.is_large)

    def ahead(self, budget: float) -> tuple[JointPrices, float]:
        """Prices that maximise the least priced cost of plans met so far under a budget, and that cost.

        No bound is higher. Where all plans are over the budget, the price of a byte is raised, and the cost is
        infinite.
        """
        time, met = self.tables.time, self._plans()
        if min(plan.held[time] for plan in met) <= budget:
            prices, most = prices_of(met, [time], budget, self.task.counted.kinds)
            return JointPrices(prices.of_bytes.get(time, 0.0), prices.exposed), most
        dearest = max((at.of_byte for at in (*self.bounds, *self.rough)), default=0.0)
        price = dearest * _DEARER or self.first.states.usual_price(time) / _DEARER
        return JointPrices(price, self.best_prices(budget).exposed), math.inf

    def ahead_alone(self, budget: float) -> JointPrices:
        """The best price of a byte, within a factor of the best bound's, with that bound's window prices.

        Without this limit, a price from only a few plans would go too far.
        """
        best, time, met = self.best_prices(budget), self.tables.time, self._plans()
        shares = np.array(best.exposed)
        seconds = np.array([plan.in_line + shares @ np.array(plan.over) for plan in met])
        price, _ = _dearest(seconds, np.array([plan.held[time] for plan in met]) - budget)
        usual = self.first.states.usual_price(time) / _DEARER
        near = min(max(price, best.of_byte / _STEP), best.of_byte * _STEP) if best.of_byte else min(price, usual)
        return JointPrices(near, best.exposed)

    def _plans(self) -> list[Point]:
        """The plans met so far: with states, and from the search without a budget."""
        met = [plan for lined in self.met.values() for plan in lined.frontier(self.tables.time)]
        return met + [point for point in self.free.points if tuple(point.picked) not in self.met]

    def best_at(self, price: float) -> Lined:
        """The sharding that costs least at a price of a byte, with the best of its known states."""

        def cost(lined: Lined) -> float:
            seconds, held = _seconds_and_bytes(lined, self.tables.time)
            return float((seconds + price * held).min())

        return min(self.met.values(), key=cost)

    def met_lowest(self) -> Point:
        """The plan of the lowest peak that was met."""
        return min((_lowest_of(lined) for lined in self.met.values()), key=lambda p: (p.peak, p.seconds))

    def comes_near(self, peak: float) -> bool:
        """Whether a plan of at most this peak is found; a search for the lowest one takes many times as long."""
        return any(_lowest_of(lined).peak <= peak for lined in self._small()) or self.lowest().peak <= peak

    def _small(self) -> Iterator[Lined]:
        """The fastest sharding, and those that are best where bytes are dear; each is looked for once."""
        first = Lined.of(self.task, self.first.point)
        usual, exposed = first.states.usual_price(self.tables.time), self.free.prices.exposed
        for k, times in enumerate((0.0, *_DEAR)):
            if k == len(self.small):
                at = JointPrices(usual * times, exposed)
                point = self.task.counted.point(self._least(at, first)[1].picked) if k else first.point
                self.small.append(Lined.of(self.task, point) if math.isfinite(point.seconds) else first)
            yield self.small[k]

    def lowest(self) -> Point:
        """The plan of the lowest peak that is found, the same under any budget; searched for once.

        The search starts from the smallest sharding, the fastest, and those where bytes are dear.
        """
        if self.smallest is None:
            self.smallest = self._search_lowest()
        return self.smallest

    def _search_lowest(self) -> Point:
        """The plan of the lowest peak, by polishing the states of small shardings as far as that helps."""
        smallest, _ = self.task.counted.smallest()
        known = [*([Lined.of(self.task, smallest)] if math.isfinite(smallest.seconds) else []), *self._small()]
        all_ = list({tuple(lined.point.picked): lined for lined in known}.values())
        for lined in all_:
            lined.within(0.0)
            lined.polished(0.0)
        lined = min(all_, key=lambda lined: lined.lowest)
        while lined.polished(_LOWER * lined.lowest) is not None:
            pass
        return _lowest_of(lined)

    def look_closely(self, budget: float) -> None:
        """Prove, in double precision, the best bound that was found in single precision."""
        if self.about(budget) <= self.bound(budget):
            return
        if self.about(budget) == self.free.bound:
            self.free = self.task.counted.proven(self.free, math.inf)
        else:
            at = max(self.rough, key=lambda at: self.rough[at] - at.of_byte * budget)
            least = minimise(self.tables.problem(at, self.worths[at]), tries=1)
            self.bounds[at] = least.bound
            del self.rough[at]

    def promising(self, budget: float, all_: Iterable[Lined]) -> tuple[float, float]:
        """The price of a byte that maximises the least cost of shardings' plans under a budget, and that cost.

        No bound is higher. The price is 0 where all plans are over the budget.
        """
        met = [_seconds_and_bytes(lined, self.tables.time) for lined in all_]
        seconds, held = np.concatenate(met, axis=1)
        return _dearest(seconds, held - budget)


@dataclass(slots=True, eq=False)
class Within:
    """The joint search under one budget."""

    joint: JointSearch
    budget: float
    best: Point | None = None
    lined: Lined | None = None  # of the best
    tried: dict[tuple[int, ...], Lined] = field(default_factory=dict)  # shardings by their choices

    @property
    def gap(self) -> float:
        """The gap of the best plan, as a share of its seconds; infinite where there is none."""
        bound = self.joint.bound(self.budget)
        return (self.best.seconds - bound) / self.best.seconds if self.best is not None else math.inf

    @property
    def is_wide(self) -> bool:
        """Whether the gap is so large that shardings without recompute are worth a search."""
        return self.gap > max(self.joint.task.gap, _OPEN + self.joint.own_gap)

    def run(self) -> None:
        """Search for the best plan and raise the bound; to be called after `look_at_known`."""
        self.look_at_equal_layers()
        self.look_for_prices()
        self.look_at_equal_layers()
        if self.best is None:
            self.look_at_segments()
        self.polish()

    def look_at_known(self) -> None:
        """Search for states of the most promising shardings that are known."""
        known = [
            (self.joint.promising(self.budget, [lined]), k, lined) for k, lined in enumerate(self.joint.met.values())
        ]
        for (price, _), _, lined in sorted(known, key=lambda row: (row[0][1], row[1]))[:_KNOWN]:
            self._take(lined, price)
        self.lined = self.lined or self.joint.first

    def polish(self) -> None:
        """Refine the states of the best sharding; while nothing fits, of the one that comes nearest."""
        lined = self.lined
        if self.best is None:
            lined = min(self.tried.values(), key=lambda tried: tried.lowest, default=lined)
        assert lined is not None
        plan = lined.polished(self.budget) if self.gap > self.joint.task.gap else None
        if plan is not None and (self.best is None or plan.seconds < self.best.seconds):
            self.best, self.lined = plan, lined

    def add(self, points: Iterable[Point]) -> None:
        """Search for states of more shardings."""
        for point in points:
            if tuple(point.picked) not in self.joint.met:
                self._take(Lined.of(self.joint.task, point))

    def _take(self, lined: Lined, price: float = 0.0) -> None:
        """Search for the states of a sharding, unless that was done or cannot help, and keep the best plan."""
        key = tuple(lined.point.picked)
        if key in self.tried or (self.best is not None and lined.point.seconds >= self.best.seconds):
            return
        self.tried[key] = lined
        plan = lined.within(self.budget, price)
        if plan is not None and (self.best is None or plan.seconds < self.best.seconds):
            self.best, self.lined = plan, lined

    def look_at_segments(self) -> None:
        """Try to save only the ends of segments of blocks in every known sharding.

        Where bytes are dear, prices would have backward begin with the whole forward.
        """
        for lined in self.joint.met.values():
            lined.look_at_segments()
            states = lined.states.fastest(self.budget)
            plan = lined.under(states) if states is not None else None
            if plan is not None and (self.best is None or plan.seconds < self.best.seconds):
                self.best, self.lined = plan, lined

    def look_for_prices(self, rounds: int = _ROUNDS) -> None:
        """Find new shardings at prices of windows and of a byte at the fullest time, and raise the bound."""
        joint, budget, lined = self.joint, self.budget, self.lined
        if lined is None:
            return
        in_vain, lowest = 0, math.inf  # rounds that led nowhere, one after the other; and the lowest peak
        moves = False  # do the prices of windows move, with that of a byte?
        for _ in range(rounds):
            seconds, highest = self.best.seconds if self.best is not None else math.inf, joint.about(budget)
            ahead, most = joint.ahead(budget)
            little = _LITTLE * (seconds - highest) if self.best is not None else -math.inf
            is_near = self.best is not None and seconds - highest <= joint.task.gap * seconds
            at = self._next_prices(ahead, moves)
            if is_near or most - highest <= little or at is None or in_vain == _IN_VAIN:
                break
            lined = joint.look(at, lined)
            self._take(lined, at.of_byte)
            if self.best is None:
                has_led = lined.lowest < lowest
            else:
                has_led = max(seconds - self.best.seconds, joint.about(budget) - highest) > max(0.0, little)
            in_vain, lowest = 0 if has_led else in_vain + 1, min(lowest, lined.lowest)
            moves = moves == has_led
        joint.look_closely(budget)

    def look_at_equal_layers(self) -> None:
        """Try shardings whose layers are equal, from choices that were met, with windows as they are.

        The price of a byte is that at which the plans met so far cost most, as long as it leads to a new sharding.
        """
        joint, task, tables = self.joint, self.joint.task, self.joint.tables
        if not task.space.windows:
            return
        points = sorted(self._shardings(), key=lambda p: p.seconds)[:_MIXED]
        dearest = 0.0
        for _ in range(1 if task.counted.is_large else _AGAIN):
            if self.gap <= task.gap:
                return
            price, _ = joint.promising(self.budget, joint.met.values())
            price = price or dearest * _DEARER or joint.ahead(self.budget)[0].of_byte
            dearest, near = max(dearest, price), joint.best_at(price)
            problem = tables.problem(JointPrices(price, None), tables.prices.worth(near.line, price))
            point = with_equal_layers(task.counted, points, problem, task.solver, joint.stopped)
            if point is None or tuple(point.picked) in joint.met:
                return
            lined = joint.met[tuple(point.picked)] = Lined.of(task, point)
            lined.states.of(tables.prices.cheapest(lined.line, price))
            self._take(lined, price)

    def _shardings(self) -> Iterator[Point]:
        """The shardings that were met, and those of the search without a budget."""
        yield from (lined.point for lined in self.joint.met.values())
        yield from (p for p in self.joint.free.points if tuple(p.picked) not in self.joint.met)

    def _next_prices(self, ahead: JointPrices, moves: bool) -> JointPrices | None:
        """The next prices to try, or None at the end.

        Starting from the best bound's, either the price of a byte moves all the way ahead while those of windows stay,
        or all prices move half the way, or all of it.
        """
        joint = self.joint
        tried = (*joint.bounds, *joint.rough)
        best = joint.best_prices(self.budget)
        alone, half = joint.ahead_alone(self.budget), ahead.towards(best) if best.of_byte else ahead
        for step in (half, ahead, alone) if moves else (alone, half, ahead):
            if step.of_byte and not any(step.is_near(at) for at in tried):
                return step
        return None


def _auto(task: Task, without: Without) -> Findings:
    """The findings of the joint search, and of searches without recompute where its gap stays wide."""
    joint = JointSearch.of(task)
    if joint is None:
        return without()
    within = Within(joint, task.budget)
    within.look_at_known()
    if math.isfinite(task.counted.rival):
        within.look_for_prices(_AT_FIRST)
        if joint.bound(task.budget) >= (1 - _WORTH) * task.counted.rival:
            return Findings(within.best, joint.bound(task.budget), joint.free)
    if within.best is None and joint.tables.fewest_bytes() > task.budget * _MET:
        return Findings(None, joint.bound(task.budget), joint.free)
    if within.best is None and not joint.comes_near(_FAR * task.budget):
        return Findings(None, joint.bound(task.budget), joint.free, lowest=joint.lowest())
    within.run()
    found = Findings(within.best, joint.bound(task.budget), joint.free, tuple(joint.stopped))
    if within.is_wide:  # shardings that need no recompute, or hold less
        found = without()
        if found.best is not None and (within.best is None or found.best.seconds < within.best.seconds):
            within.best = found.best
        within.add(frontier(found.outcome.points if found.outcome else []))
        within.polish()
        found = replace(found, best=within.best, bound=joint.bound(task.budget), outcome=joint.free)
        found = replace(found, stopped=(*joint.stopped, *found.stopped))
    if found.best is not None:
        return found
    fits = next((p for p in (joint.met_lowest(), joint.lowest()) if p.peak <= task.budget), None)
    return replace(found, lowest=joint.lowest()) if fits is None else replace(found, best=fits)


def _dearest(seconds: np.ndarray, over: np.ndarray) -> tuple[float, float]:
    """The price that maximises the least cost of plans, by seconds and bytes over budget; and that cost.

    The price is 0 where all plans are over the budget.
    """
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


def _seconds_and_bytes(lined: Lined, time: int) -> np.ndarray:
    """Seconds of the plan, and its bytes at a time, for all known states, by [seconds or bytes, state]."""
    return np.array([(lined.point.seconds + s.seconds, s.held[time]) for s in lined.states.known.values()]).T


def frontier(points: Sequence[Point]) -> list[Point]:
    """Plans on the Pareto front of seconds and peak bytes, the fastest first; at most `_MOST`."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.seconds, p.peak)):
        if math.isfinite(point.seconds) and (not found or point.peak < found[-1].peak):
            found.append(point)
    return found[:_MOST]


def lowest(task: Task) -> Point:
    """The plan of the lowest known peak, with recompute."""
    smallest, _ = task.counted.smallest()
    free = task.counted.fastest(math.inf, task.gap, until=task.until)
    points = [smallest, *([free.best] if free.best is not None else [])]
    return min((_lowest_of(Lined.of(task, p)) for p in points), key=lambda p: (p.peak, p.seconds))


def _lowest_of(lined: Lined) -> Point:
    lined.within(0.0)
    return lined.under(min(lined.states.known.values(), key=lambda s: (s.peak, s.seconds)))
