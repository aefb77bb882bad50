"""Policies of recompute: functions of a line and a budget in bytes that name the runs which backward repeats.

A user may write one; these have names:

    none          nothing
    full          everything but what enters a block of the model, and what collectives made of it
    selective     the core of attention: scores, their softmax and dropout, and what they are multiplied with
    as written    the model's own checkpoint regions, all but what enters them
    chen          blocks of the model in segments, as many as their square root; the last is not repeated

"auto" is no policy but a search, of sharding and states together (`recompute.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from autopar.graph.layers import innermost_block
from autopar.letters import NotServed
from autopar.space.timeline import Run, Timeline

Policy = Callable[[Timeline, float], Iterable[str]]
_MOST = 12  # shardings for which states are looked for


def none(line: Timeline, budget: float) -> Iterable[str]:
    """Nothing."""
    return ()


def full(line: Timeline, budget: float) -> Iterable[str]:
    """Everything but what enters a block, and what collectives have made."""
    return _all_but_entries(line, [innermost_block(_module(run)) for run in line.runs])


def selective(line: Timeline, budget: float) -> Iterable[str]:
    """The core of attention."""
    return [run.name for run in line.runs if run.is_op and run.is_core]


def as_written(line: Timeline, budget: float) -> Iterable[str]:
    """The model's own checkpoint regions."""
    return _all_but_entries(line, [run.region for run in line.runs])


def chen(line: Timeline, budget: float) -> Iterable[str]:
    """Segments of blocks, as many as the square root of their number."""
    return in_segments(line, max(1, round(math.sqrt(len(_blocks(line))))))


def in_segments(line: Timeline, length: int) -> list[str]:
    """Everything but what enters a segment of so many blocks, and what collectives have made; not the last segment."""
    blocks = _blocks(line)
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


def named(policy: str | Policy, line: Timeline, budget: float) -> set[str]:
    """The names that a policy returns, of runs that may be repeated; a letter where a name is of no run."""
    names = set((POLICIES[policy] if isinstance(policy, str) else policy)(line, budget))
    if unknown := sorted(map(str, names - {run.name for run in line.runs})):
        raise NotServed(
            f"recompute= returned {unknown[0]!r}, which the line does not run",
            seen=", ".join(line.names[:8]),
            advice="names of line.runs",
        )
    return names & set(line.names)


def _all_but_entries(line: Timeline, regions: Sequence[object]) -> list[str]:
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


def _blocks(line: Timeline) -> list[str]:
    """The blocks of the model, in order."""
    return list(dict.fromkeys(b for run in line.runs if (b := innermost_block(_module(run)))))


def _module(run: Run) -> str:
    return run.name.partition("/")[0]
