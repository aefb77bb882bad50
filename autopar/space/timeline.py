"""`Timeline`: the ops and conversions of one plan in the order in which they run, and the bytes of their values.

The states of a value that backward needs:

    saved         it stays from the forward on
    recomputed    it is dropped, and its op or conversion runs again in backward, just before what first reads it
    offloaded     it waits on the host: its memory is free from some op of forward to some op's backward
    dropped       nothing in backward needs it

What an op makes of a parameter that is gathered for its forward alone (an embedding's table) is not recomputed: it
would be gathered once more.

A plan names what it recomputes; what is saved follows, for what runs again needs its operands. `Timeline.under` goes
through forward and backward and frees each value behind its last reader: the emitted program does the same. What else a
step holds - parameters, gradients, messages - is in the pieces of `memory.py`, and does not change.

Where one more run of each is not enough, some come more than once (`Passing`): what such a run makes for the backward
of an op behind a certain one is made in passing. It is dropped after that backward, and made once more when backward
comes nearer.

`Passage`s are how the values of a graph lie on each other, whatever is chosen; a `Timeline` is that of one plan.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.space.limits import LIMITS
from autopar.space.passage import OWN, Passage
from autopar.space.steps import NOWHERE, Away, Passing, Steps

if TYPE_CHECKING:
    from autopar.space.space import Space

SMALL = 64 * 2**10  # bytes of a value that is saved whatever is recomputed: statistics, counts
RESIDENT = -1  # instead of a value's number: parameters, buffers and inputs, which always exist


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One run of an op, or of a conversion before it, on one device."""

    name: str  # the name that a plan gives its result
    seconds: float  # seconds of one run in forward
    reads: tuple[int, ...]  # values, as numbers
    makes: tuple[int, ...]
    keeps: tuple[int, ...]  # values that its backward reads
    first: tuple[int, ...]  # values among `keeps` that the backward frees before its own peak
    time: int  # the op's time in forward (see `memory.py`)
    work: float = 0.0  # temporary bytes
    is_op: bool = True
    region: str = ""  # the model's own checkpoint region around it
    is_core: bool = False  # is it in the core of an attention?
    # is what it makes always dropped? The copy of a parameter that is gathered again, or what is inside a kernel
    is_forced: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Uncovered:
    """Communication of a window of backward that is exposed: recomputed ops there run beside it."""

    first: int  # the ops of the window, by their times in forward
    last: int
    seconds: float  # each time that the window comes
    times: int  # how often the window comes in a step


@dataclass(frozen=True, slots=True, eq=False)
class Momentary:
    """Bytes that a plan is counted to hold at some time, but holds during part of that time only."""

    temporaries: np.ndarray  # bytes of conversions beyond the pieces, which run before or after an op
    made: np.ndarray  # bytes of gradients that an op's backward makes; recomputation runs before they exist

    @staticmethod
    def nothing(times: int) -> Momentary:
        return Momentary(np.zeros(times), np.zeros(times))


