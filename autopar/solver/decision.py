"""The parts of a plan.

Decision     the choice for one site
Conversion   a change of sharding between two sites
State        where a value is between forward and backward
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autopar.letters import BadPlan
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


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of a value that stays on the device until backward has read it."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The state of a value that is dropped after its last read in forward, and made again in backward."""

    # If not empty, backward makes the value once more: in passing, for what is behind this op (`space/timeline.py`).
    passing: str = ""


@dataclass(frozen=True, slots=True)
class Regathered:
    """The state of a parameter whose gathered copy is dropped after forward, and gathered again in backward."""


@dataclass(frozen=True, slots=True)
class Offloaded:
    """The state of a value that waits for backward on the host.

    Its copy begins behind its last reader in forward, and its memory is free behind the forward of `gone`. It begins to
    come back before the backward of `comes`. Both are names of ops.
    """

    gone: str
    comes: str


# `match` over the union names what to extend.
State = Saved | Recomputed | Regathered | Offloaded


def states_of(
    recomputed: Collection[str],
    passing: Mapping[str, str],
    regathered: Collection[str] = (),
    offloaded: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> dict[str, State]:
    """The states of values by name, without those that are saved; a letter where a value would have two."""
    for name, op in passing.items():
        if name not in recomputed:
            raise BadPlan(f"the plan makes {name} in passing, which it does not recompute")
        if not op:
            raise BadPlan(f"the plan makes {name} in passing for what is behind no op")
    if both := sorted(set(recomputed).intersection(regathered)):
        raise BadPlan(f"the plan recomputes {both[0]}, and also gathers it again as a parameter")
    if both := sorted(offloaded.keys() & {*recomputed, *regathered}):
        raise BadPlan(f"the plan has {both[0]} on the host, and also makes or gathers it again")
    states: dict[str, State] = {name: Regathered() for name in sorted(regathered)}
    states |= {name: Offloaded(*ops) for name, ops in sorted(offloaded.items())}
    return states | {name: Recomputed(passing.get(name, "")) for name in sorted(recomputed)}
