"""Better plans out of those that were met.

Prices lead to corners: plans that are best at some price. What lies between two of them - half of a layer as in one,
half as in the other; some layers so, the others so - is found here.

    alike      one integer program over the choices of the plans that were met, in which all layers but the first and
               the last do the same: with all windows as they are, and memory at a price
    spliced    one plan up to some place in the model, the other from there on: every place is tried, all at once

Neither makes a bound. What they miss, the plan's gap says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.graph.layers import around_number
from autopar.letters import Infeasible
from autopar.solver.budget import Budgeted, Outcome, Point
from autopar.solver.integer import IntegerProgram, backend_of
from autopar.space.space import Edge, Site, Space
from autopar.space.windows import Window

_GAP, _NODES, _PIVOTS = 4e-3, 50, 5_000  # of the integer program
_STEPS = 3  # of the search for a price of memory
_ENOUGH = 1e-3  # a gap that is not worth it
_BIG = 1e9  # seconds of what leads nowhere


def polished(
    counted: Budgeted, outcome: Outcome, budget: float, gap: float, solver: str, stopped: list[str]
) -> Point | None:
    """The best plan within the budget: one of those met, or one that lies between them."""

    def best() -> Point | None:
        return min((p for p in points if p.peak <= budget), key=lambda p: p.seconds, default=None)

    points = list(outcome.points)
    if (found := best()) is not None and found.seconds - outcome.bound <= max(gap, _ENOUGH) * found.seconds:
        return found
    if counted.space.windows:
        points += alike(counted, points, budget, outcome.prices.of_bytes, solver, stopped)
    points += spliced(counted, points, budget)
    return best()


# -- layers that do the same


def alike(
    counted: Budgeted,
    points: Sequence[Point],
    budget: float,
    prices: Mapping[int, float],
    solver: str,
    stopped: list[str],
) -> list[Point]:
    """The best plan with equal layers.

    If memory has a price, for several heights of it, so that there are plans just over and just within the budget.
    """
    backend, found = backend_of(solver, _GAP, _NODES, _PIVOTS), list[Point]()

    def at(height: float) -> Point | None:
        folded = _Folded.of(counted, points, {t: p * height for t, p in prices.items() if p > 0})
        program = IntegerProgram(folded.space, backend, fold=False)
        program.hide()
        program.pose(program.terms)
        try:
            answer = program.solve()
        except Infeasible:
            return None
        if not answer.ended:
            stopped.append("the integer program of layers that do the same")
        if answer.picked is None:
            return None
        point = counted.point(folded.unfold(answer.picked))
        if not np.isfinite(point.seconds):  # of a search that was stopped: choices that do not go together
            return None
        found.append(point)
        return point

    over, under, height = None, None, 1.0
    for _ in range(_STEPS if any(p > 0 for p in prices.values()) else 1):
        point = at(height)
        if point is None or any((point.seconds, point.peak) == (p.seconds, p.peak) for p in found[:-1]):
            break
        over, under = (point, under) if point.peak > budget else (over, point)
        if over is None or under is None:
            height *= 2 if under is None else 0.5
            continue
        saved = sum(p * (over.held[t] - under.held[t]) for t, p in prices.items())
        if saved <= 0 or under.seconds <= over.seconds:
            break
        # at which both are worth the same: something between them may be worth more
        height = (under.seconds - over.seconds) / saved
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Folded:
    """A space with one site for each kind of site, and of its choices those that plans which were met have taken."""

    space: Space
    kind: list[int]  # of every site: which site of the folded space
    left: list[np.ndarray]  # of those: the choices that are left

    def unfold(self, picked: Sequence[int]) -> list[int]:
        return [int(self.left[k][picked[k]]) for k in self.kind]

    @staticmethod
    def of(counted: Budgeted, points: Sequence[Point], prices: Mapping[int, float]) -> _Folded:
        space, problem = counted.space, counted.priced(prices)
        kind = numbered(space)
        first = [kind.index(k) for k in range(max(kind) + 1)]
        left = [np.array(sorted(taken)) for taken in _taken(space, kind, first, points)]
        sites = [_with_choices(space.sites[i], left[k]) for k, i in enumerate(first)]
        for i, k in enumerate(kind):
            sites[k].seconds[:] += problem.costs[i][left[k]]
        edge_of = _numbered(
            (kind[e.source], kind[e.target], e.operand, id(e.given_by), id(e.taken_by)) for e in space.edges
        )
        edges, flows = list[Edge](), list[tuple[np.ndarray, np.ndarray]]()
        for k, e, factor in zip(edge_of, space.edges, problem.factors, strict=True):
            if k == len(edges):
                folded, of_edge = _with_flows(e, kind, left)
                edges.append(folded)
                flows.append(of_edge)
            edges[k].seconds[:] += factor.table[np.ix_(*flows[k])]
        windows: dict[Any, list[Window]] = {}
        for w in space.windows:
            communication = _summed((edge_of[j], table) for j, table in w.communication)
            compute = _summed((kind[i], run) for i, run in w.compute)
            key = w.times, *((k, t.tobytes()) for part in (communication, compute) for k, t in part)
            moved = tuple((k, t[np.ix_(*flows[k])]) for k, t in communication)
            run = tuple((k, c[left[k]]) for k, c in compute)
            windows.setdefault(key, []).append(replace(w, communication=moved, compute=run))
        alike = tuple(map(_as_one, windows.values()))
        space = replace(space, sites=tuple(sites), edges=tuple(edges), memory=None, windows=alike)
        return _Folded(space, kind, left)


def _as_one(windows: Sequence[Window]) -> Window:
    """Windows that are alike, as one that comes as often as all of them."""
    return replace(windows[0], times=sum(w.times for w in windows))


def _with_choices(site: Site, left: np.ndarray) -> Site:
    """A site with some of its choices, and no seconds yet."""
    choices = tuple(site.choices[c] for c in left)
    return replace(site, choices=choices, seconds=np.zeros(len(left)), regathered=(), scattered=(), compute=())


def _with_flows(e: Edge, kind: Sequence[int], left: Sequence[np.ndarray]) -> tuple[Edge, tuple[np.ndarray, np.ndarray]]:
    """An edge between kinds of sites, without seconds yet, and the flows that their choices leave."""
    source, target = kind[e.source], kind[e.target]
    given, given_by = np.unique(e.given_by[left[source]], return_inverse=True)
    taken, taken_by = np.unique(e.taken_by[left[target]], return_inverse=True)
    folded = replace(
        e,
        source=source,
        target=target,
        given=tuple(e.given[f] for f in given),
        taken=tuple(e.taken[f] for f in taken),
        given_by=given_by.reshape(-1),
        taken_by=taken_by.reshape(-1),
        seconds=np.zeros((len(given), len(taken))),
    )
    return folded, (given, taken)


def numbered(space: Space) -> list[int]:
    """The kind of each site, as a number: that of the sites which do the same in other layers."""
    names = _alike([s.name for s in space.sites])
    return _numbered((name, id(s.choices), len(s.choices)) for name, s in zip(names, space.sites, strict=True))


def _alike(names: Sequence[str]) -> list[str]:
    """The names with their first number left out, but for the first and the last of its kind.

    At an end there is less to hide behind.
    """
    parts = [around_number(name) for name in names]
    last: dict[str, int] = {}
    for part in parts:
        if part:
            last[part[0]] = max(last.get(part[0], 0), part[1])
    return [
        f"{part[0]}*{part[2]}" if part and 0 < part[1] < last[part[0]] else name
        for name, part in zip(names, parts, strict=True)
    ]


def _numbered(keys: Any) -> list[int]:
    """A number for each key, the same for equal ones, in the order in which they come."""
    known: dict[Any, int] = {}
    return [known.setdefault(key, len(known)) for key in keys]


def _taken(space: Space, kind: Sequence[int], first: Sequence[int], points: Sequence[Point]) -> list[set[int]]:
    """The choices that some plan has taken at a site of each kind; of a parameter, with every policy."""
    taken: list[set[int]] = [set() for _ in first]
    for p in points:
        for k, choice in zip(kind, p.picked, strict=True):
            taken[k].add(choice)
    for k, i in enumerate(first):
        if (site := space.sites[i]).regathered or site.scattered:
            chosen = {site.choices[c] for c in taken[k]}
            taken[k] |= {c for c, choice in enumerate(site.choices) if choice in chosen}
    return taken


def _summed(parts: Any) -> list[tuple[int, np.ndarray]]:
    total: dict[int, np.ndarray] = {}
    for k, table in parts:
        total[k] = total[k] + table if k in total else table
    return list(total.items())


# -- one plan up to some place, another from there on


def spliced(counted: Budgeted, points: Sequence[Point], budget: float) -> list[Point]:
    """Plans that are one up to some place in the model, and another from there on.

    Of a few that are near the budget, one is over it and one within it.
    """
    place = _places(counted.space)
    under = sorted((p for p in points if p.peak <= budget), key=lambda p: p.seconds)[:3]
    over = sorted(
        (p for p in points if p.peak > budget and under and p.seconds < under[0].seconds), key=lambda p: p.peak
    )[:3]
    pairs = [pair for a in under for b in over for pair in ((a, b), (b, a))]
    return [p for first, second in pairs if (p := _best_splice(counted, place, first, second, budget)) is not None]


def _places(space: Space) -> np.ndarray:
    """The place of each site in the model: ops in their order, a parameter where it is first used."""
    first: dict[int, int] = {}
    for e in space.edges:
        if space.sites[e.source].kind != "op":
            first[e.source] = min(first.get(e.source, e.target), e.target)
    rank = sorted(range(len(space.sites)), key=lambda i: (first.get(i, i), i not in first, i))
    place: np.ndarray = np.empty(len(rank), dtype=int)
    place[rank] = np.arange(len(rank))
    return place


def _best_splice(counted: Budgeted, place: np.ndarray, first: Point, second: Point, budget: float) -> Point | None:
    """The fastest of those within the budget, where it is faster than both that are."""
    sites, edges, n = counted.space.sites, counted.space.edges, len(counted.space.sites)

    def along(on_sites: Any, on_edges: Any) -> np.ndarray:
        """The sum of site and edge tables, by how many places take the first plan."""
        steps = np.zeros(n + 2)

        def count(places: Sequence[int], value: Callable[..., float]) -> None:
            marks = sorted({0, *(p + 1 for p in places), n + 1})
            for low, high in itertools.pairwise(marks):
                amount = value(*(first.picked if low > p else second.picked for p in places))
                steps[low] += amount
                steps[high] -= amount

        for i, table in on_sites:
            count((int(place[i]),), lambda picks, i=i, table=table: table[picks[i]])
        for k, table in on_edges:
            e = edges[k]
            count(
                (int(place[e.source]), int(place[e.target])),
                lambda a, b, e=e, table=table: min(_BIG, table[e.given_by[a[e.source]], e.taken_by[b[e.target]]]),
            )
        return np.cumsum(steps)[: n + 1]

    seconds = along(((i, s.seconds) for i, s in enumerate(sites)), ((k, e.seconds) for k, e in enumerate(edges)))
    for w in counted.space.windows:
        seconds = seconds - w.times * np.minimum(along((), w.communication), along(w.compute, ()))
    limit = min(p.seconds for p in (first, second) if p.peak <= budget)
    able = seconds < limit
    for time in counted.rows:
        on_sites, on_edges = counted.row(time)
        able &= along(on_sites.items(), on_edges.items()) <= budget
    order = np.argsort(place)
    for k in sorted(np.flatnonzero(able), key=lambda k: (seconds[k], k))[:24]:
        picked = np.array(second.picked)
        picked[order[:k]] = np.array(first.picked)[order[:k]]
        point = counted.point(picked.tolist())
        if point.peak <= budget and np.isfinite(point.seconds):
            return point
    return None
