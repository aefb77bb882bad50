"""Exact minimisation of a sum of small tables by eliminating variables one after the other.

Where that grows too wide, a lower bound and a plan near it.

    variable     a site; its cost table is one number a choice
    factor       a table over classes of choices of some variables: an edge prices what leaves and what arrives, not
                 whole choices
    eliminate    add up all that a variable has a part in, minimise over it, and leave a factor over its neighbours

What was computed once for the same tables is found again by their identity. Regions (the layers of a model) are
contracted first, each to tables over what surrounds it: alike ones cost one, and the chain that they leave, halved and
not eaten from its end, its logarithm. A variable that many others neighbour (a rotary table, a mask, an encoder's
output) is split into copies when tables would grow over the limit, one a region if that is enough: the minimum of the
split problem is a lower bound, and its copies' choices, made one, a plan.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.graph.layers import block
from autopar.space.space import Space

WIDEST = 1 << 19  # entries of a table
_RIVALS, _NOWHERE = 12, 1e300  # kinds that others are compared with; and what stands for infinity there
_OPEN, _SWEEPS = (
    1e-3,
    4,
)  # of a cost: a gap that is worth a descent; and how often it goes through the variables that were split
_CHEAP = 1 << 16  # tables up to this size are all as good: what has been through least goes first


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A table over classes of choices: its axes are variables, each with the class of every choice."""

    scope: tuple[int, ...]
    classes: tuple[np.ndarray, ...]
    table: np.ndarray
    generation: int = 0  # how many eliminations it has been through


@dataclass(frozen=True, slots=True)
class Found:
    """Choices of all variables, their cost, and a number that no choices go under."""

    picked: list[int]
    cost: float
    bound: float
    split: tuple[int, ...] = ()  # variables that were split


@dataclass
class Problem:
    """Costs of the choices of each variable, and factors over them."""

    costs: list[np.ndarray]
    factors: list[Factor]
    regions: Sequence[Sequence[int]] = ()  # variables that are eliminated together, before all others
    memo: dict[Any, Any] = field(default_factory=dict)  # what was computed once, by the identity of its tables

    def __post_init__(self) -> None:
        alike: dict[bytes, np.ndarray] = {}
        known = {id(c): alike.setdefault(c.tobytes(), c) for c in {id(c): c for c in self.costs}.values()}
        self.costs = [known[id(c)] for c in self.costs]

    def value(self, picked: Sequence[int]) -> float:
        return float(
            sum(c[i] for c, i in zip(self.costs, picked, strict=True))
            + sum(f.table[tuple(m[picked[v]] for v, m in zip(f.scope, f.classes, strict=True))] for f in self.factors)
        )

    def minimise(self, widest: int = WIDEST, tries: int = 8, gap: float = 0.0) -> Found:
        """The best choices; where variables had to be split, the best of a few ways to make their copies agree."""
        try:
            return self._minimised(widest, tries, gap)
        finally:
            self.memo.clear()  # its runs know it, and it them: what nothing would free while the collector rests

    def _minimised(self, widest: int, tries: int, gap: float) -> Found:
        first = _Run(self, {}, widest)
        if not math.isfinite(first.bound) or not first.copies:
            return Found(
                first.picked, self.value(first.picked) if math.isfinite(first.bound) else math.inf, first.bound
            )
        fixed = _agreed(first)
        best: tuple[float, list[int]] = (math.inf, first.picked)
        options = itertools.chain([fixed], _neighbours(first, fixed))
        for chosen in itertools.islice(options, tries):
            run = _Run(self, chosen, widest)
            while run.copies:  # what is fixed changes the order of elimination, and with it what is too wide
                chosen = {**chosen, **_agreed(run)}
                run = _Run(self, chosen, widest)
            best = min(best, (self.value(run.picked), run.picked), key=lambda b: b[0])
            if best[0] - first.bound <= gap * best[0]:
                break
        if tries > 1 and math.isfinite(best[0]) and best[0] - first.bound > max(gap, _OPEN) * best[0]:
            best = self._descended(best, set(first.copies), first.bound, widest)
        return Found(best[1], best[0], first.bound, tuple(first.copies))

    def _descended(
        self, best: tuple[float, list[int]], hubs: set[int], bound: float, widest: int
    ) -> tuple[float, list[int]]:
        """Better choices, from some: of each variable that was split in turn the best while the others that were keep
        theirs, as long as that helps.
        """
        cost, picked = best
        for _ in range(_SWEEPS):
            before = cost
            for hub in sorted(hubs):
                least = self.by_choice(hub, picked, widest, hubs)
                choice = int(np.argmin(least))
                if least[choice] < cost - _OPEN * max(0.0, cost - bound):
                    cost, picked = float(least[choice]), [*picked[:hub], choice, *picked[hub + 1 :]]
            if cost == before or cost - bound <= _OPEN * cost:
                break
        if cost == best[0]:
            return best
        run = _Run(self, {hub: picked[hub] for hub in sorted(hubs)}, widest)
        return min(best, (self.value(run.picked), run.picked), key=lambda b: b[0])

    def by_choice(
        self, v: int, picked: Sequence[int], widest: int = WIDEST, hubs: set[int] | None = None
    ) -> np.ndarray:
        """For each choice of one variable the least that everything costs with it.

        Where tables would be too wide, variables that many neighbour keep what is `picked`.

        `hubs` are those of calls before, and are added to: what was too wide for one variable is for the next.
        """
        last = (
            len(self.costs) - 1
        )  # a run keeps what comes last: the variable changes places with it, and all else stays as it is
        swapped = {v: last, last: v}
        costs = list(self.costs)
        costs[v], costs[last] = costs[last], costs[v]
        moved = {v, last}
        factors = [
            f if moved.isdisjoint(f.scope) else Factor(tuple(swapped.get(u, u) for u in f.scope), f.classes, f.table)
            for f in self.factors
        ]
        regions = [
            region if moved.isdisjoint(region) else [swapped.get(u, u) for u in region if u != v]
            for region in self.regions
        ]
        problem = Problem(costs, factors, regions, self.memo)
        hubs = set() if hubs is None else hubs
        while True:
            try:
                run = _Run(problem, {swapped.get(u, u): picked[u] for u in sorted(hubs) if u != v}, widest, kept=1)
                return run.constant + run.costs[last]
            except _TooWide as e:
                degree = Counter(u for f in self.factors for u in f.scope)
                near = [swapped.get(u, u) for u in e.near if u < last]
                hubs.add(max((u for u in near if u not in hubs), key=lambda u: (degree[u], -u)))


