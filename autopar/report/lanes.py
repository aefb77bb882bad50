"""The predicted step as a page draws it: what computes, which communication compute waits for, the host's link."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar.report.limits import LIMITS
from autopar.solver.lanes import COMMUNICATION, CPUS, FORWARD, HOST, Event
from autopar.solver.plan import Plan
from autopar.space.windows import DOWN, UP

# Kinds of communication.
OVERLAPPED = "overlapped"
BLOCKING = "blocking"
EXPOSED = "exposed"


def step_of(plan: Plan) -> dict[str, list[Any]]:
    """Events of the predicted step: place as a number, lane, kind, begin and duration in seconds.

    The kind of compute is its part of the step. Communication of a window overlaps with compute or is exposed, and is
    two events where it is both; other communication is blocking. Copies go down to the host, or up.
    """
    events = plan.timeline().events if plan.has_space else plan.record.step()  # none of a plan in stages
    names = dict.fromkeys(event.place for event in events)
    places = {place: i for i, place in enumerate(names)}
    rows = []
    for event in events:
        begins = event.begins_s
        for kind, seconds in _pieces(event):
            if seconds > LIMITS.same * plan.step_time_s:
                rows.append([places[event.place], event.lane, kind, _short(begins), _short(seconds)])
            begins += seconds
    return {"places": list(places), "events": rows}


def _pieces(event: Event) -> Iterator[tuple[str, float]]:
    """The pieces of an event, each of one kind, with their seconds."""
    if event.lane == HOST:
        yield event.part if event.part in (UP, DOWN) else DOWN if event.part == FORWARD else UP, event.seconds
    elif event.lane == CPUS or event.lane != COMMUNICATION:
        yield event.part, event.seconds
    elif event.hidden_s is None:
        yield BLOCKING, event.seconds
    else:
        yield OVERLAPPED, event.hidden_s
        yield EXPOSED, event.seconds - event.hidden_s


def _short(seconds: float) -> float:
    """Seconds with seven digits: a picture shows no more, and pages are sent around."""
    return float(f"{seconds:.7g}")
