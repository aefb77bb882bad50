"""Values that wait on the host: which of a plan's saved values travel, and when.

    travels    copies down in turn, each behind its last reader in forward; copies up, as late as backward allows
    packed     of given states, the values that are needed last travel: as few as the budget asks for
    fitted     the fastest states that can be packed, of those that looser budgets lead to

A copy that would not end in time is not made, so that by the plan's own seconds no step waits for a link: forward has
freed every value before it ends, and no value leaves the host before backward begins. What the link carries until then
is a budget of its own: a plan that holds so many bytes more at the fullest time, and moves nothing, takes no longer
than one that moves them. So the bound under a budget is that under this looser one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.sharding.host import Host
from autopar.solver.limits import LIMITS
from autopar.solver.states import Again, StateSearch, StepStates
from autopar.space.space import Space
from autopar.space.steps import Away, Passing
from autopar.space.timeline import Through, Timeline
from autopar.space.windows import CPUS, UP

_LIMITS = LIMITS.states


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """The host as one device sees it: its link, and the bytes that the device may use."""

    host: Host
    bytes: float

    def carried(self, seconds: float) -> float:
        """The most bytes that can have left a device after so many seconds."""
        return min(self.bytes, max(0.0, seconds) * self.host.down_bytes_per_s)

    def beside(self, nbytes: float) -> Room:
        """The room that is left beside so many bytes of optimizer states."""
        return replace(self, bytes=max(0.0, self.bytes - nbytes)) if nbytes else self


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The values of one run that could travel: they do together."""

    run: int
    values: tuple[int, ...]
    bytes: float
    left: int  # the time of forward at which the last of them is last read
    need: int  # the time of backward at which the first of them is needed


class Packing:
    """The travels of one timeline's values."""

    def __init__(
        self, search: StateSearch, room: Room, pace: np.ndarray, passes: int = 1, repeats: bool = True
    ) -> None:
        self.search = search
        self.passes = passes  # micro-batches of a step: `pace` is of one, and seconds of runs are of all
        self.repeats = repeats  # whether backward may repeat runs
        self.line: Timeline = search.line
        self.room = room
        self.pace = pace  # seconds of each time of forward and backward
        line = self.line
        last = list(line.made_by)
        self.able: dict[int, list[int]] = {}  # run -> what it makes that may travel
        for i, run in enumerate(line.runs):
            for v in run.reads:
                last[v] = i
            values = [v for v in run.makes if not line.fixed[v]]
            if values and i not in line.forced:
                self.able[i] = values
        self.last = [line.runs[i].time for i in last]  # value -> the time of forward at which it is last read
        self._stays: dict[tuple[Again, Passing], Through] = {}  # states -> the step where nothing travels

    @property
    def largest(self) -> list[int]:
        """The runs that make most of what may be dropped, the largest first."""
        size = {i: float(self.line.bytes[values].sum()) for i, values in self.able.items()}
        return sorted(size, key=lambda i: -size[i])[: _LIMITS.largest]

    @property
    def carried(self) -> float:
        """The most bytes that can have left by the end of forward."""
        return self.room.carried(float(self.pace[: self.line.ops].sum()))

    def packed(self, states: StepStates, budget: float) -> StepStates | None:
        """The states with as few values on the host as bring their peak under the budget; None where none do."""
        if states.peak <= budget:
            return states
        through = self._where_nothing_travels(states)
        if float((through.held - self._most_away(through)).max()) > budget:
            return None
        groups = sorted(self._groups(states.again, through), key=lambda g: (-g.need, g.left))
        ends = self._ends(through)

        def under(count: int) -> StepStates:
            away = self.travels(groups[:count], ends)
            held = self.line.under(states.again, states.passing, away).held
            return replace(states, held=held, away=away)

        few = 0
        many = len(groups)
        best = under(many)
        if best.peak > budget:
            return None
        while many - few > 1:
            middle = (few + many) // 2
            found = under(middle)
            if found.peak <= budget:
                many = middle
                best = found
            else:
                few = middle
        return best

    def peak(self, states: StepStates) -> float:
        """The peak of the states with all on the host that comes in time."""
        through = self._where_nothing_travels(states)
        away = self.travels(list(self._groups(states.again, through)), self._ends(through))
        return float(self.line.under(states.again, states.passing, away).held.max())

    def _where_nothing_travels(self, states: StepStates) -> Through:
        if states.key not in self._stays:
            self._stays[states.key] = self.line.under(states.again, states.passing)
        return self._stays[states.key]

    def _most_away(self, through: Through) -> np.ndarray:
        """The most bytes that can be away at every time."""
        n = self.line.ops
        most = np.zeros(len(through.held))
        most[:n] = np.cumsum(self.pace[:n]) * self.room.host.down_bytes_per_s
        most[n : 2 * n] = most[n - 1]
        return np.minimum(most, self.room.bytes)

    def _groups(self, again: Again, through: Through) -> Iterator[Group]:
        """The values of each run that backward needs, and that are saved for it."""
        line = self.line
        needs = first_needs(line, through)
        end = 2 * line.ops
        for i, able in self.able.items():
            values = tuple(v for v in able if needs[v] < end) if i not in again else ()
            if values:
                size = float(line.bytes[list(values)].sum())
                yield Group(i, values, size, max(self.last[v] for v in values), min(needs[v] for v in values))

    def _ends(self, through: Through) -> np.ndarray:
        """Seconds after which each time begins; the last entry is the end of backward."""
        pace = self.pace.copy()
        for i, time in zip(through.ran, through.times, strict=True):
            pace[time] += self.line.runs[i].seconds / self.passes if i not in self.line.once else 0.0
        return np.concatenate([[0.0], np.cumsum(pace)])

    def travels(self, groups: Sequence[Group], ends: np.ndarray) -> Away:
        """The times between which each value is away; groups too late, or too many for the host, stay."""
        host = self.room.host
        n = self.line.ops
        returns: dict[int, int] = {}
        free = np.inf
        for g in sorted(groups, key=lambda g: -g.need):
            begins = min(free, float(ends[g.need])) - host.up_s(g.bytes)
            if begins >= ends[n]:
                returns[g.run] = int(np.searchsorted(ends, begins, side="right")) - 1
                free = begins
        found: dict[int, tuple[int, int]] = {}
        free = used = 0.0
        for g in sorted(groups, key=lambda g: g.left):
            done = max(free, float(ends[g.left + 1])) + host.down_s(g.bytes)
            if g.run in returns and done <= ends[n] and used + g.bytes <= self.room.bytes:
                gone = int(np.searchsorted(ends, done)) - 1
                found |= dict.fromkeys(g.values, (gone, returns[g.run]))
                free = done
                used += g.bytes
        return found


