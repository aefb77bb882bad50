"""States in which runs come more than once: groups of stages of a line, for budgets under what one more run of each
reaches.

A stage is a stretch of forward between two times at which few bytes are alive. A group of stages saves what enters it
and nothing else. Backward goes through it once to have what enters each of its stages, and makes the rest of a stage
when it comes there: everything but the last stage runs twice more. A stage that is in no group has the states of a
price.

    least[s, room] = min over what begins at s of  its seconds + least[the stage behind it, room less what it saves]

where its own backward must fit in the room too. Bytes and seconds of these tables are estimates: what they lead to is
counted on the line, and where it is over the budget, less room is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.states import Again, StateSearch, StepStates
from autopar.space.timeline import Segments, Timeline

_SLOTS = 512  # of room
_PRICES = 8  # states of so many prices are offered to a stage
_LONGEST = 12  # stages in a group
_NEAR = 3  # ops on either side of a stage's beginning, where no fewer bytes are alive
_TRIED = 8  # rooms
_FINER, _BESIDE = 256, 6  # more segments, and how many are tried where the step is fullest
_WIDE = 2.0  # times the bytes that are alive at both neighbours: no stage begins there
_WORK = 1 << 16  # runs that are gone through for that, in all


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to treat the stages from one on: alone under the states of a price, or as a group."""

    stages: int  # so many
    again: Again
    seconds: float
    saved: float  # bytes that stay until backward comes there
    peak: float  # and those of the backward itself
    is_group: bool


def in_groups(search: StateSearch, budget: float, prices: int = _PRICES) -> StepStates | None:
    """The fastest states within a budget that groups of stages lead to; None where none was found.

    A stage in no group has the states of one of so many prices; without prices, all of it is saved or none.
    """
    stages = _Stages(search.line)
    priced = sorted(search.priced)[-prices:] if prices else []
    offered = [search.priced[price].again for price in (*priced, 0.0)]
    ways = [list(_ways(offered, stages, s)) for s in range(len(stages))]
    found = list[StepStates]()
    under, over = -math.inf, math.inf  # rooms that lead under the budget, or to nothing; and over it
    room = budget - float(search.line.other.max(initial=0.0))
    for _ in range(_TRIED):
        chosen = _cheapest(ways, room)
        away = budget
        if chosen is not None:
            again = frozenset().union(*(way.again for _, way in chosen))
            found.append(search.of(again, _segments(stages, chosen)))
            away = budget - found[-1].peak
        under, over = (max(under, room), over) if away >= 0 else (under, min(over, room))
        is_between = math.isfinite(under) and math.isfinite(over)
        room = (under + over) / 2 if is_between else room + away
        if room <= 0 or over - under < budget / _SLOTS:
            break
    fits = [states for states in found if states.peak <= budget]
    if fits:
        return min(fits, key=lambda s: s.seconds)
    everything = search.of(frozenset(range(len(search.line.runs))))
    lowest = min((*found, everything, *search.known.values()), key=lambda s: (s.peak, s.seconds))
    return _in_finer(search, stages, lowest, budget) or _in_finer(search, stages, everything, budget)


