"""The searches for the fastest plan, in the order in which they are tried.

    exact search       by elimination, where no window couples choices
    prices             of bytes and of exposed communication, which give a bound and plans
    fewer conversions  plans such as data parallelism, where prices leave something open
    agreements         of variables that had to be split, in more ways, where plan and bound are far apart
    between plans      layers that do the same, and plans that are spliced, out of those that prices led to
    smaller budgets    whose plans fit too
    whole program      an integer program over all choices of a space that is small
    smallest plan      where none that fits was found

Each is told what those before it have found, says whether it has anything to add, and leaves a better plan, a higher
bound, or both. Another search is another entry of `SEARCHES`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from autopar.letters import Infeasible
from autopar.solver.budget import Budgeted, Outcome
from autopar.solver.eliminate import factors_of, minimise, regions_of
from autopar.solver.figures import budget_for, size
from autopar.solver.integer import optimise, smallest
from autopar.solver.limits import LIMITS
from autopar.solver.offload import Room
from autopar.solver.points import Point
from autopar.solver.polish import polished
from autopar.solver.standing_bytes import least_standing, standing
from autopar.solver.tables import Problem
from autopar.solver.ties import settled
from autopar.space.space import Space

_LIMITS = LIMITS.searches


@dataclass(frozen=True, slots=True)
class Task:
    """A space whose fastest plan within a budget is searched for, and the limits of that search."""

    counted: Budgeted
    budget: float  # bytes a device; infinite where there is none
    solver: str
    backend: Any  # the backend of integer programs
    gap: float  # gap at which a plan is good enough
    until: float  # a time of the monotonic clock, after which a plan that was found is not improved
    recomputes: bool = False  # whether recompute may bring a plan over the budget within it
    room: Room | None = None  # the host, where saved values may wait on it

    @property
    def space(self) -> Space:
        return self.counted.space

    @property
    def is_long(self) -> bool:
        """Whether there are so many places that a search for shardings at many times takes too long."""
        return len(self.space.sites) > _LIMITS.long

    @property
    def has_budget(self) -> bool:
        return math.isfinite(self.budget)

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self.until

    def is_small(self, with_rows: bool | None = None) -> bool:
        """Whether the whole space is small enough for an integer program."""
        if with_rows is None:
            with_rows = bool(self.counted.tables.rows or self.space.windows)
        pairs = sum(e.seconds.size for e in self.space.edges)
        return pairs <= (_LIMITS.pairs_with_rows if with_rows else _LIMITS.pairs)


@dataclass(frozen=True, slots=True)
class Findings:
    """The best plan and the highest lower bound so far, and what else searches have found."""

    best: Point | None = None
    bound: float = -math.inf  # seconds that no plan goes under
    outcome: Outcome | None = None  # the outcome of the search by prices
    stopped: tuple[str, ...] = ()  # searches that were stopped before their end
    lowest: Point | None = None  # the plan of the lowest known peak, where nothing fits
    needs: float = 0.0  # bytes that any plan needs, where nothing fits

    def is_open(self, gap: float) -> bool:
        """Whether some plan may be faster than the best one by more than this share."""
        return self.best is None or self.best.seconds - self.bound > gap * self.best.seconds


class Search(Protocol):
    """One way to find plans and bounds."""

    def accepts(self, task: Task, found: Findings) -> bool:
        """Whether the search can add anything."""

    def look(self, task: Task, found: Findings) -> Findings:
        """The findings, with a better plan or a higher bound where it finds any."""


class ExactSearch:
    """A sum of tables, minimised by elimination, exactly or nearly. Its plan may be over the budget."""

    def accepts(self, task: Task, found: Findings) -> bool:
        return not task.space.windows

    def look(self, task: Task, found: Findings) -> Findings:
        least = minimise(problem_of(task.space), gap=task.gap)
        best = task.counted.point(least.picked) if np.isfinite(least.cost) else None
        return replace(found, best=best, bound=least.bound)


class PriceSearch:
    """Prices of bytes and of exposed communication, raised until plan and bound meet, or no price helps."""

    def accepts(self, task: Task, found: Findings) -> bool:
        return bool(task.space.windows) or (found.best is not None and found.best.peak > task.budget)

    def look(self, task: Task, found: Findings) -> Findings:
        outcome = task.counted.fastest(task.budget, task.gap, until=task.until)
        if outcome.hopeless and not task.recomputes:
            raise over_budget(task)
        return replace(found, best=outcome.best, bound=max(found.bound, outcome.bound), outcome=outcome)


class FewerConversions:
    """Plans with fewer conversions at the prices of the bound, where these leave something open."""

    def accepts(self, task: Task, found: Findings) -> bool:
        return found.outcome is not None and task.has_time and found.is_open(max(task.gap, _LIMITS.nearly))

    def look(self, task: Task, found: Findings) -> Findings:
        assert found.outcome is not None
        for point in task.counted.with_fewer_conversions(found.outcome.prices):
            found = _with(found, point, task.budget)
        return found


class Agreements:
    """A better plan at the prices of the bound: variables that were split there are made one in more ways."""

    def accepts(self, task: Task, found: Findings) -> bool:
        return found.outcome is not None and task.has_time and found.is_open(max(task.gap, _LIMITS.wide))

    def look(self, task: Task, found: Findings) -> Findings:
        assert found.outcome is not None
        point = task.counted.closest(found.outcome.prices)
        return _with(found, point, task.budget) if math.isfinite(point.seconds) else found


class BetweenPlans:
    """Better plans in between those that prices led to."""

    def accepts(self, task: Task, found: Findings) -> bool:
        return found.outcome is not None and task.has_time

    def look(self, task: Task, found: Findings) -> Findings:
        assert found.outcome is not None
        stopped = list(found.stopped)
        best = polished(task.counted, found.outcome, task.budget, task.gap, task.solver, stopped)
        return replace(found, best=best, stopped=tuple(stopped))


class SmallerBudgets:
    """Plans for smaller budgets, which fit too: prices for these lead to some that this budget's prices miss.

    Prices do not see what no sum of tables counts: where a plan is over the budget by that alone, room is left for it.
    """

    def accepts(self, task: Task, found: Findings) -> bool:
        if found.outcome is None or not task.has_budget or not found.is_open(task.gap):
            return False
        return bool(self._budgets(task, found))

    def look(self, task: Task, found: Findings) -> Findings:
        best = found.best
        stopped = list(found.stopped)
        for budget in self._budgets(task, found):
            if task.has_time:
                outcome = task.counted.fastest(budget, task.gap, until=task.until, proves=False)
                plan = polished(task.counted, outcome, budget, task.gap, task.solver, stopped)
                if plan is not None:
                    plan = settled(task.counted, plan, task.budget)
                if plan is not None and (best is None or plan.seconds < best.seconds):
                    best = plan
        return replace(found, best=best, stopped=tuple(stopped))

    def _budgets(self, task: Task, found: Findings) -> list[float]:
        """The smaller budgets that are worth a search."""
        assert found.outcome is not None
        is_far = found.best is not None and found.is_open(_LIMITS.far)
        least = math.inf if found.best is None else found.best.seconds
        over = [p for p in found.outcome.points if p.peak > task.budget and p.seconds < least]
        uncounted = (p.peak - tables for p in over if (tables := task.counted.points.by_tables(p).peak) <= task.budget)
        room = max(uncounted, default=0.0)
        return [*([task.budget - room] if room else []), *(task.budget * share for share in _LIMITS.less if is_far)]


@dataclass(frozen=True, slots=True)
class WholeProgram:
    """The integer program of all choices: for small spaces whose gap is open, or `always`."""

    always: bool = False

    def accepts(self, task: Task, found: Findings) -> bool:
        if self.always:
            return True
        gap = max(task.gap, LIMITS.rounding.closed if task.is_small(with_rows=True) else _LIMITS.nearly)
        has_time = found.best is None or task.has_time
        return task.is_small() and has_time and found.is_open(gap)

    def look(self, task: Task, found: Findings) -> Findings:
        try:
            answer = optimise(task.space, task.backend, task.budget, sorted(task.counted.tables.rows))
        except Infeasible:
            # With a budget, only the backend's tolerance may be at fault: the findings stand.
            if not task.has_budget:
                raise
            return found
        if answer.ended:
            found = replace(found, bound=max(found.bound, answer.value))
        else:
            found = replace(found, stopped=(*found.stopped, "the integer program of all choices"))
        if answer.picked is None:
            return found
        plan = task.counted.point(answer.picked)
        if plan.peak > task.budget:  # Some bytes are in no table, so the program does not see them.
            return found
        is_faster = found.best is None or plan.seconds < found.best.seconds
        return replace(found, best=plan) if answer.ended or (math.isfinite(plan.seconds) and is_faster) else found


class SmallestPlan:
    """The plan of the lowest known peak, where prices led to none that fits; with recompute there are smaller ones."""

    def accepts(self, task: Task, found: Findings) -> bool:
        return found.best is None and task.has_budget and not task.recomputes

    def look(self, task: Task, found: Findings) -> Findings:
        lowest, _ = task.counted.smallest()
        return replace(found, best=lowest) if lowest.peak <= task.budget else found


SEARCHES: tuple[Search, ...] = (
    ExactSearch(),
    PriceSearch(),
    FewerConversions(),
    Agreements(),
    BetweenPlans(),
    SmallerBudgets(),
    WholeProgram(),
    SmallestPlan(),
)


def _with(found: Findings, point: Point, budget: float) -> Findings:
    """The findings with one more plan, which is the best where it is the fastest that fits."""
    assert found.outcome is not None
    outcome = replace(found.outcome, points=[*found.outcome.points, point])
    if point.peak > budget or (found.best is not None and point.seconds >= found.best.seconds):
        return replace(found, outcome=outcome)
    return replace(found, best=point, outcome=replace(outcome, best=point))


def problem_of(space: Space) -> Problem:
    """The space as a sum of tables for elimination."""
    return Problem([s.seconds for s in space.sites], factors_of(space), regions_of(space))


def over_budget(task: Task, lowest: Point | None = None, needs: float = 0.0) -> Infeasible:
    """The letter about a budget that nothing fits: the bytes that any plan needs, and the smallest plan.

    `lowest` is the smallest plan with recompute, and `needs` the bytes that no such plan goes under, as far as known.
    """
    space = task.space
    memory = task.space.memory
    assert memory is not None
    best, bound = (lowest, needs) if lowest is not None and task.is_long else task.counted.smallest()
    if lowest is None and task.is_small() and best.peak > bound:
        answer = smallest(task.space, task.backend, best.peak)
        if answer.picked is not None:
            best = min(best, task.counted.point(answer.picked), key=lambda p: p.peak)
        if answer.ended:
            bound = max(bound, _whole_bytes(answer.value))
    needs = max(needs, sum(standing(space).values()))
    if lowest is not None and lowest.recomputed and lowest.peak <= best.peak:
        when = memory.when(int(lowest.held.argmax()))
        recomputes = f"which recomputes {len(lowest.recomputed)} values"
        beside = f"; {size(best.peak)} without recompute" if best is not lowest else ""
        return Infeasible(
            f"no plan of {size(task.budget)} a device was found on mesh {space.setting.mesh}",
            seen=(
                f"{size(needs)} are needed by any plan; {size(lowest.peak)}, at the {when}, in the smallest plan that "
                f"was found, {recomputes}{beside}"
            ),
            advice=f"{budget_for(lowest.peak)}, or more devices",
            needs=needs,
            smallest=lowest.peak,
            stands=least_standing(space),
            fullest=f"{size(lowest.peak)} at the {when}, {recomputes}",
        )
    fullest = int(best.held.argmax())
    bound = max(bound, needs)
    unaided = " that recomputes nothing" if task.recomputes else ""
    kinds = {kind: held[fullest] for kind, held in memory.held(best.picked, space.edges).items()}
    fills = ", ".join(f"{kind} {size(float(n))}" for kind, n in sorted(kinds.items(), key=lambda pair: -pair[1]) if n)
    filled = f"at the {memory.when(fullest)}, the fullest time of the smallest plan: {fills}"
    return Infeasible(
        f"no plan of {size(task.budget)} a device was found on mesh {space.setting.mesh}",
        seen=f"{size(bound)} are needed by any plan{unaided}; {filled}",
        advice=f"{budget_for(best.peak)}, the smallest for which a plan{unaided} was found, or more devices",
        needs=bound,
        smallest=best.peak,
        stands=least_standing(space),
        fullest=filled,
    )


def _whole_bytes(value: float) -> int:
    """Bytes as a whole number: the nearest within a backend's tolerance, else rounded down."""
    nearest = round(value)
    return nearest if abs(value - nearest) < 1e-6 * value else math.floor(value)
