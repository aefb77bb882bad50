"""`PricedTables`: a space as a sum of tables, in which prices turn bytes and exposed communication into seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.once import Once
from autopar.solver.eliminate import factors_of, regions_of
from autopar.solver.tables import Factor, Problem
from autopar.space.space import Space


class PricedTables:
    """The tables of one space at one set of prices after the other, and the memory rows that were priced so far."""

    def __init__(self, space: Space, kind_of: Sequence[int]) -> None:
        self.space = space
        self.kind_of = kind_of  # the kind of each window
        self.rows: dict[int, tuple[dict[int, np.ndarray], dict[int, np.ndarray]]] = {}  # time -> its row
        self._alike: dict[bytes, np.ndarray] = {}
        of = space.sites, space.edges
        self._regions = space.known("regions", of, lambda: regions_of(space))
        self._unpriced = space.known("factors", of, lambda: factors_of(space))
        self._shapes: Once = space.known("shapes", of, Once)

    def problem(
        self,
        prices: Mapping[int, float],
        of_time: float = 1.0,
        exposed: Sequence[float] | None = None,
        converted: float = 1.0,
    ) -> Problem:
        """Seconds (times `of_time`) and priced bytes as tables to be minimised.

        `exposed` has, for each kind of window, the share that counts as exposed; without it all communication does.
        Conversions of what ops make count `converted` times.
        """
        once = Once()

        def priced(base: np.ndarray, extras: list[tuple[float, np.ndarray]] | None) -> np.ndarray:
            if extras is None and of_time == 1.0:
                return base
            by, tables = zip(*extras, strict=True) if extras else ((), ())
            return once(by, (base, *tables), lambda: _times(base, of_time) + sum(p * b for p, b in extras or ()))

        rows = [(price, self.row(t)) for t, price in sorted(prices.items()) if price > 0]
        on_sites: dict[int, list[tuple[float, np.ndarray]]] = {}
        on_edges: dict[int, list[tuple[float, np.ndarray]]] = {}
        shares = [1.0] * len(self.space.windows) if exposed is None else [exposed[kind] for kind in self.kind_of]
        for w, share in zip(self.space.windows, shares, strict=True):
            for k, table in w.communication if share < 1 else ():
                on_edges.setdefault(k, []).append((-(1 - share) * w.times * of_time, table))
            for i, run in w.compute if share > 0 and exposed is not None else ():
                on_sites.setdefault(i, []).append((-share * w.times * of_time, run))
        for price, (held_by_sites, held_by_edges) in rows:
            for i, held in held_by_sites.items():
                on_sites.setdefault(i, []).append((price, held))
            for k, held in held_by_edges.items():
                on_edges.setdefault(k, []).append((price, held))
        for k, e in enumerate(self.space.edges) if converted > 1 else ():
            if e.ahead is None:
                on_edges.setdefault(k, []).append((converted - 1, e.seconds))
        costs = [priced(s.seconds, on_sites.get(i)) for i, s in enumerate(self.space.sites)]
        tables = [priced(e.seconds, on_edges.get(k)) for k, e in enumerate(self.space.edges)]
        factors = [
            f if f.table is table else Factor(f.scope, f.classes, table)
            for f, table in zip(self._unpriced, tables, strict=True)
        ]
        return Problem(costs, factors, self._regions, shapes=self._shapes)

    def row(self, time: int) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        """Bytes at a time, in tables of sites and of edges."""
        assert self.space.memory is not None
        if time not in self.rows:
            sites, edges = self.space.memory.row(time)
            self.rows[time] = self._shared(sites), self._shared(edges)
        return self.rows[time]

    def alike(self, table: np.ndarray) -> np.ndarray:
        """The one object that stands for all tables equal to this one, so that results for it serve all."""
        return self._alike.setdefault(table.tobytes() + repr(table.shape).encode(), table)

    def _shared(self, tables: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        return {i: self.alike(table) for i, table in tables.items()}


def _times(seconds: np.ndarray, of_time: float) -> np.ndarray:
    """Seconds multiplied by `of_time`; infinite ones stay infinite, even times 0."""
    if of_time == 1.0:
        return seconds
    return np.where(np.isfinite(seconds), np.nan_to_num(seconds, posinf=0.0) * of_time, math.inf)
