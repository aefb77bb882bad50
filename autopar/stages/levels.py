"""Levels: the same blocks where a stage saves less for backward and takes longer, one after the other.

First stages hold more micro-batches than last ones. So each stage has the level that its bytes allow, whatever the
others have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from autopar.stages.actions import Order
from autopar.stages.bounds import Atoms, Block

Picks = tuple[int, ...]  # the level of each stage
_KINDS = ("forward", "inward", "weights", "standing", "saved", "kept")


class Levels:
    """Seconds and bytes of stages by their cut and their levels."""

    def __init__(self, levels: Sequence[Atoms]) -> None:
        self.atoms = levels[0]
        self.count = len(levels)
        self.sums = np.array([list(map(atoms.sums, _KINDS)) for atoms in levels])
        self.spent = self.sums[:, :3].sum(1)
        self.transfers = np.broadcast_to(self.atoms.transfer, len(self.atoms.blocks) - 1)

    def blocks(self, cut: Sequence[int], picks: Picks = ()) -> np.ndarray:
        """The amounts of each stage by kind: seconds of forward and both parts of backward, and bytes."""
        ends = np.array([*accumulate(cut, initial=0)])
        picks = picks or (0,) * len(cut)
        found: np.ndarray = (self.sums[picks, :, ends[1:]] - self.sums[picks, :, ends[:-1]]).T
        return found

    def lowest(self, cut: Sequence[int]) -> list[Block]:
        """The stages where all save as little as they can."""
        return [Block(*stage) for stage in self.blocks(cut, (self.count - 1,) * len(cut)).T.tolist()]

    def amounts(self, cut: Sequence[int], place: Sequence[int], picks: Picks = ()) -> np.ndarray:
        """The seconds of actions and of borders, as `Steps.amounts` has them."""
        ends = np.array([*accumulate(cut, initial=0)])
        forward, inward, weights, *_ = self.blocks(cut, picks)
        return self._amounts(ends, forward, inward, weights, place)

    def amounts_of(self, cuts: np.ndarray, place: Sequence[int]) -> np.ndarray:
        """The same of many cuts at once, where all is saved: a column each."""
        ends = np.concatenate([np.zeros((1, len(cuts)), int), np.cumsum(cuts.T, axis=0)])
        forward, inward, weights, *_ = (sums[ends[1:]] - sums[ends[:-1]] for sums in self.sums[0])
        return self._amounts(ends, forward, inward, weights, place)

    def _amounts(
        self, ends: np.ndarray, forward: np.ndarray, inward: np.ndarray, weights: np.ndarray, place: Sequence[int]
    ) -> np.ndarray:
        whole = inward + weights
        inward = np.where(ends[:-1] > self.atoms.frozen, inward, 0.0)
        hops: np.ndarray = np.zeros_like(forward)
        leaves = np.flatnonzero(np.diff(place))
        hops[leaves] = self.transfers[ends[1:-1] - 1][leaves]
        return np.concatenate([forward, whole, inward, whole - inward, hops])

    def busiest(self, cut: Sequence[int], place: Sequence[int]) -> float:
        """Seconds of a turn on the coordinate that works most, where all is saved."""
        ends = np.array([*accumulate(cut, initial=0)])
        return float(np.bincount(place, self.spent[0, ends[1:]] - self.spent[0, ends[:-1]]).max())

    def longest(self, cut: Sequence[int]) -> float:
        """Seconds of a turn in the stage that takes longest, where all is saved."""
        ends = np.array([*accumulate(cut, initial=0)])
        return float((self.spent[0, ends[1:]] - self.spent[0, ends[:-1]]).max())

    def sizes(self, flight: InFlight, cut: Sequence[int], picks: Picks = ()) -> tuple[float, ...]:
        """The most bytes of each coordinate."""
        *_, standing, saved, kept = self.blocks(cut, picks)
        return tuple((np.bincount(flight.place, standing) + flight.most(saved, kept)).tolist())

    def within(self, flight: InFlight, cut: Sequence[int], budget: float) -> Picks | None:
        """The level of each stage with which no coordinate is over a budget; None where there are none.

        A coordinate that is over takes the next level of the stage of which that costs the fewest seconds a byte.
        """
        ends = np.array([*accumulate(cut, initial=0)])
        levels = self.sums[:, :, ends[1:]] - self.sums[:, :, ends[:-1]]
        *_, standing, _, kept = levels[0]
        saved = levels[:, _KINDS.index("saved")]
        dearer = np.diff(levels[:, :3].sum(1), axis=0) / np.maximum(1.0, -np.diff(saved, axis=0))  # seconds a byte
        free = budget - np.bincount(flight.place, standing)
        picks: np.ndarray = np.zeros(len(cut), int)
        over = np.flatnonzero(flight.most(saved[0], kept) > free)
        for r in over.tolist():
            own = flight.own[r]
            ways = _cheapest_first(dearer[:, own].T.tolist())
            held = flight.most_at(r, saved[ways, own], kept)
            fits = np.flatnonzero(held <= free[r])
            if not len(fits):
                return None
            picks[own] = ways[fits[0]]
        return tuple(picks.tolist())


def _cheapest_first(dearer: Sequence[Sequence[float]]) -> np.ndarray:
    """The levels of some stages, one step after the other, each the cheapest next one."""
    now = [0] * len(dearer)
    found = [tuple(now)]
    while any(at < len(steps) for at, steps in zip(now, dearer, strict=True)):
        costs = [steps[at] if at < len(steps) else math.inf for at, steps in zip(now, dearer, strict=True)]
        now[costs.index(min(costs))] += 1
        found.append(tuple(now))
    return np.array(found)


class InFlight:
    """The micro-batches of its stages that each coordinate holds at its fullest moments, in one order."""

    def __init__(self, order: Order) -> None:
        self.place = list(order.place)
        self.own = [np.flatnonzero(np.array(self.place) == r) for r in range(order.coordinates)]
        rows = [_fullest(order, r) for r in range(order.coordinates)]
        self.rows = np.concatenate(rows)
        self.first = np.cumsum([0, *(len(of_coordinate) for of_coordinate in rows[:-1])])

    def most(self, saved: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """The most that each coordinate holds: a turn `saved` from F to B or I, and `kept` from I to W."""
        found: np.ndarray = np.maximum.reduceat(self.rows @ np.concatenate([saved, kept]), self.first)
        return found

    def most_at(self, coordinate: int, saved: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """The most that one coordinate holds in each of several ways in which its own stages save."""
        own = self.own[coordinate]
        last = self.first[coordinate + 1] if coordinate + 1 < len(self.first) else len(self.rows)
        rows = self.rows[self.first[coordinate] : last]
        stages = len(self.place)
        found: np.ndarray = (rows[:, own] @ saved.T + (rows[:, stages:] @ kept)[:, None]).max(axis=0)
        return found


def _fullest(order: Order, coordinate: int) -> np.ndarray:
    """Turns of stages from F to B or I, and from I to W, at moments that no other exceeds."""
    stages = order.stages
    now = np.zeros(2 * stages)
    moments = {tuple(now.tolist())}
    for action in order.actions[coordinate]:
        now[action.stage] += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
        now[stages + action.stage] += {"F": 0, "B": 0, "I": 1, "W": -1}[action.kind]
        moments.add(tuple(now.tolist()))
    rows = np.array(sorted(moments, key=sum, reverse=True))
    kept: list[np.ndarray] = []
    for row in rows:
        if not any((row <= other).all() for other in kept):
            kept.append(row)
    return np.array(kept)
