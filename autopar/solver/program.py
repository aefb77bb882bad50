"""`solve`: the searches of a list, one after the other, and the plan that is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.solver.budget import Budgeted, Prices
from autopar.solver.chosen import plan_of
from autopar.solver.integer import backend_of, infeasible
from autopar.solver.plan import Plan
from autopar.solver.policies import Policy
from autopar.solver.recompute import lowest
from autopar.solver.recompute import recompute as recomputing
from autopar.solver.rivals import PricedSpace
from autopar.solver.searches import SEARCHES, Findings, Search, Task, over_budget
from autopar.solver.ties import settled
from autopar.space.space import Space

_CLOSED = 1e-9  # a gap that is rounding


def solve(
    space: Space,
    solver: str = "cbc",
    *,
    budget: float = math.inf,
    gap: float = 0.0,
    until: float = math.inf,
    searches: Sequence[Search] = SEARCHES,
    recompute: str | Policy = "none",
) -> Plan:
    """The fastest plan of the space that was found. No device holds more than `budget` bytes.

    `recompute` is the policy by which backward makes values again (`recompute.py`).

    The search ends within `gap` of its bound, or where the searches can do no more; the plan's own gap says how near
    that is. `until` is a time of the monotonic clock after which a plan that was found is not improved.
    """
    counted = Budgeted(space)
    task = Task(counted, budget, solver, backend_of(solver), gap, until, recompute != "none")

    def without() -> Findings:
        return _searched(task, searches)

    if recompute == "none" or (recompute == "auto" and not task.has_budget) or space.memory is None:
        found = without()
    else:
        found = recomputing(task, recompute, without)
    if found.best is None and task.has_budget:
        raise over_budget(task, lowest(task) if task.recomputes and not found.hopeless else None)
    if found.best is None:
        raise infeasible(space, "elimination had to split, and found no choices that go together")
    best = found.best
    if task.has_time and not best.recomputed:
        best = settled(counted, best, budget)
    plan = plan_of(space, best, found.bound, budget if counted.rows or best.recomputed else math.inf)
    is_open = plan.gap > max(gap, _CLOSED)  # where the bound is met, what was stopped had nothing left to find
    prices = found.outcome.prices if found.outcome else Prices({}, (0.0,) * counted.kinds)
    return replace(
        plan,
        stopped=tuple(dict.fromkeys(found.stopped)) if is_open else (),
        search=PricedSpace(counted, best.picked, prices),
    )


def _searched(task: Task, searches: Sequence[Search]) -> Findings:
    """The findings of the searches, one after the other."""
    found = Findings()
    for search in searches:
        if search.accepts(task, found):
            found = search.look(task, found)
            if found.bound == math.inf:
                raise infeasible(task.space, "no choices go together")
    return found


def peak_where_nothing_is_dear(space: Space) -> float:
    """The peak of the plan whose hidden communication and memory are free.

    One elimination tells whether a budget is near.
    """
    counted = Budgeted(space)
    return counted.at({}, exposed=[0.0] * counted.kinds)[0].peak
