"""The cheapest states of a timeline's values under a budget: which runs backward repeats for the fewest seconds.

At given prices of bytes the cheapest states are a minimum cut. A run that is repeated needs its operands; a value that
backward needs is saved, at the price of its bytes from its last reader in forward to its first in backward, or its run
is repeated, at its seconds:

    source -> needed(v)                 the backward of some op reads v
    repeated(u) -> needed(v)            run u reads v
    needed(v) -> repeated(run of v)     price of the bytes of v
    repeated(u) -> sink                 seconds that u adds to the step

The price is raised until states fit; between the last two prices there are states that are one up to some place and
another from there on. `refine.py` looks closer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.flow import Network
from autopar.solver.limits import LIMITS
from autopar.space.steps import Away, Passing
from autopar.space.timeline import Timeline

_LIMITS = LIMITS.states

Again = frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class StepStates:
    """Runs that backward repeats, the seconds that they add to a step, and the bytes of the step at every time."""

    again: Again
    seconds: float
    held: np.ndarray
    passing: Passing = ()  # repeated runs that are run more than once
    hidden: float = 0.0  # further seconds of the runs, which overlap communication that nothing else hides
    away: Away = field(default_factory=dict)  # values that wait on the host

    @property
    def key(self) -> tuple[Again, Passing]:
        return self.again, self.passing

    @property
    def peak(self) -> float:
        return float(self.held.max())


class StateSearch:
    """The search for states of one timeline."""

    def __init__(self, line: Timeline) -> None:
        self.line = line
        self.known: dict[tuple[Again, Passing], StepStates] = {}
        self.none = self.of(line.forced)
        self.fullest = int(self.none.held.argmax())
        self.priced: dict[float, StepStates] = {0.0: self.none}  # price of a byte at the fullest time -> its states
        self.windows = _windows(line)
        self._network: StateNetwork | None = None  # None until it is asked for

    @property
    def network(self) -> StateNetwork:
        """The network whose cuts give cheapest states."""
        if self._network is None:
            self._network = StateNetwork(self.line, self.line.needed)
        return self._network

    def of(self, again: Again, passing: Passing = ()) -> StepStates:
        """The states in which these runs are repeated, as far as backward needs them.

        Runs that always come again come once: programs gather a parameter once more for backward, not twice.
        """
        again = again | self.line.forced
        passing = tuple(pair for pair in passing if pair[0] not in self.line.forced)
        if (again, passing) not in self.known:
            through = self.line.under(again, passing)
            ran = frozenset(through.ran)
            often = Counter(through.ran)
            often.subtract(self.line.once & ran)
            seconds = sum(self.line.runs[i].seconds * n for i, n in often.items())
            hidden = self.line.hidden(through)
            come = tuple(pair for pair in passing if pair[0] in ran)
            states = StepStates(ran, seconds - hidden, through.held, come, hidden)
            self.known[again, passing] = self.known[states.key] = states
        return self.known[again, passing]

    def within(self, budget: float, price: float = 0.0) -> StepStates | None:
        """The fastest known states within a budget, after a search by prices from `price` on, or None."""
        if self.none.peak <= budget:
            return self.none
        neighbours = self._price(budget, price)
        if neighbours is not None:
            self.know(self._spliced(*neighbours, budget))
        self.know(self._splices(budget, _LIMITS.pairs))
        return self.fastest(budget)

    def know(self, found: Iterable[StepStates]) -> None:
        """Remember states that were found elsewhere."""
        for states in found:
            self.known[states.key] = states

    def fastest(self, budget: float) -> StepStates | None:
        """The fastest known states within a budget, or None."""
        return min((s for s in self.known.values() if s.peak <= budget), key=lambda s: s.seconds, default=None)

    def usual_price(self, time: int) -> float:
        """Seconds of all runs, divided by the bytes that could be dropped at a time."""
        line = self.line
        droppable = sum(
            float(line.bytes[v])
            for v, (first, last) in enumerate(self.windows)
            if v in line.needed and not line.fixed[v] and first <= time < last
        )
        return sum(run.seconds for run in line.runs) / max(1.0, droppable)

    # -- at prices

    def at_price(self, price: float) -> StepStates:
        """The states of least seconds and priced bytes, at a price of bytes at the timeline's fullest time."""
        if price not in self.priced:
            self.priced[price] = self.of(cheapest(self.network, self.windows, {self.fullest: price}))
        return self.priced[price]

    def _price(self, budget: float, price: float) -> tuple[StepStates, StepStates] | None:
        """States that fit the budget and faster ones that do not, neighbours in price; None if not found.

        The price of a byte at the fullest time is raised until states fit. Where bytes cost more than everything else,
        backward would begin with the whole forward: the peak rises again, so that the price is raised step by step, and
        no more once it has risen. From a price that may be near the first steps are small.
        """
        step = _LIMITS.near if price else _LIMITS.step
        price = price or self.usual_price(self.fullest) / _LIMITS.step**2
        low = 0.0
        high = math.inf
        lowest = math.inf
        in_vain = 0
        for _ in range(_LIMITS.raised):
            peak = self.at_price(price).peak
            if peak <= budget:
                high = price
            else:
                low = price
            in_vain = in_vain + 1 if peak > lowest and step == _LIMITS.step else 0
            lowest = min(lowest, peak)
            if low and (math.isfinite(high) or in_vain == _LIMITS.in_vain):
                break
            price = price * step if low else price / step
            step = min(step * step, _LIMITS.step)
        if not low or math.isinf(high):
            return None
        return self._neighbours(self.at_price(high), self.at_price(low), budget)

    def _neighbours(self, under: StepStates, over: StepStates, budget: float) -> tuple[StepStates, StepStates]:
        """The neighbours in price between which the budget lies, from two states further apart.

        At the price at which two states cost the same there may be one that costs less; where there is none, they are
        neighbours.
        """
        time = self.fullest
        for _ in range(_LIMITS.between):
            dropped = float(over.held[time] - under.held[time])
            if dropped <= 0:
                break
            price = (under.seconds - over.seconds) / dropped
            found = self.at_price(price)
            cost = found.seconds + price * found.held[time]
            known = over.seconds + price * over.held[time]
            if found in (over, under) or cost >= known * (1 - LIMITS.rounding.same):
                break
            if found.peak <= budget:
                under = found
            else:
                over = found
        return under, over

    # -- between states

    def _splices(self, budget: float, pairs: int) -> Iterable[StepStates]:
        """States that follow one known state up to some run, and another from there on."""
        all_ = sorted((s for s in self.known.values() if not s.passing), key=lambda s: s.seconds)
        under = [s for s in all_ if s.peak <= budget][:1]
        over = [s for s in all_ if s.peak > budget and (not under or s.seconds < under[0].seconds)][-pairs:]
        for one in under:
            for other in over:
                yield from self._spliced(one, other, budget)

    def _spliced(self, under: StepStates, over: StepStates, budget: float) -> Iterable[StepStates]:
        """States with as many runs of the faster state as fit, at the beginning or at the end."""
        for first in (True, False):
            low = 0  # a number of runs of the faster state that fits
            high = len(self.line.runs)  # a number that may not fit
            while high - low > 1:
                middle = (low + high) // 2
                place = middle if first else len(self.line.runs) - middle
                front, back = (over, under) if first else (under, over)
                mixed = frozenset(i for i in front.again if i < place) | frozenset(i for i in back.again if i >= place)
                states = self.of(mixed)
                if states.peak <= budget:
                    low = middle
                    yield states
                else:
                    high = middle


