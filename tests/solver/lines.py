"""Lines that are drawn: small chains of runs with skips."""

from __future__ import annotations

import numpy as np

from autopar.space.timeline import Momentary, Run, Timeline


def drawn(seed: int, most: int = 8) -> Timeline:
    """A chain with skips: each run reads one or two values that were made before, and keeps some of what it has."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, most + 1))
    runs = []
    for i in range(count):
        before = list(range(i))
        reads = tuple(sorted(set(rng.choice(before[-3:], size=min(len(before), 2)).tolist()))) if before else ()
        keeps = tuple(v for v in (*reads, i) if rng.random() < 0.6)
        runs.append(Run(f"run{i}", float(rng.integers(1, 9)), reads, (i,), keeps, (), i))
    size = rng.integers(1, 9, count) * 2.0**20
    leaves = np.zeros(count, bool)
    leaves[-1] = rng.random() < 0.5
    held = np.zeros(2 * count + 1)
    every, momentary = tuple(range(count)), Momentary.nothing(len(held))
    line = Timeline(tuple(runs), size, leaves, every, count, held, momentary, every, {})
    line.other = np.zeros(len(held))  # nothing but the values of runs
    return line
