"""`SmallShardings`: the search for shardings that hold little, where those of a joint search hold too much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from autopar.solver.budget import Budgeted
from autopar.solver.joint import JointPrices, JointTables, without_states
from autopar.solver.limits import LIMITS
from autopar.solver.lined import Lined, lowest_of
from autopar.solver.points import Point, frontier
from autopar.solver.searches import Task

_LIMITS = LIMITS.joint


class SmallShardings:
    """The small shardings of the space of a joint search; each is searched for once."""

    def __init__(
        self, task: Task, tables: JointTables, exposed: tuple[float, ...], met: Mapping[tuple[int, ...], Lined]
    ) -> None:
        self.task = task
        self.tables = tables
        self.exposed = exposed  # the prices of windows without a budget
        self.met = met  # the shardings that the joint search has met so far; the first is the fastest
        self.dear: list[Lined] = []  # shardings that `_where_bytes_are_dear` has found so far
        self._lowest: Point | None = None  # the plan of the lowest peak; None until it is searched for
        self._bare: Budgeted | None = None  # the space of `bare`; None until it is asked for

    @property
    def first(self) -> Lined:
        """The fastest sharding where memory costs nothing."""
        return next(iter(self.met.values()))

    @property
    def bare(self) -> Budgeted:
        """The space with the bytes that no states change."""
        if self._bare is None:
            self._bare = Budgeted(without_states(self.task.space))
        return self._bare

    def that_fit(self, budget: float) -> Iterator[Lined]:
        """Fast shardings whose bytes that no states change fit in a budget; small ones if none fit.

        The fastest of them come first. In a large space they are those that are best where bytes are dear.
        """
        if self.task.is_long:
            yield from self._where_bytes_are_dear()
            return
        gap = max(self.task.gap, _LIMITS.bare_gap)
        outcome = self.bare.fastest(budget, gap, until=self.task.until, little=_LIMITS.rough, proves=False)
        fits = frontier([p for p in outcome.points if p.peak <= budget])
        for point in fits or sorted(outcome.points, key=lambda p: p.peak)[: _LIMITS.bare_smallest]:
            if math.isfinite(point.seconds):
                yield self._lined(point)

    def _where_bytes_are_dear(self) -> Iterator[Lined]:
        """Shardings that are best where bytes are dear; each is looked for once."""
        usual = self.first.states.usual_price(self.tables.time)
        for k, times in enumerate(_LIMITS.dear):
            if k == len(self.dear):
                at = JointPrices(usual * times, self.exposed, usual * times)
                point = self.task.counted.point(self.tables.least(at, [self.first.laid])[1].picked)
                self.dear.append(self._lined(point) if math.isfinite(point.seconds) else self.first)
            yield self.dear[k]

    def lowest(self) -> Point:
        """The plan of the lowest peak that is found, the same under any budget; searched for once.

        The search starts from the fastest sharding, and the smallest in what no states change.
        """
        if self._lowest is None:
            self._lowest = self._search()
        return self._lowest

    def _search(self) -> Point:
        """The plan of the lowest peak, by polishing the states of small shardings, where it takes no time."""
        all_ = [Lined.of(self.task, self.first.point)]
        if self.task.is_long:
            all_ += self._where_bytes_are_dear()
        elif math.isfinite((smallest := self.bare.smallest()[0]).seconds):
            all_.append(self._lined(smallest))
        for lined in all_:
            lined.within(0.0)
            if not self.task.is_long:
                lined.polished(0.0)
        lined = min(all_, key=lambda lined: lined.lowest)
        peak = math.inf
        best: Point | None = None  # It may have values on the host, and hold less than its states say.
        while not self.task.is_long:
            found = lined.polished(_LIMITS.lower * min(peak, lined.lowest))
            if found is None:
                break
            peak = found.peak
            best = found
        lowest = lowest_of(lined)
        return lowest if best is None else min(lowest, best, key=lambda point: (point.peak, point.seconds))

    def _lined(self, point: Point) -> Lined:
        """A sharding with its states: those that are known, or none yet."""
        known = self.met.get(tuple(point.picked))
        return known or Lined.of(self.task, self.task.counted.point(point.picked))
