"""`Lined`: one sharding with its timeline, and what is known of its states."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.availability import Laid
from autopar.solver.limits import LIMITS
from autopar.solver.offload import Packing, faster, fitted, pace_of, states_on_host, told
from autopar.solver.points import Point
from autopar.solver.policies import IN_ONE_LOOK, Policy, in_segments, named, repeated
from autopar.solver.refine import refined
from autopar.solver.searches import Task
from autopar.solver.states import StateSearch, StepStates
from autopar.space.timeline import Timeline


@dataclass(slots=True, eq=False)
class Lined:
    """A sharding with its timeline, and the search for its states."""

    point: Point
    line: Timeline
    states: StateSearch
    packing: Packing | None = None  # None: nothing may wait on the host

    @staticmethod
    def of(task: Task, point: Point) -> Lined:
        line = Timeline.of(task.space, point.picked, point.held, point.momentary)
        states = StateSearch(line)
        if task.room is None:
            return Lined(point, line, states)
        pace = pace_of(task.space, point.picked)
        room = task.room.beside(states_on_host(task.space, point.picked))
        packing = Packing(states, room, pace, task.space.setting.passes, task.recomputes)
        return Lined(point, line, states, packing)

    @property
    def laid(self) -> Laid:
        return Laid(self.point.picked, self.line)

    def under(self, states: StepStates) -> Point:
        """The plan of this sharding with these states."""
        what = repeated(self.line, states)
        return replace(
            self.point,
            seconds=self.point.seconds + states.seconds,
            held=states.held,
            recomputed=what.names,
            recompute_s=states.seconds + states.hidden,
            recompute_hidden_s=states.hidden,
            passing=what.passing,
            offloaded=told(self.line, states.away),
            host_bytes=float(self.line.bytes[list(states.away)].sum()),
        )

    def named(self, policy: str | Policy, budget: float) -> StepStates:
        """The states that a policy names for this sharding."""
        what = named(policy, self.line, budget)
        line = self.line
        return self.states.of(line.again(what.names), line.passing(what.passing))

    def within(self, budget: float, price: float = 0.0) -> Point | None:
        """The fastest plan found within a budget, starting at a price that may be near; None where none was."""
        states = self.states.within(budget, price) if self.packing is None else fitted(self.packing, budget)
        return None if states is None else self.under(states)

    def look_at_segments(self) -> None:
        """Try states in which only the ends of segments of blocks are saved."""
        for length in LIMITS.recompute.segments:
            self.states.of(self.line.again(in_segments(self.line, length)))

    def frontier(self, time: int) -> list[Point]:
        """The plans of all known states on the Pareto front of seconds and bytes at a time, the fastest first."""
        found: list[Point] = []
        for states in sorted(self.states.known.values(), key=lambda s: (s.seconds, s.held[time])):
            if not found or states.held[time] < found[-1].held[time]:
                more = states.seconds
                point = self.point
                in_line = point.in_line + more
                found.append(replace(point, seconds=point.seconds + more, in_line=in_line, held=states.held))
        return found

    @property
    def at_step(self) -> float:
        """The most bytes during the optimizer's step, which no states change."""
        return float(self.line.other[2 * self.line.ops :].max())

    @property
    def lowest(self) -> float:
        """The lowest peak of all known states."""
        return min(states.peak for states in self.states.known.values())

    def polished(self, budget: float) -> Point | None:
        """The fastest plan within a budget after refining known states and those of named policies, or None."""
        for policy in IN_ONE_LOOK:
            self.states.of(self.line.again(named(policy, self.line, budget).names))
        best = refined(self.states, budget)
        if self.packing is not None:
            best = faster(best, fitted(self.packing, budget))
        return None if best is None else self.under(best)


def seconds_and_bytes(lined: Lined, time: int) -> np.ndarray:
    """Seconds of the plan, and its bytes at a time, for all known states, by [seconds or bytes, state]."""
    return np.array([(lined.point.seconds + s.seconds, s.held[time]) for s in lined.states.known.values()]).T


def lowest_of(lined: Lined) -> Point:
    """The plan of the lowest peak of a sharding's known states, after a look for small ones."""
    lined.within(0.0)
    return lined.under(min(lined.states.known.values(), key=lambda s: (s.peak, s.seconds)))
