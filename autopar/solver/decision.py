"""A plan's parts: what is decided for one site, and how one value changes its sharding between two sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.sharding.convert import Step
from autopar.sharding.placement import Sharding
from autopar.sharding.strategies import Choice


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice that was taken for one site."""

    op: str
    kind: str
    choice: Choice
    seconds: float  # of the op itself
    source: str = ""
    outputs: tuple[str, ...] = ()  # whole: `float32[8, 16]`; none in files of older releases
    reads: tuple[str, ...] = ()  # the sites that give its operands, in order

    def flows(self, operand: int | None = None) -> tuple[Any, ...]:
        return self.choice.output() if operand is None else self.choice.operand(operand)


def conversion_name(target: str, operand: int) -> str:
    """The name of what arrives at an operand, converted: `blocks.0.up/linear:0`."""
    return f"{target}:{operand}"


@dataclass(frozen=True, slots=True)
class Conversion:
    """A value that changes its sharding between two sites."""

    source: str
    target: str
    operand: int
    value: tuple[Sharding, Sharding]  # as it leaves, as it arrives
    gradient: tuple[Sharding, Sharding] | None  # as it arrives back, as it leaves; None where the value has none
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    seconds: float

    @property
    def name(self) -> str:
        return conversion_name(self.target, self.operand)
