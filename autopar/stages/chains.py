"""Chains of actions, each of which begins when the one before has ended or arrived.

A run ends with such a chain, which is as long as the run. At other prices the order may end with another chain, but
never before this one does: so chains of runs bound the seconds of an order at prices that were not simulated.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from autopar.stages.levels import InFlight
from autopar.stages.limits import LIMITS
from autopar.stages.simulate import Steps


class Chains:
    """The chains with which the last runs of one order ended: how often each has a price, and a border."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.rows: np.ndarray = np.zeros((0, steps.first_hop + steps.order.stages))
        last: dict[int, int] = {}
        self.before: list[int] = []  # step -> the step before on its coordinate, or -1
        for number, (r, *_) in enumerate(steps.steps):
            self.before.append(last.get(r, -1))
            last[r] = number

    @cached_property
    def in_flight(self) -> InFlight:
        """The micro-batches that coordinates hold, which only a budget asks for."""
        return InFlight(self.steps.order)

    def least(self, amounts: np.ndarray) -> float:
        """Seconds that the order takes at least, at the `amounts` of prices."""
        return float((self.rows @ amounts).max(initial=0.0))

    def least_of(self, amounts: np.ndarray) -> np.ndarray:
        """The same at the amounts in each column."""
        found: np.ndarray = (self.rows @ amounts).max(axis=0, initial=0.0)
        return found

    def run(self, amounts: np.ndarray) -> float:
        """Seconds of the order, whose last chain is kept."""
        steps = self.steps
        seconds = amounts.tolist()
        ends = steps.ends_at(seconds)
        row = np.zeros(len(seconds))
        step = max(range(len(ends)), key=ends.__getitem__)
        while step >= 0:
            _, source, hop, price = steps.steps[step]
            row[price] += 1
            before = self.before[step]
            arrived = ends[source] + seconds[steps.first_hop + hop] if source >= 0 else 0.0
            if source >= 0 and (before < 0 or arrived > ends[before]):
                row[steps.first_hop + hop] += 1
                before = source
            step = before
        self.rows = np.array([*self.rows[1 - LIMITS.chains :], row])
        return max(ends)
