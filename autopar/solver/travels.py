"""`Travel`: a copy of what a run makes to the host and back, with its bytes and the seconds of the link."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.solver.offload import first_needs
from autopar.solver.points import Point
from autopar.space.space import Space
from autopar.space.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Travel:
    """What one run makes that waits on the host. Seconds are those of a step, in all of its micro-batches."""

    value: str
    gone: str  # the op behind whose forward its memory is free
    comes: str  # the op before whose backward it begins to return
    left: int  # the time of forward at which the last of it is read
    need: int  # the time of backward at which the first of it is read
    bytes: float  # bytes of one micro-batch
    down_s: float
    up_s: float


def travels_of(space: Space, point: Point) -> list[Travel]:
    """The travels of a plan's values in the order in which they go; none where no link is described."""
    host = space.setting.cluster.host
    if not point.offloaded or host is None:
        return []
    line = Timeline.of(space, point.picked, point.held, point.momentary)
    needs = first_needs(line, line.under(line.again(point.recomputed), line.passing(point.passing)))
    passes = space.setting.passes
    last = [line.runs[i].time for i in line.made_by]
    for run in line.runs:
        for v in run.reads:
            last[v] = run.time
    found = []
    for run in line.runs:
        values = [v for v in run.makes if not line.fixed[v] and needs[v] < 2 * line.ops]
        if run.name in point.offloaded and values:
            left = max(last[v] for v in values)
            need = min(needs[v] for v in values)
            nbytes = float(line.bytes[values].sum())
            down_s = passes * host.down_s(nbytes)
            up_s = passes * host.up_s(nbytes)
            found.append(Travel(run.name, *point.offloaded[run.name], left, need, nbytes, down_s, up_s))
    return sorted(found, key=lambda travel: travel.left)
