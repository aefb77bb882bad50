"""A list scheduler with split backward: what may begin first runs first; then gradients, forwards, the rest last.

Where the order of forwards and gradients is given, it finds the places of the rest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from autopar.stages.actions import Action, Order, Prices

_KINDS = "IFW"  # The first goes first where several may begin at one time.
_STEPS = {"F": 1, "I": -1}  # The stage that waits for a forward is the next, for gradients the one before.


Fixed = Sequence[Sequence[tuple[str, int]]]  # kinds and stages of each coordinate, without those of W


def listed(
    place: tuple[int, ...], turns: int, prices: Prices, caps: Sequence[int], fixed: Fixed | None = None
) -> Order:
    """The order in which no coordinate holds more than `caps` turns of stages between their F and their W.

    With `fixed`, all F and I of a coordinate run in that order. Caps are raised where they leave nothing to run: where
    stages of one coordinate share a channel, what others wait for may have come behind what the caps keep out.
    """
    while (order := _Listing(place, turns, prices, caps, fixed).order()) is None:
        caps = [cap + 1 for cap in caps]
    return order


class _Listing:
    def __init__(
        self, place: tuple[int, ...], turns: int, prices: Prices, caps: Sequence[int], fixed: Fixed | None
    ) -> None:
        stages = range(len(place))
        self.fixed = None if fixed is None else [deque(of_one) for of_one in fixed]
        self.place = place
        self.turns = turns
        self.prices = prices
        self.caps = caps
        self.hops = prices.hops(place)
        self.own: list[list[int]] = [[] for _ in range(max(place) + 1)]
        for s in stages:
            self.own[place[s]].append(s)
        self.free = [0.0] * len(self.own)
        self.held = [0] * len(self.own)
        self.actions: list[list[Action]] = [[] for _ in self.own]
        self.next = {kind: [0] * len(place) for kind in _KINDS}  # turns
        self.came: dict[str, list[list[float]]] = {kind: _none_yet(place) for kind in _KINDS}  # seconds, by turn
        self.came["F"][0] = [0.0] * turns
        channels: dict[tuple[str, int, int], deque[int]] = {}
        self.queues: dict[tuple[str, int], deque[int]] = {}  # stages that messages of a stage's channel go to
        for kind, step in _STEPS.items():
            for s in stages:
                if 0 <= s - step < len(place) and place[s - step] != place[s]:
                    self.queues[kind, s] = channels.setdefault((kind, place[s - step], place[s]), deque())

    def order(self) -> Order | None:
        """The order, or None where nothing may run before all has."""
        best = [self._best(r) for r in range(len(self.own))]
        for _ in range(len(_KINDS) * self.turns * len(self.place)):
            start, rank, stage = min(best)
            if start == math.inf:
                return None
            self._run(_KINDS[rank], -stage, start)
            near = range(max(0, -stage - 1), min(len(self.place), -stage + 2))
            for r in {self.place[s] for s in near}:
                best[r] = self._best(r)
        return Order(self.place, self.turns, tuple(map(tuple, self.actions)))

    def _best(self, r: int) -> tuple[float, int, int]:
        """Start, rank of the kind, and negated stage of what coordinate `r` may run next."""
        found = [(math.inf, 0, 0)]
        following = None if self.fixed is None else next(iter(self.fixed[r]), None)
        for later, s in enumerate(reversed(self.own[r])):
            # A slot is left for each later stage of the coordinate: what waits there ends the turns that are held.
            is_full = self.held[r] >= self.caps[r] - (later if self.fixed is None else 0)
            for rank, kind in enumerate(_KINDS):
                if self.fixed is not None and kind != "W" and (kind, s) != following:
                    continue
                turn = self.next[kind][s]
                queue = self.queues.get((kind, s))
                is_there = turn < len(self.came[kind][s]) and (not queue or queue[0] == s)
                if is_there and not (kind == "F" and is_full):
                    found.append((max(self.free[r], self.came[kind][s][turn]), rank, -s))
        return min(found)

    def _run(self, kind: str, stage: int, start: float) -> None:
        r = self.place[stage]
        if self.fixed is not None and kind != "W":
            self.fixed[r].popleft()
        end = self.free[r] = start + self.prices.stages[stage].of(kind)
        self.actions[r].append(Action(kind, stage, self.next[kind][stage]))
        self.next[kind][stage] += 1
        self.held[r] += {"F": 1, "I": 0, "W": -1}[kind]
        if (kind, stage) in self.queues:
            self.queues[kind, stage].popleft()
        if kind == "I":
            self.came["W"][stage].append(end)
        reader = stage + _STEPS.get(kind, 0)
        if kind == "F" and reader == len(self.place):
            self.came["I"][stage].append(end)
        elif kind != "W" and reader >= 0:
            self.came[kind][reader].append(end + self.hops[min(stage, reader)])
            if (kind, reader) in self.queues:
                self.queues[kind, reader].append(reader)


def _none_yet(place: tuple[int, ...]) -> list[list[float]]:
    return [[] for _ in place]
