"""Rivals of a choice: the best plans in which one site is decided otherwise, at the prices of the bound.

They are looked for when `plan.explain` asks. That needs the whole space with its tables, so a plan holds it only until
`autoparallelize` takes the plan: training would carry it along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from autopar.sharding.strategies import Choice
from autopar.solver.budget import Budgeted
from autopar.solver.curve import Curve
from autopar.solver.eliminate import least_by_choice
from autopar.solver.lanes import Event, events_of
from autopar.solver.plan_of_choices import held_of
from autopar.solver.points import Point
from autopar.solver.prices import Prices
from autopar.solver.tables import Problem
from autopar.solver.travels import Travel, travels_of

if TYPE_CHECKING:
    from autopar.solver.plan import Beside

CurveOf = Callable[[int | Sequence[int], bool], Curve]


class PricedSpace:
    """The space that a plan was chosen from and the prices of its bound, until it is released."""

    def __init__(self, counted: Budgeted, point: Point, prices: Prices, curve: CurveOf) -> None:
        self.counted: Budgeted | None = counted
        self._curve: CurveOf | None = curve
        self.point = point
        self.picked = point.picked
        self.prices = prices
        self._problem: Problem | None = None
        self._travels: dict[str, Travel] | None = None
        self.others: Callable[[], tuple[Beside, ...]] | None = None  # given by who knows presets
        self.known_beside: tuple[Beside, ...] | None = None
        self.cuts: Callable[[], list[tuple[int, int, float]]] | None = None  # given by who cuts a plan into stages
        self._hubs: set[int] = set()  # variables that keep their choice while rivals of others are looked for

    def at(self, point: Point) -> PricedSpace:
        """The same space, for a plan with other states."""
        assert self.counted is not None and self._curve is not None
        return PricedSpace(self.counted, point, self.prices, self._curve)

    @property
    def is_priced(self) -> bool:
        """Whether bytes have a price, because of a budget."""
        return any(self.prices.of_bytes.values())

    @property
    def is_over(self) -> bool:
        """Whether the space was released."""
        return self.counted is None

    @property
    def counted_as_kernels(self) -> frozenset[str]:
        """The results of the groups of ops whose seconds and bytes are those of a kernel."""
        assert self.counted is not None
        sites = self.counted.space.kernels
        return sites.results if sites is not None else frozenset()

    def let_go(self) -> None:
        """Release the space and its tables."""
        self.counted = self._problem = self._curve = self.others = self.cuts = self._travels = None

    def beside(self) -> tuple[Beside, ...]:
        """Plans of presets on the same mesh, made when they are first asked for."""
        if self.known_beside is None:
            self.known_beside = self.others() if self.others is not None else ()
        return self.known_beside

    def moved(self) -> list[tuple[int, int, float]]:
        """The seconds of a step where a stage begins so many blocks later, by stages and by blocks."""
        return self.cuts() if self.cuts is not None else []

    def curve(self, budgets: int | Sequence[int], host: bool) -> Curve:
        """The fastest step under each budget; where the plan may, with values on the host, or without."""
        assert self._curve is not None
        return self._curve(budgets, host)

    def travel(self, value: str) -> Travel | None:
        """The copies of a value to the host and back; None of one that stays."""
        assert self.counted is not None
        if self._travels is None:
            self._travels = {travel.value: travel for travel in travels_of(self.counted.space, self.point)}
        return self._travels.get(value)

    def line(self) -> tuple[list[str], dict[str, list[int]]]:
        """The times of a step by name, and the bytes that the plan holds at each, by kind."""
        assert self.counted is not None
        space = self.counted.space
        held = held_of(space, self.point)
        times = [] if space.memory is None else [space.memory.when(t) for t in range(space.memory.times)]
        by_kind: dict[str, list[int]] = {}
        for kind, bytes_ in held.items():
            if bytes_.any():
                by_kind[kind] = [round(float(n)) for n in bytes_]
        return times, by_kind

    def events(self) -> list[Event]:
        """The predicted step as events."""
        assert self.counted is not None
        return events_of(self.counted.space, self.point)

    def told(self, name: str) -> list[str]:
        """A line for each kernel of an op, with its seconds and their origin."""
        assert self.counted is not None
        space = self.counted.space
        k = next(i for i, site in enumerate(space.sites) if site.name == name)
        return space.told(name, space.sites[k].choices[self.picked[k]]) if space.told is not None else []

    def rivals(self, name: str, most: int = 3) -> list[tuple[Choice, float, float]]:
        """The best other choices of a site, each with two differences in seconds from the choice taken.

        The first is how much longer the best plan with it takes, at least; the second is that of the op itself.
        """
        assert self.counted is not None
        if self._problem is None:
            self._problem = self.counted.tables.problem(self.prices.of_bytes, exposed=self.prices.exposed)
        sites = self.counted.space.sites
        v = next(i for i, s in enumerate(sites) if s.name == name)
        least = least_by_choice(self._problem, v, self.picked, hubs=self._hubs)
        choices = sites[v].choices
        own = sites[v].seconds
        mine = self.picked[v]
        others = [int(i) for i in np.argsort(least, kind="stable") if np.isfinite(least[i])]
        rivals = [i for i in others if choices[i] != choices[mine]]
        return [(choices[i], float(least[i] - least[mine]), float(own[i] - own[mine])) for i in rivals[:most]]
