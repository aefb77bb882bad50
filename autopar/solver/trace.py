"""The step as records of a trace: lanes, the memory of a device, and arrows from what moves to what reads it.

The format is that of chrome://tracing, which ui.perfetto.dev reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autopar.sharding.convert import Step
from autopar.solver.lanes import BACKWARD, COMMUNICATION, COMPUTE, CPUS, FORWARD, HOST, OPTIMIZER, Event

if TYPE_CHECKING:
    from autopar.solver.plan import Plan

_LANES = (COMPUTE, COMMUNICATION, HOST, CPUS)  # a thread for each, from 1


@dataclass(frozen=True, slots=True)
class Told:
    """What a trace says of a plan's places beside their seconds, all of it by name."""

    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # shardings and sizes of a place
    # Readers of conversions: `(conversion, part)` to the place and the part of the event that reads the value.
    readers: Mapping[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    # Bytes by kind at the times of a step, which are named as in `plan.line()`.
    times: Sequence[str] = ()
    held: Mapping[str, Sequence[int]] = field(default_factory=dict)


def told_of(plan: Plan) -> Told:
    """The arguments, readers and memory of a plan whose space is there."""
    axes = plan.mesh.axes
    arguments: dict[str, dict[str, Any]] = {}
    for name, d in plan.decisions.items():
        arguments[name] = {"op": d.op, "sharding": repr(d.choice), "outputs": ", ".join(d.outputs), "source": d.source}
    readers = {}
    for c in plan.conversions:
        name = f"{c.source} to {c.target}"
        is_parameter = c.source in plan.parameter_bytes
        said = {FORWARD: _steps(c.forward, axes), BACKWARD: _steps(c.backward, axes)}
        arguments[name] = {"value": f"{c.value[0].text(axes)} -> {c.value[1].text(axes)}", **said}
        if is_parameter:
            arguments[name]["bytes in full"] = plan.parameter_bytes[c.source]
        readers[name, FORWARD] = c.target, FORWARD
        if not is_parameter:
            readers[name, BACKWARD] = c.source, BACKWARD
        elif c.source not in plan.regathered:  # Backward of those gathers and reduces under one name.
            readers[name, BACKWARD] = c.source, OPTIMIZER
    return Told(arguments, readers, *plan.line())


def _steps(steps: Iterable[Step], axes: Sequence[str]) -> str:
    return ", ".join(step.text(axes) for step in steps)


def records(pid: int, process: str, events: Sequence[Event], told: Told) -> Iterator[dict[str, Any]]:
    """The records of one process: a thread for each lane, arrows, and the memory."""
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}}
    there = {COMPUTE, COMMUNICATION, *(event.lane for event in events)}
    for tid, lane in enumerate(_LANES, 1):
        if lane in there:
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane}}
    for event in events:
        yield {
            "ph": "X",
            "pid": pid,
            "tid": _thread(event),
            "name": event.place,
            "cat": event.part,
            "ts": 1e6 * event.begins_s,
            "dur": 1e6 * event.seconds,
            "args": {"part": event.part, **_known(told.arguments.get(event.place, {}))},
        }
    yield from _arrows(pid, events, told)
    yield from _memory(pid, events, told)


def _thread(event: Event) -> int:
    return 1 + _LANES.index(event.lane)


def _known(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value}


def _first(events: Iterable[Event], lane: str) -> dict[tuple[str, str], Event]:
    """The first event of each place and part on a lane."""
    found: dict[tuple[str, str], Event] = {}
    for event in events:
        if event.lane == lane:
            found.setdefault((event.place, event.part), event)
    return found


def _arrows(pid: int, events: Sequence[Event], told: Told) -> Iterator[dict[str, Any]]:
    """Arrows from communication to the event that reads what it brings, where that begins later."""
    computed = _first(events, COMPUTE)
    for number, (moved, event) in enumerate(_first(events, COMMUNICATION).items(), 1):
        reader = computed.get(told.readers.get(moved, moved))
        if reader is not None and reader.begins_s > event.begins_s:
            arrow = {"pid": pid, "name": "arrives", "cat": "arrives", "id": 1000 * pid + number}
            yield {**arrow, "ph": "s", "tid": _thread(event), "ts": 1e6 * event.begins_s}
            yield {**arrow, "ph": "f", "bp": "e", "tid": _thread(reader), "ts": 1e6 * reader.begins_s}


def _memory(pid: int, events: Sequence[Event], told: Told) -> Iterator[dict[str, Any]]:
    """A counter of bytes by kind; a time whose op takes no seconds stands where the one before it does."""
    computed = {f"{part} of {place}": event.begins_s for (place, part), event in _first(events, COMPUTE).items()}
    updates = [event.begins_s for event in events if event.part == OPTIMIZER]
    computed["optimizer step"] = min(updates, default=0.0)
    now = 0.0
    for k, time in enumerate(told.times):
        now = max(now, computed.get(time, now))
        yield {
            "ph": "C",
            "pid": pid,
            "name": "memory of a device",
            "ts": 1e6 * now,
            "args": {kind: held[k] for kind, held in told.held.items()},
        }
