"""Values: the actions of a pipeline, their order on each coordinate, and their prices.

An action is a stage, a kind and a turn (a micro-batch), spelled as torch prints it:

    0F3    forward of stage 0, turn 3
    0B3    its backward as a whole
    0I3    the gradients of what came in, which the stage before waits for
    0W3    the rest of that backward, which nobody waits for
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.letters import BadOrder

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, slots=True, repr=False)
class Action:
    """One kind of work of one stage for one turn."""

    kind: str
    stage: int
    turn: int

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind}{self.turn}"

    @staticmethod
    def of(text: str) -> Action:
        read = _ACTION.fullmatch(text)
        if read is None:
            raise BadOrder(f"{text!r} is not an action of a pipeline", advice="stage, one of F B I W, turn: 0F3")
        return Action(read[2], int(read[1]), int(read[3]))


@dataclass(frozen=True, slots=True)
class Order:
    """The actions of each coordinate of the pipeline axis, first to last, and the coordinate of each stage."""

    place: tuple[int, ...]
    turns: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.place)

    @property
    def coordinates(self) -> int:
        return len(self.actions)

    def at(self, coordinate: int) -> tuple[Action, ...]:
        """The actions of one coordinate, first to last."""
        return self.actions[coordinate]

    def texts(self) -> tuple[str, ...]:
        """One text a coordinate, which `Order.of` reads."""
        return tuple(" ".join(map(repr, actions)) for actions in self.actions)

    @staticmethod
    def of(place: Iterable[int], turns: int, texts: Iterable[str]) -> Order:
        return Order(tuple(place), turns, tuple(tuple(map(Action.of, text.split())) for text in texts))

    def most_held(self, saved: Sequence[float], kept: Sequence[float]) -> tuple[float, ...]:
        """The most that each coordinate holds: a turn `saved` from F to B or I, and `kept` from I to W."""
        late = [k - s for s, k in zip(saved, kept)]
        changes = {"F": saved, "B": [-s for s in saved], "I": late, "W": [-k for k in kept]}
        found = []
        for actions in self.actions:
            now = most = 0.0
            for action in actions:
                now += changes[action.kind][action.stage]
                if now > most:
                    most = now
            found.append(most)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class StagePrices:
    """Seconds of one stage and turn; a whole backward is `inward + weights`.

    Where nothing before a stage is differentiated, its backward is `weights` alone and `inward` is zero.
    """

    forward: float
    inward: float
    weights: float

    def of(self, kind: str) -> float:
        return {"F": self.forward, "I": self.inward, "W": self.weights, "B": self.inward + self.weights}[kind]


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of all stages, and the seconds that a value or its gradient takes across each border of stages."""

    stages: tuple[StagePrices, ...]
    transfer: float | tuple[float, ...] = 0.0

    def hops(self, place: Sequence[int]) -> list[float]:
        """Seconds across the border after each stage: zero where both stages are on one coordinate."""
        borders = range(len(place) - 1)
        seconds = self.transfer if isinstance(self.transfer, tuple) else (self.transfer,) * len(borders)
        return [seconds[s] if place[s] != place[s + 1] else 0.0 for s in borders]
