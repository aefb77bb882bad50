"""`solve`: run a list of searches on a space, and build the plan that they leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.letters import Infeasible
from autopar.solver.axis_use import as_named
from autopar.solver.budget import Budgeted
from autopar.solver.curve import Curve, CurvePoint, between, curve_of, point_of
from autopar.solver.eliminate import minimise
from autopar.solver.figures import size, time
from autopar.solver.integer import backend_of, infeasible
from autopar.solver.limits import LIMITS
from autopar.solver.offload import Room
from autopar.solver.plan import Plan
from autopar.solver.plan_of_choices import plan_of
from autopar.solver.points import Point, Points
from autopar.solver.policies import Policy
from autopar.solver.prices import Prices
from autopar.solver.recompute import lowest
from autopar.solver.recompute import recompute as recomputing
from autopar.solver.rivals import PricedSpace
from autopar.solver.searches import SEARCHES, Findings, Search, Task, over_budget, problem_of
from autopar.solver.standing_bytes import least_standing
from autopar.solver.ties import settled
from autopar.space.space import Outdone, Space


def solve(
    space: Space,
    solver: str = "cbc",
    *,
    budget: float = math.inf,
    gap: float = 0.0,
    until: float = math.inf,
    searches: Sequence[Search] = SEARCHES,
    recompute: str | Policy = "none",
    wide: Callable[[], Sequence[Space]] | None = None,
    is_trial: bool = False,
    rival: float = math.inf,
    room: Room | None = None,
) -> Plan:
    """The fastest plan found in the space, on which no device holds more than `budget` bytes.

    `recompute` is the policy by which backward makes values again (`recompute.py`). `wide` makes the spaces
    of the plan's curve, where this is not the only one. Where nothing fits, the letter about a trial
    has the bytes of the smallest plan that was met, and no words.

    The search ends within `gap` of its bound, or where the searches can do no more; the plan's own gap says how near
    that is. `until` is a time of the monotonic clock after which a plan that was found is not improved. `Outdone` is
    raised where no plan is found that takes less than `rival` seconds, those of a plan of another space.
    """
    counted = Budgeted(space, rival)
    task = Task(counted, budget, solver, backend_of(solver), gap, until, recompute != "none", room)

    def without() -> Findings:
        return _searched(task, searches)

    may_change = task.has_budget and (recompute == "auto" or room is not None)
    if space.memory is None or not (may_change or recompute not in ("auto", "none")):
        found = without()
    else:
        found = recomputing(task, recompute, without)
    best = found.best
    if math.isfinite(rival) and (best is None or best.seconds >= rival):
        raise Outdone(found.bound)
    if best is None:
        raise _none_found(task, found, is_trial)
    if task.has_time and not best.recomputed and not best.offloaded:
        best = settled(counted, best, budget)
    best, plan = _with_named_axes(counted, best, found.bound, budget)
    widest = (lambda: [space]) if wide is None else wide

    def curve(budgets: int | Sequence[int], host: bool) -> Curve:
        searched = _CurveSearch(solver, gap, recompute, room if host else None)
        return searched.fastest(widest(), budgets)

    # A plan that meets the bound makes stopped searches irrelevant.
    is_open = plan.gap > max(gap, LIMITS.rounding.closed)
    prices = found.outcome.prices if found.outcome else Prices({}, (0.0,) * counted.kinds)
    return replace(
        plan,
        defaults=(*_said_of_policy(recompute, best.recompute_s - best.recompute_hidden_s, found), *plan.defaults),
        stopped=tuple(dict.fromkeys(found.stopped)) if is_open else (),
        search=PricedSpace(counted, best, prices, curve),
    )


def _said_of_policy(policy: str | Policy, adds: float, found: Findings) -> tuple[tuple[str, str], ...]:
    """A line of text about what a policy costs, beside a bound for plans that neither recompute nor fit."""
    if not adds or policy == "auto" or found.outcome is None:
        return ()
    name = repr(policy) if isinstance(policy, str) else "a function"
    free = f"if nothing had to be, whatever it held, no plan would take less than {time(found.outcome.bound)}"
    return (("recompute", f"{name}, which adds {time(adds)} to a step: {free}"),)


def _with_named_axes(counted: Budgeted, best: Point, bound: float, budget: float) -> tuple[Point, Plan]:
    """A plan as its axes are named, and its point; it says what that costs."""
    space = counted.space
    told = budget if counted.tables.rows or best.recomputed or best.offloaded else math.inf
    plan = plan_of(space, best, bound, told)
    named = as_named(counted, best, plan, budget)
    if named is best:
        return best, plan
    plan = plan_of(space, named, bound, told)
    adds = named.seconds - best.seconds
    if adds > LIMITS.rounding.over * best.seconds:
        axes = ", ".join(space.setting.mesh.axes)
        said = f"{axes} are alike, and used as their names say: used otherwise a step takes {time(adds)} less"
        plan = replace(plan, defaults=(("axes", said),))
    return named, plan


def _none_found(task: Task, found: Findings, is_trial: bool) -> Infeasible:
    """The letter about a search that found no plan."""
    if not task.has_budget:
        return infeasible(task.space, "elimination had to split, and found no choices that go together")
    known = found.lowest or (lowest(task) if task.recomputes else None)
    if not is_trial:
        return over_budget(task, known, found.needs)
    smallest = (known or task.counted.smallest()[0]).peak
    return Infeasible(
        f"no plan of {size(task.budget)} a device was found", smallest=smallest, stands=least_standing(task.space)
    )


@dataclass(frozen=True, slots=True)
class _CurveSearch:
    """How the plans of a curve are searched for."""

    solver: str
    gap: float
    recompute: str | Policy
    room: Room | None

    def fastest(self, spaces: Sequence[Space], budgets: int | Sequence[int]) -> Curve:
        """The fastest step of any space under each budget; the first space chooses budgets for a number."""
        curve = self.of(spaces[0], budgets)
        budgets = [point.budget for point in curve]
        for space in spaces[1:]:
            curve = curve.or_faster(self.of(space, budgets))
        return curve

    def of(self, space: Space, budgets: int | Sequence[int]) -> Curve:
        """The fastest step under each budget: from one joint search, or under a policy from a plan for each."""
        recomputes = self.recompute != "none"
        backend = backend_of(self.solver)
        task = Task(Budgeted(space), math.inf, self.solver, backend, self.gap, math.inf, recomputes, self.room)
        found = curve_of(task, budgets) if self.recompute == "auto" and space.memory is not None else None
        if found is not None:
            return found
        if isinstance(budgets, int):
            free = solve(space, self.solver, gap=self.gap)
            budgets = between(task.counted.smallest()[0].peak, free.peak_bytes, budgets)
        points = []
        for budget in sorted(budgets, reverse=True):
            try:
                plan = solve(space, self.solver, budget=budget, gap=self.gap, recompute=self.recompute, room=self.room)
            except Infeasible:
                points.append(CurvePoint(budget, math.inf, task.counted.fastest(math.inf, self.gap).bound))
            else:
                points.append(point_of(plan, budget))
        return Curve(tuple(points))


def _searched(task: Task, searches: Sequence[Search]) -> Findings:
    """The findings of some searches, run one after the other."""
    found = Findings()
    for search in searches:
        if search.accepts(task, found):
            found = search.look(task, found)
            if found.bound == math.inf:
                raise infeasible(task.space, "no choices go together")
            if found.bound >= task.counted.rival:
                break
    return found


def least_seconds(space: Space, rival: float, gap: float = 0.0) -> float:
    """Seconds that no plan of a space goes below, whatever it holds; the search ends at `rival` seconds."""
    if not space.windows:
        return minimise(problem_of(space), gap=gap).bound
    return Budgeted(space, rival).fastest(math.inf, gap).bound


def peak_where_nothing_is_dear(space: Space) -> float:
    """Peak bytes of a plan where memory and hidden communication cost nothing, by one elimination.

    It tells whether a budget is near.
    """
    counted = Budgeted(space)
    return counted.at({}, exposed=[0.0] * counted.kinds)[0].peak


def most_promising_first(spaces: Sequence[Space]) -> Sequence[Space]:
    """Spaces of the same choices, the one first in which a plan that is good in any of them is fastest."""
    if len(spaces) < 2:
        return spaces
    counted = Budgeted(spaces[0])
    picked = counted.at({}, exposed=[0.0] * counted.kinds)[0].picked
    return sorted(spaces, key=lambda space: Points(space).of(picked).seconds)
