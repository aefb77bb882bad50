"""`Line`: the ops and conversions of one plan in the order in which they run, and what the step holds of their values.

The states of a value that backward needs:

    saved         it stays from the forward on
    recomputed    it is dropped, and its op or conversion runs again in backward, just before what first reads it
    dropped       nothing in backward needs it

A plan names what it recomputes; what is saved follows, for what runs again needs its operands. `Line.held` runs through
forward and backward and frees each value behind its last reader: the emitted program does the same. What else a step
holds - parameters, gradients, messages - is in the pieces of `memory.py`, and does not change.

`Passage`s are how the values of a graph lie on each other, whatever is chosen; a `Line` is that of one plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from autopar.space.space import Space

SMALL = 64 * 2**10  # bytes of a value that is saved whatever is recomputed: statistics, counts
RESIDENT = -1  # in place of a value: parameters, buffers and inputs are there anyway
OWN = -1  # in place of an edge: the memory is its own


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A value that an op makes."""

    bytes: np.ndarray  # by choice of the op
    shows: int  # the edge whose value's memory it shows; OWN of a value with memory of its own
    is_kept: bool  # does the backward of its own op read it?


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """An op, as values pass through it."""

    site: int
    edges: tuple[int, ...]  # by which its operands arrive
    kept: tuple[bool, ...]  # of each: does its backward read what arrives?
    made: tuple[Made, ...]
    region: str = ""  # the model's own checkpoint region around it
    is_core: bool = False  # is it in the core of an attention, between the products?
    besides: np.ndarray | None = None  # bytes that its backward reads besides, by choice
    work: np.ndarray | None = None  # and bytes that it makes for the while


@dataclass(frozen=True, slots=True, eq=False)
class Passages:
    """The ops of a graph in the order of the forward, and the edges between them."""

    ops: tuple[Passage, ...] = ()
    sources: tuple[tuple[int, int], ...] = ()  # of each edge the op whose value it carries, as which; or (-1, 0)
    arrives: tuple[
        np.ndarray, ...
    ] = ()  # of each edge a number for each flow of `taken`: equal ones are converted once
    converted: tuple[np.ndarray, ...] = ()  # of each edge the bytes that a conversion makes, by [given, taken]
    gathered: frozenset[int] = frozenset()  # edges of parameters
    ends: tuple[int, ...] = ()  # edges by which values leave the graph


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """An op, or a conversion before it, on one device."""

    name: str  # as a plan names what it makes
    seconds: float  # of running it once in forward
    reads: tuple[int, ...]  # values, as numbers
    makes: tuple[int, ...]
    keeps: tuple[int, ...]  # values that its backward reads
    time: int  # of the op in forward (see `memory.py`)
    work: float = 0.0  # bytes that it makes for the while
    is_op: bool = True
    region: str = ""  # the model's own checkpoint region around it
    is_core: bool = False  # is it in the core of an attention?
    is_forced: bool = False  # is what it makes always dropped? The copy of a parameter that is gathered again