@dataclass(eq=False)
class Timeline:
    """The runs of one plan, the bytes of their values, and the other memory of the step."""

    runs: tuple[Run, ...]
    bytes: np.ndarray  # bytes by value
    leaves: np.ndarray  # whether the caller holds each value until backward has ended
    made_by: tuple[int, ...]  # value -> the run that makes it
    ops: int  # number of ops in the forward
    held: np.ndarray  # bytes at every time where all is saved, as the plan's pieces say
    momentary: Momentary  # bytes in `held` that exist during a part of an op's time only
    run_of: tuple[int, ...]  # op -> its run
    travels: dict[int, tuple[int, int]]  # edge -> the value that leaves and the value that arrives, of those in runs
    # values of a region in chunks, whose backward follows at once, and conversions of inputs
    saved_always: frozenset[int] = frozenset()
    uncovered: tuple[Uncovered, ...] = ()
    covers: float = 1.0  # seconds of it that a second of what is repeated hides, each time

    def __post_init__(self) -> None:
        small = min(SMALL, LIMITS.small * float(self.held.max(initial=0.0)))
        # Values that leave the graph, and small ones, are dropped only where their run is forced.
        self.fixed = self.leaves | (self.bytes <= small)
        self.fixed[list(self.saved_always)] = True
        gathered = {v for run in self.runs if not run.is_op and not run.reads for v in run.makes if not self.fixed[v]}
        self.fixed[[v for run in self.runs if not gathered.isdisjoint(run.reads) for v in run.makes]] = True
        self.fixed[[v for i in self.forced for v in self.runs[i].makes]] = False
        self.steps = Steps(self)
        # Bytes of what is in no run, by time: where all is saved, the line holds what the pieces say.
        self.other: np.ndarray = self.held - self.steps.held(self.steps.repeated(self.forced))

    @functools.cached_property
    def needed(self) -> frozenset[int]:
        """The values that some backward reads."""
        return frozenset(v for run in self.runs for v in run.keeps)

    @functools.cached_property
    def forced(self) -> frozenset[int]:
        """The runs that come again wherever what they make is needed."""
        return frozenset(i for i, run in enumerate(self.runs) if run.is_forced)

    @functools.cached_property
    def once(self) -> frozenset[int]:
        """Conversions that come again, whose seconds are counted once, by the sharding."""
        return frozenset(i for i in self.forced if not self.runs[i].is_op)

    @staticmethod
    def of(space: Space, picked: Sequence[int], held: np.ndarray, momentary: Momentary) -> Timeline:
        """The timeline of the plan that picks these choices and holds these bytes at every time."""
        return _TimelineWriter(space, picked).line(held, momentary)

    @property
    def names(self) -> list[str]:
        """Names of the runs that may be recomputed, since they make something that could be dropped."""
        return [run.name for run in self.runs if any(not self.fixed[v] for v in run.makes)]

    def again(self, recomputed: Collection[str]) -> frozenset[int]:
        """Indices of the runs with these names, and of those that are always recomputed."""
        names = frozenset(recomputed)
        return frozenset(i for i, run in enumerate(self.runs) if run.name in names) | self.forced

    def hidden(self, through: Through) -> float:
        """Seconds of exposed communication that recomputed ops hide."""
        if not self.uncovered:
            return 0.0
        by_time = np.zeros(self.ops)
        for i, time in zip(through.ran, through.times, strict=True):
            if self.runs[i].is_op:
                by_time[2 * self.ops - 1 - time] += self.runs[i].seconds * self.covers
        return sum(w.times * min(w.seconds, float(by_time[w.first : w.last + 1].sum())) for w in self.uncovered)

    @functools.cached_property
    def costs(self) -> tuple[float, ...]:
        """Seconds that recomputing each run would add to a step, if all ops in its window were recomputed too."""
        seconds = np.array([run.seconds for run in self.runs])
        at = np.array([run.time if run.is_op else -1 for run in self.runs])
        left = np.ones(len(seconds))
        for w in self.uncovered:
            inside = (at >= w.first) & (at <= w.last)
            whole = float(seconds[inside].sum())
            left[inside] -= w.times * min(w.seconds, self.covers * whole) / whole if whole else 0.0
        return tuple((seconds * left).tolist())

    def passing(self, named: Mapping[str, str]) -> Passing:
        """The runs that are recomputed in passing; `named` maps the name of a run to that of an op."""
        at = {run.name: (i, run.time) for i, run in enumerate(self.runs)}
        return tuple(sorted((at[name][0], at[op][1]) for name, op in named.items() if at[name][0] not in self.forced))

    def saved(self, again: frozenset[int]) -> frozenset[int]:
        """The values kept from forward to their last reader in backward, if these runs are recomputed."""
        wanted = self.needed.union(*(self.runs[i].reads for i in self.under(again).ran))
        return frozenset(v for v in wanted if self.fixed[v] or self.made_by[v] not in again)

    def peak(self, again: frozenset[int] = frozenset()) -> float:
        """The most bytes at any time of a step in which these runs are recomputed."""
        return float(self.under(again | self.forced).held.max(initial=0.0))

    def under(self, again: frozenset[int], passing: Passing = (), away: Away = NOWHERE) -> Through:
        """The step in which these runs are recomputed: what runs again, and the bytes at every time."""
        repeated = self.steps.repeated(again, passing)
        times = self.steps.back[repeated.places].tolist()
        return Through(tuple(repeated.runs), tuple(times), self.steps.held(repeated, away) + self.other)


@dataclass(frozen=True, slots=True, eq=False)
class Through:
    """A step in which some runs are recomputed: the repeated runs in order, and the bytes at every time."""

    ran: tuple[int, ...]
    times: tuple[int, ...]  # run in `ran` -> the time of the backward before which it is repeated
    held: np.ndarray


