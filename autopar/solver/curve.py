"""The Pareto curve of a model: the fastest step under each of several memory budgets, from one search.

A price of bytes leads to a sharding, and to a bound for every budget at once; what was found under one budget fits
under all that are larger (`recompute.py`). So a curve costs a few plans and not one a budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.solver import text
from autopar.solver.joint import JointPrices
from autopar.solver.joint_search import JointSearch
from autopar.solver.limits import LIMITS
from autopar.solver.points import Point, frontier
from autopar.solver.recompute import Within
from autopar.solver.searches import Task

_LIMITS = LIMITS.curve


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The fastest step under one budget; its time is infinite where no plan was found."""

    budget: int  # bytes a device
    step_time_s: float
    lower_bound_s: float  # least seconds of any plan under this budget
    peak_bytes: int
    recompute_s: float  # seconds of recompute
    recomputed: int  # number of values that are recomputed


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
        return text.curve_of(self)

    def or_faster(self, other: Curve) -> Curve:
        """The faster point of two curves under each of the same budgets, with the lower of both bounds."""
        points = []
        for pair in zip(self, other, strict=True):
            fastest = min(pair, key=lambda p: p.step_time_s)
            points.append(replace(fastest, lower_bound_s=min(p.lower_bound_s for p in pair)))
        return Curve(tuple(points))


def curve_of(task: Task, budgets: int | Sequence[int]) -> Curve | None:
    """The curve of a space under these budgets, or under so many from the fastest plan's peak down.

    A number of budgets ends at the lowest peak. None where nothing could be dropped.
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
    return Curve(tuple(_point_of(joint, met, budget) for budget in ordered))


def _point_of(joint: JointSearch, met: Sequence[Point], budget: int) -> CurvePoint:
    """The fastest plan of all that were met whose peak is within a budget."""
    fits = [p for p in met if p.peak <= budget * (1 + LIMITS.rounding.over)]
    bound = joint.bound(budget)
    if not fits:
        return CurvePoint(budget, math.inf, bound, 0, 0.0, 0)
    best = min(fits, key=lambda p: p.seconds)
    return CurvePoint(budget, best.seconds, bound, math.ceil(best.peak), best.recompute_s, len(best.recomputed))


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
