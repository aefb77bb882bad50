"""`Memory`: all that a step holds on the fullest device, as pieces with their bytes by choice and their times.

    time 0 .. n-1       the forward of op 0 .. n-1
    time n .. 2n-1      the backward of op n-1 .. 0
    time 2n ..          the optimizer's step, which on a CPU goes from one parameter to the next

A piece belongs to a site (bytes by its choice) or to an edge (bytes by what leaves and what arrives: a conversion makes
something). The memory at a time is a sum over choices, so it is a row of the solver; the peak of a plan is the largest
of them, and of what no sum counts (`Readers`, `Merged`, `Temporaries`). Values that lie on one memory (views) are one
piece, as long as nothing converts between them. States of the optimizer are there from the second step on: that step
counts, and `first` is the other. What is counted is what the emitted program holds with its outputs in the user's hands
until backward has ended, which begins at the loss, where there is one. `pieces.py` builds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autopar.space.gather_messages import GatherMessages
from autopar.space.lookup import Taken
from autopar.space.passage import Passages

if TYPE_CHECKING:
    from autopar.space.conversion_bytes import Temporaries
    from autopar.space.shown_gradients import ShownGradients
    from autopar.space.space import Edge

KINDS = (
    "parameters",
    "gradients",
    "optimizer states",
    "step temporaries",
    "inputs and buffers",
    "saved activations",
    "gathered parameters",
    "gradients of activations",
    "transients",
)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Bytes that are in memory from time `first` to time `last`."""

    kind: str
    place: int  # index of a site, or of an edge
    is_edge: bool
    bytes: np.ndarray  # bytes by choice, or by [given, taken] for an edge
    first: int
    last: int


@dataclass(frozen=True, slots=True, eq=False)
class Readers:
    """The edges by which several ops read values on one memory and, in turn, need it after forward.

    The memory stays for the last op that takes it as it is. Its pieces divide that time among the edges, and count an
    edge's part where the value arrives there as it is: a later reader that takes it so needs the parts of those before.
    Where a view is converted, what reads it behind the conversion needs the memory of that one's result instead.
    """

    edges: tuple[int, ...]
    bytes: tuple[np.ndarray, ...]  # one table an edge, by [given, taken]: 0 where the value is converted
    begins: tuple[int, ...]  # first time of each edge's part
    ends: tuple[int, ...]  # last time at which each edge's op needs the value
    # The views through which each edge's value was made, the last first.
    behind: tuple[tuple[View, ...], ...]

    def missing(self, place: Callable[[int], tuple[int, int]]) -> Iterator[tuple[float, int, int]]:
        """Bytes that no piece counts under a plan, each with its first and last time."""
        found = [float(table[place(k)]) for k, table in zip(self.edges, self.bytes, strict=True)]
        converted = {view.edge for views in self.behind for view in views if not view.kept[place(view.edge)]}
        if not any(found) or (not converted and 0.0 not in found):
            return

        def last_converted(views: tuple[View, ...]) -> View | None:
            return next((view for view in views if view.edge in converted), None)

        on = [last_converted(views) for views in self.behind]
        for memory in dict.fromkeys(on):
            several = [(e, n) for e, n, of in zip(self.ends, found, on, strict=True) if n and of is memory]
            if not several:
                continue
            end, amount = max(several)
            since = -1 if memory is None else memory.counted
            for n, of, begin, last in zip(found, on, self.begins, self.ends, strict=True):
                first = max(begin, since + 1)
                until = min(last, end)
                if not (n and of is memory) and first <= until:
                    yield amount, first, until


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """An edge to an op that makes a view: where it converts the value, the view is on the memory of the result."""

    edge: int
    kept: np.ndarray  # bytes by [given, taken]: 0 where the value is converted
    counted: int  # the last time at which the conversion's own piece counts its result


