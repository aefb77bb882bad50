"""The predicted step beside a measured one: a trace for Perfetto, and errors by kind of op."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from autopar.letters import BadPlan
from autopar.solver.figures import aligned, time
from autopar.solver.lanes import COMMUNICATION, COMPUTE, HOST, Event
from autopar.solver.trace import Told, records

PREFIX = "autopar: "
MESSAGES = "messages"  # a place of its own: parameters and gradients that are packed to travel together


class Range(NamedTuple):
    """A range of an emitted program that a profiler records: the place in the plan and the part of the step."""

    place: str  # a name of the plan
    part: str  # "forward", "backward" or "recompute"
    is_exchange: bool

    def __str__(self) -> str:
        return f"{PREFIX}{self.place}{', exchange' if self.is_exchange else ''}, {self.part}"

    @staticmethod
    def read(text: str) -> Range | None:
        """The range that a profiler's event name stands for; None for other events."""
        if not text.startswith(PREFIX):
            return None
        place, _, part = text.removeprefix(PREFIX).rpartition(", ")
        return Range(place.removesuffix(", exchange"), part, place.endswith(", exchange"))


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The predicted events of a step; `kinds` maps each place to its op, and `told` has more for a trace."""

    events: tuple[Event, ...]
    kinds: Mapping[str, str]
    told: Told = field(default_factory=Told, repr=False)
    # Of a plan in stages, each coordinate with its events; `events` is empty.
    devices: tuple[tuple[str, tuple[Event, ...], Told], ...] = ()

    def save(self, path: str | Path, profile: Any = None) -> Path:
        """Write the step as a trace, to be opened at ui.perfetto.dev or in chrome://tracing.

        Beside compute and communication it has the copies of values that wait on the host, the memory of a device as a
        counter, an arrow from what moves to the op that reads it, and the sharding of each place.
        `profile` is a torch.profiler.profile of one step of this plan's program, or the events that `measured` reads in
        one: they stand beside the predicted ones.
        """
        devices = self.devices or (("predicted", self.events, self.told),)
        found = [record for pid, of_one in enumerate(devices, 1) for record in records(pid, *of_one)]
        if profile is not None:
            self._refuse_stages()
            found += records(2, "measured", measured(profile), replace(self.told, times=(), held={}))
        try:
            Path(path).write_text(json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}), encoding="utf-8")
        except OSError as e:
            raise BadPlan(f"the timeline cannot be written to {path}", seen=f"{type(e).__name__}: {e}") from e
        return Path(path)

    def by_kind(self, profile: Any) -> dict[str, tuple[float, float]]:
        """(predicted, measured) seconds by kind of op; communication and its packing are one kind."""
        self._refuse_stages()
        found: dict[str, list[float]] = {}
        for which, events in enumerate((self.events, measured(profile))):
            for event in events:
                kind = COMMUNICATION if event.lane == COMMUNICATION else self.kinds.get(event.place, COMMUNICATION)
                # The emitted program does not include the optimizer, and its copies on the host's link have no ranges.
                if event.part != "optimizer" and event.lane != HOST:
                    found.setdefault(kind, [0.0, 0.0])[which] += event.seconds
        return {kind: (predicted, real) for kind, (predicted, real) in found.items()}

    def _refuse_stages(self) -> None:
        if self.devices:
            raise BadPlan(
                "a profile is of one rank, which runs a part of the stages of this plan",
                advice="a plan of the same model without a pipeline",
            )

    def compare(self, profile: Any) -> str:
        """A table of predicted and measured seconds by kind of op."""
        rows = sorted(self.by_kind(profile).items(), key=lambda row: -max(row[1]))
        all_predicted = sum(predicted for _, (predicted, _) in rows)
        all_measured = sum(real for _, (_, real) in rows)
        rows.append(("all", (all_predicted, all_measured)))
        lines = [(kind, time(p), time(m), _ratio(p, m)) for kind, (p, m) in rows]
        return "\n".join(aligned(("kind of op", "predicted", "measured", "predicted over measured"), lines))


def measured(profile: Any) -> list[Event]:
    """The events of a step that torch.profiler recorded on this rank; a letter where there are none.

    On a GPU, an event lasts as long as its kernels, and begins when it was launched.
    """
    if isinstance(profile, Sequence):
        return list(profile)
    found = []
    for event in profile.events():
        of = Range.read(event.name)
        if of is not None:
            on_device = getattr(event, "device_time_total", 0.0)
            seconds = 1e-6 * (on_device or event.time_range.elapsed_us())
            lane = COMMUNICATION if of.is_exchange else COMPUTE
            found.append(Event(of.place, lane, of.part, 1e-6 * event.time_range.start, seconds))
    if not found:
        raise BadPlan(
            "the profile has no step of a parallel model",
            advice="with torch.profiler.profile() as profile: model(**batch).loss.backward()",
        )
    first = min(event.begins_s for event in found)
    return [event._replace(begins_s=event.begins_s - first) for event in found]


def _ratio(predicted: float, real: float) -> str:
    return f"{predicted / real:.2g}" if real else "not run"