@dataclass(slots=True, eq=False)
class Line:
    """The runs of a plan, the bytes of their values, and what the step holds besides."""

    runs: tuple[Run, ...]
    bytes: np.ndarray  # of each value
    leaves: np.ndarray  # of each value: it is in the caller's hands until backward has ended
    made_by: tuple[int, ...]  # of each value the run that makes it
    ops: int  # in the forward
    held: np.ndarray  # bytes at every time where all is saved, as the plan's pieces say
    seconds: float  # of a step where all is saved
    run_of: tuple[int, ...]  # of each op its run
    travels: dict[int, tuple[int, int]]  # edge -> the value that leaves and the value that arrives, of those in runs
    fixed: np.ndarray = field(init=False)  # of each value: it is not dropped, for it leaves, or is small
    other: np.ndarray = field(init=False)  # bytes of what is in no run, by time
    needed: frozenset[int] = field(init=False)  # values that some backward reads
    forced: frozenset[int] = field(init=False)  # runs that come again wherever what they make is needed

    def __post_init__(self) -> None:
        self.needed = frozenset(v for run in self.runs for v in run.keeps)
        self.forced = frozenset(i for i, run in enumerate(self.runs) if run.is_forced)
        self.fixed = self.leaves | (self.bytes <= SMALL)
        self.fixed[[v for i in self.forced for v in self.runs[i].makes]] = False
        self.other = np.zeros(len(self.held))
        own, times = self._own(self.forced)
        most = np.zeros(len(self.held))
        np.maximum.at(most, times, own)
        self.other = self.held - most

    @staticmethod
    def of(space: Space, picked: Sequence[int], seconds: float) -> Line:
        """The line of the plan that picks these choices."""
        return _Writer(space, picked).line(seconds)

    @property
    def names(self) -> list[str]:
        """The runs that may be recomputed: they make something that could be dropped."""
        return [run.name for run in self.runs if any(not self.fixed[v] for v in run.makes)]

    def again(self, recomputed: Collection[str]) -> frozenset[int]:
        """The runs that these names are of."""
        return frozenset(i for i, run in enumerate(self.runs) if run.name in recomputed) | self.forced

    def seconds_of(self, again: Collection[int]) -> float:
        """Seconds of what runs a second time, where these runs are recomputed."""
        return sum(self.runs[i].seconds for i in self.ran(frozenset(again)))

    def ran(self, again: frozenset[int]) -> list[int]:
        """The runs that run a second time, in the order in which backward comes to them."""
        return [i for is_op, i, _ in self._steps(again) if not is_op]

    def saved(self, again: frozenset[int]) -> frozenset[int]:
        """The values that are there from forward to their last reader in backward."""
        ran = self.ran(again)
        wanted = self.needed.union(*(self.runs[i].reads for i in ran))
        return frozenset(v for v in wanted if self.fixed[v] or self.made_by[v] not in again)

    def peak(self, again: frozenset[int] = frozenset()) -> float:
        """The most bytes that a device holds at any time of a step."""
        return float(self.held_under(again | self.forced).max(initial=0.0))

    def held_under(self, again: frozenset[int]) -> np.ndarray:
        """Bytes at every time of a step."""
        own, times = self._own(again)
        most = np.full(len(self.held), -np.inf)
        np.maximum.at(most, times, own)
        return np.where(np.isfinite(most), most + self.other, self.held)

    # -- running through

    def _steps(self, again: frozenset[int]) -> list[tuple[bool, int, int]]:
        """The backward: for each op those of its runs that come again, then its own; with the time of each."""
        steps = list[tuple[bool, int, int]]()
        there, last = set[int](), 2 * self.ops - 1
        for i in range(len(self.runs) - 1, -1, -1):
            run = self.runs[i]
            if not run.is_op:
                continue
            time = last - run.time
            for value in run.keeps:
                self._make(value, again, there, steps, time)
            steps.append((True, i, time))
        return steps

    def _make(
        self, value: int, again: frozenset[int], there: set[int], steps: list[tuple[bool, int, int]], time: int
    ) -> None:
        """Let what makes a value run again, and before it what makes its operands, where they are not there."""
        pending = [value]
        while pending:
            wanted = pending[-1]
            run = self.made_by[wanted]
            if wanted in there or self.fixed[wanted] or run not in again:
                pending.pop()
                continue
            missing = [
                v for v in self.runs[run].reads if v not in there and not self.fixed[v] and self.made_by[v] in again
            ]
            if missing:
                pending += missing
                continue
            pending.pop()
            there.update(self.runs[run].makes)
            steps.append((False, run, time))

    def _own(self, again: frozenset[int]) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of the runs' values at every step of forward and backward, and the time of each step."""
        forward = len(self.runs)
        steps = self._steps(again)
        count = forward + len(steps)
        change = np.zeros(count + 1)
        work = np.zeros(count)
        size, fixed = self.bytes, self.fixed
        born, last = dict[int, int](), dict[int, int]()
        for t, run in enumerate(self.runs):
            for v in run.reads:
                last[v] = t
            for v in run.makes:
                born[v] = last[v] = t
        for t, (is_op, i, _) in enumerate(steps, forward):
            run = self.runs[i]
            if not is_op:
                work[t] = run.work
                for v in run.makes:
                    if not fixed[v]:  # the first life of what is made again has ended
                        change[born[v]] += size[v]
                        change[last[v] + 1] -= size[v]
                        born[v] = last[v] = t
            for v in run.keeps if is_op else run.reads:
                last[v] = t
        for v, first in born.items():
            change[first] += size[v]
            change[count if self.leaves[v] else last[v] + 1] -= size[v]
        times = np.array([run.time for run in self.runs] + [time for _, _, time in steps], int)
        return np.cumsum(change[:-1]) + work, times


class _Writer:
    """Writes the line of one plan: every conversion once, before the op that first takes what it makes."""

    def __init__(self, space: Space, picked: Sequence[int]) -> None:
        assert space.memory is not None
        self.space, self.picked, self.memory = space, picked, space.memory
        self.passages = space.memory.passages
        self.runs: list[Run] = []
        self.bytes: list[float] = []
        self.made_by: list[int] = []
        self.values: list[list[int]] = []  # of each op its values, as numbers
        self.run_of: list[int] = []
        self.travels: dict[int, tuple[int, int]] = {}
        self.converted: dict[tuple[int, int, int], int] = {}
        self.times = space.setting.accumulation  # micro-batches: what a run takes, it takes in each

    def line(self, seconds: float) -> Line:
        """All runs in order."""
        for time, op in enumerate(self.passages.ops):
            self._op(time, op)
        left = {self._arrives(edge, len(self.passages.ops) - 1) for edge in self.passages.ends}
        leaves = [value in left for value in range(len(self.bytes))]
        held = sum(self.memory.held(self.picked, self.space.edges).values(), np.zeros(self.memory.times))
        ops = len(self.passages.ops)
        return Line(
            tuple(self.runs),
            np.array(self.bytes, float),
            np.array(leaves, bool),
            tuple(self.made_by),
            ops,
            held,
            seconds,
            tuple(self.run_of),
            self.travels,
        )

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
        if op.besides is not None:
            makes.append(self._value(float(op.besides[choice])))
            keeps.append(makes[-1])
        seconds = float(site.compute[0][choice]) * self.times if site.compute else 0.0
        work = float(op.work[choice]) if op.work is not None else 0.0
        reads = tuple(v for v in _values(arrived.values()) if v not in makes)
        run = Run(
            site.name,
            seconds,
            reads,
            tuple(makes),
            _values(keeps),
            time,
            work,
            region=op.region,
            is_core=op.is_core,
        )
        self.run_of.append(len(self.runs))
        self._write(run)

    def _arrives(self, edge: int, time: int, is_kept: bool = False) -> int:
        """The value that arrives over an edge: that which leaves, or what a conversion makes of it.

        The gathered copy of a parameter is among the pieces, with as long as the op's own backward keeps it.
        """
        (source, port), e = self.passages.sources[edge], self.space.edges[edge]
        value = self.values[source][port] if source >= 0 else RESIDENT
        place, is_gathered = e.place(self.picked), edge in self.passages.gathered
        made = float(self.passages.converted[edge][place])
        if not made or (value == RESIDENT and not is_gathered):
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
                time,
                is_op=False,
                is_forced=is_forced,
            )
            self._write(run)
        if not is_gathered:
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
    """The values, each once, without what is there anyway."""
    return tuple(v for v in dict.fromkeys(values) if v != RESIDENT)
