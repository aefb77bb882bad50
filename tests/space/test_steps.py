"""The bytes of a step, in states of all sorts, are those of a program that is written out and gone through."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.solver.lines import drawn


def program(line, again, passing):
    """What runs, in order: (time, what it makes, what it reads, what it frees before it runs)."""
    until = dict(passing)
    there = set()
    steps = [(run.time, run.makes, run.reads, ()) for run in line.runs]

    def repeat(value, time):
        i = line.made_by[value]
        if i in again and not line.fixed[value] and value not in there:
            for other in line.runs[i].reads:
                repeat(other, time)
            there.update(line.runs[i].makes)
            came.append(i)

    for run in reversed(line.runs):
        came = []
        time = 2 * line.ops - 1 - run.time
        for value in run.keeps:
            repeat(value, time)
        steps += [(time, line.runs[i].makes, line.runs[i].reads, ()) for i in sorted(came)]
        steps.append((time, (), [v for v in run.keeps if v not in run.first], run.first))
        there -= {v for i in came if run.time > until.get(i, line.ops) for v in line.runs[i].makes}
    return steps


def held(line, steps):
    """The most bytes at every time, if each value is freed behind its last reader before it is made again."""
    most = np.zeros(len(line.held))
    for moment, (time, *_) in enumerate(steps):
        there = 0.0
        for value, nbytes in enumerate(line.bytes):
            made = max((m for m, step in enumerate(steps[: moment + 1]) if value in step[1]), default=None)
            again = next((m for m, step in enumerate(steps) if m > moment and value in step[1]), len(steps))
            wants = [m for m, step in enumerate(steps) if value in step[2]]
            wants += [m - 1 for m, step in enumerate(steps) if value in step[3]]
            leaves = bool(line.leaves[value])
            is_wanted = leaves or made == moment or any(moment <= m < again for m in wants)
            there += nbytes if made is not None and is_wanted else 0.0
        most[time] = max(most[time], there)
    return most


@pytest.mark.parametrize("seed", range(12))
def test_a_step_holds_what_its_program_holds(seed):
    """Whatever is repeated, once or more often in passing."""
    rng = random.Random(seed)
    plain = drawn(seed, 10)
    runs = [replace(run, first=tuple(v for v in run.keeps if rng.random() < 0.3)) for run in plain.runs]
    line = replace(plain, runs=tuple(runs))
    for share in (0.0, 0.4, 0.8):
        again = frozenset(i for i in range(len(line.runs)) if rng.random() < share) | line.forced
        few = tuple((i, rng.randrange(line.ops)) for i in sorted(again) if rng.random() < 0.5)
        for passing in ((), few):
            repeated = line.steps.repeated(again, passing)
            np.testing.assert_array_equal(line.steps.held(repeated), held(line, program(line, again, passing)))
