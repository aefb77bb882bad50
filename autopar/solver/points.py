"""Exact seconds and bytes of a plan, by its choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.solver.lookup import Flows, HeldBytes, Tables
from autopar.space.space import Space


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A plan that was met: its choices, seconds, and bytes at every time."""

    picked: list[int]
    seconds: float
    held: np.ndarray
    in_line: float = 0.0  # seconds without the communication in windows
    over: tuple[float, ...] = ()  # of each kind of window: communication less compute
    recomputed: frozenset[str] = frozenset()  # values that backward makes again (see `space/timeline.py`),
    recompute_s: float = 0.0  # and the part of its seconds that this takes

    @property
    def peak(self) -> float:
        return float(self.held.max())


class Points:
    """Looks up the plans of one space: all that does not depend on choices is laid out once."""

    def __init__(self, space: Space) -> None:
        windows = space.windows
        kinds: dict[Any, int] = {}
        self.kind_of = []  # of each window; those whose tables are the same are of one kind
        for w in windows:
            key = (w.times, *(id(t) for _, t in (*w.communication, *w.compute)))
            self.kind_of.append(kinds.setdefault(key, len(kinds)))
        self.kinds = len(kinds)
        self.flows = Flows(space)
        self.seconds = Tables(
            ((i, s.seconds) for i, s in enumerate(space.sites)),
            ((k, e.seconds) for k, e in enumerate(space.edges)),
        )
        self.beside = Tables((p for w in windows for p in w.compute), (p for w in windows for p in w.communication))
        self.window_of_run: np.ndarray = np.repeat(range(len(windows)), [len(w.compute) for w in windows]).astype(int)
        self.window_of_message: np.ndarray = np.repeat(
            range(len(windows)), [len(w.communication) for w in windows]
        ).astype(int)
        self.times_of_windows = np.array([w.times for w in windows], float)
        self._held = HeldBytes(space.memory) if space.memory is not None else None

    def of(self, picked: Sequence[int]) -> Point:
        """The plan of these choices, with its exact seconds and bytes."""
        taken, times, count = self.flows.under(picked), self.times_of_windows, len(self.times_of_windows)
        whole = float(self.seconds.of_sites(taken).sum() + self.seconds.of_edges(taken).sum())
        moved = np.bincount(self.window_of_message, self.beside.of_edges(taken), count)
        run = np.bincount(self.window_of_run, self.beside.of_sites(taken), count)
        over = np.bincount(np.array(self.kind_of, int), times * (moved - run), self.kinds)
        hidden, in_line = float((times * np.minimum(moved, run)).sum()), whole - float((times * moved).sum())
        held = self._held.under(taken) if self._held is not None else np.zeros(1)
        return Point(list(picked), whole - hidden, held, in_line, tuple(over.tolist()))

    def by_tables(self, point: Point) -> Point:
        """The same plan with the bytes that sums of tables count: what the solver's rows say."""
        if self._held is None:
            return point
        return replace(point, held=self._held.under(self.flows.under(point.picked), is_exact=False))
