"""Travels of values within the stages of a pipeline: each leaves and returns within its own block.

A stage is a run of blocks, wherever the program is cut. So a copy down that ends within the forward of its block ends
within that of any stage, and one up that begins within the block's backward begins within the stage's: what blocks
move adds up, as all else of them does, and no action of an order waits for a copy. Between the two actions a value of
every micro-batch in flight is on the host.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.sharding.host import Host
from autopar.solver.offload import Group, first_needs, pace_of
from autopar.solver.states import Again
from autopar.space.space import Space
from autopar.space.steps import Away
from autopar.space.timeline import Timeline
from autopar.stages.blocks import Units


@dataclass(frozen=True, slots=True, eq=False)
class _Half:
    """The ops of a block in one half of a micro-batch: their times, and the seconds at which each begins."""

    times: Sequence[int]
    ends: Sequence[float]  # one more than times: the last is the end of the half


class StageTravels:
    """Finds the values of each block that its own seconds let travel."""

    def __init__(self, space: Space, picked: Sequence[int], line: Timeline, blocks: np.ndarray, units: Units) -> None:
        host = space.setting.cluster.host
        assert host is not None, "a room on the host says how it is reached"
        self.host: Host = host
        self.line = line
        self.blocks = blocks  # op -> its block
        self.last = [line.runs[i].time for i in line.made_by]  # value -> the op that is the last to read it
        for run in line.runs:
            for v in run.reads:
                self.last[v] = run.time
        self.anywhere = {i for i, run in enumerate(line.runs) if run.name in units.anywhere}
        pace = pace_of(space, picked)
        # A backward in two parts brings all of them back in the first.
        names = [line.runs[i].name for i in line.run_of]
        inward = np.array([1.0 - units.weights.get(name, 0.0) for name in names])
        pace[line.ops :] *= inward[::-1]
        self.forward = [self._half(pace, block, is_backward=False) for block in range(len(units.names))]
        self.backward = [self._half(pace, block, is_backward=True) for block in range(len(units.names))]

    def _half(self, pace: np.ndarray, block: int, is_backward: bool) -> _Half:
        ops = np.flatnonzero(self.blocks == block)
        times = 2 * self.line.ops - 1 - ops[::-1] if is_backward else ops
        return _Half(times.tolist(), [0.0, *np.cumsum(pace[times]).tolist()])

    def under(self, again: Again, most: float = math.inf) -> Away:
        """The values that wait where these runs are repeated, at most so many bytes a block, and when."""
        found: dict[int, tuple[int, int]] = {}
        by_block: dict[int, list[Group]] = {}
        for group in self._groups(again):
            by_block.setdefault(int(self.blocks[self.line.runs[group.run].time]), []).append(group)
        for block, groups in by_block.items():
            found |= self._within(self.forward[block], self.backward[block], groups, most)
        return found

    def _groups(self, again: Again) -> Iterator[Group]:
        """The results of each run that are saved, and that no other block reads."""
        line = self.line
        needs = first_needs(line, line.under(again))
        end = 2 * line.ops
        for i, run in enumerate(line.runs):
            if i in again or i in self.anywhere or i in line.forced:
                continue
            values = tuple(v for v in run.makes if not line.fixed[v] and needs[v] < end)
            if values:
                left = max(self.last[v] for v in values)
                need = min(needs[v] for v in values)
                block = self.blocks[run.time]
                if self.blocks[left] == block == self.blocks[end - 1 - need]:
                    yield Group(i, values, float(line.bytes[list(values)].sum()), left, need)

    def _within(self, forward: _Half, backward: _Half, groups: Sequence[Group], most: float) -> Away:
        """The travels of a block's values, copied one behind the other each way; those too late stay."""
        returns: dict[int, int] = {}
        free = math.inf
        for g in sorted(groups, key=lambda g: -g.need):
            begins = min(free, backward.ends[backward.times.index(g.need)]) - self.host.up_s(g.bytes)
            if begins >= 0.0:
                returns[g.run] = backward.times[bisect.bisect_right(backward.ends, begins) - 1]
                free = begins
        found: dict[int, tuple[int, int]] = {}
        free = used = 0.0
        for g in sorted(groups, key=lambda g: g.left):
            done = max(free, forward.ends[forward.times.index(g.left) + 1]) + self.host.down_s(g.bytes)
            if g.run in returns and done <= forward.ends[-1] and used + g.bytes <= most:
                gone = forward.times[bisect.bisect_left(forward.ends, done) - 1]
                found |= dict.fromkeys(g.values, (gone, returns[g.run]))
                free = done
                used += g.bytes
        return found


def away_of(line: Timeline, offloaded: Mapping[str, tuple[str, str]]) -> Away:
    """The values that a plan has on the host by the names of their runs, and when."""
    if not offloaded:
        return {}
    at = {line.runs[i].name: time for time, i in enumerate(line.run_of)}
    found: dict[int, tuple[int, int]] = {}
    for run in line.runs:
        if run.name in offloaded:
            gone, comes = offloaded[run.name]
            values = [v for v in run.makes if not line.fixed[v] and v in line.needed]
            found |= dict.fromkeys(values, (at[gone], 2 * line.ops - 1 - at[comes]))
    return found
