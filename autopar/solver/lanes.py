"""The predicted step as events on lanes, compute and communication and the link to the host, with their times.

Ops run one behind the other, forward and then backward; conversions in line stand between them. What moves in a window
ends with the window: its first part runs beside the compute that hides it, and the rest is the time that it adds
(`space/windows.py`). What an op sends beside its own compute begins with that. The optimizer comes last. Where a step
is of several micro-batches an event is what all of them take together, and what is gathered before the first comes
first. The last of these events ends with the step time of the plan.

Copies of parameters that lie on the host, and steps of its CPUs beside backward, are in windows too, on lanes of their
own. Behind them are the copies of values that wait on the host, which nothing waits for. A copy down ends with the
forward of the op behind which its memory is free, and one up begins with the backward of the op before which it
returns; those of one way follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autopar.solver.points import Point
from autopar.solver.travels import travels_of
from autopar.space import windows
from autopar.space.space import Edge, Space
from autopar.space.timeline import Timeline
from autopar.space.windows import LINKS, Window, seconds_on_host

COMPUTE, COMMUNICATION, HOST = "compute", "communication", "host"
CPUS = windows.CPUS  # steps of the host's CPUs
FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "forward", "backward", "recompute", "optimizer"
# The lanes of windows on the host, and the part of their events.
_LANE_OF = {windows.UP: (HOST, windows.UP), windows.DOWN: (HOST, windows.DOWN), windows.CPUS: (CPUS, OPTIMIZER)}


class Event(NamedTuple):
    """Something that takes time in a step: an op, a conversion, an update, or a copy to the host or back."""

    place: str  # a name of the plan; of a conversion, `source to target`
    lane: str
    part: str  # FORWARD, BACKWARD, RECOMPUTE or OPTIMIZER; of a parameter's copy on the lane of the host, UP or DOWN
    begins_s: float
    seconds: float
    # The seconds of communication in a window or beside an op, which compute hides; None for all other events.
    hidden_s: float | None = None


def events_of(space: Space, point: Point) -> list[Event]:
    """The events of a plan's step, in order, and then those of the lane of the host."""
    return _LaneWriter(space, point).step()


@dataclass(slots=True)
class _Moved:
    """Seconds of an edge's conversions outside of windows: in forward, and in backward."""

    forward: float
    backward: float


