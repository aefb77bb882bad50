"""Levels of one sharding, from saving all that backward needs to what enters each block, by block.

Where there is room on the host, values of each level but the first wait there, as many as blocks move by themselves.

Each stage of a pipeline takes one of them (`stages/levels.py`); together they are states of the whole program, as no
stage reads what another has not saved for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.by_block import saved_by_block
from autopar.solver.limits import LIMITS
from autopar.solver.lined import Lined
from autopar.solver.points import Point, Points
from autopar.solver.policies import full
from autopar.solver.stage_travels import StageTravels
from autopar.solver.states import Again, StateSearch, cheapest
from autopar.space.space import Space
from autopar.space.steps import NOWHERE, Away
from autopar.space.timeline import Timeline
from autopar.stages.blocks import Units


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Runs of the whole program that backward repeats: what they add to it, and what is saved, by block of a turn."""

    again: Again
    seconds: np.ndarray
    saved: np.ndarray  # bytes on the device
    away: Away  # values that wait on the host


class StageLevels:
    """The levels of a point's sharding, the fastest first. Each saves less than the last."""

    def __init__(self, space: Space, point: Point, units: Units, repeats: bool = True, most: float = 0.0) -> None:
        memory = space.memory
        assert memory is not None
        self.space = space
        self.whole = Points(space).of(point.picked)  # nothing is recomputed
        self.line = Timeline.of(space, self.whole.picked, self.whole.held, self.whole.momentary)
        self.search = StateSearch(self.line)
        self.blocks = np.array([units.of.get(space.sites[op.site].name, 0) for op in memory.passages.ops], int)
        self.units = units
        self.repeats = repeats  # whether backward may repeat runs
        self.most = most  # bytes that a block may have on the host for each micro-batch
        self.travels = StageTravels(space, point.picked, self.line, self.blocks, units) if most else None
        self.levels = self._levels()

    def _levels(self) -> list[Level]:
        found: list[Level] = []
        for again, away in self._with_travels(sorted(self._states(), key=self._seconds)):
            saved, _ = saved_by_block(self.line, again, self.units, self.blocks, away)
            level = Level(again, self._by_block(again), saved, away)
            if not found or saved.sum() < found[-1].saved.sum():
                between = self._between(found[-1], level) if found else ()
                found += [*between, level]
        return found

    def _with_travels(self, states: Sequence[Again]) -> Iterator[tuple[Again, Away]]:
        """The states, the first of them without travels, and then each with as many as there may be."""
        yield states[0], NOWHERE
        for again in states if self.travels is not None else states[1:]:
            yield again, NOWHERE if self.travels is None else self.travels.under(again, self.most)

    def _between(self, one: Level, other: Level) -> Iterator[Level]:
        """Levels at which some blocks of every few have the states of one, and the rest those of the other."""
        few = LIMITS.states.of_few
        block = np.arange(len(self.units.names))
        for of_other in range(1, few):
            is_other = (block + 1) * of_other // few > block * of_other // few
            again = {i for i in one.again | other.again if i in (other if is_other[self._block(i)] else one).again}
            seconds = np.where(is_other, other.seconds, one.seconds)
            ways = {
                v: (other if is_other[self._block(self.line.made_by[v])] else one) for v in {*one.away, *other.away}
            }
            away = {v: of.away[v] for v, of in ways.items() if v in of.away}
            yield Level(frozenset(again), seconds, np.where(is_other, other.saved, one.saved), away)

    def _block(self, run: int) -> int:
        return int(self.blocks[self.line.runs[run].time])

    @property
    def most_on_host(self) -> float:
        """The most bytes of a micro-batch that any block has on the host, at any level."""
        return max(float(self.on_host(level).max()) for level in range(len(self.levels)))

    def on_host(self, level: int) -> np.ndarray:
        """Bytes of a micro-batch on the host, by block."""
        found = np.zeros(len(self.units.names))
        for v in self.levels[level].away:
            found[self._block(self.line.made_by[v])] += float(self.line.bytes[v])
        return found

    def _seconds(self, again: Again) -> float:
        return sum(self.line.runs[i].seconds for i in again - self.line.forced)

    def _by_block(self, again: Again) -> np.ndarray:
        """Seconds of a micro-batch that repeated runs take."""
        seconds = np.zeros(len(self.units.names))
        for i in again - self.line.forced:
            seconds[self._block(i)] += self.line.runs[i].seconds / self.space.setting.passes
        return seconds

    def _states(self) -> Iterator[Again]:
        """Runs to repeat, at prices of what is saved and where entries of blocks alone are."""
        search = self.search
        yield search.none.again
        if not self.repeats:
            return
        begins = self.line.ops
        usual = search.usual_price(begins)
        for times in LIMITS.states.of_stages:
            yield cheapest(search.network, search.windows, {begins: times * usual}) | self.line.forced
        yield self.line.again(list(full(self.line, 0.0)))

    def together(self, ends: Sequence[tuple[int, int]], picks: Sequence[int]) -> Point:
        """The plan in which the stages, which begin and end at these blocks, have these levels."""
        again: set[int] = set()
        away: dict[int, tuple[int, int]] = {}
        for (a, z), pick in zip(ends, picks, strict=True):
            level = self.levels[pick]
            again.update(i for i in level.again if a <= self._block(i) < z)
            away |= {v: times for v, times in level.away.items() if a <= self._block(self.line.made_by[v]) < z}
        states = self.search.of(frozenset(again))
        if away:
            states = replace(states, held=self.line.under(states.again, states.passing, away).held, away=away)
        return Lined(self.whole, self.line, self.search).under(states)