def regions_of(space: Space) -> list[list[int]]:
    """The layers of a model, by the numbers in names: of each the sites whose values do not leave it.

    Names are only where to look: layers are one if their tables are.
    """
    blocks = [block(s.name.partition("/")[0]) for s in space.sites]
    region = {i: path for i, path in enumerate(blocks) if path}
    leaves = {e.source for e in space.edges if region.get(e.source) != region.get(e.target)}
    found: dict[str, list[int]] = {}
    for i, name in region.items():
        if i not in leaves:
            found.setdefault(name, []).append(i)
    return [region for region in found.values() if len(region) > 1]


def _agreed(run: _Run) -> dict[int, int]:
    """Of each split variable the choice that costs its copies least together."""
    return {v: int(np.argmin(np.sum([run.marginals[c] for c in copies], axis=0))) for v, copies in run.copies.items()}


def _neighbours(run: _Run, fixed: Mapping[int, int]) -> Any:
    """The agreement with one split variable at another of the choices that its copies asked for."""
    for v, copies in run.copies.items():
        asked = sorted(
            {run.wished[c] for c in copies} - {fixed[v]}, key=lambda k: sum(run.marginals[c][k] for c in copies)
        )
        for k in asked[:3]:
            yield {**fixed, v: k}


@dataclass(frozen=True, slots=True, eq=False)
class _Contracted:
    """A region, and the variables around it in the order that its tables speak of.

    `run` is of the first region that was alike.
    """

    inside: tuple[int, ...]
    around: tuple[int, ...]
    run: _Run


class _TooWide(Exception):
    """A region cannot be contracted: these variables make its tables wide."""

    def __init__(self, near: set[int]) -> None:
        super().__init__()
        self.near = near


