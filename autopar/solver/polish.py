"""Better plans in between those that prices led to.

Prices lead to corners: plans that are best at some price. What lies between two of them - half of a layer as in one,
half as in the other; some layers so, the others so - is found here.

    alike      one integer program over the choices of the plans that were met, in which all layers but the first and
               the last do the same: with all windows as they are, and memory at a price
    spliced    one plan up to some place in the model, the other from there on: every place is tried, all at once

Neither makes a bound. What they miss, the plan's gap says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.graph.layers import around_number
from autopar.letters import Infeasible
from autopar.solver.budget import Budgeted, Outcome
from autopar.solver.integer import IntegerProgram, backend_of
from autopar.solver.limits import LIMITS
from autopar.solver.points import Point
from autopar.solver.tables import Problem
from autopar.space.lookup import Tables, Taken
from autopar.space.space import Edge, Site, Space
from autopar.space.windows import Window

_LIMITS = LIMITS.polish

_BIG = 1e9  # seconds that stand for infinity


def polished(
    counted: Budgeted, outcome: Outcome, budget: float, gap: float, solver: str, stopped: list[str]
) -> Point | None:
    """The fastest plan within the budget, among those met and those found between them, or None."""

    def best() -> Point | None:
        return min((p for p in points if p.peak <= budget), key=lambda p: p.seconds, default=None)

    points = list(outcome.points)
    enough = max(gap, _LIMITS.enough if counted.rounds == LIMITS.prices.rounds else LIMITS.rounding.closed)
    if (found := best()) is not None and found.seconds - outcome.bound <= enough * found.seconds:
        return found
    if counted.space.windows:
        points += alike(counted, _near(outcome, budget), budget, outcome.prices.of_bytes, solver, stopped)
    points += spliced(counted, points, budget)
    return best()


def _near(outcome: Outcome, budget: float) -> list[Point]:
    """The plans whose priced cost is near the bound; between others there is little to find."""
    prices = outcome.prices
    worth = {}
    for p in outcome.points:
        exposed = sum(share * over for share, over in zip(prices.exposed, p.over, strict=True))
        of_bytes = sum(price * (p.held[t] - budget) for t, price in prices.of_bytes.items() if price)
        worth[id(p)] = p.in_line + exposed + of_bytes
    ordered = sorted(outcome.points, key=lambda p: worth[id(p)])
    near = sum(worth[id(p)] <= outcome.bound + _LIMITS.close * abs(outcome.bound) for p in ordered)
    return ordered[: max(near, _LIMITS.few)]


# -- layers that do the same


def alike(
    counted: Budgeted,
    points: Sequence[Point],
    budget: float,
    prices: Mapping[int, float],
    solver: str,
    stopped: list[str],
) -> list[Point]:
    """Plans whose layers are equal, each of least cost at some price of memory around that of the bound.

    Prices are chosen so that there are plans just over and just within the budget. Without a price there is one plan.
    """
    found = list[Point]()

    def at(height: float) -> Point | None:
        problem = counted.tables.problem({t: p * height for t, p in prices.items() if p > 0})
        point = with_equal_layers(counted, points, problem, solver, stopped)
        if point is not None:
            found.append(point)
        return point

    over, under = None, None
    height = 1.0
    for _ in range(_LIMITS.steps if any(p > 0 for p in prices.values()) else 1):
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
        # At this height both plans cost the same, and a plan between them may cost less.
        height = (under.seconds - over.seconds) / saved
    return found


def with_equal_layers(
    counted: Budgeted, points: Sequence[Point], problem: Problem, solver: str, stopped: list[str]
) -> Point | None:
    """The plan of least cost with equal layers, from choices that some points took; None if none is found.

    Windows are as they are; the problem has all communication in line.
    """
    folded = _Folded.of(counted, points, problem)
    program = IntegerProgram(folded.space, backend_of(solver, _LIMITS.gap, _LIMITS.nodes, _LIMITS.pivots), fold=False)
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
    # A stopped search may return choices that do not go together.
    return point if np.isfinite(point.seconds) else None


@dataclass(frozen=True, slots=True, eq=False)
class _Folded:
    """A space with one site for each kind of site, limited to choices that the plans met so far have taken."""

    space: Space
    kind: list[int]  # the site of the folded space for each site
    left: list[np.ndarray]  # the remaining choices of each folded site

    def unfold(self, picked: Sequence[int]) -> list[int]:
        return [int(self.left[k][picked[k]]) for k in self.kind]

    @staticmethod
    def of(counted: Budgeted, points: Sequence[Point], problem: Problem) -> _Folded:
        space = counted.space
        kind = numbered(space)
        first = [kind.index(k) for k in range(max(kind) + 1)]
        left = [np.array(sorted(taken)) for taken in _taken(space, kind, first, points)]
        sites = [_with_choices(space.sites[i], left[k]) for k, i in enumerate(first)]
        for i, k in enumerate(kind):
            sites[k].seconds[:] += problem.costs[i][left[k]]
        edge_of = _numbered(
            (kind[e.source], kind[e.target], e.operand, id(e.given_by), id(e.taken_by)) for e in space.edges
        )
        edges = list[Edge]()
        flows = list[tuple[np.ndarray, np.ndarray]]()
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
    """Windows that are alike as a single one, which comes as often as all of them."""
    return replace(windows[0], times=sum(w.times for w in windows))


def _with_choices(site: Site, left: np.ndarray) -> Site:
    """A site with some of its choices and zero seconds."""
    choices = tuple(site.choices[c] for c in left)
    return replace(site, choices=choices, seconds=np.zeros(len(left)), policies=(), compute=())


def _with_flows(e: Edge, kind: Sequence[int], left: Sequence[np.ndarray]) -> tuple[Edge, tuple[np.ndarray, np.ndarray]]:
    """An edge between kinds of sites with zero seconds, and the indices of flows that remain at its ends."""
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
    """The kind of each site, as a number: sites that do the same in different layers have the same."""
    names = _alike([s.name for s in space.sites])
    return _numbered((name, id(s.choices), len(s.choices)) for name, s in zip(names, space.sites, strict=True))


def _alike(names: Sequence[str]) -> list[str]:
    """Names with `*` for their layer, except for the first and last layer, which have less to hide behind."""
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
    """An index for each key, the same for equal keys, in order of appearance."""
    known: dict[Any, int] = {}
    return [known.setdefault(key, len(known)) for key in keys]


def _taken(space: Space, kind: Sequence[int], first: Sequence[int], points: Sequence[Point]) -> list[set[int]]:
    """The choices that plans have taken at sites of each kind; for a parameter, with every policy."""
    taken: list[set[int]] = [set() for _ in first]
    for p in points:
        for k, choice in zip(kind, p.picked, strict=True):
            taken[k].add(choice)
    for k, i in enumerate(first):
        if (site := space.sites[i]).policies:
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
    """Plans that follow one plan up to some place in the model, and another from there on.

    They are made of pairs of a plan over the budget and one within it, a few of each nearest to it.
    """
    under = sorted((p for p in points if p.peak <= budget), key=lambda p: p.seconds)[:3]
    over = sorted(
        (p for p in points if p.peak > budget and under and p.seconds < under[0].seconds), key=lambda p: p.peak
    )[:3]
    if not over:
        return []
    place = _places(counted.space)
    rows = [Tables(*map(dict.items, counted.tables.row(t))) for t in counted.tables.rows]
    pairs = [pair for a in under for b in over for pair in ((a, b), (b, a))]
    found = [_best_splice(counted, rows, _Splices(counted, place, *pair), budget) for pair in pairs]
    return [p for p in found if p is not None]


def _places(space: Space) -> np.ndarray:
    """The position of each site in the model: ops in their order, other sites where they are first used."""
    first: dict[int, int] = {}
    for e in space.edges:
        if space.sites[e.source].kind != "op":
            first[e.source] = min(first.get(e.source, e.target), e.target)
    rank = sorted(range(len(space.sites)), key=lambda i: (first.get(i, i), i not in first, i))
    place: np.ndarray = np.empty(len(rank), dtype=int)
    place[rank] = np.arange(len(rank))
    return place


class _Splices:
    """All plans that are `first` in the places before k and `second` from there on, for every k at once.

    An entry of a table changes with k once for each of its ends: sums over entries are sums of these changes.
    """

    def __init__(self, counted: Budgeted, place: np.ndarray, first: Point, second: Point) -> None:
        self.first = first
        self.second = second
        self.place = place
        self.flows = counted.points.flows
        self.count = len(place) + 1
        self.of_first = counted.points.flows.under(first.picked)
        self.of_second = counted.points.flows.under(second.picked)

    def changes(self, tables: Tables) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Entries at k = 0, sites then edges; and all changes: the index of the entry, the k, and the amount.

        An edge's entry changes with the first of its ends, then with the other.
        """
        sites = len(tables.sites)
        places = self.place
        ends = places[self.flows.source[tables.edges]], places[self.flows.target[tables.edges]]
        first, second = self.of_first, self.of_second
        leaves_first = Taken(first.choices, first.leaves, second.arrives)
        arrives_first = Taken(first.choices, second.leaves, first.arrives)
        before, after = tables.of_edges(second), tables.of_edges(first)
        between = np.where(ends[0] < ends[1], tables.of_edges(leaves_first), tables.of_edges(arrives_first))
        before, between, after = (np.minimum(entries, _BIG) for entries in (before, between, after))
        alone = tables.of_sites(second)
        number = np.arange(sites + len(tables.edges))
        return (
            np.concatenate([alone, before]),
            np.concatenate([number, number[sites:]]),
            np.concatenate([places[tables.sites], np.minimum(*ends), np.maximum(*ends)]) + 1,
            np.concatenate([tables.of_sites(first) - alone, between - before, after - between]),
        )

    def sums(self, tables: Tables) -> np.ndarray:
        """The sum of all entries of some tables, by k."""
        start, _, at, change = self.changes(tables)
        return start.sum() + np.cumsum(np.bincount(at, change, self.count + 1))[: self.count]

    def hidden(self, counted: Budgeted) -> np.ndarray:
        """Seconds of communication that compute hides in all windows, by k."""
        start, entry, at, change = self.changes(counted.points.beside)
        runs = len(counted.points.beside.sites)
        times = counted.points.times_of_windows
        window = np.concatenate([counted.points.window_of_run, counted.points.window_of_message])
        # the windows' events in order: their beginning at 0, then one change after the other
        everything = np.concatenate([start, change])
        which = np.concatenate([np.arange(len(start)), entry])
        when = np.concatenate([np.zeros(len(start), int), at])
        order = np.lexsort((when, window[which]))
        of = window[which][order]
        when = when[order]
        is_run = which[order] < runs
        amounts = everything[order]
        run, moved = (_sums_within(of, np.where(part, amounts, 0.0)) for part in (is_run, ~is_run))
        hides = times[of] * np.minimum(run, moved)
        begins = np.flatnonzero(np.diff(of, prepend=-1))
        steps = np.diff(hides, prepend=0.0)
        steps[begins] = hides[begins]
        return np.cumsum(np.bincount(when, steps, self.count + 1))[: self.count]

    def picked(self, k: int) -> list[int]:
        """The choices of the plan that takes `second` from place k on."""
        return np.where(self.place < k, self.first.picked, self.second.picked).tolist()


def _sums_within(groups: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """Cumulative sums that restart with each group; members of a group are adjacent."""
    sums = np.cumsum(amounts)
    begins = np.flatnonzero(np.diff(groups, prepend=-1))
    before = (sums - amounts)[begins]
    return sums - np.repeat(before, np.diff(begins, append=len(groups)))


def _best_splice(counted: Budgeted, rows: Sequence[Tables], splices: _Splices, budget: float) -> Point | None:
    """The fastest splice within the budget, if it is faster than the plan of both that fits; else None."""
    seconds = splices.sums(counted.points.seconds) - splices.hidden(counted)
    limit = min(p.seconds for p in (splices.first, splices.second) if p.peak <= budget)
    able = seconds < limit
    for row in rows:
        able &= splices.sums(row) <= budget
    for k in sorted(np.flatnonzero(able).tolist(), key=lambda k: (seconds[k], k))[:24]:
        point = counted.point(splices.picked(k))
        if point.peak <= budget and np.isfinite(point.seconds):
            return point
    return None
