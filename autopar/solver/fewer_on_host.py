"""Move optimizer states of a plan back to devices where a step gets faster, though less memory is left for values.

Prices of bytes move the states of layers that are alike together. Between all of them and none lie plans that no price
leads to: some states on the host, and a little more recompute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.solver.limits import LIMITS
from autopar.solver.lined import Lined
from autopar.solver.offload import states_on_host
from autopar.solver.searches import Findings, Task
from autopar.space.space import Site


def with_fewer_on_host(task: Task, found: Findings) -> Findings:
    """The findings with a faster plan that has fewer states on the host, if there is one.

    No plan remains that has more there than the budget of the host. How many move back is halved between a number that
    is known to be good, or too small, and one that is not.
    """
    if found.best is None or task.room is None:
        return found
    picked = found.best.picked
    twins = [(k, _on_device(site, i)) for k, (site, i) in enumerate(zip(task.space.sites, picked, strict=True))]
    hosted = [(k, twin) for k, twin in twins if twin is not None]
    best = found.best if _has_room(task, picked) else None
    good = 0
    bad = len(hosted) + 1
    for _ in range(LIMITS.recompute.moved_back if hosted else 0):
        count = (good + bad) // 2
        if count == good:
            break
        other = _moved_back(picked, hosted[:count])
        plan = Lined.of(task, task.counted.point(other)).within(task.budget) if _has_room(task, other) else None
        is_better = plan is not None and (best is None or plan.seconds < best.seconds)
        best = plan if is_better else best
        if is_better or not _has_room(task, other):
            good = count
        else:
            bad = count
    return replace(found, best=best)


def _has_room(task: Task, picked: Sequence[int]) -> bool:
    """Whether optimizer states have room on the host: choices know of those that are cut alike alone."""
    assert task.room is not None
    return states_on_host(task.space, picked) <= task.room.bytes


def _moved_back(picked: Sequence[int], twins: Sequence[tuple[int, int]]) -> list[int]:
    """The choices with those of some sites exchanged."""
    other = list(picked)
    for k, twin in twins:
        other[k] = twin
    return other


def _on_device(site: Site, choice: int) -> int | None:
    """The choice that differs in that states lie on devices; None where they do already."""
    policies = site.policies
    if site.kind != "parameter" or not policies or not policies[choice].on_host:
        return None
    wanted = policies[choice]._replace(on_host=0.0)
    same = (i for i, c in enumerate(site.choices) if c == site.choices[choice] and policies[i] == wanted)
    return next(same, None)
