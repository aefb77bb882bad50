"""Move optimizer states of a plan back to devices where a step gets faster, though less memory is left for values.

Prices of bytes move the states of layers that are alike together. Between all of them and none lie plans that no price
leads to: some states on the host, and a little more recompute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.solver.limits import LIMITS
from autopar.solver.lined import Lined
from autopar.solver.points import Point
from autopar.solver.searches import Findings, Task
from autopar.space.space import Site


def with_fewer_on_host(task: Task, found: Findings) -> Findings:
    """The findings with a faster plan that has fewer states on the host, if there is one.

    How many move back is halved between a number that is known to be good and one that is not.
    """
    best = found.best
    if best is None or not task.has_time:
        return found
    twins = [(k, _on_device(site, i)) for k, (site, i) in enumerate(zip(task.space.sites, best.picked, strict=True))]
    hosted = [(k, twin) for k, twin in twins if twin is not None]
    good = 0
    bad = len(hosted) + 1
    for _ in range(LIMITS.recompute.moved_back if hosted else 0):
        count = (good + bad) // 2
        if count == good:
            break
        plan = _moved_back(task, best.picked, hosted[:count])
        if plan is not None and plan.seconds < best.seconds:
            best = plan
            good = count
        else:
            bad = count
    return replace(found, best=best)


def _moved_back(task: Task, picked: Sequence[int], twins: Sequence[tuple[int, int]]) -> Point | None:
    """The fastest plan found in which these parameters have their states on devices; None where none fits."""
    other = list(picked)
    for k, twin in twins:
        other[k] = twin
    return Lined.of(task, task.counted.point(other)).within(task.budget)


def _on_device(site: Site, choice: int) -> int | None:
    """The choice that differs in that states lie on devices; None where they do, or have to be on the host."""
    policies = site.policies
    if site.kind != "parameter" or not policies or not policies[choice].on_host:
        return None
    wanted = policies[choice]._replace(on_host=0.0)
    same = (i for i, c in enumerate(site.choices) if c == site.choices[choice] and policies[i] == wanted)
    return next(same, None)
