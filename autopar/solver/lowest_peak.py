"""The search for the plan of the lowest peak of a space, and a lower bound of any peak."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.solver.limits import LIMITS
from autopar.solver.points import Point
from autopar.solver.prices import TINY, weights_of

if TYPE_CHECKING:
    from autopar.solver.budget import Budgeted

_LIMITS = LIMITS.prices


@dataclass(frozen=True, slots=True, eq=False)
class LowestPeak:
    """The plans that are met on the way to the lowest peak, the same under any budget, and a lower bound of it."""

    points: list[Point]
    bound: float

    @property
    def best(self) -> Point:
        """The plan of the lowest peak that was found."""
        return min(self.points, key=lambda p: (p.peak, p.seconds))


def lowest_peak(counted: Budgeted) -> LowestPeak:
    """Search for the plan of the lowest peak: weights of times are raised where plans are full."""
    first, _ = counted.at({})
    points = [first]
    times = counted.points.fullest(first)
    bound = 0.0
    # The weights see only bytes in tables, so progress is measured in them.
    by_tables = [counted.points.by_tables(first)]
    weights = dict.fromkeys(times, 1.0 / len(times))
    done = list[dict[int, float]]()
    # A small weight on seconds decides the choices that no memory row mentions.
    a_little = _LIMITS.seconds_weight * first.peak / max(TINY, first.seconds)
    for _ in range(_LIMITS.rounds):
        point, _ = counted.at(weights, a_little, is_rough=counted.is_large)
        if math.isfinite(point.seconds):
            points.append(point)
            by_tables.append(counted.points.by_tables(point))
        times = sorted({*times, *counted.points.fullest(by_tables[-1])})
        before = weights
        weights, guess = weights_of(by_tables, times)
        done.append(before)
        if min(p.peak for p in by_tables) <= guess * (1 + _LIMITS.near) or weights in done:
            break
    for w in (before, weights):
        # Rounding in the linear program may make weights sum to more than 1, and the bound too high.
        least = counted.at(w, 0.0)[1] / max(1.0, sum(w.values()))
        bound = max(bound, least * (1 - LIMITS.rounding.same))
    points = [p for p in points if math.isfinite(p.seconds)] or [first]
    best = min(points, key=lambda p: (p.peak, p.seconds))
    for share in _LIMITS.between:  # Searches for budgets between bound and best often meet smaller plans.
        if min(p.peak for p in by_tables) <= bound * (1 + _LIMITS.near):
            break
        between = bound + (best.peak - bound) * share
        points = counted.fastest(between, _LIMITS.rough_gap, points, proves=False).points
        best = min(points, key=lambda p: (p.peak, p.seconds))
    return LowestPeak(points, bound)
