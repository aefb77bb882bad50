"""The Pareto curve of a model: the fastest step under each of several memory budgets, from one search.

A price of bytes leads to a sharding, and to a bound for every budget at once; what was found under one budget fits
under all that are larger (`recompute.py`). So a curve costs a few plans and not one a budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autopar.solver.figures import Row, aligned, size, time
from autopar.solver.joint import JointPrices
from autopar.solver.joint_search import JointSearch
from autopar.solver.limits import LIMITS
from autopar.solver.offload import states_on_host
from autopar.solver.points import Point, frontier
from autopar.solver.recompute import Within
from autopar.solver.searches import Task

if TYPE_CHECKING:
    from autopar.solver.plan import Plan

_LIMITS = LIMITS.curve


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The fastest step under one budget; its time is infinite where no plan was found."""

    budget: int  # bytes a device
    step_time_s: float
    lower_bound_s: float  # least seconds of any plan under this budget
    peak_bytes: int = 0
    recompute_s: float = 0.0  # seconds of recompute
    recomputed: int = 0  # number of values that are recomputed
    host_bytes: int = 0  # the most that lie on the host, optimizer states included
    offloaded: int = 0  # number of values that wait there for backward


@dataclass(frozen=True, slots=True)
class Curve:
    """Memory budgets and step times, the largest budget first."""

    points: tuple[CurvePoint, ...]

    def __iter__(self) -> Iterator[CurvePoint]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, place: int) -> CurvePoint:
        return self.points[place]

    def __str__(self) -> str:
        head: Row = ("budget", "step", "bound", "gap", "peak", "recompute", "values")
        rows = list(map(_row, self))
        if any(point.host_bytes for point in self):
            head = (*head, "host", "there")
            rows = [(*row, *_of_host(point)) for row, point in zip(rows, self, strict=True)]
        return "\n".join(aligned(head, rows))

    def or_faster(self, other: Curve) -> Curve:
        """The faster point of two curves under each of the same budgets, with the lower of both bounds."""
        points = []
        for pair in zip(self, other, strict=True):
            fastest = min(pair, key=lambda p: p.step_time_s)
            points.append(replace(fastest, lower_bound_s=min(p.lower_bound_s for p in pair)))
        return Curve(tuple(points))


def _row(point: CurvePoint) -> Row:
    budget = size(point.budget)
    bound = time(point.lower_bound_s)
    if not math.isfinite(point.step_time_s):
        return budget, "none found", bound, "", "", "", ""
    gap = f"{1 - point.lower_bound_s / point.step_time_s:.2%}"
    again = time(point.recompute_s)
    count = str(point.recomputed)
    return budget, time(point.step_time_s), bound, gap, size(point.peak_bytes), again, count


def _of_host(point: CurvePoint) -> Row:
    return (size(point.host_bytes), str(point.offloaded)) if point.host_bytes else ("", "")


def point_of(plan: Plan, budget: int) -> CurvePoint:
    """A plan as the point of a curve."""
    return CurvePoint(
        budget,
        plan.step_time_s,
        plan.lower_bound_s,
        plan.peak_bytes,
        plan.recompute_s,
        len(plan.recomputed),
        plan.host_bytes,
        len(plan.offloaded),
    )


def curve_of(task: Task, budgets: int | Sequence[int]) -> Curve | None:
    """The curve of a space under these budgets, or under so many from the fastest plan's peak down.

    A number of budgets ends at the lowest peak with all values on the device. None where nothing could be dropped.
    """
    joint = JointSearch.of(task)
    if joint is None:
        return None
    if isinstance(budgets, int):
        budgets = between(_lowest(joint), joint.first.point.peak, budgets)
    met = [joint.first.point]
    ordered = sorted(budgets, reverse=True)
    for lined in joint.met.values():
        met += [lined.under(states) for states in lined.states.known.values()]
    for k, budget in enumerate(ordered):
        within = Within(joint, budget)
        within.look_at_known()
        if k in (*range(0, len(ordered), _LIMITS.every), len(ordered) - 1) and within.best is not joint.first.point:
            within.look_at_equal_layers()
            within.look_for_prices(_LIMITS.rounds)
            if within.is_wide and task.counted.rounds > LIMITS.prices.rounds:
                points = frontier(task.counted.fastest(budget, task.gap).points)
                within.add(points)
                met += points
        if within.best is not None:
            met.append(within.best)
    joint.look_closely(math.inf)
    found: list[CurvePoint] = []
    bound = 0.0  # What fits in a budget fits in a larger one, whose bound then holds too.
    for budget in ordered:
        found.append(_point_under(joint, met, budget, bound))
        bound = found[-1].lower_bound_s
    return Curve(tuple(found))


def _point_under(joint: JointSearch, met: Sequence[Point], budget: int, bound: float) -> CurvePoint:
    """The fastest plan that was met whose peak is within a budget; none takes less than `bound`."""
    fits = [p for p in met if p.peak <= budget * (1 + LIMITS.rounding.over)]
    best = min(fits, key=lambda p: p.seconds, default=None)
    bound = max(bound, joint.bound_beside_host(budget, math.inf if best is None else best.seconds))
    if best is None:
        return CurvePoint(budget, math.inf, bound)
    return CurvePoint(
        budget,
        best.seconds,
        bound,
        math.ceil(best.peak),
        best.recompute_s,
        len(best.recomputed),
        round(best.host_bytes + states_on_host(joint.task.space, best.picked)),
        len(best.offloaded),
    )


def _lowest(joint: JointSearch) -> float:
    """The lowest peak that was found for the fastest sharding, and for one found where a byte is dear."""
    usual = joint.first.states.usual_price(joint.tables.time)
    joint.look(JointPrices(usual, joint.free.prices.exposed), joint.first)
    for lined in joint.met.values():
        lined.within(0.0)
    return min(states.peak for lined in joint.met.values() for states in lined.states.known.values())


def between(low: float, high: float, count: int) -> list[int]:
    """Evenly spaced budgets in bytes, `count` of them, from high to low."""
    return [math.ceil(high - (high - low) * k / max(1, count - 1)) for k in range(count)]
