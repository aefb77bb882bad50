"""Builds the windows of a space: which gathers and reductions move beside which ops (`windows.py` defines a window)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autopar.once import Once
from autopar.space.schedule import Schedule, Transit
from autopar.space.setting import Setting
from autopar.space.space import Edge, Site
from autopar.space.windows import Window


class Movement(NamedTuple):
    """A parameter's value on an edge: the index of the op that takes it, and seconds of its gather and reduction."""

    op: int
    gather: np.ndarray
    reduction: np.ndarray
    is_before: bool = False  # whether that op runs before the first micro-batch


class OpsBeside(NamedTuple):
    """The ops that communication runs beside, and how often: once in a step, or in every other micro-batch too."""

    window: int
    way: str  # "forward" or "backward"
    every: bool


def windows_of(
    schedule: Schedule,
    ops: Sequence[int],
    movements: Mapping[int, Movement],
    sites: Sequence[Site],
    edges: Sequence[Edge],
    setting: Setting,
) -> tuple[Window, ...]:
    """The windows of a step whose ops are these sites, in order; `movements` are by edge.

    Of several calls, the first gathers what is kept, and the last reduces what waits; what is gathered again, and what
    is reduced at once, move in each. Of several micro-batches of a call, what is kept is gathered before the first.
    """
    tables = WindowTables(setting.cluster.hidden)
    moved: dict[OpsBeside, list[tuple[int, np.ndarray]]] = {}

    def put(transit: Transit, way: str, every: bool, edge: int, table: np.ndarray) -> None:
        if tables.hidden and transit.beside is not None and tables.is_any(table):
            moved.setdefault(OpsBeside(transit.beside, way, every), []).append((edge, tables.share(table)))

    for k, (op, gather, reduction, is_before) in movements.items():
        source = sites[edges[k].source]
        again = tables.part(edges[k], source.regathered, gather)
        if not is_before:
            put(schedule.gather(op), "forward", False, k, gather if setting.turns == 1 else again)
            put(schedule.gather(op), "forward", True, k, again)
        put(schedule.gather_again(op), "backward", False, k, again)
        put(schedule.gather_again(op), "backward", True, k, again)
        put(schedule.reduction(op), "backward", False, k, reduction)
        put(schedule.reduction(op), "backward", True, k, tables.part(edges[k], source.scattered, reduction))
    found = []
    for beside, communication in sorted(moved.items(), key=lambda item: item[0]):
        if beside.every and setting.passes == 1:
            continue
        first, last = schedule.spans[beside.window]
        times = setting.passes - 1 if beside.every else 1
        name = f"{beside.way} of {sites[ops[first]].name} to {sites[ops[last]].name}"
        compute = tables.compute(sites, ops[first : last + 1], ("forward", "backward").index(beside.way))
        found.append(Window(beside.way, (ops[first], ops[last]), name, times, tuple(communication), compute))
    return tuple(found)


@dataclass(slots=True, eq=False)
class WindowTables:
    """Tables of windows, one object for equal tables, so that windows that are alike can be recognised."""

    hidden: float  # the share of the shorter of both sums that takes no time
    once: Once = field(default_factory=Once)

    def part(self, edge: Edge, choices: tuple[bool, ...], table: np.ndarray) -> np.ndarray:
        """A table with zeros wherever the edge's source takes none of the marked choices."""
        marked = edge.marked(choices)
        return self.once(("part", marked.tobytes()), (table,), lambda: np.where(marked[:, None], table, 0.0))

    def on_edge(self, edge: Edge, seconds: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Seconds by choice of an edge's source as a table by [given, taken], where the mask is true."""

        def made() -> np.ndarray:
            given: np.ndarray = np.zeros(len(edge.given))
            given[edge.given_by] = seconds
            return np.where(mask, given[:, None], 0.0)

        return self.once(("on edge", mask.tobytes()), (edge.given, edge.given_by, seconds), made)

    def is_any(self, table: np.ndarray) -> bool:
        """Whether a table has a second that is not zero."""
        return self.once("is any", (table,), lambda: bool(table.any()))

    def share(self, table: np.ndarray) -> np.ndarray:
        """The share of a table's seconds that can be hidden."""
        if self.hidden == 1:
            return table
        return self.once("share", (table,), lambda: self.hidden * table)

    def compute(self, sites: Sequence[Site], ops: Sequence[int], way: int) -> tuple[tuple[int, np.ndarray], ...]:
        """Compute seconds of these ops in one direction, by choice; ops without any are left out."""
        computing = [i for i in ops if sites[i].compute and self.is_any(sites[i].compute[way])]
        return tuple((i, self.share(sites[i].compute[way])) for i in computing)
