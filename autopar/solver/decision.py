"""The parts of a plan: `Decision`, the choice for one site, and `Conversion`, a change of sharding between two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.sharding.convert import Step
from autopar.sharding.placement import Sharding
from autopar.sharding.strategies import Choice


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice for one site."""

    op: str
    kind: str
    choice: Choice
    seconds: float  # seconds of the op itself
    source: str = ""
    outputs: tuple[str, ...] = ()  # whole: `float32[8, 16]`; none in files of older releases
    reads: tuple[str, ...] = ()  # the sites that give its operands, in order

    def flows(self, operand: int | None = None) -> tuple[Any, ...]:
        return self.choice.output() if operand is None else self.choice.operand(operand)


def conversion_name(target: str, operand: int) -> str:
    """The name of a converted operand: `blocks.0.up/linear:0`."""
    return f"{target}:{operand}"


@dataclass(frozen=True, slots=True)
class Conversion:
    """A value whose sharding changes between two sites."""

    source: str
    target: str
    operand: int
    value: tuple[Sharding, Sharding]  # shardings at the source and at the target
    gradient: tuple[Sharding, Sharding] | None  # shardings of the gradient at target and source; None without gradient
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    seconds: float

    @property
    def name(self) -> str:
        return conversion_name(self.target, self.operand)
