"""`Prices` of memory and of exposed communication, and the linear programs that give the next ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pulp

from autopar.solver.limits import LIMITS
from autopar.solver.points import Point

_LIMITS = LIMITS.prices

TINY = 1e-30  # Stands for 0 where it would divide.


@dataclass(frozen=True, slots=True)
class Prices:
    """Lagrange multipliers: seconds a byte at each time, and the exposed share of each kind of window."""

    of_bytes: dict[int, float]
    exposed: tuple[float, ...]

    def towards(self, other: Prices) -> Prices:
        times = sorted({*self.of_bytes, *other.of_bytes})
        return Prices(
            {t: (self.of_bytes.get(t, 0.0) + other.of_bytes.get(t, 0.0)) / 2 for t in times},
            tuple((a + b) / 2 for a, b in zip(self.exposed, other.exposed, strict=True)),
        )

    @property
    def rounded(self) -> Any:
        return tuple((t, f"{p:.9e}") for t, p in sorted(self.of_bytes.items()) if p > 0), tuple(
            f"{share:.9f}" for share in self.exposed
        )


def prices_of(points: Sequence[Point], budgets: Mapping[int, float], kinds: int) -> tuple[Prices, float]:
    """The prices that maximise the least priced cost of the plans met so far, and that cost.

    `budgets` are by time. No bound exceeds that cost. The prices solve the linear program  max theta,  theta <= seconds
    in line + sum of share * over + sum of price * (bytes - budget).
    """
    if not points:
        return Prices(dict.fromkeys(budgets, 1.0), (0.0,) * kinds), math.inf
    program = pulp.LpProblem("prices", pulp.LpMaximize)
    most = max(p.seconds for p in points) or 1.0
    worth = max([1.0, *budgets.values()])  # A budget of 0 counts as one byte, which can be divided by.
    unit = worth / most  # The program counts budgets and the slowest plan's seconds, so that numbers are near 1.
    theta = pulp.LpVariable("theta")
    price = {t: pulp.LpVariable(f"p_{t}", lowBound=0, upBound=1e4) for t in budgets}
    share = [pulp.LpVariable(f"e_{k}", lowBound=0, upBound=1) for k in range(kinds)]
    program.setObjective(theta + 0)
    for p in points:
        rows = [(v, float((p.held[t] - budgets[t]) / worth)) for t, v in price.items()] + [
            (v, o / most) for v, o in zip(share, p.over, strict=True)
        ]
        program.addConstraint(theta - pulp.LpAffineExpression(rows) <= p.in_line / most)
    if program.solve(_backend()) != pulp.LpStatusOptimal:  # A program that was stopped gives no prices.
        return Prices({}, (0.0,) * kinds), -math.inf
    found = Prices(
        {t: max(0.0, float(v.value() or 0.0)) / unit for t, v in price.items()},
        tuple(min(1.0, max(0.0, float(v.value() or 0.0))) for v in share),
    )
    return found, float(theta.value() or 0.0) * most


def weights_of(points: Sequence[Point], times: Sequence[int]) -> tuple[dict[int, float], float]:
    """The weights of times that maximise the least weighted mean of bytes of plans met, and that mean."""
    program = pulp.LpProblem("weights", pulp.LpMaximize)
    unit = max(TINY, *(p.peak for p in points))
    theta = pulp.LpVariable("theta")
    weight = {t: pulp.LpVariable(f"w_{t}", lowBound=0) for t in times}
    program.setObjective(theta + 0)
    program.addConstraint(pulp.lpSum(weight.values()) == 1)
    for p in points:
        program.addConstraint(theta - pulp.lpSum(v * float(p.held[t] / unit) for t, v in weight.items()) <= 0)
    if program.solve(_backend()) != pulp.LpStatusOptimal:
        return dict.fromkeys(times, 1.0 / len(times)), math.inf
    return {t: max(0.0, float(v.value() or 0.0)) for t, v in weight.items()}, float(theta.value() or 0.0) * unit


def _backend() -> Any:
    return pulp.PULP_CBC_CMD(msg=False, threads=1, options=[f"maxIterations {_LIMITS.pivots}"])