class _TimelineWriter:
    """Builds the timeline of one plan, with every conversion once, before the op that first takes its result."""

    def __init__(self, space: Space, picked: Sequence[int]) -> None:
        assert space.memory is not None
        self.space, self.picked, self.memory = space, picked, space.memory
        self.passages = space.memory.passages
        self.runs: list[Run] = []
        self.bytes: list[float] = []
        self.made_by: list[int] = []
        self.values: list[list[int]] = []  # op -> the numbers of its values
        self.run_of: list[int] = []
        self.travels: dict[int, tuple[int, int]] = {}
        self.converted: dict[tuple[int, int, int], int] = {}
        self.saved_always: set[int] = set()
        self.handed: dict[int, list[int]] = {}  # time of an op -> values kept by ops that run in its kernel
        self.times = space.setting.passes  # micro-batches: what a run takes, it takes in each

    def line(self, held: np.ndarray, momentary: Momentary) -> Timeline:
        """The timeline with all runs in order."""
        for time, op in enumerate(self.passages.ops):
            self._op(time, op)
        left = {self._arrives(edge, len(self.passages.ops) - 1) for edge in self.passages.ends}
        leaves = [value in left for value in range(len(self.bytes))]
        ops = len(self.passages.ops)
        return Timeline(
            tuple(self.runs),
            np.array(self.bytes, float),
            np.array(leaves, bool),
            tuple(self.made_by),
            ops,
            held,
            momentary,
            tuple(self.run_of),
            self.travels,
            frozenset(self.saved_always),
            tuple(self._uncovered()),
            self.space.setting.cluster.hidden / self.times,
        )

    def _uncovered(self) -> Iterator[Uncovered]:
        at = {op.site: time for time, op in enumerate(self.passages.ops)}
        for window in self.space.windows:
            if window.way == "backward":
                communication, compute = window.seconds(self.picked, self.space.edges)
                if communication > compute:
                    first, last = (at[site] for site in window.span)
                    yield Uncovered(first, last, communication - compute, window.times)

    def _op(self, time: int, op: Passage) -> None:
        site, choice = self.space.sites[op.site], self.picked[op.site]
        arrived = {e: self._arrives(e, time, kept) for e, kept in zip(op.edges, op.kept, strict=True)}
        values, makes = list[int](), list[int]()
        keeps = [arrived[e] for e, kept in zip(op.edges, op.kept, strict=True) if kept]
        for made in op.made:
            if made.shows >= 0:
                value = arrived[made.shows]
            else:
                value = self._value(float(made.bytes[choice]))
                makes.append(value)
            values.append(value)
            if made.is_kept:
                keeps.append(value)
        self.values.append(values)
        if op.runs_at not in (OWN, time):
            self.handed.setdefault(op.runs_at, []).extend(keeps)
            keeps = []
        keeps += self.handed.pop(time, [])
        if op.besides is not None:
            makes.append(self._value(float(op.besides[choice])))
            keeps.append(makes[-1])
        seconds = float(site.compute[0][choice]) * self.times if site.compute else 0.0
        work = float(op.work[choice]) if op.work is not None else 0.0
        first = [arrived[e] for e, is_first in zip(op.edges, op.first, strict=True) if is_first]
        reads = tuple(v for v in _values(arrived.values()) if v not in makes)
        run = Run(
            site.name,
            seconds,
            reads,
            tuple(makes),
            _values(keeps),
            tuple(v for v in _values(first) if keeps.count(v) == 1),
            time,
            work,
            region=op.region,
            is_core=op.is_core,
            is_forced=op.is_inner,
        )
        if op.in_chunks or op.is_route:
            self.saved_always.update(v for v in (*makes, *keeps) if v != RESIDENT)
        if self.space.is_once(op.site, choice):  # Every turn takes the one value.
            self.saved_always.update(makes)
        self.run_of.append(len(self.runs))
        self._write(run)

    def _arrives(self, edge: int, time: int, is_kept: bool = False) -> int:
        """The value that arrives over an edge: the one that leaves, or the result of its conversion.

        The gathered copy of a parameter is among the pieces, with as long as the op's own backward keeps it.
        """
        (source, port), e = self.passages.sources[edge], self.space.edges[edge]
        value = self.values[source][port] if source >= 0 else RESIDENT
        place, is_gathered = e.place(self.picked), edge in self.passages.gathered
        made = float(self.passages.converted[edge][place])
        if not made:
            if value != RESIDENT:
                self.travels[edge] = value, value
            return value
        if is_gathered and is_kept:
            return RESIDENT
        key = (e.source, port, int(self.passages.arrives[edge][place[1]]))
        if key not in self.converted:
            made_value = self.converted[key] = self._value(made)
            reads = [value] if value != RESIDENT else []
            policies = self.space.sites[e.source].regathered
            is_forced = is_gathered and bool(policies) and policies[self.picked[e.source]]
            run = Run(
                f"{self.space.sites[e.target].name}:{e.operand}",
                float(e.forward[place]) * self.times,
                tuple(reads),
                (made_value,),
                (),
                (),
                time,
                0.0 if is_forced else self.memory.beside_value(edge, place),
                is_op=False,
                is_forced=is_forced,
            )
            self._write(run)
            is_once = self.space.is_once(e.source, self.picked[e.source])
            # The converted copy of an input stays for its next reader.
            if (value == RESIDENT or is_once) and not is_gathered:
                self.saved_always.add(made_value)
        if not is_gathered and value != RESIDENT:
            self.travels[edge] = value, self.converted[key]
        return self.converted[key]

    def _value(self, nbytes: float) -> int:
        self.bytes.append(nbytes)
        self.made_by.append(-1)  # until its run is written
        return len(self.bytes) - 1

    def _write(self, run: Run) -> None:
        for value in run.makes:
            self.made_by[value] = len(self.runs)
        self.runs.append(run)


def _values(values: Iterable[int]) -> tuple[int, ...]:
    """The distinct values, without those that are always in memory."""
    return tuple(v for v in dict.fromkeys(values) if v != RESIDENT)