class _Run:
    """One elimination of everything but some variables that are kept, with others held at a choice."""

    def __init__(self, problem: Problem, fixed: Mapping[int, int], widest: int, kept: int | None = None) -> None:
        self.memo, self.widest, self.is_region, self.kept = (
            problem.memo,
            widest,
            kept is not None,
            kept or 0,
        )  # the last `kept` variables stay
        self.zeros: list[np.ndarray] = problem.costs[len(problem.costs) - self.kept :]
        self._within: dict[tuple[int, ...], tuple[list[int], list[np.ndarray]]] = {}
        self.costs: dict[int, np.ndarray] = dict(enumerate(problem.costs))
        self.of: dict[int, list[Factor]] = {v: [] for v in self.costs}
        self.copies: dict[int, list[int]] = {}  # of each variable that was split
        self.parent: dict[int, int] = {}  # of each copy: what was split
        self.constant, self.fixed, self.count = 0.0, dict(fixed), len(problem.costs)
        for v, choice in fixed.items():
            self.constant += float(self.costs.pop(v)[choice])
        for factor in problem.factors:
            self._add(self._without_fixed(factor))
        self.steps: list[tuple[int, np.ndarray, list[Factor]] | _Contracted] = []
        self.region = {v: i for i, region in enumerate(problem.regions) for v in region}
        if problem.regions:  # what leads to a hub first: its copies share the cost of that
            near = {u for v in self.region if v in self.of for f in self.of[v] for u in f.scope}
            self._eliminate_all([v for v in self.costs if v not in near and v < self.count - self.kept])
        for region in problem.regions:
            self._contract(tuple(v for v in region if v in self.costs))
        self._eliminate_all()
        self.bound = self.constant
        if not self.is_region:
            decided, self.marginals = self._decide(self.fixed)
            self.wished = {v: int(np.argmin(total)) for v, total in self.marginals.items()}
            self.picked = [decided[v] for v in range(len(problem.costs))]

    def _without_fixed(self, factor: Factor) -> Factor:
        held = [i for i, v in enumerate(factor.scope) if v in self.fixed]
        if not held:
            return factor
        at = tuple(
            int(m[self.fixed[v]]) if v in self.fixed else slice(None)
            for v, m in zip(factor.scope, factor.classes, strict=True)
        )
        key = (
            "fixed",
            id(factor.table),
            at if all(not isinstance(a, slice) for a in at) else tuple(a if isinstance(a, int) else None for a in at),
        )
        table = self._once(key, (factor.table,), lambda: factor.table[at])
        rest = [i for i in range(len(factor.scope)) if i not in held]
        return Factor(tuple(factor.scope[i] for i in rest), tuple(factor.classes[i] for i in rest), table)

    def _once(self, key: Any, held: Any, compute: Any) -> Any:
        """What a key names, computed the first time.

        What its identities belong to is held, so that they stay theirs.
        """
        if key not in self.memo:
            self.memo[key] = (held, compute())
        return self.memo[key][1]

    def _add(self, factor: Factor) -> None:
        if 1 in factor.table.shape:  # a variable that is seen as one class has no part in it
            seen = [i for i, n in enumerate(factor.table.shape) if n > 1]
            table = self._once(
                ("squeezed", id(factor.table)),
                factor.table,
                lambda: factor.table.reshape([factor.table.shape[i] for i in seen]),
            )
            factor = Factor(
                tuple(factor.scope[i] for i in seen), tuple(factor.classes[i] for i in seen), table, factor.generation
            )
        if not factor.scope:
            self.constant += float(factor.table)
        elif len(factor.scope) == 1:
            (v,), (m,), before = factor.scope, factor.classes, self.costs[factor.scope[0]]
            self.costs[v] = self._once(
                ("unary", id(before), id(factor.table), id(m)),
                (before, factor.table, m),
                lambda: before + factor.table[m],
            )
        else:
            for v in factor.scope:
                self.of[v].append(factor)

    # -- regions

    def _contract(self, region: tuple[int, ...]) -> None:
        """Put tables over what surrounds a region in its place; where they are too wide, split what makes them so."""
        while region:
            inside = (*region, *(v for v in self._copies_within(region)))
            number = {v: i for i, v in enumerate(inside)}
            factors: dict[int, Factor] = {id(f): f for v in inside for f in self.of[v]}
            for f in factors.values():
                for u in f.scope:
                    number.setdefault(u, len(number))
            around = tuple(number)[len(inside) :]
            lines = [
                (id(f.table), *((number[u], id(m)) for u, m in zip(f.scope, f.classes, strict=True)))
                for f in factors.values()
            ]
            key = (
                "region",
                len(region),
                *(id(self.costs[v]) for v in inside),
                *(len(self.costs[u]) for u in around),
                *lines,
            )
            run = self._once(
                key,
                (list(factors.values()), [self.costs[v] for v in inside]),
                lambda inside=inside, around=around, number=number, factors=factors: self._run_within(
                    inside, around, number, factors
                ),
            )
            if not isinstance(run, _TooWide):
                break
            names = list(number)
            if self.is_region:  # what is kept is one variable
                raise _TooWide({names[n] for n in run.near})
            able = [u for u in sorted(names[n] for n in run.near) if self._can_split(u)]
            if not able:
                return  # left to the elimination of everything, which knows no limit where nothing can be split
            self._split(min(able, key=lambda u: (self._looseness(u), u)))
            region = tuple(v for v in region if v in self.costs)  # it may have been one of them
        else:
            return
        for v in inside:
            for f in self.of.pop(v):
                for u in f.scope:
                    if u in self.of:
                        self.of[u] = [g for g in self.of[u] if g is not f]
            del self.costs[v]
        self.constant += run.constant
        for i, u in enumerate(around):
            more = run.costs[len(inside) + i]
            if more is not run.zeros[i]:
                self.costs[u] = self._once(
                    ("more", id(self.costs[u]), id(more)),
                    (self.costs[u], more),
                    lambda u=u, more=more: self.costs[u] + more,
                )
        left = {id(f): f for i in range(len(around)) for f in run.of[len(inside) + i]}
        for f in left.values():
            self._add(Factor(tuple(around[u - len(inside)] for u in f.scope), f.classes, f.table))
        self.steps.append(_Contracted(inside, around, run))

    def _copies_within(self, region: tuple[int, ...]) -> list[int]:
        """Copies of split variables that nothing outside of the region neighbours."""
        if not self.copies:
            return []
        mine = set(region)
        near = sorted(
            {
                u
                for v in region
                for f in self.of[v]
                for u in f.scope
                if u not in self.region and u not in mine and u in self.parent
            }
        )
        return [u for u in near if all(x == u or x in mine for f in self.of[u] for x in f.scope)]

    def _run_within(
        self, inside: tuple[int, ...], around: tuple[int, ...], number: Mapping[int, int], factors: Mapping[int, Factor]
    ) -> _Run | _TooWide:
        zeros = [
            self._once(("zeros", len(self.costs[u])), None, lambda u=u: np.zeros(len(self.costs[u]))) for u in around
        ]
        moved = [Factor(tuple(number[u] for u in f.scope), f.classes, f.table, f.generation) for f in factors.values()]
        try:
            return _Run(
                Problem([*(self.costs[v] for v in inside), *zeros], moved, memo=self.memo), {}, self.widest, len(around)
            )
        except _TooWide as e:
            return e

    # -- elimination

    def _eliminate_all(self, among: Collection[int] | None = None) -> None:
        """Eliminate one after the other; `among` some, those that are cheap."""
        queue: list[tuple[Any, int]] = []
        current: dict[int, Any] = {}
        wanted = set(among) if among is not None else set(range(self.count - self.kept)) if self.is_region else None

        def rank(v: int) -> None:
            if wanted is None or v in wanted:
                current[v] = self._rank(v)
                heapq.heappush(queue, (current[v], v))

        for v in self.costs:
            rank(v)
        while queue:
            priority, v = heapq.heappop(queue)
            if current.get(v) != priority or v not in self.costs:
                continue
            if among is not None and priority[0] > _CHEAP:
                continue
            if priority[0] > self.widest:
                near = {u for f in self.of[v] for u in f.scope}
                near |= {x for u in near for f in self.of[u] for x in f.scope}
                if self.is_region:
                    raise _TooWide(near)
                able = [u for u in sorted(near) if self._can_split(u)]
                if able:
                    for u in self._split(min(able, key=lambda u: (self._looseness(u), u))):
                        rank(u)
                    heapq.heappush(queue, (priority, v))
                    continue
            for u in self._eliminate(v):
                rank(u)
            del current[v]

    def _rank(self, v: int) -> tuple[int, int, int]:
        """How wide a table its elimination leaves.

        Among equals, or where all is cheap, the ones that have been through least, so that chains are halved and not
        eaten from one end.
        """
        axes: dict[int, dict[int, int]] = {}
        for f in self.of[v]:
            for u, m, n in zip(f.scope, f.classes, f.table.shape, strict=True):
                if u != v:
                    axes.setdefault(u, {})[id(m)] = n
        width = math.prod(min(math.prod(maps.values()), len(self.costs[u])) for u, maps in axes.items())
        return width if width > _CHEAP else 0, max((f.generation for f in self.of[v]), default=0), len(self.of[v])

    def _can_split(self, u: int) -> bool:
        return len({tuple(sorted(x for x in f.scope if x != u)) for f in self.of[u]}) > 1

    def _looseness(self, u: int) -> float:
        """The lower, the better it is split.

        Its factors change little with its choice, so that disagreeing copies save little, and many neighbour it.
        """
        return sum(self._spread(f, f.scope.index(u)) for f in self.of[u]) / len(self.of[u]) ** 2

    def _spread(self, factor: Factor, axis: int) -> float:
        def most() -> float:
            finite = np.isfinite(factor.table)
            spread = np.where(finite, factor.table, -math.inf).max(axis) - np.where(finite, factor.table, math.inf).min(
                axis
            )
            return float(spread[np.isfinite(spread)].max(initial=0.0))

        return float(self._once(("spread", id(factor.table), axis), factor.table, most))

    def _split(self, hub: int) -> list[int]:
        """One copy for each region that neighbours it, or else for each neighbour, with an equal share of the cost."""
        factors, cost = self.of.pop(hub), self.costs.pop(hub)
        groups: dict[Any, list[Factor]] = {}
        for by_region in (True, False):
            groups.clear()
            for f in factors:
                others = tuple(sorted(u for u in f.scope if u != hub))
                within = {self.region.get(u) for u in others} if by_region else {None}
                groups.setdefault(others if within == {None} or len(within) > 1 else within.pop(), []).append(f)
            if len(groups) > 1:
                break
        share = self._once(("share", id(cost), len(groups)), cost, lambda: cost / len(groups))
        touched, made = set(), []
        for group in groups.values():
            copy, self.count = self.count, self.count + 1
            self.costs[copy], self.of[copy] = share, []
            made.append(copy)
            for f in group:
                for u in f.scope:
                    if u != hub:
                        self.of[u].remove(f)
                        touched.add(u)
                self._add(Factor(tuple(copy if u == hub else u for u in f.scope), f.classes, f.table, f.generation))
        root = hub
        while root in self.parent:  # a copy that is split again
            root = self.parent[root]
        self.copies[root] = [c for c in self.copies.get(root, ()) if c != hub] + made
        self.parent.update(dict.fromkeys(made, hub))
        return [*made, *touched]

    def _eliminate(self, v: int) -> set[int]:
        cost, factors = self.costs.pop(v), self.of.pop(v)
        self.steps.append((v, cost, factors))
        neighbours: set[int] = set()
        for f in factors:
            for u in f.scope:
                if u != v:
                    self.of[u].remove(f)
                    neighbours.add(u)
        scope = tuple(sorted(neighbours))
        place = {u: i for i, u in enumerate(scope)}
        key = (
            "eliminate",
            id(cost),
            tuple(
                (id(f.table), tuple((place.get(u, -1), id(m)) for u, m in zip(f.scope, f.classes, strict=True)))
                for f in factors
            ),
        )
        classes, table = self._once(key, (cost, factors), lambda: _minimised(v, cost, factors, scope))
        self._add(Factor(scope, classes, table, 1 + max((f.generation for f in factors), default=0)))
        return neighbours

    # -- choices

    def _decide(self, given: Mapping[int, int]) -> tuple[dict[int, int], dict[int, np.ndarray]]:
        """Backwards through the eliminations: each variable takes what is best for those decided after it.

        With what each copy of a split variable would pay for each choice.
        """
        decided: dict[int, int] = dict(given)
        marginals: dict[int, np.ndarray] = {}
        for step in reversed(self.steps):
            if isinstance(step, _Contracted):
                picks, totals = step.run.within(tuple(decided[u] for u in step.around))
                decided.update(zip(step.inside, picks, strict=True))
                copies = [(v, totals[i]) for i, v in enumerate(step.inside) if v in self.parent] if self.parent else []
            else:
                v, cost, factors = step
                total = self._total(v, cost, factors, decided)
                decided[v] = int(np.argmin(total))
                copies = [(v, total)] if v in self.parent or self.is_region else []
            for v, total in copies:
                marginals[v] = total
                hub = v
                while hub in self.parent:  # what was eliminated before the split asks for it
                    hub = self.parent[hub]
                    decided.setdefault(hub, decided[v])
        return decided, marginals

    @staticmethod
    def _total(v: int, cost: np.ndarray, factors: Sequence[Factor], decided: Mapping[int, int]) -> np.ndarray:
        total = cost.copy()
        for f in factors:
            total += f.table[tuple(m if u == v else m[decided[u]] for u, m in zip(f.scope, f.classes, strict=True))]
        return total

    def within(self, around: tuple[int, ...]) -> tuple[list[int], list[np.ndarray]]:
        """The choices of a region whose surroundings have decided, and what each of its variables would pay for every
        choice.
        """
        if around not in self._within:
            first = self.count - self.kept
            decided, totals = self._decide({first + i: choice for i, choice in enumerate(around)})
            self._within[around] = [decided[v] for v in range(first)], [totals[v] for v in range(first)]
        return self._within[around]


