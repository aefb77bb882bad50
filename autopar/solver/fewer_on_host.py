"""Move what a plan has of parameters on the host back to devices where a step gets faster, with less memory for values.

Prices of bytes move the states of layers that are alike together. Between all of them and none lie plans that no price
leads to: some states on the host, and a little more recompute. Parameters that lie there whole move back first, and
leave their states; then states do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autopar.solver.limits import LIMITS
from autopar.solver.lined import Lined
from autopar.solver.offload import states_on_host
from autopar.solver.points import Point
from autopar.solver.searches import Findings, Task
from autopar.space.space import Site


def with_fewer_on_host(task: Task, found: Findings) -> Findings:
    """The findings with a faster plan that has fewer states on the host, if there is one.

    No plan remains that has more there than the budget of the host.
    """
    best = found.best
    if best is None or task.room is None:
        return found
    for back in (_with_states_alone, _on_device):
        if best is not None:
            best = _with_fewer(task, best, back)
    return replace(found, best=best)


def _with_fewer(task: Task, whole: Point, back: Callable[[Site, int], int | None]) -> Point | None:
    """The plan, or a faster one with choices that lead `back` at some sites; None where none has room.

    How many do is halved between a number that is known to be good, or too small, and one that is not.
    """
    picked = whole.picked
    twins = [(k, back(site, i)) for k, (site, i) in enumerate(zip(task.space.sites, picked, strict=True))]
    hosted = [(k, twin) for k, twin in twins if twin is not None]
    best = whole if _has_room(task, picked) or not hosted else None
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
    return best


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
    """The choice that differs in that states lie on devices; None where they do, or parts are on the host."""
    if not site.has_on_host(choice) or site.policies[choice].with_part:
        return None
    wanted = site.policies[choice]._replace(on_host=0.0)
    return next((i for i in _alike(site, choice) if site.policies[i] == wanted), None)


def _with_states_alone(site: Site, choice: int) -> int | None:
    """The choice that differs in that states alone lie on the host; None where no more does."""
    if not site.has_on_host(choice) or not site.policies[choice].with_part:
        return None
    wanted = site.policies[choice]._replace(on_host=0.0, with_part=False)
    here = (i for i in _alike(site, choice) if site.policies[i]._replace(on_host=0.0) == wanted)
    return next((i for i in here if site.policies[i].on_host), None)


def _alike(site: Site, choice: int) -> Iterator[int]:
    """The choices that shard a parameter as one does."""
    return (i for i, c in enumerate(site.choices) if c == site.choices[choice])
