"""One elimination of a sum of tables, and the choices that it leads to.

    eliminate    add up all that a variable has a part in, minimise over it, and leave a factor over its neighbours
    region       variables that are contracted first, to tables over what surrounds them: a region whose tables are
                 those of another costs nothing
    hub          a variable that many others neighbour (a rotary table, a mask, an encoder's output): it is split into
                 copies when tables would grow over the limit, one a region if that is enough
    decide       backwards through the steps: each variable takes what is best for those decided after it

What was computed once for the same tables is found again by their identity. The chain that regions leave is halved, and
not eaten from its end, so that it costs its logarithm.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from autopar.solver.limits import LIMITS
from autopar.solver.tables import Factor, Problem, minimum_over

_LIMITS = LIMITS.elimination

_T = TypeVar("_T")
_Rank = tuple[int, int, int]


class TooWide(Exception):
    """Raised where a region cannot be contracted, since tables over these variables would be too wide."""

    def __init__(self, near: set[int]) -> None:
        super().__init__()
        self.near = near


class Remainder:
    """The variables that are not eliminated yet: their costs, and the factors over them."""

    def __init__(self, problem: Problem, fixed: Mapping[int, int]) -> None:
        self.once = problem.once
        self.shapes = problem.shapes
        self.costs: dict[int, np.ndarray] = dict(enumerate(problem.costs))
        self.factors: dict[int, list[Factor]] = {v: [] for v in self.costs}  # variable -> the factors over it
        self.constant = 0.0
        self.count = len(problem.costs)  # number of variables, copies of split ones included
        for v, choice in fixed.items():
            self.constant += float(self.costs.pop(v)[choice])
        for factor in problem.factors:
            self.add(self._without_fixed(factor, fixed))

    def add(self, factor: Factor) -> None:
        if 1 in factor.table.shape:  # A variable with one class does not change the cost.
            factor = self._squeezed(factor)
        if not factor.scope:
            self.constant += float(factor.table)
        elif len(factor.scope) == 1:
            (v,) = factor.scope
            (m,) = factor.classes
            before = self.costs[factor.scope[0]]
            self.costs[v] = self.once("unary", (before, factor.table, m), lambda: before + factor.table[m])
        else:
            for v in factor.scope:
                self.factors[v].append(factor)

    def add_cost(self, v: int, more: np.ndarray) -> None:
        before = self.costs[v]
        self.costs[v] = self.once("more", (before, more), lambda: before + more)

    def take(self, v: int) -> tuple[np.ndarray, list[Factor]]:
        """The cost and factors of a variable, which are removed with it."""
        cost = self.costs.pop(v)
        factors = self.factors.pop(v)
        for f in factors:
            for u in f.scope:
                if u != v:
                    self.factors[u].remove(f)
        return cost, factors

    def neighbours(self, *variables: int) -> set[int]:
        """The variables that share a factor with one of these, themselves included."""
        return {u for v in variables for f in self.factors[v] for u in f.scope}

    def _squeezed(self, factor: Factor) -> Factor:
        seen = [i for i, n in enumerate(factor.table.shape) if n > 1]
        shape = [factor.table.shape[i] for i in seen]
        table = self.once("squeezed", (factor.table,), lambda: factor.table.reshape(shape))
        scope = tuple(factor.scope[i] for i in seen)
        classes = tuple(factor.classes[i] for i in seen)
        return Factor(scope, classes, table, factor.generation)

    def _without_fixed(self, factor: Factor, fixed: Mapping[int, int]) -> Factor:
        free = [i for i, v in enumerate(factor.scope) if v not in fixed]
        if len(free) == len(factor.scope):
            return factor
        held = tuple(int(m[fixed[v]]) if v in fixed else None for v, m in factor.axes())
        at = tuple(slice(None) if place is None else place for place in held)
        table = self.once(("fixed", id(factor.table), held), (factor.table,), lambda: factor.table[at])
        return Factor(tuple(factor.scope[i] for i in free), tuple(factor.classes[i] for i in free), table)


class Hubs:
    """Variables with many neighbours that are split into copies, so that tables stay narrow."""

    def __init__(self, left: Remainder, region: Mapping[int, int]) -> None:
        self.left = left
        self.region = region  # variable -> the index of its region
        self.copies: dict[int, list[int]] = {}  # variable that was split -> its copies
        self.parent: dict[int, int] = {}  # copy -> the variable, or copy, that was split

    def split_among(
        self, near: Collection[int], inside: Sequence[int] = (), often: Counter[Any] | None = None
    ) -> list[int]:
        """Split the `near` variable of the loosest factors; returns variables whose tables changed, or none.

        With it are split as many of its kind `inside` a region as were split there before, which `often` counts: those
        of a long loop are in few rounds.
        """
        able = [u for u in sorted(near) if self._can_split(u)]
        if not able:
            return []
        hub = min(able, key=lambda u: (self._looseness(u), u))
        kind = self._kind(hub)
        before = 0 if often is None else often[kind]
        alike = (u for u in inside if u != hub and self._kind(u) == kind and self._can_split(u))
        hubs = [hub, *itertools.islice(alike, before)]
        if often is not None:
            often[kind] += len(hubs)
        return list(itertools.chain.from_iterable(map(self._split, hubs)))

    def root(self, v: int) -> int:
        """The original variable of a copy, or of a copy's copy."""
        while v in self.parent:
            v = self.parent[v]
        return v

    def within(self, region: Sequence[int]) -> list[int]:
        """Copies whose neighbours are all inside a region."""
        if not self.copies:
            return []
        mine = set(region)
        around = self.left.neighbours(*region) - mine
        near = sorted(u for u in around if u not in self.region and u in self.parent)
        return [u for u in near if self.left.neighbours(u) <= {u, *mine}]

    def _can_split(self, u: int) -> bool:
        return len({frozenset(f.scope) for f in self.left.factors[u]}) > 1

    def _kind(self, u: int) -> Any:
        """A key of variables that have the same tables."""
        tables = sorted(id(f.table) for f in self.left.factors[u])
        return id(self.left.costs[u]), *tables

    def _looseness(self, u: int) -> float:
        """The score of a variable that may be split: lower is better.

        Good ones have many factors, which change little with its choice, so that copies which disagree save little.
        """
        factors = self.left.factors[u]
        return sum(self._spread(f, f.scope.index(u)) for f in factors) / len(factors) ** 2

    def _spread(self, factor: Factor, axis: int) -> float:
        """The largest difference within a factor along one of its axes."""

        def most() -> float:
            finite = np.isfinite(factor.table)
            highest = np.where(finite, factor.table, -math.inf).max(axis)
            spread = highest - np.where(finite, factor.table, math.inf).min(axis)
            return float(spread[np.isfinite(spread)].max(initial=0.0))

        return float(self.left.once(("spread", axis), (factor.table,), most))

    def _split(self, hub: int) -> list[int]:
        """Replace a variable by copies with equal shares of its cost; returns them and the variables around."""
        left = self.left
        cost, factors = left.take(hub)
        groups = self._groups(hub, factors)
        share = left.once(("share", len(groups)), (cost,), lambda: cost / len(groups))
        touched = set[int]()
        made = list[int]()
        for group in groups:
            copy = left.count
            left.count = left.count + 1
            left.costs[copy] = share
            left.factors[copy] = []
            made.append(copy)
            for f in group:
                touched.update(u for u in f.scope if u != hub)
                left.add(f.over({hub: copy}))
        root = self.root(hub)  # A copy may be split again; `copies` is kept for the original variable.
        self.copies[root] = [c for c in self.copies.get(root, ()) if c != hub] + made
        self.parent.update(dict.fromkeys(made, hub))
        return [*made, *touched]

    def _groups(self, hub: int, factors: Sequence[Factor]) -> list[list[Factor]]:
        """The factors of each copy: those of one region, or if there is only one, those of one neighbour."""
        for by_region in (True, False):
            groups: dict[Any, list[Factor]] = {}
            for f in factors:
                others = tuple(sorted(u for u in f.scope if u != hub))
                regions = {self.region.get(u) for u in others} if by_region else {None}
                is_inside = len(regions) == 1 and regions != {None}
                groups.setdefault(regions.pop() if is_inside else others, []).append(f)
            if len(groups) > 1:
                break
        return list(groups.values())