def _minimised(
    v: int, cost: np.ndarray, factors: Sequence[Factor], scope: tuple[int, ...]
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The minimum over one variable of its cost and its factors.

    The classes of each neighbour, and the table over them.
    """
    maps: list[list[np.ndarray]] = [[] for _ in scope]  # the different classes by which factors see each neighbour
    for f in factors:
        for u, m in zip(f.scope, f.classes, strict=True):
            if u != v and not any(m is known for known in maps[scope.index(u)]):
                maps[scope.index(u)].append(m)
    joint, views = [], []
    for known in maps:
        rows, inverse = (
            np.unique(np.stack(known), axis=1, return_inverse=True)
            if len(known) > 1
            else (np.arange(known[0].max() + 1)[None], known[0])
        )
        joint.append(np.asarray(inverse).reshape(-1))
        views.append({id(m): rows[i] for i, m in enumerate(known)})
    own = (
        np.stack([m for f in factors for u, m in zip(f.scope, f.classes, strict=True) if u == v])
        if factors
        else np.zeros((1, len(cost)), int)
    )
    finite = np.flatnonzero(np.isfinite(cost))
    shape = tuple(int(j.max()) + 1 for j in joint)
    result = np.full(shape, math.inf)
    if not len(finite):
        return tuple(joint), result
    kinds, where = np.unique(own[:, finite], axis=1, return_inverse=True)
    least = np.full(kinds.shape[1], math.inf)
    np.minimum.at(least, np.asarray(where).reshape(-1), cost[finite])
    terms = []
    for f in factors:  # each with the variable first, its other axes where the result has them
        others = [u for u in f.scope if u != v]
        table = np.moveaxis(f.table, f.scope.index(v), 0)
        for axis, u in enumerate(others):
            table = np.take(table, views[scope.index(u)][id(f.classes[f.scope.index(u)])], axis=axis + 1)
        order = np.argsort([scope.index(u) for u in others], kind="stable")
        table = table.transpose(0, *(int(o) + 1 for o in order))
        wide = [1] * len(scope)
        for o in order:
            wide[scope.index(others[int(o)])] = shape[scope.index(others[int(o)])]
        terms.append(table.reshape(table.shape[0], *wide))
    order_of = sorted(
        range(len(terms)), key=lambda i: math.prod(terms[i].shape[1:])
    )  # what is small is added up before it is spread
    whole: np.ndarray = np.empty(shape)
    for k in _undominated(least, terms, kinds) if kinds.shape[1] * result.size > _CHEAP else range(kinds.shape[1]):
        total: Any = least[k]
        for i in order_of[:-1]:
            total = total + terms[i][kinds[i, k]]
        if order_of:  # without factors there is one kind, and no term
            total = np.add(total, terms[order_of[-1]][kinds[order_of[-1], k]], out=whole)
        np.minimum(result, total, out=result)
    return tuple(joint), result


def _undominated(least: np.ndarray, terms: Sequence[np.ndarray], kinds: np.ndarray) -> list[int]:
    """The kinds of a variable that some neighbours may want.

    Not those that a kind which looks cheap beats, whatever the neighbours do.
    """
    rows = [
        np.minimum(term.reshape(term.shape[0], -1), _NOWHERE) for term in terms
    ]  # finite, so that what leads nowhere can be compared
    rough = least + sum(r.mean(axis=1)[own] for r, own in zip(rows, kinds, strict=True))
    left: np.ndarray = np.isfinite(least)
    for rival in np.argsort(rough, kind="stable")[:_RIVALS]:
        if not left[rival]:
            continue
        worst = least[rival] - least  # by how much the rival can be dearer than each kind
        for r, own in zip(rows, kinds, strict=True):
            worst = worst + (r[own[rival]] - r).max(axis=1)[own]
        beaten = worst <= 0
        beaten[rival] = False
        left &= ~beaten
    return [int(k) for k in np.flatnonzero(left)]
