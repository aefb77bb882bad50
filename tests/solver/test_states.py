"""States of lines that are drawn: bytes against a simulation of its own, the best against every set of runs."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from autopar.solver import groups
from autopar.solver.refine import lightest, refined
from autopar.solver.state_program import by_program
from autopar.solver.states import StateNetwork, StateSearch
from autopar.space.timeline import Momentary, Run, Timeline
from tests.solver.lines import drawn


def simulated(line: Timeline, again: frozenset[int], passing=()) -> tuple[float, float]:
    """Peak and seconds: values are made, read and dropped one event after the other, with no clever bookkeeping."""
    events: list[tuple[str, int]] = [("forward", i) for i in range(len(line.runs))]
    have: set[int] = set()

    def forget(op):
        for run, until in passing:
            if until < op:
                have.difference_update(line.runs[run].makes)

    def wanted(value):
        run = line.made_by[value]
        if line.fixed[value] or run not in again or value in have:
            return set()
        have.update(line.runs[run].makes)
        return {run}.union(*map(wanted, line.runs[run].reads))

    for i in reversed(range(len(line.runs))):
        comes = set().union(*map(wanted, line.runs[i].keeps))
        events += [("again", run) for run in sorted(comes)]  # in the order of the forward
        events.append(("backward", i))
        forget(i)

    def touched(kind, i):
        run = line.runs[i]
        return set(run.keeps) if kind == "backward" else {*run.reads, *run.makes}

    peak, seconds = 0.0, 0.0
    for t, (kind, i) in enumerate(events):
        seconds += line.runs[i].seconds if kind == "again" else 0.0
        here = 0.0
        for v in range(len(line.bytes)):
            makers = [s for s, (k, j) in enumerate(events) if k != "backward" and v in line.runs[j].makes]
            begun = [s for s in makers if s <= t]
            if not begun:
                continue
            until = min((s for s in makers if s > t), default=len(events))
            if line.fixed[v]:  # it is made once, whatever runs again
                begun, until = makers[:1], len(events)
            reads = [s for s in range(begun[-1], until) if v in touched(*events[s])]
            if line.leaves[v] or max(reads) >= t:
                here += line.bytes[v]
        peak = max(peak, here)
    return peak, seconds


@pytest.mark.parametrize("seed", range(60))
def test_bytes_and_seconds_are_those_of_a_simulation(seed):
    line, search = drawn(seed), StateSearch(drawn(seed))
    rng = np.random.default_rng(seed)
    for share in (0.0, 0.3, 0.7, 1.0):
        again = frozenset(i for i in range(len(line.runs)) if rng.random() < share)
        states = search.of(again)
        assert (states.peak, states.seconds) == pytest.approx(simulated(line, again)), again


@pytest.mark.parametrize("seed", range(60))
def test_what_comes_in_passing_is_that_of_a_simulation(seed):
    line, search = drawn(seed, 12), StateSearch(drawn(seed, 12))
    rng = np.random.default_rng(seed)
    for share in (0.7, 0.9, 1.0):
        again = frozenset(i for i in range(len(line.runs)) if rng.random() < share)
        passing = tuple((i, int(rng.integers(i, len(line.runs)))) for i in sorted(again) if rng.random() < 0.5)
        states = search.of(again, passing)
        assert (states.peak, states.seconds) == pytest.approx(simulated(line, again, passing)), (again, passing)


def test_what_always_comes_again_comes_once():
    line = drawn(3)
    line = replace(line, runs=(line.runs[0], replace(line.runs[1], is_forced=True), *line.runs[2:]))
    states = StateSearch(line).of(frozenset({0, 1}), ((0, 2), (1, 2)))
    assert 1 in states.again and [run for run, _ in states.passing] == [0]
    assert line.passing({"run0": "run2", "run1": "run2"}) == states.passing  # as a plan of it is read


def test_in_groups_a_line_fits_in_less():
    """Sixteen blocks of four ops: in groups of four, backward has one group's entries and one block's values."""
    line = blocks_of(16)
    search = StateSearch(line)
    everything = search.of(frozenset(i for i, run in enumerate(line.runs) if (i + 1) % 4))
    found = refined(StateSearch(line), 0.75 * everything.peak)
    assert found is not None and found.passing and found.peak <= 0.75 * everything.peak
    assert found.seconds <= 2 * sum(run.seconds for run in line.runs)
    runs = Counter(line.under(found.again, found.passing).ran)
    assert max(runs.values()) == 2


@pytest.mark.parametrize(("share", "seconds", "often"), [(0.6, 79, 2), (0.5, 95, 3), (0.4, 132, 4)])
def test_groups_lie_in_groups(share, seconds, often):
    """The less room there is, the more often the first blocks come; at .4 one block with what enters it fits."""
    line = blocks_of(16)
    everything = StateSearch(line).of(frozenset(i for i, run in enumerate(line.runs) if (i + 1) % 4))
    found = refined(StateSearch(line), share * everything.peak)
    assert found is not None and found.peak <= share * everything.peak and found.seconds <= seconds
    assert (found.peak, found.seconds) == simulated(line, found.again, found.passing)
    assert max(Counter(line.under(found.again, found.passing).ran).values()) >= often


def blocks_of(count: int) -> Timeline:
    """Blocks of a chain whose ops keep what they make, the last of a block less than the others."""
    runs, size = [], []
    for i in range(4 * count):
        runs.append(Run(f"{i}", 1.0, (i - 1,) if i else (), (i,), (*((i - 1,) if i else ()), i), (), i))
        size.append(2.0**20 if i % 4 == 3 else 3 * 2.0**20)
    every, nothing = tuple(range(4 * count)), Momentary.nothing(8 * count + 1)
    leaves, held = np.zeros(4 * count, bool), np.zeros(8 * count + 1)
    line = Timeline(tuple(runs), np.array(size), leaves, every, 4 * count, held, nothing, every, {})
    line.other = np.zeros(8 * count + 1)
    return line


def subsets(line: Timeline):
    runs = range(len(line.runs))
    return (frozenset(s) for n in range(len(line.runs) + 1) for s in itertools.combinations(runs, n))


@pytest.mark.parametrize("count", [60, pytest.param(150, marks=pytest.mark.nightly)])
def test_what_is_found_is_within_the_budget_and_mostly_the_best(count):
    """Of lines with three budgets each, nothing found is over the budget or better than the best of all sets."""
    asked = best = 0
    for seed in range(count):
        line = drawn(seed)
        search = StateSearch(line)
        every = [StateSearch(line).of(s) for s in subsets(line)]
        lowest, none = min(s.peak for s in every), search.none.peak
        for share in (0.25, 0.5, 0.75):
            budget = lowest + share * (none - lowest)
            truth = min(s.seconds for s in every if s.peak <= budget)
            found = refined(StateSearch(line), budget)
            assert found is not None and found.peak <= budget
            assert found.passing or found.seconds >= truth - 1e-12
            asked += none > budget
            best += none > budget and found.seconds <= truth + 1e-12
    assert asked > 1.3 * count and best >= 0.95 * asked, (best, asked)


@pytest.mark.parametrize("count", [6, pytest.param(13, marks=pytest.mark.nightly)])
def test_integer_programs_find_what_fits_and_mostly_the_best(count):
    """Of lines with three budgets each, most that some set of runs fits into have the fewest seconds of all sets."""
    asked = best = 0
    for seed in range(count):
        line = drawn(seed)
        every = [StateSearch(line).of(s) for s in subsets(line)]
        for share in (0.9, 0.75, 0.6):
            budget = share * StateSearch(line).none.peak
            fits = [s.seconds for s in every if s.peak <= budget]
            found = by_program(StateSearch(line), budget)
            assert found is None or (found.peak <= budget and found.seconds >= min(fits))
            asked += bool(fits)
            best += found is not None and found.seconds == min(fits)
    assert asked > 1.5 * count and best >= 0.7 * asked, (best, asked)


@pytest.mark.parametrize("seed", range(40))
def test_a_cut_costs_the_least_of_all_sets(seed):
    line, rng = drawn(seed), np.random.default_rng(seed)
    price = {v: float(rng.integers(0, 12)) for v in range(len(line.bytes))}

    def cost(again):
        wanted, pending, total, seen = set(line.needed), list(line.needed), 0.0, set()
        while pending:
            v = pending.pop()
            if line.fixed[v] or v in seen:
                continue
            seen.add(v)
            run = line.made_by[v]
            if run in again:
                total += line.runs[run].seconds
                pending += line.runs[run].reads
            else:
                total += price[v]
        return total + 0.0 * len(wanted)

    flow = StateNetwork(line, line.needed).cut(price)
    assert cost(flow.again) == pytest.approx(min(map(cost, subsets(line))))
    assert sum(flow.wanted.values()) == pytest.approx(cost(flow.again))


@pytest.mark.parametrize("seed", range(30))
def test_the_lightest_things_are_those_of_all_subsets(seed):
    rng = np.random.default_rng(seed)
    costs, amounts = rng.integers(1, 20, 9) * 1.0, rng.integers(0, 12, 9) * 2.0**20
    needed = (float(rng.integers(-3, 60)) + 0.5) * 2.0**20  # which no amounts come to exactly: those are rounded down
    every = [s for n in range(10) for s in itertools.combinations(range(9), n)]
    enough = [sum(costs[list(s)]) for s in every if sum(amounts[list(s)]) >= needed]
    chosen = lightest(costs, amounts, needed)
    assert (chosen is None) == (not enough)
    if chosen is not None:
        assert sum(amounts[chosen]) >= needed and sum(costs[chosen]) == min(enough)


def test_parts_of_other_prices_fill_a_budget():
    """Twelve like layers of a dear and a large, and a cheap and a small value: neither alone fills the budget."""
    runs, size = [], []
    for layer in range(12):
        for seconds, mib in ((9.0, 9.0), (4.0, 3.0), (1.0, 0.5)):
            i = len(runs)
            runs.append(Run(f"{layer}.{mib}", seconds, (i - 1,) if i else (), (i,), (i,), (), i))
            size.append(mib * 2.0**20)
    count = len(runs)
    line = Timeline(
        tuple(runs),
        np.array(size),
        np.zeros(count, bool),
        tuple(range(count)),
        count,
        np.zeros(2 * count + 1),
        Momentary.nothing(2 * count + 1),
        tuple(range(count)),
        {},
    )
    line.other = np.zeros(2 * count + 1)
    search = StateSearch(line)
    for mib in (4, 10, 13, 20, 31):
        found = refined(StateSearch(line), search.none.peak - mib * 2.0**20)
        rest = range(12)
        best = min(9 * a + 4 * b + c for a in rest for b in rest for c in rest if 9 * a + 3 * b + 0.5 * c >= mib)
        assert found.seconds <= best + 1.0, mib


def test_what_comes_of_a_table_gathered_for_forward_alone_is_saved():
    """It would be gathered once more, ahead of the rest of backward."""
    size, leaves = np.full(3, 2.0**20), np.zeros(3, bool)

    def line(table):
        runs = (table, Run("embedding", 1.0, (0,), (1,), (), (), 0), Run("act", 1.0, (1,), (2,), (1, 2), (), 1))
        return Timeline(runs, size, leaves, (0, 1, 2), 2, np.zeros(5), Momentary.nothing(5), (1, 2), {})

    assert line(Run("embedding:1", 1.0, (), (0,), (), (), 0, is_op=False)).names == ["embedding:1", "act"]
    assert line(Run("scale", 1.0, (), (0,), (), (), 0)).names == ["scale", "embedding", "act"]


def test_stages_that_are_alike_are_looked_at_once(monkeypatch):
    """Twice as many blocks have as many kinds of stages, whatever their runs are called."""
    looked = []
    monkeypatch.setattr(groups, "_sets", lambda part, none, sets=groups._sets: looked.append(part) or sets(part, none))
    for count in (12, 24):
        search = StateSearch(blocks_of(count))
        groups.in_groups(search, 0.5 * search.none.peak)
    assert len(looked) % 2 == 0 and len(looked) < 24
