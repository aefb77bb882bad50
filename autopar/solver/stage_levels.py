"""Levels of recompute of one sharding, from saving all that backward needs to what enters each block, by block.

Each stage of a pipeline takes one of them (`stages/levels.py`); together they are states of the whole program, as no
stage reads what another has not saved for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.by_block import saved_by_block
from autopar.solver.limits import LIMITS
from autopar.solver.lined import Lined
from autopar.solver.points import Point, Points
from autopar.solver.policies import full
from autopar.solver.states import Again, StateSearch, cheapest
from autopar.space.space import Space
from autopar.space.timeline import Timeline
from autopar.stages.blocks import Units


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Runs of the whole program that backward repeats: what they add to it, and what is saved, by block of a turn."""

    again: Again
    seconds: np.ndarray
    saved: np.ndarray


class StageLevels:
    """The levels of a point's sharding, the fastest first. Each saves less than the last."""

    def __init__(self, space: Space, point: Point, units: Units) -> None:
        memory = space.memory
        assert memory is not None
        self.space = space
        self.whole = Points(space).of(point.picked)  # nothing is recomputed
        self.line = Timeline.of(space, self.whole.picked, self.whole.held, self.whole.momentary)
        self.search = StateSearch(self.line)
        self.blocks = np.array([units.of.get(space.sites[op.site].name, 0) for op in memory.passages.ops], int)
        self.units = units
        self.levels = self._levels()

    def _levels(self) -> list[Level]:
        found: list[Level] = []
        for again in sorted(self._states(), key=self._seconds):
            saved, _ = saved_by_block(self.line, again, self.units, self.blocks)
            level = Level(again, self._by_block(again), saved)
            if not found or saved.sum() < found[-1].saved.sum():
                between = self._between(found[-1], level) if found else ()
                found += [*between, level]
        return found

    def _between(self, one: Level, other: Level) -> Iterator[Level]:
        """Levels at which some blocks of every few have the states of one, and the rest those of the other."""
        few = LIMITS.states.of_few
        block = np.arange(len(self.units.names))
        for of_other in range(1, few):
            is_other = (block + 1) * of_other // few > block * of_other // few
            again = {i for i in one.again | other.again if i in (other if is_other[self._block(i)] else one).again}
            seconds = np.where(is_other, other.seconds, one.seconds)
            yield Level(frozenset(again), seconds, np.where(is_other, other.saved, one.saved))

    def _block(self, run: int) -> int:
        return int(self.blocks[self.line.runs[run].time])

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
        begins = self.line.ops
        usual = search.usual_price(begins)
        for times in LIMITS.states.of_stages:
            yield cheapest(search.network, search.windows, {begins: times * usual}) | self.line.forced
        yield self.line.again(list(full(self.line, 0.0)))

    def together(self, ends: Sequence[tuple[int, int]], picks: Sequence[int]) -> Point:
        """The plan in which the stages, which begin and end at these blocks, have these levels."""
        again: set[int] = set()
        for (a, z), level in zip(ends, picks, strict=True):
            again.update(i for i in self.levels[level].again if a <= self._block(i) < z)
        states = self.search.of(frozenset(again))
        return Lined(self.whole, self.line, self.search).under(states)
