"""A closer look at the states of a timeline under a budget, once prices have led as near as they can.

    parts        of what is repeated as the price rises, those that lower the peak enough in fewest seconds: a knapsack
    filled       runs that need not be repeated after all, and a faster run in the place of another
    lowered      where nothing fits: states next to those of the lowest peak, as long as one lowers it
    groups       where nothing fits still, or much is repeated: stages that are run twice more (`groups.py`)
    program      where much is repeated of a short line: an integer program (`state_program.py`)

Each starts from the states that the search of a line knows, and adds what it finds to them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from autopar.solver.groups import in_groups
from autopar.solver.limits import LIMITS
from autopar.solver.state_program import by_program
from autopar.solver.states import Again, StateSearch, StepStates
from autopar.space.timeline import Run, Timeline

_LIMITS = LIMITS.refine


def refined(search: StateSearch, budget: float) -> StepStates | None:
    """The fastest states within a budget that a closer look finds; None where nothing fits."""
    best = search.within(budget) or _lowered(search, budget)
    if best is None:
        grouped = in_groups(search, budget)
        return None if grouped is None else _filled(search, grouped, budget)
    if best is search.none:
        return best
    steps = _steps(search, budget)
    over = sum(states.peak > budget for states in steps)
    time = int(steps[over - 1].held.argmax())
    begins = _begins(search, steps[over - 1].again)
    for first in sorted({0, max(0, over - 1 - _LIMITS.apart)}):
        parts = list[Again]()
        for low, high in itertools.pairwise(steps[first:]):
            parts += _parts(search, high.again - low.again)
        search.know(_with_parts(search, steps[first], parts, begins, time, budget))
    found = search.fastest(budget) or best
    if found.seconds > _LIMITS.much * sum(run.seconds for run in search.line.runs):
        in_groups(search, budget)
        if len(search.line.names) <= _LIMITS.few:
            by_program(search, budget)
        found = search.fastest(budget) or found
    return _filled(search, found, budget)


# -- parts


def _steps(search: StateSearch, budget: float) -> list[StepStates]:
    """States at ascending prices, from no recompute to a few steps beyond the first that fit the budget."""
    price = min((p for p, states in search.priced.items() if states.peak <= budget), default=max(search.priced))
    for _ in range(_LIMITS.beyond):
        price *= _LIMITS.step
        search.at_price(price)
    return list(dict.fromkeys(search.priced[p] for p in sorted(search.priced) if p <= price))


def _parts(search: StateSearch, again: Again) -> list[Again]:
    """Partition of these runs, with runs together where one depends on another.

    A run depends on another if it reads what that one makes and backward itself does not need.
    """
    line = search.line
    root = {i: i for i in again}

    def found(i: int) -> int:
        while root[i] != i:
            root[i] = i = root[root[i]]
        return i

    for i in again:
        for v in line.runs[i].reads:
            if line.made_by[v] in again and v not in line.needed:
                root[found(i)] = found(line.made_by[v])
    parts: dict[int, set[int]] = {}
    for i in sorted(again):
        parts.setdefault(found(i), set()).add(i)
    return [frozenset(part) for part in parts.values()]


def _with_parts(
    search: StateSearch, base: StepStates, parts: Sequence[Again], begins: Sequence[int], time: int, budget: float
) -> Iterable[StepStates]:
    """States that add to a base those parts which lower the peak enough in the fewest seconds.

    What a part lowers is estimated. Where the peak stays over the budget, so many more bytes are asked for; later
    amounts lie between one that led over the budget and one that led under it.
    """
    least = base.peak - budget
    most = math.inf
    needed = base.peak - budget
    seconds = np.array([sum(search.line.costs[i] for i in part) for part in parts])
    lowered = np.array([_dropped(search, part, begins, time) for part in parts])
    for _ in range(_LIMITS.mixed):
        chosen = lightest(seconds, lowered, needed)
        if chosen is None:
            most = needed
            needed = (least + needed) / 2
            continue
        states = search.of(base.again.union(*(parts[k] for k in chosen)))
        if states.peak <= budget:
            yield states
            most = needed
        else:
            least = needed
        needed = (least + most) / 2 if math.isfinite(most) else needed + states.peak - budget


def _begins(search: StateSearch, again: Again) -> list[int]:
    """The time in backward from which each value is in memory again, if these runs are repeated.

    A value is needed then itself, or for a run that is repeated and reads it.
    """
    begins = [end for _, end in search.windows]
    for i in sorted(again, reverse=True):
        run = search.line.runs[i]
        first = min((begins[v] for v in run.makes), default=0)
        for v in (*run.makes, *run.reads):
            begins[v] = min(begins[v], first)
    return begins


def _dropped(search: StateSearch, again: Iterable[int], begins: Sequence[int], time: int) -> float:
    """Bytes that repeating these runs frees at a time: saved otherwise, and not made again by then."""
    line = search.line
    made = [v for i in again for v in line.runs[i].makes if v in line.needed and not line.fixed[v]]
    return sum(float(line.bytes[v]) for v in made if search.windows[v][0] <= time < begins[v])


def _size(line: Timeline, run: Run) -> float:
    """Bytes of what a run makes and could be dropped."""
    return sum(float(line.bytes[v]) for v in run.makes if not line.fixed[v])


def lightest(costs: np.ndarray, amounts: np.ndarray, needed: float) -> list[int] | None:
    """Indices of the things of least total cost whose amounts sum to `needed`; None if all are too little.

    A knapsack, with each amount rounded down to a slot of what is needed.
    """
    if needed <= 0:
        return []
    slots = np.minimum((amounts * (_LIMITS.slots / needed)).astype(int), _LIMITS.slots)
    least = np.full(_LIMITS.slots + 1, math.inf)  # needed slots -> the least cost
    least[0] = 0.0
    takes = list[np.ndarray]()
    for cost, n in zip(costs, slots, strict=True):
        without = np.concatenate([np.zeros(n), least[: _LIMITS.slots + 1 - n]])
        takes.append(cost + without < least)
        least = np.minimum(least, cost + without)
    if not math.isfinite(least[_LIMITS.slots]):
        return None
    left = _LIMITS.slots
    chosen = list[int]()
    for k in reversed(range(len(takes))):
        if takes[k][left]:
            chosen.append(k)
            left = max(0, left - int(slots[k]))
    return chosen


# -- filled


def _filled(search: StateSearch, best: StepStates, budget: float) -> StepStates:
    """The states after leaving out runs that need not be repeated, and exchanging runs for faster ones."""
    runs = search.line.runs
    time = int(best.held.argmax())
    begins = _begins(search, best.again)
    for i in sorted(best.again, key=lambda i: -runs[i].seconds)[: _LIMITS.left_out]:
        fits = best.held[time] + _least_more(search, i, best.again, begins, time) <= budget
        if fits and i in best.again and runs[i].seconds > 0:
            best = _faster(search, best, best.again - {i}, budget)
    for _ in range(min(_LIMITS.exchanges, max(1, _LIMITS.work // (_LIMITS.pairs * len(runs))))):
        before = best
        for out, into in _exchanges(search, best, budget):
            best = _faster(search, best, best.again - {out} | {into}, budget)
            if best is not before:
                break
        if best is before:
            break
    return best


def _least_more(search: StateSearch, i: int, again: Again, begins: Sequence[int], time: int) -> float:
    """The fewest bytes that saving what a run makes adds at a time.

    What is saved for it alone may go, as operands of all that is repeated for it.
    """
    line = search.line
    made = (v for v in line.runs[i].makes if not line.fixed[v] and search.windows[v][0] <= time < begins[v])
    gone = set[int]()
    pending = [i]
    while pending:
        wanted = [v for v in line.runs[pending.pop()].reads if v not in line.needed]
        pending += [line.made_by[v] for v in wanted if line.made_by[v] in again]
        gone.update(v for v in wanted if line.made_by[v] not in again)
    return sum(float(line.bytes[v]) for v in made) - sum(float(line.bytes[v]) for v in gone)


def _faster(search: StateSearch, best: StepStates, again: Again, budget: float) -> StepStates:
    states = search.of(again, best.passing)
    return states if states.peak <= budget and states.seconds < best.seconds else best


def _exchanges(search: StateSearch, best: StepStates, budget: float) -> list[tuple[int, int]]:
    """Pairs of a repeated run and a faster one to repeat in its place, those that save most first.

    Of runs that take as long and drop as much, one stands for all.
    """
    line = search.line
    time = int(best.held.argmax())
    slack = budget - best.peak
    begins = _begins(search, best.again)
    kinds: dict[tuple[bool, float, float], int] = {}
    for i, run in enumerate(line.runs):
        dropped = _dropped(search, (i,), begins, time)
        if i not in line.forced and run.seconds > 0 and (dropped or i in best.again):
            kinds[i in best.again, run.seconds, dropped] = i
    outs = [(seconds, dropped, i) for (is_again, seconds, dropped), i in kinds.items() if is_again]
    intos = [(seconds, dropped, i) for (is_again, seconds, dropped), i in kinds.items() if not is_again]
    pairs = [
        (s - t, i, j) for s, n, i in outs for t, m, j in intos if t < s * (1 - LIMITS.rounding.same) and n - m <= slack
    ]
    return [(i, j) for _, i, j in sorted(pairs, reverse=True)[: _LIMITS.pairs]]


# -- lowered


def _lowered(search: StateSearch, budget: float) -> StepStates | None:
    """States within a budget, reached from the lowest known peak by one run at a time; or None."""
    best = min(search.known.values(), key=lambda states: (states.peak, states.seconds))
    for _ in range(min(_LIMITS.lowered, _LIMITS.work // (_LIMITS.next * len(search.line.runs)))):
        found = min(
            (search.of(again) for again in _next(search, best)), key=lambda s: (s.peak, s.seconds), default=best
        )
        if found.peak >= best.peak:
            return None
        best = found
        if best.peak <= budget:
            return best
    return None


def _next(search: StateSearch, states: StepStates) -> Iterable[Again]:
    """Sets of runs with one run less or more, of those whose values are largest where the step is fullest."""
    line = search.line
    time = int(states.held.argmax())
    size = [_size(line, run) for run in line.runs]
    alive = [i for i, run in enumerate(line.runs) if size[i] and run.time <= time]
    for i in sorted(alive, key=lambda i: -size[i])[: _LIMITS.next]:
        yield states.again - {i} if i in states.again else states.again | {i}
