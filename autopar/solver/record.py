"""`Record`: what a plan's file keeps of the search, in a few kilobytes: the step, its memory, its slowest places.

The space tells more, but only the process that planned has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autopar.graph.layers import folded, innermost_block
from autopar.solver import staged
from autopar.solver.lanes import Event
from autopar.solver.limits import LIMITS
from autopar.solver.text import rival_lines

if TYPE_CHECKING:
    from autopar.solver.plan import Plan

_LIMITS = LIMITS.words


@dataclass(frozen=True, slots=True)
class Record:
    """Memory at the fullest of equal spans of a step, events of blocks, and texts about the slowest places."""

    times: tuple[str, ...] = ()
    held: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # bytes at each time, by kind
    places: tuple[str, ...] = ()
    # Events: a number of a place, lane, part, and the seconds at which it begins and that it takes.
    events: tuple[tuple[int, str, str, float, float], ...] = ()
    # Seconds that compute hides, by the numbers of the events of communication that may overlap with it.
    hidden: tuple[tuple[int, float], ...] = ()
    told: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # rivals by name, with `*` for the layer
    # Presets on the same mesh: name, seconds, bytes, whether it fits, and the reason why there is no such plan.
    beside: tuple[tuple[str, float | None, int, bool, str], ...] = ()

    def line(self) -> tuple[list[str], dict[str, list[int]]]:
        """Times of the step by name, and the bytes held at each, by kind."""
        return list(self.times), {kind: list(map(round, held)) for kind, held in self.held.items()}

    def step(self) -> list[Event]:
        """The step, an event for what one block does in a row."""
        hidden = dict(self.hidden)
        return [
            Event(self.places[place], lane, part, begins, s, hidden.get(number))
            for number, (place, lane, part, begins, s) in enumerate(self.events)
        ]


def record_of(plan: Plan) -> Record:
    """The record of a plan whose space is there; of another, the one that it was read with."""
    if not plan.has_space or plan.search is None:
        return plan.record
    is_whole = plan.pipeline is None  # `staged.py` tells the step of another by the plan alone.
    times, held = plan.search.line() if is_whole else ([], {})
    kept = fullest(list(zip(*held.values(), strict=True)), _LIMITS.times)
    events = list(_in_blocks(plan.search.events(), _LIMITS.pause * plan.step_time_s)) if is_whole else []
    places = list(dict.fromkeys(event.place for event in events))
    number = dict(zip(places, itertools.count(), strict=False))
    known = plan.search.known_beside or ()
    told = {folded(name): tuple(rival_lines(plan, name)) for name in _slowest(plan)}
    told |= {} if is_whole else {staged.PATTERN: tuple(staged.moved_lines(plan))}
    return Record(
        tuple(times[t] for t in kept),
        {kind: tuple(np.array(nbytes, float)[kept].tolist()) for kind, nbytes in held.items()},
        tuple(places),
        tuple((number[e.place], e.lane, e.part, _short(e.begins_s), _short(e.seconds)) for e in events),
        tuple((k, _short(event.hidden_s)) for k, event in enumerate(events) if event.hidden_s is not None),
        told,
        tuple((r.name, None if r.why else r.step_time_s, r.peak_bytes, r.fits, r.why) for r in known),
    )


def fullest(held: Sequence[tuple[int, ...]], most: int) -> list[int]:
    """The fullest time of each of at most so many equal spans."""
    spans = min(most, len(held))
    ends = [len(held) * k // spans for k in range(spans + 1)] if spans else [0]
    return [max(range(first, end), key=lambda t: sum(held[t])) for first, end in itertools.pairwise(ends)]


def _in_blocks(events: Sequence[Event], pause: float) -> Iterator[Event]:
    """The events, with those of one block that follow each other on a lane as one, up to a pause."""
    last: dict[str, Event] = {}
    for event in sorted(events, key=lambda event: event.begins_s):
        place = event.place.partition(" to ")[0].partition("/")[0]
        event = event._replace(place=innermost_block(place) or event.place)
        before = last.get(event.lane)
        if before is not None:
            ends = before.begins_s + before.seconds
            is_alike = _kind(before) == _kind(event)
            if is_alike and event.begins_s - ends <= pause:
                seconds = event.begins_s + event.seconds - before.begins_s
                hidden = None if event.hidden_s is None else (before.hidden_s or 0.0) + event.hidden_s
                last[event.lane] = before._replace(seconds=seconds, hidden_s=hidden)
                continue
            yield before
        last[event.lane] = event
    yield from last.values()


def _kind(event: Event) -> tuple[str, str, bool]:
    """The key that events of a block share which are written as one."""
    return event.place, event.part, event.hidden_s is None


def _slowest(plan: Plan) -> list[str]:
    """The first of the ops that are alike, of those that take most of the step."""
    seconds: dict[str, float] = {}
    first: dict[str, str] = {}
    for name, decision in plan.decisions.items():
        if decision.kind == "op":
            first.setdefault(folded(name), name)
            seconds[folded(name)] = seconds.get(folded(name), 0.0) + decision.seconds
    found = sorted(seconds, key=lambda name: -seconds[name])[: _LIMITS.slowest]
    return [first[name] for name in found if seconds[name]]


def _short(seconds: float) -> float:
    """Seconds with six digits: the file is read for a picture."""
    return float(f"{seconds:.6g}")
