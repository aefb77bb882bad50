"""What a plan recomputes: policies by name, a user's own, and the search for it.

A policy says which runs of a line backward repeats:

    none          nothing
    full          everything but what enters a block of the model, and what collectives made of it
    selective     the core of attention: scores, their softmax and dropout, and what they are multiplied with
    as written    the model's own checkpoint regions, all but what enters them
    chen          blocks of the model in segments, as many as their square root; the last is not repeated
    auto          the fewest seconds under the budget, for whichever sharding

A user's policy is a function of the line and the budget in bytes, which returns names of runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from autopar.graph.layers import innermost_block
from autopar.letters import NotServed
from autopar.solver.budget import Point
from autopar.solver.searches import Findings, Task
from autopar.solver.states import States, StateSearch
from autopar.space.line import Line, Run

Policy = Callable[[Line, float], Iterable[str]]
_MOST = 12  # shardings for which states are looked for


def none(line: Line, budget: float) -> Iterable[str]:
    """Nothing."""
    return ()


def full(line: Line, budget: float) -> Iterable[str]:
    """Everything but what enters a block, and what collectives have made."""
    return _all_but_entries(line, [innermost_block(_module(run)) for run in line.runs])


def selective(line: Line, budget: float) -> Iterable[str]:
    """The core of attention."""
    return [run.name for run in line.runs if run.is_op and run.is_core]


def as_written(line: Line, budget: float) -> Iterable[str]:
    """The model's own checkpoint regions."""
    return _all_but_entries(line, [run.region for run in line.runs])


def chen(line: Line, budget: float) -> Iterable[str]:
    """Segments of blocks, as many as the square root of their number."""
    blocks = list(dict.fromkeys(b for run in line.runs if (b := innermost_block(_module(run)))))
    length = max(1, round(math.sqrt(len(blocks))))
    segment = {b: f"segment {i // length}" for i, b in enumerate(blocks)}
    last = segment[blocks[-1]] if blocks else ""
    parts = [segment.get(innermost_block(_module(run)), "") for run in line.runs]
    return _all_but_entries(line, ["" if part == last else part for part in parts])


POLICIES: dict[str, Policy] = {
    "none": none,
    "full": full,
    "selective": selective,
    "as written": as_written,
    "chen": chen,
}


def _all_but_entries(line: Line, regions: Sequence[object]) -> list[str]:
    """The runs of regions, but those whose values another region reads, and collectives.

    Where a region has ended, what it leaves is an entry of the next.
    """
    read_by: dict[int, set[object]] = {}
    for run, region in zip(line.runs, regions, strict=True):
        for value in run.reads:
            read_by.setdefault(value, set()).add(region)
    found = []
    for run, region in zip(line.runs, regions, strict=True):
        leaves = any(read_by.get(value, set()) - {region} for value in run.makes)
        if region and run.is_op and not leaves:
            found.append(run.name)
    return found


def _module(run: Run) -> str:
    return run.name.partition("/")[0]


class Recompute:
    """The search for what to recompute, under one policy."""

    def __init__(self, policy: str | Policy) -> None:
        self.policy = policy

    def accepts(self, task: Task, found: Findings) -> bool:
        """Can it add anything here? Where everything fits, "auto" recomputes nothing."""
        if self.policy == "none" or task.space.memory is None:
            return False
        return self.policy != "auto" or task.has_budget

    def look(self, task: Task, found: Findings) -> Findings:
        """The findings with the fastest plan that recomputes.

        Their bound is that of plans under no budget: a budget binds sharding alone, and not sharding with recompute.
        """
        counted = task.counted
        free = counted.fastest(math.inf, task.gap, until=task.until)
        known = [*free.points, *(found.outcome.points if found.outcome else ())]
        best = found.best if self.policy == "auto" else None
        for point in _frontier(known):
            if best is not None and point.seconds >= best.seconds:
                break
            recomputed = self._recomputed(task, point)
            if recomputed is not None and (best is None or recomputed.seconds < best.seconds):
                best = recomputed
        return replace(found, best=best, bound=free.bound, outcome=found.outcome or free)

    def _recomputed(self, task: Task, point: Point) -> Point | None:
        """A sharding with what the policy recomputes; None where it does not fit."""
        line = Line.of(task.space, point.picked, point.seconds)
        search = StateSearch(line)
        if self.policy == "auto":
            states = search.within(task.budget, [set(policy(line, task.budget)) for policy in POLICIES.values()])
        else:
            states = search.of(line.again(_names(self.policy, line, task.budget)))
            states = states if states.peak <= task.budget else None
        return None if states is None else _with(point, line, states)


def _with(point: Point, line: Line, states: States) -> Point:
    names = frozenset(line.runs[i].name for i in states.again - line.forced)
    return replace(
        point,
        seconds=point.seconds + states.seconds,
        held=states.held,
        recomputed=names,
        recompute_s=states.seconds,
    )


def _names(policy: str | Policy, line: Line, budget: float) -> Collection[str]:
    """The names that a policy returns; a letter where they are none of runs that may be recomputed."""
    names = set((POLICIES[policy] if isinstance(policy, str) else policy)(line, budget))
    if unknown := sorted(map(str, names - {run.name for run in line.runs})):
        raise NotServed(
            f"recompute= returned {unknown[0]!r}, which the line does not run",
            seen=", ".join(line.names[:8]),
            advice="names of line.runs",
        )
    return names & set(line.names)


def _frontier(points: Sequence[Point]) -> list[Point]:
    """The plans that hold less than every faster one, the fastest first."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.seconds, p.peak)):
        if math.isfinite(point.seconds) and (not found or point.peak < found[-1].peak):
            found.append(point)
    return found[:_MOST]
