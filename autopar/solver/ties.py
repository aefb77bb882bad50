"""Ties between plans of equal seconds: less communication comes first, then less memory, then fewer kinds of sharding.

Communication that hides behind compute takes no time, so that many plans are as fast as the best.

    settled     from a plan on: sites that are alike (the same site of each layer but the first and the last) are all
                given the one other choice under which the plan comes first, until no such change is left

What a change does to seconds, communication and bytes is added up from the tables that it touches, for all choices at
once. No plan takes longer than the one that was given, or holds more than the budget; the bound is not touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.once import Once
from autopar.solver.budget import Budgeted
from autopar.solver.limits import LIMITS
from autopar.solver.points import Point
from autopar.solver.polish import numbered
from autopar.space.memory import Piece
from autopar.space.space import Space

_LIMITS = LIMITS.ties


def settled(counted: Budgeted, best: Point, budget: float) -> Point:
    """The plan that comes first among those as fast as the best, or faster, that changes from it lead to."""
    if not best.seconds > 0:
        return best
    most = max(budget, best.peak)
    room = 0.0
    for _ in range(_LIMITS.tries):
        point = counted.point(_Changes(counted.space, best, budget - room).run())
        if point.peak <= most:
            return point if point.seconds <= best.seconds * (1 + LIMITS.rounding.same) else best
        room += point.peak - most  # Some bytes are in no table, so changes do not see them.
    return best


def communication(space: Space, picked: Sequence[int]) -> float:
    """Seconds of all communication, hidden or exposed."""
    return float(sum(e.seconds[e.given_by[picked[e.source]], e.taken_by[picked[e.target]]] for e in space.edges))


class _Changes:
    """A plan while it is being changed, with the seconds of its windows and its bytes by time."""

    def __init__(self, space: Space, best: Point, budget: float) -> None:
        self.space = space
        self.budget = budget
        self.picked = list(best.picked)
        self.step = best.seconds
        self.held = best.held.copy()
        self.room = best.seconds * LIMITS.rounding.same  # seconds that all changes together may add
        self.pairs = np.array([w.seconds(best.picked, space.edges) for w in space.windows]).reshape(-1, 2)
        kinds: dict[int, list[int]] = {}
        for i, kind in enumerate(numbered(space)):
            kinds.setdefault(kind, []).append(i)
        self.kinds = [alike for alike in kinds.values() if len(self.space.sites[alike[0]].choices) > 1]
        self.kind_of = {i: k for k, alike in enumerate(self.kinds) for i in alike}
        self.near: list[list[int]] = [[] for _ in self.space.sites]  # the edges of each site
        for k, e in enumerate(self.space.edges):
            self.near[e.source].append(k)
            self.near[e.target].append(k)
        # The windows of each edge with the seconds of its communication in them, and the same for the compute of sites.
        self.moves: dict[int, list[tuple[int, np.ndarray]]] = {}
        self.runs: dict[int, list[tuple[int, np.ndarray]]] = {}
        for w, window in enumerate(space.windows):
            for k, table in window.communication:
                self.moves.setdefault(k, []).append((w, table))
            for i, run in window.compute:
                self.runs.setdefault(i, []).append((w, run))
        self.on_site: dict[int, list[Piece]] = {}
        self.on_edge: dict[int, list[Piece]] = {}
        for piece in space.memory.pieces if space.memory else ():
            (self.on_edge if piece.is_edge else self.on_site).setdefault(piece.place, []).append(piece)

    def run(self) -> list[int]:
        waiting = dict.fromkeys(range(len(self.kinds)))
        made = [0] * len(self.kinds)
        while waiting:
            k = next(iter(waiting))
            del waiting[k]
            if made[k] < _LIMITS.changes and self._change(self.kinds[k]):
                made[k] += 1
                near = {
                    i
                    for m in self.kinds[k]
                    for j in self.near[m]
                    for i in (self.space.edges[j].source, self.space.edges[j].target)
                }
                waiting.update(dict.fromkeys(sorted({self.kind_of[i] for i in near if i in self.kind_of})))
        return self.picked

    def _change(self, alike: Sequence[int]) -> bool:
        """Give sites that are alike the choice under which the plan comes first; False if nothing changes."""
        edges = sorted({k for i in alike for k in self.near[i]})
        more, moved, beside = self._seconds(alike, edges)
        before = {self.picked[i] for i in alike}
        peak = float(self.held.max())
        able = [
            int(c)
            for c in np.flatnonzero((more <= self.room) & ((more < -self._same) | (moved <= _LIMITS.none * self.step)))
            if before != {c}
        ]
        found = [
            (self._order(float(more[c]), float(moved[c]), float(h.max()), 1), c, h)
            for c, h in zip(able, self._held(alike, edges, able), strict=True)
            if h.max() <= max(self.budget, peak)
        ]
        first = min(found, key=lambda one: one[:2], default=None)
        if first is None or first[0] >= self._order(0.0, 0.0, peak, len(before)):
            return False
        _, c, self.held = first
        for w, change in beside.items():
            self.pairs[w] += change[:, c]
        for i in alike:
            self.picked[i] = c
        self.room = self._same if more[c] < -self._same else self.room - float(more[c])
        self.step = self.step + float(more[c])
        return True

    @property
    def _same(self) -> float:
        """Seconds by which two steps may differ and count as equal."""
        return LIMITS.rounding.same * self.step

    def _order(self, more: float, moved: float, peak: float, kinds: int) -> tuple[float, ...]:
        """The key by which changed plans are compared; differences within rounding are equal."""
        return (
            round(more / self._same) if more < -self._same else 0.0,
            round(moved / (_LIMITS.none * self.step)),
            round(peak),
            kinds,
        )

    def _seconds(
        self, alike: Sequence[int], edges: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, dict[int, np.ndarray]]:
        """Differences by the choice that all these sites take: seconds, communication, both window sums.

        The last has, by window, [communication or compute, choice].
        """
        count = len(self.space.sites[alike[0]].choices)
        members = set(alike)
        once = Once()
        in_line, moved = np.zeros(count), np.zeros(count)
        beside: dict[int, np.ndarray] = {}

        def by_choice(k: int, table: np.ndarray) -> np.ndarray:
            e = self.space.edges[k]
            f, g = self.picked[e.source], self.picked[e.target]
            gives, takes = e.source in members, e.target in members

            def difference() -> np.ndarray:
                chosen = table[e.given_by if gives else e.given_by[f], e.taken_by if takes else e.taken_by[g]]
                return chosen - table[e.given_by[f], e.taken_by[g]]

            return once((f, g, gives, takes), (table, e.given_by, e.taken_by), difference)

        for k in edges:
            moved += by_choice(k, self.space.edges[k].seconds)
            for w, table in self.moves.get(k, ()):
                beside.setdefault(w, np.zeros((2, count)))[0] += by_choice(k, table)
        for i in alike:
            in_line += self.space.sites[i].seconds - self.space.sites[i].seconds[self.picked[i]]
            for w, run in self.runs.get(i, ()):
                beside.setdefault(w, np.zeros((2, count)))[1] += run - run[self.picked[i]]
        hidden = np.zeros(count)
        for w, change in beside.items():
            hidden += self.space.windows[w].times * (
                np.minimum(*(self.pairs[w][:, None] + change)) - self.pairs[w].min()
            )
        return in_line + moved - hidden, moved, beside

    def _held(self, alike: Sequence[int], edges: Sequence[int], able: list[int]) -> np.ndarray:
        """Bytes at every time, by [choice, time], if all these sites took one of these choices."""
        members = set(alike)
        changes = np.zeros((len(able), len(self.held) + 1))
        if not able:
            return changes[:, 1:]

        def add(piece: Piece, amount: np.ndarray) -> None:
            changes[:, piece.first] += amount
            changes[:, piece.last + 1] -= amount

        for i in alike:
            for piece in self.on_site.get(i, ()):
                add(piece, piece.bytes[able] - piece.bytes[self.picked[i]])
        for k in edges:
            if k in self.on_edge:
                e = self.space.edges[k]
                f, g = e.given_by[self.picked[e.source]], e.taken_by[self.picked[e.target]]
                ends = e.given_by[able] if e.source in members else f, e.taken_by[able] if e.target in members else g
                for piece in self.on_edge[k]:
                    add(piece, piece.bytes[ends] - piece.bytes[f, g])
        held: np.ndarray = self.held + np.cumsum(changes, axis=1)[:, :-1]
        return held