@dataclass(frozen=True, slots=True, eq=False)
class Converted:
    """The edges by which several ops read a value: those that convert it alike share one result.

    Pieces divide the time of that result among the edges, as if all did. What another conversion needs is missing.
    """

    edges: tuple[int, ...]
    bytes: tuple[np.ndarray, ...]  # one table an edge, by [given, taken]: 0 where nothing is converted
    arrives: tuple[np.ndarray, ...]  # one array an edge: a number per flow of `taken`; equal ones are converted once
    begins: tuple[int, ...]  # time at which each edge's op takes the value
    parts: tuple[int, ...]  # first time of each edge's part, which lasts to its end; later than the end: no part
    ends: tuple[int, ...]  # last time at which each edge's op needs the result

    def missing(self, place: Callable[[int], tuple[int, int]]) -> Iterator[tuple[float, int, int]]:
        """Bytes that no piece counts under a plan, each with its first and last time."""
        alike: dict[int, list[int]] = {}
        amounts = []
        for i, k in enumerate(self.edges):
            at = place(k)
            amounts.append(float(self.bytes[i][at]))
            if amounts[-1]:
                alike.setdefault(int(self.arrives[i][at[1]]), []).append(i)
        if len(next(iter(alike.values()), ())) == len(self.edges):
            return
        for several in alike.values():
            amount = amounts[several[0]]
            time = min(self.begins[i] for i in several)
            for first, last in sorted((self.parts[i], self.ends[i]) for i in several):
                if first <= last:
                    if time < first:
                        yield amount, time, first - 1
                    time = max(time, last + 1)
            if time <= (end := max(self.ends[i] for i in several)):
                yield amount, time, end


@dataclass(frozen=True, slots=True, eq=False)
class Viewed:
    """The result of a conversion that stays for views on it: where all of these are converted in turn, it ends earlier.

    Its piece counts it as long as any reader of a view may need it.
    """

    edge: int
    bytes: np.ndarray  # a table by [given, taken]
    itself: int  # the last time at which the op behind the edge, or what it makes directly, needs it
    last: int  # the last time of its piece
    # Each reader of a view: the views on the way, its own edge first; the last time at which it needs this memory if no
    # view is converted; and that time if one is.
    readers: tuple[tuple[tuple[View, ...], int, int], ...]

    def missing(self, place: Callable[[int], tuple[int, int]]) -> Iterator[tuple[float, int, int]]:
        """Bytes, less than none, that its piece counts too long under a plan, with their first and last time."""
        if not (amount := float(self.bytes[place(self.edge)])):
            return
        end = self.itself
        for views, needs, takes in self.readers:
            end = max(end, needs if all(view.kept[place(view.edge)] for view in views) else takes)
        if end < self.last:
            yield -amount, end + 1, self.last


