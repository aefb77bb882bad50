"""`Goal`: so many tokens in so many days, and what that takes of a kind of device."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from autopar.commands.fitting import Fitting, KindFit
from autopar.letters import Infeasible, Letter
from autopar.solver.workload import StepRates

_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True)
class Goal:
    """A number of tokens (or of rows, where a model takes no tokens), and what limits their training."""

    tokens: float
    days: float | None = None  # None: as many as the fewest devices take.
    price: float | None = None  # One device, one hour.

    @staticmethod
    def of(tokens: str | None, days: float | None, price: float | None) -> Goal | None:
        """The goal that a command line names, if it names one."""
        for name, given in (("--days", days), ("--price", price)):
            if given is not None and tokens is None:
                raise Letter(
                    f"{name} {given:g} needs the number of tokens that are to be trained", advice="--tokens 1T"
                )
            if given is not None and not 0 < given < math.inf:
                raise Letter(f"{name} {given:g} is not more than 0")
        return None if tokens is None else Goal(tokens_of(tokens), days, price)

    def days_of(self, rates: StepRates) -> float:
        """The days that a number of devices takes; a step that was begun is ended."""
        steps = math.ceil(self.tokens / rates.amount)
        return timedelta(seconds=steps * rates.step_s) / timedelta(days=1)

    def cost_of(self, rates: StepRates) -> float | None:
        """The cost of the devices for these days; None without a price."""
        return None if self.price is None else 24 * self.days_of(rates) * rates.devices * self.price

    def met(self, fitting: Fitting, held: KindFit) -> KindFit:
        """The plan on the fewest devices that take no more than the days; a late one where no number does."""
        if held.plan is None or self.days is None:
            return held
        search = _GoalSearch(self, fitting, held)
        return search.run()


def tokens_of(text: str) -> float:
    """The number in a text such as 1T, 300B, 1.5e12 or 2_000_000."""
    match = re.fullmatch(r"([\d_,]*\.?\d+(?:e\d+)?)([KMBGT]?)", text.strip(), re.IGNORECASE)
    count = float(re.sub("[_,]", "", match[1])) * _SCALES[match[2].upper()] if match else 0.0
    if not 1 <= count < math.inf:
        raise Letter(f"--tokens {text!r} is not a number of tokens", advice="1T, 300B or 1e12")
    return count


class _GoalSearch:
    """The search for the fewest devices of a kind that reach a goal.

    It begins at the number that would do if devices added up from the fewest that hold a step.
    """

    def __init__(self, goal: Goal, fitting: Fitting, held: KindFit) -> None:
        assert held.plan is not None
        self.goal = goal
        self.fitting = fitting
        self.held = held
        least = held.plan.mesh.size
        self.counts = [n for n in fitting.counts(held.kind) if n >= least]
        self.plans: dict[int, Any] = {least: held.plan}

    def run(self) -> KindFit:
        """The plan that reaches the goal, or the fastest that was found."""
        wanted = self._days(self.counts[0]) / self._limit * self.counts[0]
        at = next((k for k, n in enumerate(self.counts) if n >= wanted), len(self.counts) - 1)
        while at > 0 and self._days(self.counts[at]) <= self._limit and self._days(self.counts[at - 1]) <= self._limit:
            at -= 1
        while self._days(self.counts[at]) > self._limit:
            if at + 1 == len(self.counts) or self._days(self.counts[at + 1]) >= self._days(self.counts[at]):
                return self.held._replace(plan=self.plans[self.counts[at]], is_late=True)
            at += 1
        return self.held._replace(plan=self.plans[self.counts[at]])

    @property
    def _limit(self) -> float:
        assert self.goal.days is not None
        return self.goal.days

    def _days(self, devices: int) -> float:
        """The days that so many devices take; infinite where no plan fits."""
        if devices not in self.plans:
            try:
                self.plans[devices] = self.fitting.on(self.held.kind, devices)
            except Infeasible:
                self.plans[devices] = None
        plan = self.plans[devices]
        return math.inf if plan is None else self.goal.days_of(plan.rates)
