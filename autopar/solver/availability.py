"""Prices of having a value in backward: multipliers of the constraints in `joint.py`, at one price of a byte.

They are the flows of the minimum cut that gives the cheapest states of one sharding (`states.py`): what passes from an
op to what it reads, and on to what made that.

What a value is worth depends on how it is sharded: behind a conversion it is worth the conversion more. So prices are
told apart by the flow in which a value leaves or arrives. Shardings say those of the flows that they have; where none
has a flow, the mean of the others stands in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.solver.polish import numbered
from autopar.solver.states import CutFlow, StateNetwork
from autopar.space.passage import Passage, Passages
from autopar.space.space import Space
from autopar.space.timeline import Run, Timeline


@dataclass(frozen=True, slots=True, eq=False)
class Availability:
    """Seconds that it is worth to have values in backward, by edge and by the flow in which it leaves or arrives."""

    leaving: Sequence[np.ndarray]
    arriving: Sequence[np.ndarray]
    saving: np.ndarray  # Repeating an op takes these seconds, with what it reads.


class Laid(NamedTuple):
    """A sharding as its choices and their timeline."""

    picked: Sequence[int]
    line: Timeline


class _Alike(NamedTuple):
    """Edges that are alike, and what says in which flows a value leaves and arrives over them."""

    edges: np.ndarray
    sources: np.ndarray  # the site of each
    targets: np.ndarray
    given_by: np.ndarray  # choice of a source -> flow that leaves
    taken_by: np.ndarray
    flows: tuple[int, int]  # numbers of flows that may leave, and that may arrive


class AvailabilityPrices:
    """Computes availability prices at one priced time of a space."""

    def __init__(self, space: Space, passages: Passages, time: int, kind_of_window: Sequence[int]) -> None:
        self.space = space
        self.passages = passages
        self.time = time
        self.kinds = numbered(space)
        self.kind_of_window = kind_of_window
        self._at = {op.site: t for t, op in enumerate(passages.ops)}
        self._adds: dict[Sequence[float], tuple[float, ...]] = {}  # exposed shares of the last call -> its result
        last = 2 * len(passages.ops) - 1
        # Whether the backward of each op runs at the priced time or later.
        self.wants = [last - t >= time for t in range(len(passages.ops))]
        # Whether each operand of each op is kept at the priced time.
        self.kept = [self._kept(op, last - t) for t, op in enumerate(passages.ops)]
        self.leaving_edges: dict[tuple[int, int], list[int]] = {}  # value -> the edges over which it leaves its op
        self._groups = _alike(space, self.kinds)
        inside = {k for op in passages.ops for k in op.edges}
        for k, source in enumerate(passages.sources):
            if source[0] >= 0 and k in inside and k not in passages.gathered:
                self.leaving_edges.setdefault(source, []).append(k)
        # The last cut is remembered with its timeline and price: callers ask for the same one repeatedly.
        self._flow = CutFlow(frozenset(), {}, {})
        self._line: Timeline | None = None
        self._priced: tuple[float, tuple[float, ...]] = (0.0, ())

    def _kept(self, op: Passage, back: int) -> tuple[bool, ...]:
        """Whether each operand of an op is kept, at the priced time, for its backward at time `back`."""
        pairs = zip(op.kept, op.first, strict=True)
        return tuple(kept and back - is_first >= self.time for kept, is_first in pairs)

    def _wanted(self, run: Run) -> Sequence[int]:
        """The values that are kept at the priced time for the backward of a run."""
        if not self.wants[run.time]:
            return ()
        is_there = 2 * len(self.passages.ops) - 1 - run.time == self.time
        return [v for v in run.keeps if v not in run.first] if is_there else run.keeps

    def worth(self, laid: Sequence[Laid], price: float, exposed: Sequence[float] | None = None) -> Availability:
        """The availability prices under some shardings, equal for edges that are alike.

        `exposed` is the share that counts as exposed, of each kind of window; without it all communication does.
        """
        return self._worth([(of, self._cut(of.line, price, self.adds(exposed))) for of in laid])

    def worth_under(
        self,
        laid: Laid,
        price: float,
        exposed: Sequence[float] | None,
        again: frozenset[int],
        own: frozenset[int],
        of_time: float = 1.0,
    ) -> Availability:
        """The availability prices where exactly the runs `again` are repeated; seconds count `of_time` times.

        The runs `own` are repeated for their own backward, whoever else reads what they make: only what they read in
        turn is asked for.
        """
        line = laid.line
        wanted, saved, repeated = self._costs(line, price, self.adds(exposed))
        for i, run in enumerate(line.runs):
            makes = [v for v in run.makes if not line.fixed[v]]
            repeated[i] = repeated[i] * of_time if i in again else math.inf
            saved |= dict.fromkeys(makes, 0.0 if i in own else math.inf) if i in again else {}
            wanted = wanted.difference(makes) if i in own else wanted
        askers: dict[int, list[int]] = {}  # value -> the runs of `own` that read it
        for i in sorted(own):
            for v in line.runs[i].reads:
                askers.setdefault(v, []).append(i)
        flow = StateNetwork(line, wanted | askers.keys(), repeated).cut(saved)
        into, asked = dict(flow.into), dict(flow.wanted)
        for v, runs in askers.items():
            amount = asked.pop(v, 0.0)
            into |= {(i, v): into.get((i, v), 0.0) + amount / len(runs) for i in runs}
        return self._worth([(laid, CutFlow(flow.again, into, asked))])

    def _worth(self, cuts: Sequence[tuple[Laid, CutFlow]]) -> Availability:
        shared = [(np.asarray(laid.picked), *self._shared_out(laid.line, flow)) for laid, flow in cuts]
        leaving: list[np.ndarray] = [np.zeros(0)] * len(self.space.edges)
        arriving = list(leaving)
        known: dict[bytes, np.ndarray] = {}  # Equal prices are one object, so that what they lead to is shared.
        for alike in self._groups:
            leaves = _Mean(alike.flows[0])
            arrives = _Mean(alike.flows[1])
            for picked, of_leaving, of_arriving in shared:
                leaves.add(alike.given_by[picked[alike.sources]], of_leaving[alike.edges])
                arrives.add(alike.taken_by[picked[alike.targets]], of_arriving[alike.edges])
            means = [known.setdefault(mean.tobytes(), mean) for mean in (leaves.found(), arrives.found())]
            for k in alike.edges.tolist():
                leaving[k], arriving[k] = means
        last, flow = cuts[-1]
        return Availability(leaving, arriving, self._through(last.line, flow))

    def _through(self, line: Timeline, flow: CutFlow) -> np.ndarray:
        """The flow through the run of each op, the mean over ops that are alike."""
        asked: dict[int, float] = dict(flow.wanted)
        for (_, value), amount in flow.into.items():
            asked[value] = asked.get(value, 0.0) + amount
        through: np.ndarray = np.zeros(len(line.run_of))
        for op, i in enumerate(line.run_of):
            through[op] = sum(asked.get(v, 0.0) for v in line.runs[i].makes)
        kinds = np.array([self.kinds[op.site] for op in self.passages.ops])
        for kind in np.unique(kinds):
            through[kinds == kind] = through[kinds == kind].mean()
        return through

    def cheapest(self, line: Timeline, price: float, exposed: Sequence[float] | None = None) -> frozenset[int]:
        """The runs to recompute under one sharding for the least seconds, at a price of a byte."""
        return self._cut(line, price, self.adds(exposed)).again

    def adds(self, exposed: Sequence[float] | None) -> tuple[float, ...]:
        """The least share of its seconds that recomputing each op adds to a step, by op.

        Backward repeats it in its own window, or in one that comes before: compute there hides what counts as exposed.
        """
        if exposed is None or not any(exposed):
            return (1.0,) * len(self.passages.ops)
        if exposed not in self._adds:
            share = self.space.setting.cluster.hidden / self.space.setting.passes
            hides = [0.0] * len(self.passages.ops)
            for window, kind in zip(self.space.windows, self.kind_of_window, strict=True):
                if window.way == "backward":
                    hides[self._at[window.span[1]]] += share * exposed[kind] * window.times
            most = itertools.accumulate(reversed(hides), max)
            self._adds = {exposed: tuple(1.0 - h for h in most)[::-1]}
        return self._adds[exposed]

    def _cut(self, line: Timeline, price: float, adds: tuple[float, ...]) -> CutFlow:
        if line is not self._line or (price, adds) != self._priced:
            wanted, saved, again = self._costs(line, price, adds)
            self._flow = StateNetwork(line, wanted, again).cut(saved)
            self._line = line
            self._priced = (price, adds)
        return self._flow

    def _costs(
        self, line: Timeline, price: float, adds: tuple[float, ...]
    ) -> tuple[set[int], dict[int, float], list[float]]:
        """The values that backward wants, the cost of saving each value, and that of repeating each run."""
        wanted = {v for run in line.runs if run.is_op for v in self._wanted(run)}
        saved = {v: price * float(line.bytes[v]) for v in range(len(line.bytes))}
        again = [run.seconds * adds[run.time] if run.is_op else run.seconds for run in line.runs]
        return wanted, saved, again

    def _shared_out(self, line: Timeline, flow: CutFlow) -> tuple[np.ndarray, np.ndarray]:
        """A cut's flows by edge, (leaving, arriving): from an op to its operands, and on to their makers."""
        edges = len(self.space.edges)
        leaving, arriving = np.zeros(edges), np.zeros(edges)
        keepers: dict[int, int] = {}  # value -> the number of edges whose targets keep it
        users: dict[int, int] = {}  # converted value -> the number of edges that use it
        for time, op in enumerate(self.passages.ops):
            for k, kept in zip(op.edges, self.kept[time], strict=True):
                if k in line.travels:
                    given, arrived = line.travels[k]
                    if kept:
                        keepers[arrived] = keepers.get(arrived, 0) + 1
                    if given != arrived:
                        users[arrived] = users.get(arrived, 0) + 1
        for time in range(len(self.passages.ops) - 1, -1, -1):
            op = self.passages.ops[time]
            run = line.run_of[time]
            same: dict[int, int] = {}
            for k in op.edges:
                if k in line.travels:
                    same[line.travels[k][1]] = same.get(line.travels[k][1], 0) + 1
            for k, kept in zip(op.edges, self.kept[time], strict=True):
                if k not in line.travels:
                    continue
                given, arrived = line.travels[k]
                through = flow.into.get((run, arrived), 0.0) / same[arrived]
                for i in (i for i, made in enumerate(op.made) if made.shows == k):
                    through += sum(float(leaving[j]) for j in self.leaving_edges.get((time, i), ()))
                arriving[k] = through
                direct = 0.0
                if kept:
                    direct = flow.wanted.get(arrived, 0.0) / keepers[arrived]
                if given == arrived:
                    leaving[k] = through + direct
                else:
                    leaving[k] = flow.into.get((line.made_by[arrived], given), 0.0) / users[arrived]
        return leaving, arriving