def first_needs(line: Timeline, through: Through) -> list[int]:
    """The time of backward at which each value is first read; its end for those that are not."""
    last = 2 * line.ops - 1
    found = [last + 1] * len(line.bytes)
    for run in line.runs:
        for v in run.keeps if run.is_op else ():
            found[v] = min(found[v], last - run.time)
    for i, time in zip(through.ran, through.times, strict=True):
        for v in line.runs[i].reads:
            found[v] = min(found[v], time)
    return found


def fitted(packing: Packing, budget: float) -> StepStates | None:
    """The fastest states found that fit in the budget with values on the host; None where none do.

    The looser the budget under which states are searched, the more has to travel: the loosest that can be packed.
    """
    search = packing.search
    found = packing.packed(search.none, budget)
    if found is not None or not packing.repeats:
        return found
    best = search.within(budget)
    whole = min(search.none.peak, budget + packing.carried) - budget
    # The loosest of a few budgets, and then halfway towards the next: what can be packed is not all that is tighter.
    low = high = 0.0
    for share in np.linspace(1.0, 0.0, _LIMITS.looser, endpoint=False).tolist():
        if (found := _under(packing, budget, budget + share * whole)) is not None:
            best = faster(best, found)
            low = share
            break
        high = share
    for _ in range(_LIMITS.halved if high else 0):
        middle = (low + high) / 2
        if (found := _under(packing, budget, budget + middle * whole)) is not None:
            best = faster(best, found)
            low = middle
        else:
            high = middle
    limit = np.inf if best is None else best.seconds
    known = sorted((s for s in set(search.known.values()) if s.seconds < limit), key=lambda s: s.seconds)
    for states in known[-_LIMITS.packed :]:
        if (found := packing.packed(states, budget)) is not None:
            best = faster(best, found)
            break
    if best is None:
        best = _with_more(packing, budget)
    return None if best is None else _with_less(packing, best, budget)


def _under(packing: Packing, budget: float, looser: float) -> StepStates | None:
    """The fastest states under a looser budget, packed into a budget; None where they do not fit."""
    states = packing.search.within(looser)
    return None if states is None else packing.packed(states, budget)