@dataclass(slots=True, eq=False)
class _LaneWriter:
    space: Space
    point: Point
    now: float = 0.0
    events: list[Event] = field(default_factory=list)
    repeated: dict[int, float] = field(default_factory=dict)  # op time -> recompute seconds before its backward
    ended: dict[str, float] = field(default_factory=dict)  # site -> the time at which its forward ends
    began: dict[str, float] = field(default_factory=dict)  # site -> the time at which its backward begins

    def step(self) -> list[Event]:
        space = self.space
        picked = self.point.picked
        arriving: dict[int, list[int]] = {}
        for k, edge in enumerate(space.edges):
            arriving.setdefault(edge.target, []).append(k)
        moved = self._in_line()
        beside = seconds_on_host(space.windows, picked, space.edges)
        ends = {FORWARD: _by(space.windows, FORWARD, 1), BACKWARD: _by(space.windows, BACKWARD, 0)}
        again = self._again()
        order = [k for k, site in enumerate(space.sites) if site.kind != "parameter"]
        first = [e for e, edge in enumerate(space.edges) if space.setting.turns > 1 and self._is_kept(edge)]
        for e in first:
            self._put(_named(space, space.edges[e]), COMMUNICATION, FORWARD, moved[e].forward)
            moved[e].forward = 0.0
        for k in order:
            for e in arriving.get(k, ()):
                self._put(_named(space, space.edges[e]), COMMUNICATION, FORWARD, moved[e].forward)
            self._run(k, FORWARD)
            self._close(ends[FORWARD].get(k, ()), FORWARD)
            self.ended[space.sites[k].name] = self.now
        for k in reversed(order):
            self.began[space.sites[k].name] = self.now
            for name, seconds in again.get(k, ()):
                self._put(name, COMPUTE, RECOMPUTE, seconds)
            self._run(k, BACKWARD)
            for e in arriving.get(k, ()):
                self._put(_named(space, space.edges[e]), COMMUNICATION, BACKWARD, moved[e].backward)
            self._close(ends[BACKWARD].get(k, ()), BACKWARD)
        for k, site in enumerate(space.sites):
            if site.kind == "parameter":
                whole = float(site.seconds[picked[k]])
                left = whole - beside.get(k, (0.0, 0.0))[0] / self._hidden
                self._put(site.name, COMPUTE, OPTIMIZER, left if left > 1e-9 * whole else 0.0)
                for e in arriving.get(k, ()):
                    self._put(
                        _named(space, space.edges[e]), COMMUNICATION, OPTIMIZER, moved[e].forward + moved[e].backward
                    )
        return [*self.events, *self._travels()]

    def _travels(self) -> Iterator[Event]:
        """The copies to the host, each as late as those behind it allow, and those back, each as early."""
        travels = travels_of(self.space, self.point)
        ends = math.inf
        begins = []
        for travel in travels[::-1]:
            ends = min(ends, self.ended[travel.gone]) - travel.down_s
            begins.append(ends)
        for travel, at in zip(travels, begins[::-1], strict=True):
            yield Event(travel.value, HOST, FORWARD, at, travel.down_s)
        free = 0.0
        for travel in sorted(travels, key=lambda travel: travel.need):
            free = max(free, self.began[travel.comes])
            yield Event(travel.value, HOST, BACKWARD, free, travel.up_s)
            free += travel.up_s

    def _put(self, place: str, lane: str, part: str, seconds: float) -> None:
        """Add an event in line, and advance the time."""
        if seconds > 0:
            self.events.append(Event(place, lane, part, self.now, seconds))
            self.now += seconds

    def _run(self, k: int, part: str) -> None:
        """Add an op in one direction, and what its local form exchanges."""
        site = self.space.sites[k]
        choice = self.point.picked[k]
        passes = self.space.setting.passes
        if not site.compute and part == FORWARD:
            self._put(site.name, COMPUTE, part, float(site.seconds[choice]))
        way = (FORWARD, BACKWARD).index(part)
        if site.compute:
            setting = self.space.setting
            is_once = part == FORWARD and self.space.is_once(k, choice)
            runs = setting.accumulation if is_once else passes
            self._put(site.name, COMPUTE, part, runs * float(site.compute[way][choice]))
        if site.exchange:
            whole = passes * float(site.exchange[way][choice])
            in_line = whole - self._send_beside(k, part, passes * float(site.compute[way][choice]))
            self._put(site.name, COMMUNICATION, part, in_line if in_line > 1e-9 * whole else 0.0)

    def _send_beside(self, k: int, part: str, compute: float) -> float:
        """Add the messages of an op beside its compute, which is there already; returns their exposed seconds.

        Each kind runs beside the part of the compute that may hide it, and its exposed seconds follow.
        """
        space = self.space
        site = space.sites[k]
        sent = [] if space.beside is None else space.beside(site.name, site.choices[self.point.picked[k]])
        begins = self.now - compute
        exposed = 0.0
        for s in (s for s in sent if s.exchange.way == part and s.times):
            once = space.setting.passes * s.once
            hidden = self._hidden * min(s.times * once, s.beside * compute)
            apart = (s.beside * compute + s.times * once - hidden) / s.times
            for _ in range(s.times):
                self.events.append(Event(site.name, COMMUNICATION, part, begins, once, hidden / s.times))
                begins += apart
            self.now += s.times * once - hidden
            exposed += s.times * once - hidden
        return exposed

    def _close(self, ending: Iterable[Window], part: str) -> None:
        """Add the communication of windows that end here; what compute does not hide extends past it."""
        for window in ending:
            communication, compute = window.seconds(self.point.picked, self.space.edges)
            if part == BACKWARD:
                compute += self._repeated_in(window)
            whole = communication / self._hidden
            hidden = min(communication, compute)
            end = self.now + window.times * (whole - hidden)
            begins = end - window.times * whole
            left = window.times * hidden
            for k, seconds in self._of_window(window):
                edge = self.space.edges[k]
                lane, of = _LANE_OF.get(window.lane, (COMMUNICATION, part))
                name = _named(self.space, edge) if window.lane == LINKS else self.space.sites[edge.source].name
                self.events.append(Event(name, lane, of, begins, seconds, min(seconds, left)))
                left -= min(seconds, left)
                begins += seconds
            self.now = end

    def _repeated_in(self, window: Window) -> float:
        """Seconds of recompute that can hide a window's communication, each time that the window comes."""
        if not self.repeated:
            return 0.0
        assert self.space.memory is not None
        at = {op.site: time for time, op in enumerate(self.space.memory.passages.ops)}
        first, last = (at[site] for site in window.span)
        repeated = sum(seconds for time, seconds in self.repeated.items() if first <= time <= last)
        return self._hidden * repeated / self.space.setting.passes

    @property
    def _hidden(self) -> float:
        return self.space.setting.cluster.hidden

    def _of_window(self, window: Window) -> list[tuple[int, float]]:
        """Seconds of each edge that moves in a window, over all times that the window comes."""
        picked = self.point.picked
        edges = self.space.edges
        found = ((k, float(table[edges[k].place(picked)])) for k, table in window.communication)
        return [(k, window.times * seconds / self._hidden) for k, seconds in found if seconds > 0]

    def _in_line(self) -> list[_Moved]:
        """Seconds of each edge that are in no window."""
        space = self.space
        picked = self.point.picked
        beside = {FORWARD: np.zeros(len(space.edges)), BACKWARD: np.zeros(len(space.edges))}
        for window in (window for window in space.windows if window.lane == LINKS):
            for k, seconds in self._of_window(window):
                beside[window.way][k] += seconds
        found = []
        for k, edge in enumerate(space.edges):
            whole = float(edge.seconds[edge.place(picked)])
            rest = whole - beside[FORWARD][k] - beside[BACKWARD][k]
            rest = rest if rest > 1e-9 * whole else 0.0
            once = float(edge.forward[edge.place(picked)]) if edge.forward.size else 0.0
            forward = min(rest, max(0.0, self._times(edge) * once - beside[FORWARD][k]))
            found.append(_Moved(forward, rest - forward))
        return found

    def _times(self, edge: Edge) -> int:
        """The number of a value's conversions in a step: one a call, or one in all, for a copy that is kept."""
        setting = self.space.setting
        once = setting.accumulation if setting.turns > 1 else 1
        return once if self._is_kept(edge) else setting.passes

    def _is_kept(self, edge: Edge) -> bool:
        """Whether an edge brings copies of a parameter that are kept, or a value that is computed once."""
        source = self.space.sites[edge.source]
        choice = self.point.picked[edge.source]
        is_dropped = bool(source.regathered) and source.regathered[choice]
        return self.space.is_once(edge.source, choice) or (source.kind == "parameter" and not is_dropped)

    def _again(self) -> dict[int, list[tuple[str, float]]]:
        """Names and seconds of the runs that are recomputed before the backward of each site."""
        space = self.space
        point = self.point
        if not point.recomputed or space.memory is None:
            return {}
        line = Timeline.of(space, point.picked, point.held, point.momentary)
        through = line.under(line.again(point.recomputed), line.passing(point.passing))
        found: dict[int, list[tuple[str, float]]] = {}
        for i, time in zip(through.ran, through.times, strict=True):
            if i not in line.forced:  # a copy of a parameter, whose gathering is a movement
                run = line.runs[i]
                op = 2 * line.ops - 1 - time
                found.setdefault(space.memory.passages.ops[op].site, []).append((run.name, run.seconds))
                if run.is_op:
                    self.repeated[op] = self.repeated.get(op, 0.0) + run.seconds
        return found


def _named(space: Space, edge: Edge) -> str:
    return f"{space.sites[edge.source].name} to {space.sites[edge.target].name}"


def _by(of_step: Sequence[Window], way: str, end: int) -> Mapping[int, list[Window]]:
    """The windows of one direction, by the site at which they end."""
    found: dict[int, list[Window]] = {}
    for window in of_step:
        if window.way == way:
            found.setdefault(window.span[end], []).append(window)
    return found