class _Mean:
    """The mean amount of each flow, over edges and shardings that have it; of one that none has, of all others."""

    def __init__(self, flows: int) -> None:
        self.flows = flows
        self.total: np.ndarray = np.zeros(flows)
        self.count: np.ndarray = np.zeros(flows)

    def add(self, flows: np.ndarray, amounts: np.ndarray) -> None:
        """Count these amounts, each of a flow."""
        self.total += np.bincount(flows, amounts, self.flows)
        self.count += np.bincount(flows, minlength=self.flows)

    def found(self) -> np.ndarray:
        of_all = self.total.sum() / self.count.sum()
        return np.where(self.count > 0, self.total / np.maximum(self.count, 1), of_all)


def _alike(space: Space, kinds: Sequence[int]) -> list[_Alike]:
    """The edges of a space in groups of those that are alike, which share tables."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for k, e in enumerate(space.edges):
        ends = kinds[e.source], kinds[e.target], e.operand
        groups.setdefault((*ends, id(e.given_by), id(e.taken_by)), []).append(k)
    found = []
    for edges in groups.values():
        sources, targets = np.array([(space.edges[k].source, space.edges[k].target) for k in edges]).T
        first = space.edges[edges[0]]
        flows = len(first.given), len(first.taken)
        found.append(_Alike(np.array(edges), sources, targets, first.given_by, first.taken_by, flows))
    return found
