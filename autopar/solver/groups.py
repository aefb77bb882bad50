"""States in which runs are repeated more than once, for budgets below what one repetition of each run reaches.

A stage is a stretch of forward between two times at which few bytes are alive. What backward has of stages, where it
comes to the last of them with nothing but what enters the first, in so many bytes of room:

    again[s, t]   the least seconds for the stages from s to t, of
                  a way for the first of them, kept in passing, and again[behind it, t] in the room that is left
                  through the stages up to u, of which what enters u is kept; again[u, t] beside that; again[s, u]
    first[s]      the same for those that forward has just gone through, up to the end: a way that saves something and
                  first[behind it], or a group of stages of which nothing is saved, again[s, u] and first[u]

A way saves some values of one stage or of two, and repeats the rest when backward comes there. Such tables are those
of checkpoints in a chain (Griewank and Walther; rotor), with a choice of values in each stage.
What the tables lead to is counted on the line; where it is over the budget, less room is asked for.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.solver.limits import LIMITS
from autopar.solver.states import Again, StateSearch, StepStates
from autopar.space.steps import Passing
from autopar.space.timeline import Momentary, Run, Timeline

_LIMITS = LIMITS.groups


def in_groups(search: StateSearch, budget: float, is_all_or_none: bool = False) -> StepStates | None:
    """The fastest states within a budget that groups of stages lead to, or None.

    A stage may save any of its values; with `is_all_or_none`, all or none of them.
    """
    if search.none.peak <= budget or budget <= 0:
        return search.none if budget > 0 else None
    stages = _Stages(search.line)
    tables = _StageTables(stages, _ways_of(stages, is_all_or_none), budget * _LIMITS.spare / _LIMITS.slots)
    found = list[StepStates]()
    under = -math.inf  # the largest room that led under the budget, or to nothing
    over = math.inf  # the smallest room that led over the budget
    room = budget
    step = 1.0
    for _ in range(_LIMITS.rooms):
        chosen = tables.chosen(room)
        away = budget
        if chosen is not None:
            found.append(search.of(*chosen))
            away = budget - found[-1].peak
        under, over = (max(under, room), over) if away >= 0 else (under, min(over, room))
        is_between = math.isfinite(under) and math.isfinite(over)
        room = (under + over) / 2 if is_between else room + step * away
        step = 2 * step
        if room <= 0 or over - under < tables.unit or under >= _LIMITS.spare * budget:
            break
    fits = [states for states in found if states.peak <= budget]
    if fits:
        return min(fits, key=lambda s: s.seconds)
    everything = search.of(frozenset(range(len(search.line.runs))))
    lowest = min((*found, everything, *search.known.values()), key=lambda s: (s.peak, s.seconds))
    return _with_more(search, stages, lowest, budget) or _with_more(search, stages, everything, budget)


def _with_more(search: StateSearch, stages: _Stages, states: StepStates, budget: float) -> StepStates | None:
    """The states with more values in passing, added where the step is fullest until they fit; or None.

    Where the backward of an op is fullest, such a value is not read between its last reader and this op; what lies
    before that reader in the stage may join it.
    """
    last = 2 * search.line.ops - 1
    for _ in range(min(_LIMITS.finer, _LIMITS.work // (_LIMITS.beside * len(search.line.runs)))):
        time = int(states.held.argmax())
        more = itertools.islice(stages.before(min(time, last - time), states), _LIMITS.beside)
        tried = (search.of(states.again, passing) for passing in more)
        best = min(tried, key=lambda s: (s.peak, s.seconds), default=states)
        if best.peak >= states.peak:
            return None
        states = best
        if states.peak <= budget:
            return states
    return None


def with_passing(passing: Passing, until: Mapping[int, int]) -> Passing:
    """Runs in passing, with these added; a run in both has the earlier of its two times."""
    known = dict(passing)
    return tuple(sorted({**known, **{i: min(time, known.get(i, time)) for i, time in until.items()}}.items()))


class _Stages:
    """The stages of a timeline: the times at which they begin, and the runs and values in them."""

    def __init__(self, line: Timeline) -> None:
        self.line = line
        self.last = max((run.time for run in line.runs if run.reads or run.makes), default=0)
        self.reach = [line.runs[i].time for i in line.made_by]
        for run in line.runs:
            for v in run.reads:
                self.reach[v] = max(self.reach[v], run.time)
        alive = np.zeros(self.last + 2)
        for v, until in enumerate(self.reach):
            if not line.fixed[v]:
                alive[line.runs[line.made_by[v]].time + 1] += line.bytes[v]
                alive[until + 1] -= line.bytes[v]
        self.alive = np.cumsum(alive)  # bytes that are alive as the op of a time begins
        narrow = [0, *(t for t in range(1, self.last + 1) if self._is_narrow(t)), self.last + 1]
        wide = [
            t
            for before, t, behind in zip(narrow, narrow[1:], narrow[2:], strict=False)
            if self.alive[t] > _LIMITS.wide * max(self.alive[before], self.alive[behind])
        ]
        self.begins = [t for t in narrow if t not in wide]
        self.times = [run.time for run in line.runs]
        assert self.times == sorted(self.times)
        self.other = line.other + self._fixed()  # bytes of what is in no run or not dropped, by time

    def __len__(self) -> int:
        return len(self.begins) - 1

    def _is_narrow(self, time: int) -> bool:
        """Whether a time has the least live bytes nearby, and is the first of equals."""
        near = self.alive[max(1, time - _LIMITS.near) : time + _LIMITS.near + 1]
        before = self.alive[max(1, time - _LIMITS.near) : time]
        here = self.alive[time]
        return 0 < here <= near.min() and here < near.max() and (not len(before) or here < before.min())

    def _fixed(self) -> np.ndarray:
        """Bytes of values that are never dropped, by time."""
        line = self.line
        last = 2 * self.line.ops - 1
        ends = list(self.reach)
        for run in line.runs:
            for v in run.keeps:
                ends[v] = max(ends[v], last - run.time)
        held = np.zeros(len(line.held) + 1)
        for v in np.flatnonzero(line.fixed).tolist():
            end = last if line.leaves[v] else ends[v]
            held[line.runs[line.made_by[v]].time] += line.bytes[v]
            held[end + 1] -= line.bytes[v]
        return np.cumsum(held)[:-1]

    def all_runs(self, first: int, end: int) -> range:
        """The runs of the stages `first` to `end` (exclusive)."""
        return range(bisect_left(self.times, self.begins[first]), bisect_left(self.times, self.begins[end]))

    def runs(self, first: int, end: int) -> list[int]:
        """The runs of the stages `first` to `end` (exclusive) that make something."""
        return [i for i in self.all_runs(first, end) if self.line.runs[i].makes]

    def before(self, op: int, states: StepStates) -> Iterator[Passing]:
        """Passings with more values that the backward of an op can do without for now, the largest first."""
        line = self.line
        begin = max((t for t in self.begins if t <= op), default=0)
        lie = {
            v: line.runs[line.made_by[v]].time
            for v in self.made(states.again)
            if begin <= line.runs[line.made_by[v]].time <= self.reach[v] < op and not line.fixed[v]
        }
        for v in sorted(lie, key=lambda v: (-line.bytes[v], v)):
            until = self.reach[v]
            for more in ([line.made_by[v]], {line.made_by[w] for w in lie if self.reach[w] <= until}):
                passing = with_passing(states.passing, dict.fromkeys(more, until))
                if passing != states.passing:
                    yield passing

    def leaving(self, runs: Sequence[int], end: int) -> list[int]:
        """The runs of these whose values are read at or after the beginning of a stage."""
        behind = self.begins[end]
        return [i for i in runs if any(self.reach[v] >= behind for v in self.line.runs[i].makes)]

    def made(self, runs: Iterable[int]) -> set[int]:
        """The values that these runs make."""
        return {v for i in runs for v in self.line.runs[i].makes}

    def bytes_of(self, values: Iterable[int]) -> float:
        """Bytes of the values that could be dropped."""
        return sum(float(self.line.bytes[v]) for v in values if not self.line.fixed[v])

    def seconds_of(self, values: Iterable[int], again: Again) -> float:
        """Seconds of making these values again, where these runs are repeated."""
        line = self.line
        ran = set[int]()
        pending = [v for v in values if not line.fixed[v]]
        while pending:
            i = line.made_by[pending.pop()]
            if i in again and i not in ran:
                ran.add(i)
                pending += (v for v in line.runs[i].reads if not line.fixed[v])
        return sum(line.runs[i].seconds for i in ran)

    def part(self, first: int, end: int) -> Timeline:
        """The stages as a timeline of their own.

        Values that enter or leave the stages, or are never dropped, weigh nothing.
        """
        line = self.line
        begin = self.begins[first]
        behind = self.begins[end]
        here = self.all_runs(first, end)
        made = [v for i in here for v in line.runs[i].makes]
        number = {v: k for k, v in enumerate(made)}

        def own(values: Iterable[int]) -> tuple[int, ...]:
            return tuple(number[v] for v in values if v in number)

        runs = [line.runs[i] for i in here]
        ours = tuple(
            replace(
                run,
                reads=own(run.reads),
                makes=own(run.makes),
                keeps=own(run.keeps),
                first=own(run.first),
                time=run.time - begin,
            )
            for run in runs
        )
        stays = [bool(line.fixed[v]) or self.reach[v] >= behind for v in number]
        size = np.where(stays, 0.0, line.bytes[list(number)])
        ops = behind - begin
        made_by = tuple(k for k, run in enumerate(ours) for _ in run.makes)
        leaves: np.ndarray = np.zeros(len(number), bool)
        held: np.ndarray = np.zeros(2 * ops)
        return Timeline(ours, size, leaves, made_by, ops, held, Momentary.nothing(2 * ops), (), {})


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """A choice of values that some stages save, with its bytes and seconds."""

    stages: int  # their number
    again: Again  # runs whose values are not saved
    seconds: float  # seconds of repeating those runs once, in backward
    passing: float  # seconds of running the stages once more, given what is saved
    saved: float  # bytes of the saved values and of those that leave the stages
    peak: float  # peak bytes of the backward of the stages


def _ways_of(stages: _Stages, is_all_or_none: bool) -> list[list[_Way]]:
    """The ways for the stages that start at each one.

    Stages that are alike share the sets of runs to choose among.
    """
    # The sets of runs for stages of a kind, each with the bytes of its backward by time.
    alike: dict[Any, list[tuple[frozenset[int], np.ndarray]]] = {}
    found = []
    for first in range(len(stages)):
        ways = list[_Way]()
        for end in (first + n for n in _LIMITS.joined if first + n <= len(stages)):
            part = stages.part(first, end)
            key = (tuple(map(_unnamed, part.runs)), *part.bytes.tolist())
            if key not in alike:
                sets = _sets(part, is_all_or_none)
                alike[key] = [(s, part.steps.held(part.steps.repeated(s))[part.ops :]) for s in sets]
            ways += _best(_ways_among(stages, first, end, alike[key]))
        found.append(ways)
    return found


def _unnamed(run: Run) -> tuple[Any, ...]:
    """All of a run but its names: equal for runs of stages that are alike."""
    values = (run.reads, run.makes, run.keeps, run.first)
    return (*values, run.seconds, run.time, run.work, run.is_op, run.is_core, run.is_forced)


def _sets(part: Timeline, is_all_or_none: bool) -> list[frozenset[int]]:
    """Sets of runs to repeat in some stages: those that prices give, and all runs but some of the largest."""
    droppable = frozenset(part.made_by[v] for v in range(len(part.bytes)) if not part.fixed[v])
    if is_all_or_none:
        return [frozenset(), droppable]
    search = StateSearch(part)
    usual = search.usual_price(search.fullest)
    for times in _LIMITS.prices:
        search.at_price(times * usual)
    found = [states.again & droppable for states in search.known.values()]
    needed = {part.made_by[v] for v in part.needed if not part.fixed[v]}
    largest = sorted(needed, key=lambda i: (-sum(part.bytes[list(part.runs[i].makes)]), i))[: _LIMITS.subsets]
    for n in range(len(largest) + 1):
        found += (droppable.difference(kept) for kept in itertools.combinations(largest, n))
    return list(dict.fromkeys(found))


def _ways_among(
    stages: _Stages, first: int, end: int, sets: Iterable[tuple[frozenset[int], np.ndarray]]
) -> Iterator[_Way]:
    """The ways that repeat each of these sets of runs; each set has the bytes of its backward by time."""
    line = stages.line
    begin = stages.begins[first]
    behind = stages.begins[end]
    here = stages.all_runs(first, end)
    own = frozenset(here)
    leaving = stages.leaving(here, end)
    made = stages.made(here)
    wanted = made & line.needed
    may_stay = {v for v in made if v in line.needed or stages.reach[v] >= behind}
    other = stages.other[2 * line.ops - behind : 2 * line.ops - begin]
    for again, held in sets:
        dropped = frozenset(here[k] for k in again).difference(leaving)
        kept = {v for v in may_stay if line.made_by[v] not in dropped}
        seconds = stages.seconds_of(wanted, dropped)
        passing = stages.seconds_of(kept, own)
        yield _Way(end - first, dropped, seconds, passing, stages.bytes_of(kept), float((held + other).max()))


def _best(ways: Iterable[_Way]) -> list[_Way]:
    """The ways on the Pareto front of bytes saved, seconds, peak and seconds in passing."""
    ordered = sorted(ways, key=lambda way: (way.saved, way.seconds, way.peak, way.passing))
    figures = np.array([(way.saved, way.seconds, way.peak, way.passing) for way in ordered])
    is_as_good = (figures[:, None] <= figures).all(axis=2)  # whether one way is as good as another, for all pairs
    beaten = np.triu(is_as_good, 1).any(axis=0)
    return [way for way, is_beaten in zip(ordered, beaten.tolist(), strict=True) if not is_beaten]


class _StageTables:
    """Dynamic programming tables: the least seconds of stages by slots of room, and the picks behind them."""

    def __init__(self, stages: _Stages, ways: Sequence[Sequence[_Way]], unit: float) -> None:
        self.stages = stages
        self.ways = ways
        self.unit = unit
        count = len(stages)
        entering = [list[int]()] + [stages.leaving(stages.runs(s, s + 1), s + 1) for s in range(count)]
        self.entry = [self._slots(stages.bytes_of(stages.made(runs))) for runs in entering]
        through = [
            stages.seconds_of(stages.made(entering[s + 1]), frozenset(stages.runs(s, s + 1))) for s in range(count)
        ]
        # Tables of picks hold the place of a way, or minus the number of stages up to which the values are kept.
        self.again: dict[tuple[int, int], np.ndarray] = {}
        self.picked: dict[tuple[int, int], np.ndarray] = {}
        kinds = self._kinds(through)
        known: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}
        for s in range(count - 1, -1, -1):
            for t in range(s + 1, min(count, s + _LIMITS.longest) + 1):
                alike = tuple(kinds[s:t])
                if alike in known:
                    self.again[s, t], self.picked[s, t] = known[alike]
                    continue
                least, picks = known[alike] = self._nothing()
                for k, way in enumerate(ways[s]):
                    if s + way.stages <= t:
                        rest = self.again[s + way.stages, t] if s + way.stages < t else np.zeros(_LIMITS.slots + 1)
                        self._take(least, picks, k, way, self._behind(rest, way.saved) + way.passing)
                seconds = 0.0
                for u in range(s + 1, t):
                    seconds += through[u - 1]
                    value = seconds + self._later(self.again[u, t], self.entry[u]) + self.again[s, u]
                    self._less(least, picks, value, s - u)
                self.again[s, t], self.picked[s, t] = least, picks
        self.first = [*(self._nothing()[0] for _ in range(count)), np.zeros(_LIMITS.slots + 1)]
        self.chose = [self._nothing()[1] for _ in range(count)]
        for s in range(count - 1, -1, -1):
            least, picks = self.first[s], self.chose[s]
            for k, way in enumerate(ways[s]):
                self._take(least, picks, k, way, self._behind(self.first[s + way.stages], way.saved))
            for u in range(s + 1, min(count, s + _LIMITS.longest) + 1):
                self._less(least, picks, self._later(self.first[u], self.entry[u]) + self.again[s, u], s - u)

    def _kinds(self, through: Sequence[float]) -> list[int]:
        """A number for each stage, the same for stages of which tables say the same."""
        known: dict[Any, int] = {}
        found = []
        for s, ways in enumerate(self.ways):
            of_ways = ((w.stages, w.seconds, w.passing, self._slots(w.saved), self._slots(w.peak)) for w in ways)
            found.append(known.setdefault((self.entry[s], through[s], *of_ways), len(known)))
        return found

    def _slots(self, nbytes: float) -> int:
        return math.ceil(nbytes / self.unit - 1e-9)

    def _nothing(self) -> tuple[np.ndarray, np.ndarray]:
        return np.full(_LIMITS.slots + 1, math.inf), np.zeros(_LIMITS.slots + 1, int)

    def _behind(self, table: np.ndarray, saved: float) -> np.ndarray:
        return self._later(table, self._slots(saved))

    def _later(self, table: np.ndarray, slots: int) -> np.ndarray:
        """A table by the room that is left before `slots` slots are taken."""
        return np.concatenate([np.full(min(slots, _LIMITS.slots + 1), math.inf), table])[: _LIMITS.slots + 1]

    def _take(self, least: np.ndarray, picks: np.ndarray, k: int, way: _Way, rest: np.ndarray) -> None:
        value = rest + way.seconds
        value[: min(self._slots(way.peak), _LIMITS.slots + 1)] = math.inf
        self._less(least, picks, value, k)

    def _less(self, least: np.ndarray, picks: np.ndarray, value: np.ndarray, pick: int) -> None:
        is_less = value < least
        least[is_less], picks[is_less] = value[is_less], pick

    def chosen(self, room: float) -> tuple[Again, Passing] | None:
        """The runs to repeat, and those of them in passing; None where nothing fits in the room."""
        left = min(_LIMITS.slots, int(room / self.unit))
        if left < 0 or not math.isfinite(self.first[0][left]):
            return None
        stages = self.stages
        again = set[int]()
        until = dict[int, int]()
        s = 0
        while s < len(stages):
            pick = int(self.chose[s][left])
            if pick >= 0:
                way = self.ways[s][pick]
                again |= way.again
                left = left - self._slots(way.saved)
                s = s + way.stages
            else:
                end = s - pick
                own = stages.runs(s, end)
                again |= set(own).difference(stages.leaving(own, end))
                self._go_through(s, end, left, until)
                left = left - self.entry[end]
                s = end
        return frozenset(again), with_passing((), until)

    def _go_through(self, s: int, t: int, left: int, until: dict[int, int]) -> None:
        """Collect, in `until`, the runs in passing where stages s to t are made again in `left` slots of room."""
        stages = self.stages
        pick = int(self.picked[s, t][left])
        if pick < 0:
            middle = s - pick
            self._note(until, stages.runs(s, middle), stages.begins[middle] - 1)
            self._go_through(middle, t, left - self.entry[middle], until)
            self._go_through(s, middle, left, until)
            return
        way = self.ways[s][pick]
        end = s + way.stages
        if end < t:
            self._note(until, way.again, stages.begins[end] - 1)
            self._go_through(end, t, left - self._slots(way.saved), until)
        else:  # Backward is at these stages now, so each value can go after its last reader.
            for i in way.again:
                self._note(until, [i], max(stages.reach[v] for v in stages.line.runs[i].makes))

    def _note(self, until: dict[int, int], runs: Iterable[int], time: int) -> None:
        """Note runs to repeat in passing for backward down to a time after which no op reads their values."""
        for i in runs:
            if all(self.stages.reach[v] <= time for v in self.stages.line.runs[i].makes):
                until[i] = min(time, until.get(i, time))