def _in_finer(search: StateSearch, stages: _Stages, states: StepStates, budget: float) -> StepStates | None:
    """The states with more segments, one after the other where the step is fullest, until they fit in a budget.

    Where the backward of an op is fullest, a segment that begins behind the last reader of a value drops it until an
    earlier op's backward comes.
    """
    last = 2 * search.line.ops - 1
    for _ in range(min(_FINER, _WORK // (_BESIDE * len(search.line.runs)))):
        time = int(states.held.argmax())
        op = min(time, last - time)
        begins = [(t, 1) for t in stages.ends_before(op, states.again)]
        finer = [tuple(sorted({*states.segments, begin})) for begin in begins if begin not in states.segments]
        tried = (search.of(states.again, segments) for segments in finer[:_BESIDE])
        best = min(tried, key=lambda s: (s.peak, s.seconds), default=states)
        if best.peak >= states.peak:
            return None
        states = best
        if states.peak <= budget:
            return states
    return None


class _Stages:
    """The times at which the stages of a line begin, and what lies between them."""

    def __init__(self, line: Timeline) -> None:
        self.line = line
        self.last = max((run.time for run in line.runs if run.reads or run.makes), default=0)
        self.reach = [line.runs[i].time for i in line.made_by]
        for run in line.runs:
            for v in run.reads:
                self.reach[v] = max(self.reach[v], run.time)
        alive = np.zeros(self.last + 2)
        for v, until in enumerate(self.reach):
            if not line.fixed[v]:
                alive[line.runs[line.made_by[v]].time + 1] += line.bytes[v]
                alive[until + 1] -= line.bytes[v]
        self.alive = np.cumsum(alive)  # bytes that are alive as the op of a time begins
        narrow = [0, *(t for t in range(1, self.last + 1) if self._is_narrow(t)), self.last + 1]
        wide = [
            t
            for before, t, behind in zip(narrow, narrow[1:], narrow[2:], strict=False)
            if self.alive[t] > _WIDE * max(self.alive[before], self.alive[behind])
        ]
        self.begins = [t for t in narrow if t not in wide]

    def __len__(self) -> int:
        return len(self.begins) - 1

    def _is_narrow(self, time: int) -> bool:
        """Are no fewer bytes alive anywhere near, and none before it as few?"""
        near = self.alive[max(1, time - _NEAR) : time + _NEAR + 1]
        before = self.alive[max(1, time - _NEAR) : time]
        here = self.alive[time]
        return 0 < here <= near.min() and here < near.max() and (not len(before) or here < before.min())

    def runs(self, first: int, count: int) -> list[int]:
        """The runs of so many stages."""
        begin, end = self.begins[first], self.begins[first + count]
        return [i for i, run in enumerate(self.line.runs) if begin <= run.time < end and run.makes]

    def ends_before(self, op: int, again: Again) -> list[int]:
        """The times behind the last readers of values that an op's backward need not have yet, the largest first."""
        line, begin = self.line, max(t for t in self.begins if t <= op)
        values = [v for v in self.made(again) if begin <= line.runs[line.made_by[v]].time <= self.reach[v] < op]
        values.sort(key=lambda v: (-line.bytes[v], v))
        return list(dict.fromkeys(self.reach[v] + 1 for v in values if not line.fixed[v]))

    def leaving(self, runs: Sequence[int], stage: int) -> list[int]:
        """Those of the runs that make what anything behind a stage reads."""
        end = self.begins[stage + 1]
        return [i for i in runs if any(self.reach[v] >= end for v in self.line.runs[i].makes)]

    def made(self, runs: Iterable[int]) -> set[int]:
        """The values that these runs make."""
        return {v for i in runs for v in self.line.runs[i].makes}

    def needed(self, runs: Iterable[int]) -> set[int]:
        """Those of them that backward reads."""
        return {v for v in self.made(runs) if v in self.line.needed}

    def bytes_of(self, values: Iterable[int]) -> float:
        """Bytes of those of the values that could be dropped."""
        return sum(float(self.line.bytes[v]) for v in values if not self.line.fixed[v])

    def seconds_of(self, values: Iterable[int], again: Again) -> float:
        """Seconds of having these values once more, where these runs are repeated."""
        line, ran = self.line, set[int]()
        pending = [v for v in values if not line.fixed[v]]
        while pending:
            i = line.made_by[pending.pop()]
            if i in again and i not in ran:
                ran.add(i)
                pending += (v for v in line.runs[i].reads if not line.fixed[v])
        return sum(line.runs[i].seconds for i in ran)


def _ways(offered: Sequence[Again], stages: _Stages, first: int) -> Iterator[_Way]:
    """The ways to treat the stages from one on, alone under states that are offered, or as a group."""
    line = stages.line
    own = stages.runs(first, 1)
    needed, leaving = stages.needed(own), stages.leaving(own, first)
    for states in offered:
        again = states.intersection(own).difference(leaving)
        saved = stages.bytes_of(v for v in needed | stages.made(leaving) if line.made_by[v] not in again)
        seconds = stages.seconds_of(needed, again)
        yield _Way(1, again, seconds, saved, stages.bytes_of(needed), is_group=False)
    between, widest, once, passed = 0.0, 0.0, 0.0, 0.0
    for count in range(1, min(_LONGEST, len(stages) - first) + 1):
        last = first + count - 1
        here, all_ = stages.runs(last, 1), stages.runs(first, count)
        needed, leaving = stages.needed(here), stages.leaving(here, last)
        again, entries = frozenset(all_) - frozenset(leaving), stages.made(leaving)
        saved, widest = stages.bytes_of(entries), max(widest, stages.bytes_of(needed))
        alone = stages.seconds_of(stages.needed(all_), again)
        yield _Way(count, again, alone, saved, stages.bytes_of(stages.needed(all_)), is_group=False)
        once += stages.seconds_of(needed - entries, frozenset(here) - frozenset(leaving))
        if count > 1:
            yield _Way(count, again, once + passed, saved, between + widest, is_group=True)
        between += saved
        passed += stages.seconds_of(entries, frozenset(here))


def _cheapest(ways: Sequence[Sequence[_Way]], room: float) -> list[tuple[int, _Way]] | None:
    """The ways of the fewest seconds, each with the stage at which it begins; None where nothing fits in the room."""
    if room <= 0:
        return None
    count, unit = len(ways), room / _SLOTS
    least: np.ndarray = np.full((count + 1, _SLOTS + 1), math.inf)
    least[count] = 0.0
    picks: np.ndarray = np.zeros((count, _SLOTS + 1), int)
    for s in range(count - 1, -1, -1):
        for k, way in enumerate(ways[s]):
            saved, peak = math.ceil(way.saved / unit), math.ceil(way.peak / unit)
            if max(saved, peak) > _SLOTS:
                continue
            value = np.full(_SLOTS + 1, math.inf)
            value[saved:] = least[s + way.stages][: _SLOTS + 1 - saved] + way.seconds
            value[:peak] = math.inf
            better = value < least[s]
            least[s][better], picks[s][better] = value[better], k
    if not math.isfinite(least[0, _SLOTS]):
        return None
    found, s, left = list[tuple[int, _Way]](), 0, _SLOTS
    while s < count:
        way = ways[s][int(picks[s, left])]
        found.append((s, way))
        left -= math.ceil(way.saved / unit)
        s += way.stages
    return found


def _segments(stages: _Stages, chosen: Sequence[tuple[int, _Way]]) -> Segments:
    """The beginnings of groups, and of the stages within them."""
    begins = set[int]()
    for first, way in chosen:
        if way.is_group:
            begins.update(stages.begins[first : first + way.stages + 1])
    return tuple((t, 0) for t in sorted(begins) if 0 < t <= stages.last)
