"""The joint search for shardings and for what backward recomputes.

    free         the fastest plans where memory is nothing
    joint        at one price of a byte after the other, at the fullest time: the sharding for which the cheapest states
                 are cheapest, and a bound for every sharding with every schedule (`joint.py`)
    within       of each sharding that was met, the states that fit in the budget (`states.py`)
    without      where that leaves more than a little open, shardings that fit without recompute, or hold less

A policy by name, or a user's own, takes the place of `within` (`policy_search.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from autopar.solver.fewer_on_host import with_fewer_on_host
from autopar.solver.joint import JointPrices
from autopar.solver.joint_search import JointSearch
from autopar.solver.limits import LIMITS
from autopar.solver.lined import Lined, lowest_of
from autopar.solver.link_bound import look_at_link
from autopar.solver.points import Point, frontier
from autopar.solver.policies import Policy
from autopar.solver.policy_search import PolicySearch
from autopar.solver.policy_states import ALL_STATES
from autopar.solver.polish import with_equal_layers
from autopar.solver.searches import Findings, SmallestPlan, Task

_LIMITS = LIMITS.recompute


Without = Callable[[], Findings]


def recompute(task: Task, policy: str | Policy, without: Without) -> Findings:
    """The findings with recompute, by a policy or by the joint search; `without` searches without it."""
    if policy == "none":
        return with_fewer_on_host(task, _on_host_alone(task, without()))
    if policy == "auto":
        found = _auto(task, without)
        if found.best is None and task.room is not None:
            found = _auto(replace(task, room=None), without)
        return with_fewer_on_host(task, found)
    search = PolicySearch(task, policy)
    search.look()
    if search.is_hopeless:
        return search.findings
    search.close()
    if search.best is None or search.is_wide:
        _take_more(search, without)
        search.close()
    if policy in ALL_STATES and search.best is not None and task.has_budget:
        search.raise_bound(_bound_of_any_states(task, search.best))
    return search.findings


def _on_host_alone(task: Task, found: Findings) -> Findings:
    """The findings of a search without recompute, or a faster plan whose values wait on the host."""
    joint = JointSearch.of(task)
    if joint is None:
        return found
    best = found.best
    shardings = [p for p in (*frontier(joint.free.points), *task.counted.small().points) if math.isfinite(p.seconds)]
    for lined in [joint.first, *(Lined.of(task, point) for point in shardings)]:
        if best is None or lined.point.seconds < best.seconds:
            plan = lined.within(task.budget)
            best = plan if plan is not None else best
    bound = joint.bound_beside_host(task.budget, math.inf if best is None else best.seconds)
    return replace(found, best=best, bound=bound, outcome=joint.free)


def _take_more(search: PolicySearch, without: Without) -> None:
    """Try shardings that fit without recompute, then small ones: in a large space until one fits."""
    task = search.task
    is_short = not task.is_long
    for point in frontier(found.outcome.points if (found := without()).outcome else []):
        if search.take(point) and not is_short:
            return
    if search.best is None or is_short:
        for point in dict.fromkeys([*frontier(task.counted.small().points), task.counted.smallest()[0]]):
            if search.take(point, is_always=True) and not is_short:
                return


def _bound_of_any_states(task: Task, best: Point) -> float:
    """A bound for every sharding with every schedule of recompute."""
    joint = JointSearch.of(task)
    if joint is None:
        return -math.inf
    within = Within(joint, task.budget, best=best, lined=joint.first)
    within.look_for_prices(_LIMITS.rounds_for_bound)
    return joint.bound(task.budget)


@dataclass(slots=True, eq=False)
class Within:
    """The joint search under one budget."""

    joint: JointSearch
    budget: float
    best: Point | None = None
    lined: Lined | None = None  # the sharding of the best plan
    tried: dict[tuple[int, ...], Lined] = field(default_factory=dict)  # shardings by their choices
    refined: Lined | None = None  # the sharding that was refined last

    @property
    def gap(self) -> float:
        """The gap of the best plan, as a share of its seconds; infinite where there is none."""
        return (self.best.seconds - self.bound) / self.best.seconds if self.best is not None else math.inf

    @property
    def loose(self) -> float:
        """The budget of the priced time, at which values wait on the host."""
        return self.budget + self.joint.carried

    @property
    def bound(self) -> float:
        """The lower bound of any plan."""
        return self.joint.bound_beside_host(self.budget, math.inf if self.best is None else self.best.seconds)

    @property
    def is_near_rival(self) -> bool:
        """Whether the best plan may become faster than the plan of another space, if there is one."""
        return self.best is not None and self.best.seconds <= (1 + _LIMITS.open) * self.joint.task.counted.rival

    @property
    def is_wide(self) -> bool:
        """Whether the gap is worth a search without recompute, which is cheap in a small space."""
        is_open = _LIMITS.open if self.joint.task.counted.is_large else _LIMITS.small_open
        return self.gap > max(self.joint.task.gap, is_open + self.joint.own_gap)

    def run(self) -> None:
        """Search for the best plan and raise the bound; to be called after `look_at_known`."""
        self.look_at_equal_layers()
        if self.best is None:
            self.look_at_segments()
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
        for (price, _), _, lined in sorted(known, key=lambda row: (row[0][1], row[1]))[: _LIMITS.known]:
            self._take(lined, price)
        self.lined = self.lined or self.joint.first

    def polish(self) -> None:
        """Refine the states of the best sharding; while nothing fits, of the one that comes nearest."""
        lined = self.lined
        if self.best is None:
            lined = min(self.tried.values(), key=lambda tried: tried.lowest, default=lined)
        assert lined is not None
        if self.gap <= self.joint.task.gap or (self.best is None and lined is self.refined):
            return
        self.refined = lined
        plan = lined.polished(self.budget)
        if plan is not None and (self.best is None or plan.seconds < self.best.seconds):
            self.best, self.lined = plan, lined

    def add(self, points: Iterable[Point]) -> None:
        """Search for states of more shardings."""
        for point in points:
            if tuple(point.picked) not in self.joint.met:
                self._take(Lined.of(self.joint.task, point))

    def comes_near(self) -> bool:
        """Whether shardings that fit with the bytes that no states change lead to a plan near the budget."""
        lowest = math.inf
        for lined in self.joint.small.that_fit(self.loose):
            self._take(lined)
            if lined.lowest > self.loose:
                self._take_segments(lined)
            if not self.joint.task.is_long and (self.best is None or lined.point.seconds < self.best.seconds):
                plan = lined.polished(self.budget)
                if plan is not None and (self.best is None or plan.seconds < self.best.seconds):
                    self.best, self.lined = plan, lined
            lowest = min(lowest, lined.lowest)
        return lowest <= _LIMITS.far * self.loose

    def _take(self, lined: Lined, price: float = 0.0) -> None:
        """Search for the states of a sharding, unless that was done or cannot help, and keep the best plan."""
        key = tuple(lined.point.picked)
        if key in self.tried or (self.best is not None and lined.point.seconds >= self.best.seconds):
            return
        if lined.at_step > self.budget:
            return  # The optimizer's step exceeds the budget, whatever is recomputed.
        self.tried[key] = lined
        plan = lined.within(self.budget, price)
        if plan is not None and (self.best is None or plan.seconds < self.best.seconds):
            self.best, self.lined = plan, lined

    def look_at_segments(self) -> None:
        """Try to save only the ends of segments of blocks in every known sharding.

        Where bytes are dear, prices would have backward begin with the whole forward.
        """
        for lined in self.joint.met.values():
            self._take_segments(lined)

    def _take_segments(self, lined: Lined) -> None:
        """Try to save only the ends of segments of blocks in a sharding."""
        lined.look_at_segments()
        states = lined.states.fastest(self.budget)
        plan = lined.under(states) if states is not None else None
        if plan is not None and (self.best is None or plan.seconds < self.best.seconds):
            self.best, self.lined = plan, lined

    def look_for_prices(self, rounds: int = _LIMITS.rounds) -> None:
        """Find new shardings at prices of windows and of a byte at the fullest time, and raise the bound."""
        joint = self.joint
        budget = self.budget
        lined = self.lined
        if lined is None:
            return
        in_vain = 0  # rounds without progress in a row
        lowest = math.inf  # the lowest peak so far
        moves = False  # whether the prices of windows move along with that of a byte
        is_sure = False  # whether all prices moved, and that led anywhere
        for _ in range(rounds):
            seconds = self.best.seconds if self.best is not None else math.inf
            highest = joint.about(budget)
            ahead, most = joint.ahead(budget)
            little = _LIMITS.little * (seconds - highest) if self.best is not None else -math.inf
            is_near = self.best is not None and seconds - highest <= joint.task.gap * seconds
            at = self._next_prices(ahead, moves, is_sure)
            if is_near or most - highest <= little or at is None or in_vain >= _most_in_vain(self):
                break
            is_alone = at.exposed == joint.best_prices(budget).exposed
            lined = joint.look(at, lined)
            self._take(lined, at.of_byte)
            if self.best is None:
                has_led = lined.lowest < lowest
            else:
                has_led = max(seconds - self.best.seconds, joint.about(budget) - highest) > max(0.0, little)
            in_vain = 0 if has_led else in_vain + 1
            lowest = min(lowest, lined.lowest)
            moves = moves == has_led
            is_sure = has_led and not is_alone
        joint.look_closely(budget)

    def look_at_equal_layers(self) -> None:
        """Try shardings whose layers are equal, from choices that were met, with windows as they are.

        The price of a byte is that at which the plans met so far cost most, as long as it leads to a new sharding.
        """
        joint = self.joint
        task = self.joint.task
        tables = self.joint.tables
        if not task.space.windows:
            return
        points = sorted(self._shardings(), key=lambda p: p.seconds)[: _LIMITS.mixed]
        dearest = 0.0
        for _ in range(1 if task.counted.is_large else _LIMITS.mixtures):
            if self.gap <= task.gap:
                return
            price, _ = joint.promising(self.budget, joint.met.values())
            price = price or dearest * LIMITS.joint.dearer or joint.ahead(self.budget)[0].of_byte
            dearest = max(dearest, price)
            near = joint.best_at(price)
            at = JointPrices(price, None, joint.best_prices(self.budget).at_step)
            problem = tables.problem(at, tables.prices.worth([near.laid], price))
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

    def _next_prices(self, ahead: JointPrices, moves: bool, is_sure: bool) -> JointPrices | None:
        """The next prices to try, or None at the end.

        Starting from the best bound's, either the price of a byte moves all the way ahead while those of windows stay,
        or all prices move half the way; or all of it, where half the way `is_sure` to lead on as it did before.
        """
        joint = self.joint
        tried = (*joint.bounds, *joint.rough)
        best = joint.best_prices(self.budget)
        alone = joint.ahead_alone(self.budget)
        half = ahead.towards(best) if best.of_budget else ahead
        together = (ahead, half) if is_sure else (half, ahead)
        for step in (*together, alone) if moves else (alone, *together):
            if step.of_budget and not any(step.is_near(at) for at in tried):
                return step
        return None


def _most_in_vain(within: Within) -> int:
    """Rounds of prices without progress that end the search.

    They are fewer in a long model, where a round takes seconds, once little is open.
    """
    is_short = not within.joint.task.is_long or within.gap > LIMITS.joint.little_open
    return _LIMITS.in_vain if is_short else LIMITS.joint.in_vain_long


def _auto(task: Task, without: Without) -> Findings:
    """The findings of the joint search, and of searches without recompute where its gap stays wide."""
    joint = JointSearch.of(task)
    if joint is None:
        found = without()
        return SmallestPlan().look(task, found) if found.best is None else found
    within = Within(joint, task.budget)
    within.look_at_known()
    if math.isfinite(task.counted.rival):
        within.look_for_prices(_LIMITS.rounds_at_first)
        if within.bound >= (1 - _LIMITS.worth) * task.counted.rival:
            return Findings(within.best, within.bound, joint.free)
    needs = joint.tables.least_bytes(joint.carried) if within.best is None and not joint.task.is_long else 0.0
    if needs > within.budget * (1 + LIMITS.rounding.over):
        return Findings(None, within.bound, joint.free, lowest=joint.small.lowest(), needs=needs)
    if not within.is_near_rival and not within.comes_near() and within.best is None:
        # The smallest plan may fit even where no fast sharding comes near the budget.
        smallest = joint.small.lowest()
        if smallest.peak > task.budget:
            return Findings(None, within.bound, joint.free, lowest=smallest, needs=needs)
        within.best = smallest
    if not within.is_near_rival and math.isfinite(task.counted.rival):
        within.look_for_prices(_LIMITS.rounds_for_bound)
        return Findings(within.best, within.bound, joint.free)
    within.run()
    found = _and_without(within, without)
    if found.best is None:
        return _of_the_smallest(joint, found, needs)
    return replace(found, bound=_bound_by_link(within))


def _bound_by_link(within: Within) -> float:
    """The bound, raised by the time that the link to the host has where it leaves more than a little open."""
    room = within.joint.task.room
    if room is not None and within.lined is not None and within.gap > _LIMITS.worth:
        look_at_link(within.joint, room.host, within.budget, within.lined)
    return within.bound


def _and_without(within: Within, without: Without) -> Findings:
    """The findings within a budget; where the gap stays wide, also those of searches without recompute."""
    joint = within.joint
    if not within.is_wide:
        return Findings(within.best, within.bound, joint.free, tuple(joint.stopped))
    known = within.best
    found = without()
    if found.best is not None and (within.best is None or found.best.seconds < within.best.seconds):
        within.best = found.best
    within.add(frontier(found.outcome.points if found.outcome else []))
    if within.best is None or within.best is not known:
        within.polish()
    stopped = (*joint.stopped, *found.stopped)
    return replace(found, best=within.best, bound=within.bound, outcome=joint.free, stopped=stopped)


def _of_the_smallest(joint: JointSearch, found: Findings, needs: float) -> Findings:
    """The findings with the smallest known plan: as the best one where it fits, else as the lowest."""
    task = joint.task
    for search in (joint.met_lowest, joint.small.lowest):
        if (smallest := search()).peak <= task.budget:
            return replace(found, best=smallest)
    fits = task.counted.smallest_within(task.budget, joint.first.point)
    return replace(found, lowest=smallest, needs=needs) if fits is None else replace(found, best=fits)


def lowest(task: Task) -> Point:
    """The plan of the lowest known peak, with recompute."""
    smallest, _ = task.counted.smallest()
    free = task.counted.fastest(math.inf, task.gap, until=task.until)
    points = [smallest, *([free.best] if free.best is not None else [])]
    return min((lowest_of(Lined.of(task, p)) for p in points), key=lambda p: (p.peak, p.seconds))
