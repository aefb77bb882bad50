"""Exact minimisation of a sum of small tables, by eliminating one variable after the other.

Where that grows too wide, a lower bound and a plan near it: variables that many others neighbour are split into copies
(`elimination.py`). The minimum of the split problem is a lower bound, and its copies' choices, made one, a plan.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.graph.layers import block
from autopar.solver.elimination import Elimination, TooWide
from autopar.solver.limits import LIMITS
from autopar.solver.tables import Factor, Problem
from autopar.space.space import Space

_LIMITS = LIMITS.elimination


_Best = tuple[float, list[int]]  # a cost, and the choices that have it


@dataclass(frozen=True, slots=True)
class Found:
    """Choices of all variables with their cost, and a lower bound of the cost of any choices."""

    picked: list[int]
    cost: float
    bound: float
    split: tuple[int, ...] = ()  # variables that were split


def minimise(
    problem: Problem,
    widest: int = _LIMITS.widest,
    tries: int = _LIMITS.agreements,
    gap: float = 0.0,
    is_rough: bool = False,
) -> Found:
    """The choices of least cost, or the best of a few `tries` if variables had to be split.

    Each try makes the copies of split variables agree in another way. `is_rough` computes in single precision: the
    bound is then no proof.
    """
    if is_rough:
        found = minimise(problem.in_single_precision(), widest, tries, gap)
        return replace(found, cost=problem.value(found.picked))
    try:
        return _minimised(problem, widest, tries, gap)
    finally:
        # Results and eliminations refer to each other, and planning runs with garbage collection off.
        problem.once.clear()


def _minimised(problem: Problem, widest: int, tries: int, gap: float) -> Found:
    first = Elimination(problem, {}, widest)
    if not math.isfinite(first.bound):
        return Found(first.picked, math.inf, first.bound)
    if not first.copies:
        return Found(first.picked, problem.value(first.picked), first.bound)
    agreed = _agreed(first)
    best: _Best = (math.inf, first.picked)
    for chosen in itertools.islice(itertools.chain([agreed], _neighbours(first, agreed)), tries):
        run = Elimination(problem, chosen, widest)
        # Fixed variables change the order of elimination, which may split others.
        while run.copies:
            chosen = {**chosen, **_agreed(run)}
            run = Elimination(problem, chosen, widest)
        best = _better(problem, best, run)
        if best[0] - first.bound <= gap * best[0]:
            break
    if tries > 1 and math.isfinite(best[0]) and best[0] - first.bound > max(gap, _LIMITS.worth) * best[0]:
        best = _descended(problem, best, set(first.copies), first.bound, widest)
    return Found(best[1], best[0], first.bound, tuple(first.copies))


def _better(problem: Problem, best: _Best, run: Elimination) -> _Best:
    cost = problem.value(run.picked)
    return best if best[0] <= cost else (cost, run.picked)


def _agreed(run: Elimination) -> dict[int, int]:
    """The choice of each split variable with the least total cost over its copies."""
    agreed = {}
    for v, copies in run.copies.items():
        agreed[v] = int(np.argmin(np.sum([run.marginals[c] for c in copies], axis=0)))
    return agreed


def _neighbours(run: Elimination, agreed: Mapping[int, int]) -> Iterator[dict[int, int]]:
    """Variants of an agreement, with one split variable at another choice that one of its copies prefers."""
    for v, copies in run.copies.items():
        totals = [run.marginals[c] for c in copies]
        asked = {int(np.argmin(total)) for total in totals} - {agreed[v]}
        for k in sorted(asked, key=lambda k: sum(total[k] for total in totals))[: _LIMITS.choices]:
            yield {**agreed, v: k}


def _descended(problem: Problem, best: _Best, hubs: set[int], bound: float, widest: int) -> _Best:
    """Better choices by coordinate descent over the split variables.

    Each takes in turn the choice that is best while the other split ones keep theirs, as long as that helps.
    """
    cost, picked = best
    for _ in range(_LIMITS.sweeps):
        before = cost
        for hub in sorted(hubs):
            least = least_by_choice(problem, hub, picked, widest, hubs)
            choice = int(np.argmin(least))
            if least[choice] < cost - _LIMITS.worth * max(0.0, cost - bound):
                cost = float(least[choice])
                picked = [*picked[:hub], choice, *picked[hub + 1 :]]
        if cost == before or cost - bound <= _LIMITS.worth * cost:
            break
    if cost == best[0]:
        return best
    return _better(problem, best, Elimination(problem, {hub: picked[hub] for hub in sorted(hubs)}, widest))


def least_by_choice(
    problem: Problem, v: int, picked: Sequence[int], widest: int = _LIMITS.widest, hubs: set[int] | None = None
) -> np.ndarray:
    """For each choice of one variable, the least cost of everything with it.

    Where tables would be too wide, variables with many neighbours keep what is `picked`. `hubs` are those of earlier
    calls, and are added to: tables that were too wide for one variable are too wide for the next.
    """
    # An elimination keeps the last variables, so this one changes places with the last.
    last = len(problem.costs) - 1
    swapped = {v: last, last: v}
    changed = _with_last(problem, v, swapped)
    hubs = set() if hubs is None else hubs
    while True:
        fixed = {swapped.get(u, u): picked[u] for u in sorted(hubs) if u != v}
        try:
            run = Elimination(changed, fixed, widest, kept=1)
        except TooWide as e:
            degree = Counter(u for f in problem.factors for u in f.scope)
            near = [swapped.get(u, u) for u in e.near if u < last]
            hubs.add(max((u for u in near if u not in hubs), key=lambda u: (degree[u], -u)))
        else:
            return run.left.constant + run.left.costs[last]


def _with_last(problem: Problem, v: int, swapped: Mapping[int, int]) -> Problem:
    """The problem with one variable moved last and out of all regions; both problems share their memo."""
    moved = swapped.keys()
    costs = [problem.costs[swapped.get(u, u)] for u in range(len(problem.costs))]
    factors = [f if moved.isdisjoint(f.scope) else f.over(swapped) for f in problem.factors]
    regions: list[Sequence[int]] = []
    for region in problem.regions:
        others = [swapped.get(u, u) for u in region if u != v]
        regions.append(region if moved.isdisjoint(region) else others)
    return Problem(costs, factors, regions, problem.once, problem.shapes)


def regions_of(space: Space) -> list[list[int]]:
    """The sites of each layer whose values stay inside it, by the numbers in names.

    Names only say where to look: the work of a region is shared where its tables are those of another.
    """
    blocks = [block(s.name.partition("/")[0]) for s in space.sites]
    region = {i: path for i, path in enumerate(blocks) if path}
    leaves = {e.source for e in space.edges if region.get(e.source) != region.get(e.target)}
    found: dict[str, list[int]] = {}
    for i, name in region.items():
        if i not in leaves:
            found.setdefault(name, []).append(i)
    return [sites for sites in found.values() if len(sites) > 1]


def factors_of(space: Space) -> list[Factor]:
    """The tables of the seconds of a space's conversions."""
    return [Factor((e.source, e.target), (e.given_by, e.taken_by), e.seconds) for e in space.edges]
