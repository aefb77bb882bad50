"""Policies of recompute: functions of a line and a budget in bytes that name the runs which backward repeats.

A user may write one; these have names:

    none          nothing
    full          everything but what enters a block of the model, and what collectives made of it
    selective     the core of attention: scores, their softmax and dropout, and what they are multiplied with
    as written    the model's own checkpoint regions, all but what enters them
    chen          blocks of the model in segments, as many as their square root; the last is not repeated
    rotor         stages of the line, each saved or not, or run twice more in groups: the best by dynamic programming
    ilp           the values to save by an integer program, with a row for the bytes of every time

"auto" is not a policy but a search for sharding and states together (`recompute.py`).
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.graph.layers import innermost_block
from autopar.letters import Letter, NotServed
from autopar.solver.groups import in_groups
from autopar.solver.state_program import by_program
from autopar.solver.states import StateSearch, StepStates
from autopar.space.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Repeated:
    """The answer of a policy: names of runs to repeat, and those of them in passing, each with an op."""

    names: frozenset[str]
    passing: Mapping[str, str] = field(default_factory=dict)


Policy = Callable[[Timeline, float], Iterable[str] | Repeated]


def none(line: Timeline, budget: float) -> Iterable[str]:
    """Recompute nothing."""
    return ()


def full(line: Timeline, budget: float) -> Iterable[str]:
    """Recompute everything but what enters a block of the model, and what collectives have made."""
    return _all_but_entries(line, by_block(*_names_and_regions(line)))


def selective(line: Timeline, budget: float) -> Iterable[str]:
    """Recompute the core of attention."""
    return [run.name for run in line.runs if run.is_op and run.is_core]


def as_written(line: Timeline, budget: float) -> Iterable[str]:
    """Recompute the model's own checkpoint regions, but for what enters them."""
    return _all_but_entries(line, by_region(*_names_and_regions(line)))


def chen(line: Timeline, budget: float) -> Iterable[str]:
    """Recompute in segments of blocks, as many as the square root of the number of blocks."""
    return _all_but_entries(line, by_segment(*_names_and_regions(line)))


def in_segments(line: Timeline, length: int) -> list[str]:
    """Names of all runs but the entries of segments of `length` blocks, collectives, and the last segment."""
    return _all_but_entries(line, by_segment(*_names_and_regions(line), length))


def by_block(names: Sequence[str], regions: Sequence[str]) -> list[str]:
    """The block of the model that each run is in."""
    return [innermost_block(_module(name)) for name in names]


def by_region(names: Sequence[str], regions: Sequence[str]) -> list[str]:
    """The model's own checkpoint region around each run."""
    return list(regions)


def by_segment(names: Sequence[str], regions: Sequence[str], length: int = 0) -> list[str]:
    """The segment of `length` blocks of each run, none for the last; 0: their square root."""
    inside = by_block(names, regions)
    blocks = list(dict.fromkeys(filter(None, inside)))
    length = length or max(1, round(math.sqrt(len(blocks))))
    segment = {b: f"segment {i // length}" for i, b in enumerate(blocks)}
    last = segment[blocks[-1]] if blocks else ""
    parts = [segment.get(block, "") for block in inside]
    return ["" if part == last else part for part in parts]


# The regions of policies that repeat all but what enters a region: from names and checkpoint regions of runs.
REGIONS: dict[str, Callable[[Sequence[str], Sequence[str]], list[str]]] = {
    "full": by_block,
    "as written": by_region,
    "chen": by_segment,
}

IN_ONE_LOOK: dict[str, Policy] = {
    "none": none,
    "full": full,
    "selective": selective,
    "as written": as_written,
    "chen": chen,
}


def rotor(line: Timeline, budget: float) -> Repeated:
    """The best schedule of stages that are saved, not saved, or in groups; without repeats if none fits."""
    found = in_groups(StateSearch(line), budget, is_all_or_none=True)
    return Repeated(frozenset()) if found is None else repeated(line, found)


def ilp(line: Timeline, budget: float) -> Repeated:
    """The values to save by an integer program; nothing is repeated where no schedule fits."""
    found = by_program(StateSearch(line), budget)
    return Repeated(frozenset()) if found is None else repeated(line, found)


def repeated(line: Timeline, states: StepStates) -> Repeated:
    """States as a policy's answer, by the names of runs and ops."""
    names = frozenset(line.runs[i].name for i in states.again - line.forced)
    return Repeated(names, {line.runs[i].name: line.runs[line.run_of[time]].name for i, time in states.passing})


POLICIES: dict[str, Policy] = {**IN_ONE_LOOK, "rotor": rotor, "ilp": ilp}


def _asked(policy: Policy, line: Timeline, budget: float) -> Any:
    """The answer of a user's function; a letter with its line where it raises an error."""
    try:
        return policy(line, budget)
    except Letter:
        raise
    except Exception as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        inside = where.filename != __file__  # else it was called with more or fewer arguments than it takes
        raise NotServed(
            f"recompute= has raised {type(e).__name__}: {e}",
            at=f"{where.line}    {where.filename}:{where.lineno}, in {where.name}" if inside else "",
            advice="a function of a line and of a budget in bytes, which returns names of line.runs",
        ) from e


def named(policy: str | Policy, line: Timeline, budget: float) -> Repeated:
    """The answer of a policy, restricted to runs that may be repeated; a letter where a name is of no run."""
    returned = POLICIES[policy](line, budget) if isinstance(policy, str) else _asked(policy, line, budget)
    if not isinstance(returned, (Repeated, Iterable)) or isinstance(returned, str):
        raise NotServed(f"recompute= returned {returned!r}", advice="names of line.runs, or a Repeated")
    answer = returned if isinstance(returned, Repeated) else Repeated(frozenset(returned))
    names = set(answer.names)
    ops = {run.name for run in line.runs if run.is_op}
    if wrong := [pair for pair in answer.passing.items() if pair[0] not in names or pair[1] not in ops]:
        raise NotServed(
            f"recompute= makes {wrong[0][0]!r} in passing for what is behind {wrong[0][1]!r}",
            advice="one of the names that it returns, and the name of an op of line.runs",
        )
    if unknown := sorted(map(str, names - {run.name for run in line.runs})):
        raise NotServed(
            f"recompute= returned {unknown[0]!r}, which the line does not run",
            seen=", ".join(line.names[:8]),
            advice="names of line.runs",
        )
    names &= set(line.names)
    return Repeated(frozenset(names), {name: op for name, op in answer.passing.items() if name in names})


def _all_but_entries(line: Timeline, regions: Sequence[object]) -> list[str]:
    """Names of the ops in regions whose values are read in the same region only.

    What a region leaves to another is an entry of that one, and is saved.
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


def _names_and_regions(line: Timeline) -> tuple[list[str], list[str]]:
    """The name of each run, and the model's own checkpoint region around it."""
    return [run.name for run in line.runs], [run.region for run in line.runs]


def _module(name: str) -> str:
    """The path of a run's module: `h.3.up` of `h.3.up/linear:1`, `out` of the conversion `out:0`."""
    return name.partition("/")[0].partition(":")[0]