def _with_more(packing: Packing, budget: float) -> StepStates | None:
    """States with one more repeated run after another, which lowers the peak most, until they fit."""
    if float(packing.line.other.max()) > budget:  # What no states change is too much.
        return None
    states = packing.search.none
    peak = packing.peak(states)
    for _ in range(_LIMITS.more):
        nexts = [packing.search.of(states.again | {i}) for i in packing.largest if i not in states.again]
        fits = [found for one in nexts if (found := packing.packed(one, budget)) is not None]
        if fits:
            return min(fits, key=lambda found: found.seconds)
        lowest = min(((packing.peak(one), one.seconds, k) for k, one in enumerate(nexts)), default=(peak, 0.0, 0))
        if lowest[0] >= peak:
            break
        peak = lowest[0]
        states = nexts[lowest[2]]
    return None


def _with_less(packing: Packing, best: StepStates, budget: float) -> StepStates:
    """The states without runs that need not be repeated if more travels, or with faster ones instead."""
    runs = packing.line.runs
    slowest = sorted(best.again - packing.line.forced, key=lambda i: -runs[i].seconds)
    places = [frozenset[int](), *(frozenset((into,)) for into in packing.largest[: _LIMITS.exchanged])]
    pairs = ((i, into) for i in slowest for into in places)
    for i, into in itertools.islice(pairs, LIMITS.refine.work // (len(packing.line.runs) * _LIMITS.packed)):
        states = packing.search.of(best.again - {i} | into, best.passing) if i in best.again else best
        if states.seconds < best.seconds:
            best = faster(best, packing.packed(states, budget)) or best
    return best


def faster(one: StepStates | None, other: StepStates | None) -> StepStates | None:
    """The faster of two states, of which either may be missing."""
    both = [states for states in (one, other) if states is not None]
    return min(both, key=lambda states: states.seconds, default=None)


def pace_of(space: Space, picked: Sequence[int]) -> np.ndarray:
    """Seconds of each time of a micro-batch's forward and backward, with what communication adds to them."""
    memory = space.memory
    assert memory is not None
    ops = memory.passages.ops
    n = len(ops)
    pace = np.zeros(2 * n)
    at = {op.site: time for time, op in enumerate(ops)}
    for time, op in enumerate(ops):
        back = time if op.in_chunks else 2 * n - 1 - time  # The backward of a chunk follows at once.
        for way, seconds in zip((time, back), space.sites[op.site].compute, strict=False):
            pace[way] += float(seconds[picked[op.site]])
        for edge in (space.edges[k] for k in op.edges if k not in memory.passages.gathered):
            pace[time] += float(edge.forward[edge.place(picked)])
            pace[back] += float(edge.backward[edge.place(picked)])
    for window in space.windows:
        moved, computed = window.seconds(picked, space.edges)
        first, last = (at[site] for site in window.span)
        if window.lane == UP and window.way == "backward":  # Parts take the link on which values return.
            pace[2 * n - 1 - last : 2 * n - first] *= max(0.0, 1 - moved / computed) if computed else 0.0
        elif window.lane != CPUS:
            pace[first if window.way == "forward" else 2 * n - 1 - last] += max(0.0, moved - computed)
    return pace


def states_on_host(space: Space, picked: Sequence[int]) -> float:
    """Bytes of optimizer states that a device has on the host."""
    chosen = zip(space.sites, picked, strict=True)
    return sum(site.policies[i].on_host for site, i in chosen if site.policies and site.kind == "parameter")


def most_before(space: Space, step_s: float, time: int) -> float:
    """The most seconds of a micro-batch before a time of it, in plans that take no longer than `step_s`."""
    memory = space.memory
    assert memory is not None
    ops = memory.passages.ops
    back = [(2 * len(ops) - 1 - at, op) for at, op in enumerate(ops) if not op.in_chunks]
    later = [space.sites[op.site].compute for at, op in back if at > time]
    after = sum(float(compute[1].min()) for compute in later if compute)
    return step_s / space.setting.passes - after


def told(line: Timeline, away: Away) -> Mapping[str, tuple[str, str]]:
    """The travels by the names of runs: the ops behind and before which each is away."""
    ops = [line.runs[i].name for i in line.run_of]
    last = 2 * line.ops - 1
    return {line.runs[line.made_by[v]].name: (ops[gone], ops[last - comes]) for v, (gone, comes) in away.items()}
