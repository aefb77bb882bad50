"""Simulate an order: when each action starts and ends, at given prices.

A coordinate runs one action at a time, in its order. A forward waits for that of the stage before, a backward for that
of the stage behind, and for the transfer where those are on another coordinate. Transfers take nothing from anybody's
compute, and any number may be under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.stages.actions import Order, Prices, StagePrices
from autopar.stages.proof import prove

__all__ = ["Prices", "Run", "StagePrices", "Steps", "most_turns", "simulated"]
_KINDS = "FBIW"


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds of an order: `starts` and `ends` by coordinate and index, and what is held meanwhile.

    `idle` is the share of all coordinates' seconds in which they run nothing. `in_flight` are the most turns of stages
    that a coordinate holds between F and the end of B or W, `saved` and `kept` those of a stage between F and the end
    of B or I, and between I and W.
    """

    seconds: float
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    idle: float
    in_flight: tuple[int, ...]
    saved: tuple[int, ...]
    kept: tuple[int, ...]


def simulated(order: Order, prices: Prices) -> Run:
    """The run of an order, or the letter of its proof where it cannot run to its end."""
    return Steps(order).run(prices)


class Steps:
    """The actions of an order, sorted so that each stands after those that it waits for."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.first_hop = len(_KINDS) * order.stages  # Hops begin here in `amounts`.
        self.steps: list[tuple[int, int, int, int]] = []  # coordinate, step it waits for or -1, hop, price
        stages = order.stages
        turns = order.turns
        done = {kind: [-1] * (stages * turns) for kind in "FB"}
        now = [0] * order.coordinates
        codes = {kind: k * stages for k, kind in enumerate(_KINDS)}
        is_moving = True
        while is_moving:
            is_moving = False
            for r, actions in enumerate(order.actions):
                while now[r] < len(actions):
                    action = actions[now[r]]
                    kind = action.kind
                    stage = action.stage
                    source = -1
                    hop = stages - 1  # No border is behind the last stage: the action waits for nothing.
                    if kind == "F" and stage:
                        hop = stage - 1
                        source = done["F"][hop * turns + action.turn]
                    elif kind in "BI" and stage < stages - 1:
                        hop = stage
                        source = done["B"][(stage + 1) * turns + action.turn]
                    if source < 0 and hop < stages - 1:
                        break
                    if kind != "W":
                        done["F" if kind == "F" else "B"][stage * turns + action.turn] = len(self.steps)
                    self.steps.append((r, source, hop, codes[kind] + stage))
                    now[r] += 1
                    is_moving = True
        if len(self.steps) != sum(map(len, order.actions)):
            prove(order)

    def amounts(self, prices: Prices) -> list[float]:
        """The seconds of all kinds of actions of stages, then those across the border behind each stage."""
        seconds = [price.of(kind) for kind in _KINDS for price in prices.stages]
        return [*seconds, *prices.hops(self.order.place), 0.0]

    def ends(self, prices: Prices) -> list[float]:
        """The second at which each step ends."""
        return self.ends_at(self.amounts(prices))

    def ends_at(self, amounts: Sequence[float]) -> list[float]:
        """The second at which each step ends, at the `amounts` of prices."""
        hops = amounts[self.first_hop :]
        free = [0.0] * self.order.coordinates
        ends: list[float] = []
        for r, source, hop, price in self.steps:
            start = free[r]
            if source >= 0 and ends[source] + hops[hop] > start:
                start = ends[source] + hops[hop]
            free[r] = start + amounts[price]
            ends.append(free[r])
        return ends

    def run(self, prices: Prices) -> Run:
        order = self.order
        costs = [price.of(kind) for kind in _KINDS for price in prices.stages]
        starts: list[list[float]] = [[] for _ in order.actions]
        ends: list[list[float]] = [[] for _ in order.actions]
        for (r, _, _, price), end in zip(self.steps, self.ends(prices)):
            starts[r].append(end - costs[price])
            ends[r].append(end)
        seconds = max(map(max, ends))
        busy = sum(costs[price] for *_, price in self.steps)
        ones = [1] * order.stages
        return Run(
            seconds,
            tuple(map(tuple, starts)),
            tuple(map(tuple, ends)),
            1.0 - busy / (seconds * order.coordinates) if seconds else 0.0,
            tuple(map(int, order.most_held(ones, ones))),
            most_turns(order, {"F": 1, "B": -1, "I": -1}),
            most_turns(order, {"I": 1, "W": -1}),
        )


def most_turns(order: Order, changes: Mapping[str, int]) -> tuple[int, ...]:
    """The most turns of each stage, of which kinds of actions add and take away some."""
    now = [0] * order.stages
    most = [0] * order.stages
    for actions in order.actions:
        for action in actions:
            if action.kind in changes:
                now[action.stage] += changes[action.kind]
                if now[action.stage] > most[action.stage]:
                    most[action.stage] = now[action.stage]
    return tuple(most)
