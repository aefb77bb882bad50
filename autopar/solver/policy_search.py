"""`PolicySearch`: the fastest sharding whose states a policy names, and a bound for all plans that keep to it.

    free       the fastest shardings where memory is nothing: the first under which the policy fits
    repeated   the sharding that is fastest with what the policy always repeats
    smallest   where none fits: the sharding of the fewest bytes under the policy, or the proof that none fits
    priced     shardings at prices of bytes, which lead to faster plans and higher bounds

Bounds come from the tables of `joint.py`, in which only the states that the policy leaves are allowed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from autopar.solver.availability import Availability
from autopar.solver.budget import Outcome
from autopar.solver.eliminate import Found, minimise
from autopar.solver.joint import JointPrices, JointTables
from autopar.solver.limits import LIMITS
from autopar.solver.lined import Lined
from autopar.solver.points import Point, frontier
from autopar.solver.policies import POLICIES, Policy, named
from autopar.solver.policy_states import ALL_STATES, PolicyStates
from autopar.solver.prices import prices_of
from autopar.solver.searches import Findings, Task

_LIMITS = LIMITS.recompute


class _Priced(NamedTuple):
    """A bound, and the tables and prices that give it."""

    bound: float
    tables: JointTables
    at: JointPrices
    worth: Availability


class PolicySearch:
    """The search for shardings under one policy and one budget."""

    def __init__(self, task: Task, policy: str | Policy) -> None:
        self.task = task
        self.policy = policy
        self.free: Outcome = task.counted.fastest(math.inf, task.gap, until=task.until)
        self.bound = self.free.bound
        self.best: Point | None = None
        self.lowest: Point | None = None  # the smallest plan of those that are met under any budget
        self.needs = 0.0  # bytes that any plan needs which keeps to the policy
        self.met: dict[tuple[int, ...], tuple[Lined, Point]] = {}  # choices -> the sharding, and its plan
        self._tables: dict[int, JointTables] = {}
        self._highest: _Priced | None = None
        self._first: Point | None = None  # the plan that fits where memory is nothing, which is near the fastest
        self._lined: Lined | None = None  # the sharding that availability prices are of
        self._names: frozenset[str] | None = None  # A user's function named these for the plan of the bound.

    @property
    def is_hopeless(self) -> bool:
        """Whether it is proven that no plan fits which keeps to the policy."""
        return self.needs > self.task.budget * (1 + LIMITS.rounding.over)

    @property
    def is_wide(self) -> bool:
        """Whether the plan was found for its bytes, and is so far from the bound that more are worth a search."""
        if self.best is None or self.best is self._first:
            return False
        open_ = _LIMITS.open if self.task.counted.is_large else _LIMITS.small_open
        return self.best.seconds - self.bound > max(self.task.gap, open_) * self.best.seconds

    @property
    def findings(self) -> Findings:
        return Findings(self.best, self.bound, self.free, lowest=self.lowest)

    def raise_bound(self, bound: float) -> None:
        """Take a bound from elsewhere, if it is higher."""
        self.bound = max(self.bound, bound)

    def look(self) -> None:
        """Search for a plan that fits, or for the proof that there is none."""
        for point in frontier(self.free.points):
            if self.take(point, is_always=True):
                self._first = self.best
                break
        if self._is_open and self.met:
            self._begin()
            if self.best is None:
                self._look_at_fewest_bytes()

    def close(self) -> None:
        """Raise the bound towards the plan that was found, and look for faster ones on the way."""
        if self.best is not None and self._highest is None and self.policy not in ALL_STATES:
            self._begin()
        if self.best is not None and self._highest is not None:
            self._lined, _ = self._known
            self._look_at_prices()
        if self._highest is not None:
            self._prove(self._highest)

    @property
    def _is_open(self) -> bool:
        """Whether the policy says the same for every sharding, or of a function, what the bound is to be of."""
        return self.policy not in ALL_STATES and (not self._is_function or self.best is not None)

    def _begin(self) -> None:
        """Find the sharding that is fastest with what the policy always repeats."""
        self._lined, _ = self._known
        if self._is_function:
            self._names = self._named(self._lined)
        self._look_at(JointPrices(0.0, self.free.prices.exposed))

    def take(self, point: Point, is_always: bool = False) -> bool:
        """Whether the policy fits with a sharding; its plan is kept if it is the fastest."""
        key = tuple(point.picked)
        if key not in self.met and math.isfinite(point.seconds):
            lined = Lined.of(self.task, point)
            if self._names is not None and self._named(lined) != self._names:
                return False
            self.met[key] = lined, lined.under(lined.named(self.policy, self.task.budget))
        if key not in self.met:
            return False
        _, plan = self.met[key]
        if is_always and (self.lowest is None or plan.peak < self.lowest.peak):
            self.lowest = plan
        if plan.peak <= self.task.budget and (self.best is None or plan.seconds < self.best.seconds):
            self.best = plan
        return plan.peak <= self.task.budget

    @property
    def _is_function(self) -> bool:
        return not isinstance(self.policy, str) or self.policy not in POLICIES

    def _named(self, lined: Lined) -> frozenset[str]:
        return named(self.policy, lined.line, self.task.budget).names

    @property
    def _known(self) -> tuple[Lined, Point]:
        """The best plan and its sharding, or the smallest while none fits."""
        if self.best is not None:
            return self.met[tuple(self.best.picked)]
        return min(self.met.values(), key=lambda pair: pair[1].peak)

    @property
    def _fullest(self) -> int:
        """The time in backward at which the known plan holds the most."""
        lined, plan = self._known
        ops = lined.line.ops
        return ops + int(plan.held[ops : 2 * ops].argmax())

    def _at(self, time: int) -> JointTables:
        """The tables at a priced time in backward, in which only states of the policy are allowed."""
        if time not in self._tables:
            lined, plan = self._known
            states = PolicyStates.of(self.policy, self.task.space, self._names or frozenset())
            after = 2 * lined.line.ops
            step = after + int(plan.held[after:].argmax())
            self._tables[time] = JointTables(self.task.counted, time, step, states)
        return self._tables[time]

    def _least(self, tables: JointTables, at: JointPrices, of_time: float = 1.0) -> tuple[Availability, Found]:
        """The sharding of least cost at some prices, with availability prices under the last one."""
        lined = self._lined
        assert lined is not None
        again = lined.line.again(self._named(lined))
        own = tables.repeated_for_themselves(lined.line) & again
        worth = tables.prices.worth_under(lined.laid, at.of_byte, at.exposed, again, own, of_time)
        is_rough = self.task.counted.is_large and of_time > 0
        return worth, minimise(tables.problem(at, worth, of_time), tries=1, is_rough=is_rough)

    def _move(self, least: Found, is_always: bool = False) -> bool:
        """Take a sharding, which is the last one from then on; whether it is new."""
        point = self.task.counted.point(least.picked)
        is_new = tuple(point.picked) not in self.met
        self.take(point, is_always)
        if tuple(point.picked) in self.met:
            self._lined, _ = self.met[tuple(point.picked)]
        return is_new

    def _look_at(self, at: JointPrices) -> None:
        """Find the sharding of least cost at some prices, and the bound that these give."""
        is_priced = at.of_budget > 0
        # Before the first backward nothing has been repeated yet: all seconds of the policy are seen from there.
        tables = self._at(self._fullest if is_priced else self._known[0].line.ops)
        worth, least = self._least(tables, at)
        bound = least.bound - (at.of_budget * self.task.budget if is_priced else 0.0)
        if self._highest is None or bound > self._highest.bound:
            self._highest = _Priced(bound, tables, at, worth)
        self._move(least)

    def _look_at_fewest_bytes(self) -> None:
        """Take shardings of the fewest bytes at the fullest time: what the tables give there, any plan holds."""
        at = JointPrices(1.0, (0.0,) * self.task.counted.kinds)
        tables = self._at(self._fullest)
        for _ in range(_LIMITS.smallest):
            _, least = self._least(tables, at, of_time=0.0)
            self.needs = max(self.needs, least.bound)
            if self.is_hopeless or not self._move(least, is_always=True) or self.best is not None:
                return

    def _look_at_prices(self) -> None:
        """Raise prices of bytes until plan and bound meet, or no price raises the bound."""
        assert self.best is not None and self._highest is not None
        counted = self.task.counted
        tried = [JointPrices(0.0, self.free.prices.exposed)]
        for _ in range(_LIMITS.rounds):
            gap = self.best.seconds - self._highest.bound
            if gap <= max(self.task.gap, LIMITS.rounding.closed) * self.best.seconds:
                return
            times = (self._fullest, self._at(self._fullest).step) if self.task.has_budget else ()
            plans = [
                replace(plan, in_line=plan.in_line + plan.recompute_s - plan.recompute_hidden_s)
                for _, plan in self.met.values()
            ]
            prices, most = prices_of(plans, dict.fromkeys(times, self.task.budget), counted.kinds)
            if most - self._highest.bound <= _LIMITS.little * gap:
                return
            of_byte, at_step = [prices.of_bytes.get(time, 0.0) for time in times] or (0.0, 0.0)
            ahead = JointPrices(of_byte, prices.exposed, at_step)
            steps = (ahead.towards(self._highest.at), ahead)
            at = next((step for step in steps if step not in tried), None)
            if at is None:
                return
            tried.append(at)
            self._look_at(at)

    def _prove(self, highest: _Priced) -> None:
        """Take the highest bound; where it was found in single precision, after a search in double precision."""
        bound, tables, at, worth = highest
        if self.task.counted.is_large:
            bound = minimise(tables.problem(at, worth), tries=1).bound
            bound -= at.of_budget * self.task.budget if at.of_budget > 0 else 0.0
        self.raise_bound(bound)