@dataclass(frozen=True, slots=True, eq=False)
class HandedOn:
    """A gathered copy behind an op that hands a parameter on, which is dropped where the parameter's is."""

    edge: int
    bytes: np.ndarray  # a table by [given, taken]
    parameter: int  # the edge by which the parameter leaves its site
    is_dropped: np.ndarray  # whether the parameter is gathered again, by `given` of that edge
    first: int  # the times between its readers in forward and the second gather
    last: int

    def missing(self, place: Callable[[int], tuple[int, int]]) -> Iterator[tuple[float, int, int]]:
        """Bytes, less than none, that its piece counts and no program holds, with their first and last time."""
        amount = float(self.bytes[place(self.edge)])
        if amount and self.is_dropped[place(self.parameter)[0]] and self.first <= self.last:
            yield -amount, self.first, self.last


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """The edges by which several ops read one parameter; if all gather it alike, they share one gathered copy.

    Their gradients are then added up whole and reduced once, while pieces count each as reduced where it comes.
    """

    edges: tuple[int, ...]
    arrives: tuple[np.ndarray, ...]  # one array an edge: a number per flow of `taken`; equal ones are gathered once
    over: tuple[np.ndarray, ...]  # bytes that its reduction saves, by [given, taken]
    spans: tuple[tuple[int, int], ...]  # first and last times of these bytes


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """All pieces of a step, and what the sums of pieces leave out."""

    pieces: tuple[Piece, ...]
    ops: tuple[str, ...]  # names in the order of the forward
    updates: int = 1  # times of the optimizer's step
    passages: Passages = field(default_factory=Passages)  # values that share memory, for recomputation
    readers: tuple[Readers, ...] = ()  # one entry per memory that several ops read
    converted: tuple[Converted, ...] = ()  # one entry per value that several ops read
    viewed: tuple[Viewed, ...] = ()  # one entry per conversion whose result is viewed
    merged: tuple[Merged, ...] = ()  # one entry per parameter that several ops read
    shown: ShownGradients | None = None  # gradients that lie in the memory of others
    temporaries: Temporaries | None = None  # temporary bytes of conversions
    messages: GatherMessages = field(default_factory=GatherMessages)  # messages of gathers while they are cut
    handed_on: tuple[HandedOn, ...] = ()  # one entry per gathered copy of a parameter that an op hands on

    @property
    def times(self) -> int:
        return 2 * len(self.ops) + self.updates

    def when(self, time: int) -> str:
        """The name of a time, such as `backward of blocks.0.up/linear`."""
        n = len(self.ops)
        if time < n:
            return f"forward of {self.ops[time]}"
        if time < 2 * n:
            return f"backward of {self.ops[2 * n - 1 - time]}"
        return "optimizer step"

    def missing(self, place: Callable[[int], tuple[int, int]]) -> Iterator[tuple[float, int, int]]:
        """Bytes that no piece counts under a plan, each with its first and last time.

        `place` gives the entry, [given, taken], of an edge.
        """
        shared: tuple[Readers | Converted | Viewed, ...] = (*self.readers, *self.converted, *self.viewed)
        for several in shared:
            yield from several.missing(place)
        for copy in self.handed_on:
            yield from copy.missing(place)

        for merged in self.merged:
            places = [place(k) for k in merged.edges]
            over = min(float(table[at]) for table, at in zip(merged.over, places, strict=True))
            if over and len({int(flows[at[1]]) for flows, at in zip(merged.arrives, places, strict=True)}) == 1:
                for begin, last in merged.spans:
                    yield over, begin, last

        if self.shown is not None:
            yield from self.shown.missing(place)

    def held(self, picked: Sequence[int], edges: Sequence[Edge]) -> dict[str, np.ndarray]:
        """Bytes at every time, by kind, under the picked choices."""
        changes = {kind: np.zeros(self.times + 1) for kind in KINDS}
        for piece in self.pieces:
            place = edges[piece.place].place(picked) if piece.is_edge else picked[piece.place]
            amount = piece.bytes[place]
            changes[piece.kind][piece.first] += amount
            changes[piece.kind][piece.last + 1] -= amount
        for amount, begin, last in self.missing(lambda k: edges[k].place(picked)):
            changes["saved activations"][begin] += amount
            changes["saved activations"][last + 1] -= amount
        held = {kind: np.cumsum(change)[:-1] for kind, change in changes.items()}
        # A workspace below zero takes back what was counted twice: the gradient that a sum hands on to both
        # operands, or one that is gone when a backward is fullest.
        for kind, other in itertools.pairwise(("transients", "gradients of activations", "saved activations")):
            below = np.minimum(held[kind], 0.0)
            held[kind] = held[kind] - below
            held[other] = held[other] + below
        places = np.array([edge.place(picked) for edge in edges], int).reshape(-1, 2).T
        held["transients"] = held["transients"] + self.beside(Taken(np.array(picked, int), *places))
        return held

    def beside(self, taken: Taken) -> np.ndarray:
        """Bytes that conversions and messages hold at every time beyond the counted pieces."""
        if self.temporaries is None:
            return np.zeros(self.times)
        return self.temporaries.over(taken) + self.messages.over(taken, self.times)

    def beside_value(self, edge: int, place: tuple[int, int]) -> float:
        """Temporary bytes of converting the value of an edge, at an entry [given, taken]."""
        return 0.0 if self.temporaries is None else self.temporaries.of_value(edge, *place)

    def first(self, picked: Sequence[int], edges: Sequence[Edge], held: np.ndarray) -> float:
        """The peak bytes of the first step, in which the optimizer has no states before it is called."""
        states = self.held(picked, edges)["optimizer states"]
        states[2 * len(self.ops) :] = 0
        return float((held - states).max())

    def row(self, time: int) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        """Bytes at one time, by choice of each site and by flows of each edge."""
        sites: dict[int, np.ndarray] = {}
        edges: dict[int, np.ndarray] = {}
        for piece in self.pieces:
            if piece.first <= time <= piece.last:
                into = edges if piece.is_edge else sites
                into[piece.place] = into[piece.place] + piece.bytes if piece.place in into else piece.bytes
        return sites, edges
