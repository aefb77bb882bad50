"""The entries of many tables under one plan, read in one indexing operation.

A space has tens of thousands of tables, and a search asks for the entries of hundreds of plans. Laid end to end, the
tables answer a plan in one indexing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from autopar.space.space import Space


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """A plan as indices: the choice of every site, and what leaves and what arrives on every edge."""

    choices: np.ndarray
    leaves: np.ndarray
    arrives: np.ndarray


class FlowIndices:
    """The indices of what leaves and arrives on every edge, by the choices at its ends."""

    def __init__(self, space: Space) -> None:
        self.source = np.array([e.source for e in space.edges], int)
        self.target = np.array([e.target for e in space.edges], int)
        self._given, self._given_at = end_to_end([e.given_by for e in space.edges])
        self._taken, self._taken_at = end_to_end([e.taken_by for e in space.edges])

    def under(self, picked: Sequence[int]) -> Taken:
        """The choices and flows of a plan that picks these choices."""
        choices = np.asarray(picked, int)
        leaves = self._given[self._given_at + choices[self.source]].astype(int)
        return Taken(choices, leaves, self._taken[self._taken_at + choices[self.target]].astype(int))


class Tables:
    """Tables of sites (by choice) and tables of edges (by [given, taken]), laid end to end."""

    def __init__(
        self, of_sites: Iterable[tuple[int, np.ndarray]] = (), of_edges: Iterable[tuple[int, np.ndarray]] = ()
    ) -> None:
        on_sites, on_edges = list(of_sites), list(of_edges)
        self.sites = np.array([i for i, _ in on_sites], int)
        self.edges = np.array([k for k, _ in on_edges], int)
        self._by_choice, self._choice_at = end_to_end([table for _, table in on_sites])
        self._by_flows, self._flow_at = end_to_end([table for _, table in on_edges])
        self._width = np.array([table.shape[1] for _, table in on_edges], int)

    def of_sites(self, taken: Taken) -> np.ndarray:
        """The entries of the sites' tables under a plan, in their order."""
        return self._by_choice[self._choice_at + taken.choices[self.sites]]

    def of_edges(self, taken: Taken) -> np.ndarray:
        """The entries of the edges' tables under a plan, in their order."""
        row, column = taken.leaves[self.edges], taken.arrives[self.edges]
        return self._by_flows[self._flow_at + row * self._width + column]


def end_to_end(tables: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """All tables' entries in one array, and each table's offset; a table that occurs twice is stored once."""
    apart = {id(table): table for table in tables}
    ends = itertools.accumulate((table.size for table in apart.values()), initial=0)
    begins = dict(zip(apart, ends, strict=False))
    entries = [table.reshape(-1) for table in apart.values()]
    return np.concatenate(entries) if entries else np.zeros(0), np.array([begins[id(t)] for t in tables], int)