def cheapest(network: StateNetwork, windows: Sequence[tuple[int, int]], prices: Mapping[int, float]) -> Again:
    """The runs to repeat for the least cost at prices of bytes by time; saved values cost in their window."""
    line = network.line
    of_time = np.zeros(len(line.held) + 1)
    for t, price in prices.items():
        of_time[t + 1] += price
    total = np.cumsum(of_time)
    saved = {
        v: float(total[last] - total[first]) * float(line.bytes[v]) if last > first else 0.0
        for v, (first, last) in enumerate(windows)
    }
    return network.cut(saved).again


@dataclass(frozen=True, slots=True, eq=False)
class CutFlow:
    """The runs to repeat, and the flow that proves them cheapest: seconds by which each run asks for what it reads."""

    again: Again
    into: Mapping[tuple[int, int], float]  # (run, value that it reads)
    wanted: Mapping[int, float]  # value -> what backward itself asks for it


class StateNetwork:
    """The network of a line whose minimum cut gives the runs to repeat, so that backward has the `wanted` values.

    `again` has the cost of repeating each run: the timeline's own by default. Only values that something wanted may
    depend on enter the network, which keeps it small.
    """

    def __init__(self, line: Timeline, wanted: Collection[int], again: Sequence[float] | None = None) -> None:
        again = line.costs if again is None else again
        runs = len(line.runs)  # nodes: the runs, then the values, then source and sink
        self.line = line
        self.source = runs + len(line.bytes)
        self.sink = self.source + 1
        self.network = network = Network(self.sink + 1)
        pending = [v for v in sorted(wanted) if not line.fixed[v]]
        self.asking = {v: network.add(self.source, runs + v, math.inf) for v in pending}
        self.reading: dict[tuple[int, int], int] = {}
        self.saving: dict[int, int] = {}  # value -> its arc, whose capacity is the cost of saving it
        seen = set(pending)
        ran = set[int]()
        while pending:
            v = pending.pop()
            u = line.made_by[v]
            arc = network.add(runs + v, u, math.inf)
            if u not in line.forced:
                self.saving[v] = arc
            if u in ran:
                continue
            ran.add(u)
            network.add(u, self.sink, again[u])
            for w in line.runs[u].reads:
                if not line.fixed[w] and (u, w) not in self.reading:
                    self.reading[u, w] = network.add(u, runs + w, math.inf)
                    if w not in seen:
                        seen.add(w)
                        pending.append(w)
        self.room = tuple(network.room)  # before anything flows, and without costs of saving

    def cut(self, saved: Mapping[int, float]) -> CutFlow:
        """The runs to repeat for the least cost; `saved` has the cost of saving each value."""
        network = self.network
        network.room = list(self.room)
        for v, arc in self.saving.items():
            network.room[arc] = saved.get(v, 0.0)
        network.fill(self.source, self.sink)
        into = {ends: flow for ends, arc in self.reading.items() if (flow := network.flow(arc)) > 0}
        asked = {v: flow for v, arc in self.asking.items() if (flow := network.flow(arc)) > 0}
        again = frozenset(u for u in network.reached(self.source) if u < len(self.line.runs))
        return CutFlow(again, into, asked)


def _windows(line: Timeline) -> list[tuple[int, int]]:
    """The times in which each value costs if saved: from its last forward to its first backward reader."""
    last = 2 * line.ops - 1
    reads = [line.runs[line.made_by[v]].time for v in range(len(line.bytes))]
    needs = [last + 1] * len(line.bytes)
    for run in reversed(line.runs):
        for v in run.reads:
            reads[v] = max(reads[v], run.time)
        for v in run.keeps:
            needs[v] = min(needs[v], last - run.time)
    # A value that only repeated runs read is needed when their results are.
    for run in reversed(line.runs):
        first = min((needs[v] for v in run.makes), default=last + 1)
        for v in run.reads:
            if v not in line.needed:
                needs[v] = min(needs[v], first)
    return [(a + 1, b) for a, b in zip(reads, needs, strict=True)]
