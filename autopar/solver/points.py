"""`Point`: the exact seconds and bytes of one plan of a space, given its choices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autopar.solver.limits import LIMITS
from autopar.space.lookup import FlowIndices, Tables, Taken
from autopar.space.memory import Memory, Piece
from autopar.space.space import Space
from autopar.space.timeline import Momentary


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A plan that a search has met: its choices, its seconds, and bytes at every time."""

    picked: list[int]
    seconds: float
    held: np.ndarray
    momentary: Momentary  # bytes that are there during part of a time only
    in_line: float = 0.0  # seconds without the communication in windows
    over: tuple[float, ...] = ()  # communication less compute, by kind of window
    recomputed: frozenset[str] = frozenset()  # values that are recomputed in backward (see `space/timeline.py`)
    recompute_s: float = 0.0  # seconds of recomputation
    recompute_hidden_s: float = 0.0  # seconds of recomputation that overlap communication
    passing: Mapping[str, str] = field(default_factory=dict)  # value recomputed in passing -> its op
    # value that waits on the host -> the ops behind and before which it does
    offloaded: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    host_bytes: float = 0.0  # bytes of these

    @property
    def peak(self) -> float:
        return float(self.held.max())


def frontier(points: Sequence[Point]) -> list[Point]:
    """Plans on the Pareto front of seconds and peak bytes, the fastest first; a limited number."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.seconds, p.peak)):
        if math.isfinite(point.seconds) and (not found or point.peak < found[-1].peak):
            found.append(point)
    return found[: LIMITS.joint.handed_on]


class HeldBytes:
    """Looks up the bytes at every time of a step, for one plan after the other."""

    def __init__(self, memory: Memory) -> None:
        pieces = [p for p in memory.pieces if not p.is_edge] + [p for p in memory.pieces if p.is_edge]
        count = sum(not p.is_edge for p in pieces)
        self.tables = Tables(
            [(p.place, p.bytes) for p in pieces[:count]],
            [(p.place, p.bytes) for p in pieces[count:]],
        )
        self.times = memory.times
        self.memory = memory
        self.first = np.array([p.first for p in pieces], int)
        self.after = np.array([p.last + 1 for p in pieces], int)
        self.is_made = np.array([p.first >= len(memory.ops) and _is_made(p) for p in pieces], bool)

    def under(self, taken: Taken, is_exact: bool = True) -> tuple[np.ndarray, Momentary]:
        """Bytes at every time under a plan; unless `is_exact`, without those that no sum of tables counts."""
        amounts = np.concatenate([self.tables.of_sites(taken), self.tables.of_edges(taken)])
        change = np.bincount(self.first, amounts, self.times + 1) - np.bincount(self.after, amounts, self.times + 1)
        made = np.bincount(self.first[self.is_made], amounts[self.is_made], self.times)
        momentary = Momentary(np.zeros(self.times), made)
        if is_exact:
            leaves, arrives = taken.leaves.tolist(), taken.arrives.tolist()
            for amount, begin, last in self.memory.missing(lambda k: (leaves[k], arrives[k])):
                change[begin] += amount
                change[last + 1] -= amount
            momentary = Momentary(self.memory.beside(taken), made)
        return np.cumsum(change)[:-1] + momentary.temporaries, momentary


def _is_made(piece: Piece) -> bool:
    """Whether an op's backward makes this piece when it begins."""
    return piece.kind.startswith("gradients") or (piece.kind == "transients" and not piece.is_edge)


class Points:
    """Looks up plans of one space; what does not depend on choices is laid out once."""

    def __init__(self, space: Space) -> None:
        windows = space.windows
        kinds: dict[Any, int] = {}
        self.kind_of = []  # the kind of each window: windows with the same tables are of one kind
        for w in windows:
            key = (w.times, *(id(t) for _, t in (*w.communication, *w.compute)))
            self.kind_of.append(kinds.setdefault(key, len(kinds)))
        self.kinds = len(kinds)
        self.flows = FlowIndices(space)
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
        """The plan that picks these choices, with its exact seconds and bytes."""
        taken = self.flows.under(picked)
        times = self.times_of_windows
        count = len(self.times_of_windows)
        whole = float(self.seconds.of_sites(taken).sum() + self.seconds.of_edges(taken).sum())
        moved = np.bincount(self.window_of_message, self.beside.of_edges(taken), count)
        run = np.bincount(self.window_of_run, self.beside.of_sites(taken), count)
        over = np.bincount(np.array(self.kind_of, int), times * (moved - run), self.kinds)
        hidden = float((times * np.minimum(moved, run)).sum())
        in_line = whole - float((times * moved).sum())
        held, momentary = self._held.under(taken) if self._held is not None else (np.zeros(1), Momentary.nothing(1))
        return Point(list(picked), whole - hidden, held, momentary, in_line, tuple(over.tolist()))

    def by_tables(self, point: Point) -> Point:
        """The plan with the bytes that sums of tables count, as in the rows of a solver."""
        if self._held is None:
            return point
        held, momentary = self._held.under(self.flows.under(point.picked), is_exact=False)
        return replace(point, held=held, momentary=momentary)

    def fullest(self, point: Point) -> list[int]:
        """The fullest time of the forward, of each half of the backward, and of the optimizer's step."""
        if self._held is None:
            return []
        n = len(self._held.memory.ops)
        edges = [0, n, n + n // 2, 2 * n, 2 * n + 1]
        return [low + int(point.held[low:high].argmax()) for low, high in itertools.pairwise(edges) if high > low]