@dataclass(frozen=True, slots=True, eq=False)
class _Eliminated:
    """An eliminated variable, with the tables that decide its choice."""

    variable: int
    cost: np.ndarray
    factors: list[Factor]

    def totals(self, decided: Mapping[int, int]) -> np.ndarray:
        """The cost of each of its choices, given the choices of its neighbours."""
        total = self.cost.copy()
        for f in self.factors:
            total += f.table[tuple(m if u == self.variable else m[decided[u]] for u, m in f.axes())]
        return total


@dataclass(frozen=True, slots=True, eq=False)
class _Contracted:
    """A contracted region, the variables around it in the order of its tables, and the elimination of it.

    `run` may be that of an earlier region with the same tables.
    """

    inside: tuple[int, ...]
    around: tuple[int, ...]
    run: Elimination


class Elimination:
    """One elimination of a problem, with some variables `fixed` at a choice.

    With `kept`, the problem is a region: so many last variables stay, and tables that are too wide raise `TooWide`.
    """

    def __init__(self, problem: Problem, fixed: Mapping[int, int], widest: int, kept: int | None = None) -> None:
        self.widest = widest
        self.fixed = dict(fixed)
        self.is_region = kept is not None
        self.last = len(problem.costs) - (kept or 0)  # the first variable that is kept; all later ones are too
        self.zeros = problem.costs[self.last :]  # the costs of the kept variables, before it
        self.dtype = problem.costs[0].dtype
        self.left = Remainder(problem, fixed)
        self.hubs = Hubs(self.left, {v: i for i, region in enumerate(problem.regions) for v in region})
        self.steps: list[_Eliminated | _Contracted] = []
        self._within: dict[tuple[int, ...], tuple[list[int], list[np.ndarray]]] = {}
        self._run(problem.regions)
        self.bound = self.left.constant
        decided, self.marginals = ({}, {}) if self.is_region else self._decide(self.fixed)
        self.picked = [decided[v] for v in range(len(problem.costs))] if decided else []

    @property
    def copies(self) -> Mapping[int, Sequence[int]]:
        """The copies of each variable that was split."""
        return self.hubs.copies

    def _run(self, regions: Sequence[Sequence[int]]) -> None:
        """Eliminate variables away from regions while that is cheap, then each region, then the rest."""
        costs = self.left.costs
        if regions:  # Before hubs are split, so that their copies share the cost of what leads to them.
            near = self.left.neighbours(*(v for v in self.hubs.region if v in self.left.factors))
            self._eliminate({v for v in costs if v not in near and v < self.last}, only_cheap=True)
        for region in regions:
            self._contract(tuple(v for v in region if v in costs))
        self._eliminate({v for v in costs if v < self.last} if self.is_region else None)

    # -- regions

    def _contract(self, region: tuple[int, ...]) -> None:
        """Replace a region by tables over its surroundings; split hubs where these would be too wide."""
        left = self.left
        often = Counter[Any]()
        while region:
            inside = (*region, *self.hubs.within(region))
            around, run = self._region_run(inside)
            if not isinstance(run, TooWide):
                self._replace(inside, around, run)
                return
            number = (*inside, *around)
            near = {number[n] for n in run.near}
            if self.is_region:  # The variables that a region keeps must not be split.
                raise TooWide(near)
            if not self.hubs.split_among(near, inside, often):
                return  # The elimination of everything takes it, without a limit where nothing can be split.
            region = tuple(v for v in region if v in left.costs)  # The variable that was split may be a member.

    def _region_run(self, inside: tuple[int, ...]) -> tuple[tuple[int, ...], Elimination | TooWide]:
        """The variables around a region, and its elimination, shared with regions of the same tables."""
        left = self.left
        number = {v: i for i, v in enumerate(inside)}
        factors = list({id(f): f for v in inside for f in left.factors[v]}.values())
        for f in factors:
            for u in f.scope:
                number.setdefault(u, len(number))
        around = tuple(number)[len(inside) :]
        costs = [left.costs[v] for v in inside]
        sizes = tuple(len(left.costs[u]) for u in around)
        numbers = tuple(f.numbers(number) for f in factors)
        tables = (*costs, *itertools.chain.from_iterable(f.tables() for f in factors))
        # Whether tables get too wide depends on classes alone: it is found out once for all problems of a space.
        shape = ("wide", self.widest, tuple(map(len, costs)), sizes, numbers, tuple(f.generation for f in factors))
        wide: list[TooWide] = left.shapes(shape, tuple(m for f in factors for m in f.classes), list)
        if wide:
            return around, wide[0]

        def run() -> Elimination | TooWide:
            zeros = [self._zeros(len(left.costs[u])) for u in around]
            problem = Problem([*costs, *zeros], [f.over(number) for f in factors], (), left.once, left.shapes)
            try:
                return Elimination(problem, {}, self.widest, len(around))
            except TooWide as e:
                wide.append(e.with_traceback(None))  # The frames of the traceback would keep all tables alive.
                return wide[0]

        return around, left.once(("region", len(inside), sizes, numbers), tables, run)

    def _zeros(self, n: int) -> np.ndarray:
        return self.left.once(("zeros", n), (), lambda: np.zeros(n, self.dtype))

    def _replace(self, inside: tuple[int, ...], around: tuple[int, ...], run: Elimination) -> None:
        """Replace a region by the tables that its elimination has left."""
        left = self.left
        for v in inside:
            left.take(v)
        left.constant += run.left.constant
        for i, u in enumerate(around, len(inside)):
            more = run.left.costs[i]
            if more is not run.zeros[i - len(inside)]:
                left.add_cost(u, more)
        kept = range(len(inside), len(inside) + len(around))
        for f in {id(f): f for v in kept for f in run.left.factors[v]}.values():
            left.add(Factor(tuple(around[u - len(inside)] for u in f.scope), f.classes, f.table))
        self.steps.append(_Contracted(inside, around, run))

    # -- elimination

    def _eliminate(self, among: Collection[int] | None, only_cheap: bool = False) -> None:
        """Eliminate some variables, or all, in the order of the narrowest resulting table."""
        left = self.left
        queue = list[tuple[_Rank, int]]()
        current: dict[int, _Rank] = {}

        def rank(v: int) -> None:
            if among is None or v in among:
                current[v] = self._rank(v)
                heapq.heappush(queue, (current[v], v))

        for v in left.costs:
            rank(v)
        while queue:
            priority, v = heapq.heappop(queue)
            if current.get(v) != priority or v not in left.costs or (only_cheap and priority[0] > _LIMITS.cheap):
                continue
            changed = self._split_around(v) if priority[0] > self.widest else []
            if changed:
                heapq.heappush(queue, (priority, v))
            else:
                changed = self._eliminate_one(v)
                del current[v]
            for u in changed:
                rank(u)

    def _rank(self, v: int) -> _Rank:
        """The priority of a variable: the width of the table that eliminating it leaves, lower first.

        Where tables are equal, or cheap, factors from fewer eliminations come first: chains are halved rather than
        eaten from one end.
        """
        factors = self.left.factors[v]
        width = _width(v, factors, self.left.costs)
        return width if width > _LIMITS.cheap else 0, max((f.generation for f in factors), default=0), len(factors)

    def _split_around(self, v: int) -> Sequence[int]:
        """Split a variable near one whose elimination is too wide; returns the variables whose tables changed."""
        near = self.left.neighbours(*self.left.neighbours(v))
        if self.is_region:
            raise TooWide(near)
        return self.hubs.split_among(near)

    def _eliminate_one(self, v: int) -> Sequence[int]:
        """Replace a variable by a factor over its neighbours; returns these."""
        cost, factors = self.left.take(v)
        self.steps.append(_Eliminated(v, cost, factors))
        scope = tuple(sorted({u for f in factors for u in f.scope if u != v}))
        place = {u: i for i, u in enumerate(scope)}
        numbers = tuple(f.numbers(place) for f in factors)
        tables = (cost, *itertools.chain.from_iterable(f.tables() for f in factors))
        made = self.left.once(
            ("eliminate", numbers), tables, lambda: minimum_over(v, cost, factors, scope, self.left.shapes)
        )
        classes, table = made
        self.left.add(Factor(scope, classes, table, 1 + max((f.generation for f in factors), default=0)))
        return scope

    # -- choices

    def _decide(self, given: Mapping[int, int]) -> tuple[dict[int, int], dict[int, np.ndarray]]:
        """The choice of every variable, and the costs of all choices of each copy of a split variable.

        For a region, costs are those of all its variables, as copies split outside may lie inside.
        """
        parent = self.hubs.parent
        decided: dict[int, int] = dict(given)
        marginals: dict[int, np.ndarray] = {}
        for step in reversed(self.steps):
            if isinstance(step, _Contracted):
                picks, totals = step.run.within(tuple(decided[u] for u in step.around))
                decided.update(zip(step.inside, picks, strict=True))
                costs = list(zip(step.inside, totals, strict=True)) if parent else []
            else:
                total = step.totals(decided)
                decided[step.variable] = int(np.argmin(total))
                costs = [(step.variable, total)]
            for v, total in costs:
                if v in parent or self.is_region:
                    marginals[v] = total
                hub = v
                while hub in parent:  # Steps before the split refer to the original variable.
                    hub = parent[hub]
                    decided.setdefault(hub, decided[v])
        return decided, marginals

    def within(self, around: tuple[int, ...]) -> tuple[list[int], list[np.ndarray]]:
        """A region's choices, given those around it, and the costs of all choices of each variable inside."""
        if around not in self._within:
            decided, totals = self._decide({self.last + i: choice for i, choice in enumerate(around)})
            self._within[around] = [decided[v] for v in range(self.last)], [totals[v] for v in range(self.last)]
        return self._within[around]


def _width(v: int, factors: Collection[Factor], costs: Mapping[int, np.ndarray]) -> int:
    """The entries of the table that eliminating a variable leaves; a cheap table is not counted exactly."""
    near = {u for f in factors for u in f.scope if u != v}
    most = math.prod(len(costs[u]) for u in near)
    if most <= _LIMITS.cheap:
        return most
    axes: dict[int, dict[int, int]] = {u: {} for u in near}
    for f in factors:
        for u, m, n in zip(f.scope, f.classes, f.table.shape, strict=True):
            if u != v:
                axes[u][id(m)] = n
    return math.prod(min(math.prod(maps.values()), len(costs[u])) for u, maps in axes.items())
