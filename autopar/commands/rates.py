"""Rates of a plan: the step time to expect, and how much of a batch passes in a second."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from autopar.solver.plan import Plan


@dataclass(frozen=True, slots=True)
class Work:
    """What one call of a model takes in: a number of tokens, or of rows where inputs are not of tokens."""

    count: int
    unit: str

    @staticmethod
    def of(inputs: Any) -> Work:
        """The tokens of the first input of whole numbers with a length, or the rows of the first input."""
        values = inputs.values() if isinstance(inputs, dict) else inputs
        tensors = [t for t in values if hasattr(t, "shape") and len(t.shape)]
        for tensor in tensors:
            if len(tensor.shape) == 2 and not tensor.is_floating_point() and not tensor.is_complex():
                return Work(math.prod(tensor.shape), "tokens")
        return Work(tensors[0].shape[0] if tensors else 1, "rows")


@dataclass(frozen=True, slots=True)
class Rates:
    """Expected seconds of a step, the middle of the interval of nine steps of ten, and what passes in one."""

    expected_s: float
    amount: int  # tokens or rows of a step
    unit: str
    devices: int

    @property
    def per_s(self) -> float:
        return self.amount / self.expected_s

    @property
    def per_s_device(self) -> float:
        return self.per_s / self.devices


def rates_of(plan: Plan, work: Work) -> Rates:
    """The rates of a plan whose calls take in so much."""
    low, high = plan.step_interval_s
    return Rates((low + high) / 2, work.count * plan.accumulation, work.unit, plan.mesh.size)


def waiting_s(plan: Plan) -> float:
    """Seconds of a step in which devices wait for communication."""
    return sum(c.seconds for c in plan.conversions) - plan.hidden_s
