"""Search for cuts: which blocks make up each stage, with which order, within a budget of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

from autopar.letters import Infeasible
from autopar.stages.actions import Order, Prices
from autopar.stages.bounds import Atoms, Block, CutsByBound, bound, condition_of
from autopar.stages.orders import CAPPED, order_of
from autopar.stages.simulate import Run, Steps, most_turns, simulated

__all__ = ["Atoms", "Block", "Choice", "best_cuts", "bound"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A cut, as blocks of each stage, with its order: its run, and the bytes of each coordinate at their most.

    `bound` holds for every cut with every order that holds as many turns, and splits backward if this one does. Where
    `is_best`, no cut has a faster run in the orders that were tried, but for the greedy one.
    """

    cut: tuple[int, ...]
    name: str
    order: Order
    run: Run
    sizes: tuple[float, ...]
    bound: float
    is_best: bool


def best_cuts(
    atoms: Atoms,
    coordinates: int,
    turns: int,
    names: Sequence[str] = ("1f1b", "zero-bubble", "interleaved", "zb-v", "greedy"),
    stages_each: int = 0,
    budget: float = math.inf,
    most: int = 50,
) -> Choice:
    """Find the fastest cut by simulation, of the `most` of least bound and those one block from the best.

    No coordinate holds more than `budget` bytes: an order that takes more is tried with fewer turns in flight first.
    `stages_each` is for the orders that have any number of stages a coordinate; of 0, one or two. The greedy order is
    made for the best cuts of the others.
    """
    search = _Search(atoms, coordinates, turns, budget)
    each = {"gpipe": stages_each or 1, "interleaved": stages_each or 2, "zb-v": 2, "dualpipe-v": 2}
    tried: list[_Tried] = []
    for name in names:
        tried += search.best(name, each.get(name, 1), most) if name != "greedy" else []
    if "greedy" in names:
        cuts = [one.cut for one in tried] or [search.even(part) for part in ((stages_each,) if stages_each else (1, 2))]
        listed = [search.tried("greedy", cut) for cut in cuts if min(cut)]
        tried += [one for one in listed if one is not None]
    if not tried:
        raise Infeasible(f"no cut into stages on {coordinates} coordinates fits in {budget:.4g} bytes a device")
    return search.choice(min(tried, key=lambda one: one.seconds))


@dataclass(frozen=True, slots=True)
class _Tried:
    """A cut in an order, which fits."""

    seconds: float
    cut: tuple[int, ...]
    name: str
    order: Order
    sizes: tuple[float, ...]


class _Search:
    """Cuts in one order after the other, within one budget."""

    def __init__(self, atoms: Atoms, coordinates: int, turns: int, budget: float) -> None:
        self.atoms = atoms
        self.coordinates = coordinates
        self.turns = turns
        self.budget = budget
        self.open = math.inf  # No cut that was not simulated is faster.
        self.steps = lru_cache(maxsize=None)(self._steps)

    def even(self, each: int) -> tuple[int, ...]:
        """The cut whose stages differ by one block at most."""
        stages = self.coordinates * each
        blocks = len(self.atoms.blocks)
        return tuple((s + 1) * blocks // stages - s * blocks // stages for s in range(stages))

    def best(self, name: str, each: int, most: int) -> list[_Tried]:
        """Find the fastest cut in one order, if any: least bound first, until no other can be faster."""
        tried: dict[tuple[int, ...], _Tried] = {}
        least = math.inf
        is_done = each == 1
        for k, (lower, cut) in enumerate(self._cuts(name, each)):
            if each == 1 and lower >= least:
                break
            if k == most:
                is_done = False
                self.open = min(self.open, lower)
                break
            self._add(tried, name, cut, least)
            least = min([one.seconds for one in tried.values()], default=math.inf)
        if each > 1:
            self.open = min(self.open, bound(self.atoms, self.coordinates, self.turns, stages_each=each))
        while tried and not is_done:
            best = min(tried.values(), key=lambda one: one.seconds)
            for a, b in permutations(range(len(best.cut)), 2):
                moved = [size + (k == b) - (k == a) for k, size in enumerate(best.cut)]
                if moved[a] and tuple(moved) not in tried:
                    self._add(tried, name, tuple(moved), best.seconds)
            is_done = min(one.seconds for one in tried.values()) >= best.seconds
        return sorted(tried.values(), key=lambda one: one.seconds)[:1]

    def _add(self, tried: dict[tuple[int, ...], _Tried], name: str, cut: tuple[int, ...], below: float) -> None:
        one = self.tried(name, cut, below)
        if one is not None:
            tried[cut] = one

    def _cuts(self, name: str, each: int) -> CutsByBound | tuple[()]:
        """Cuts whose stages fit by themselves, by their bound, or by their seconds where it is for several."""
        if self.coordinates * each > len(self.atoms.blocks):
            return ()
        order = self.steps(name, each, None, None).order
        held = most_turns(order, {"F": 1, "B": -1, "I": -1})
        condition = condition_of(self.atoms, self.coordinates, self.turns, _is_split(order))
        saved = self.atoms.sums("saved")
        standing = self.atoms.sums("standing")
        spent = [sum(kinds) for kinds in zip(*map(self.atoms.sums, ("forward", "inward", "weights")))]

        def cost(r: int, a: int, z: int) -> float:
            size = saved[z] - saved[a]
            free = self.budget - standing[z] + standing[a]
            k = held[r] if free >= held[r] * size else free // size
            if k < (1 if each > 1 or name in CAPPED else held[r]):
                return math.inf
            return condition(r, a, z, k) if each == 1 else self.turns * each * (spent[z] - spent[a])

        return CutsByBound(len(self.atoms.blocks), self.coordinates * each, cost)

    def _steps(self, name: str, each: int, prices: Prices | None, caps: tuple[int, ...] | None) -> Steps:
        return Steps(order_of(name, self.coordinates, self.turns, each, prices, caps))

    def tried(self, name: str, cut: tuple[int, ...], below: float = math.inf) -> _Tried | None:
        """A cut in an order, with fewer turns in flight where it takes too much; None if that does not do.

        None also where the work of a coordinate takes `below` or more.
        """
        each = len(cut) // self.coordinates
        prices, stages = self.atoms.prices(cut)
        used = prices if name == "greedy" else None
        steps = self.steps(name, each, used, None)
        work = _by_coordinate(steps.order, [block.forward + block.inward + block.weights for block in stages])
        if self.turns * max(work) >= below:
            return None
        sizes = self._sizes(steps.order, stages)
        if max(sizes) > self.budget:
            caps = self._caps(steps.order, stages)
            if min(caps) < each or name not in CAPPED or (each > 1 and name != "greedy"):
                return None
            steps = self.steps(name, each, used, caps)
            sizes = self._sizes(steps.order, stages)
        return _Tried(max(steps.ends(prices)), cut, name, steps.order, sizes) if max(sizes) <= self.budget else None

    def _sizes(self, order: Order, stages: Sequence[Block]) -> tuple[float, ...]:
        """The most bytes of each coordinate."""
        held = order.most_held([block.saved for block in stages], [block.kept for block in stages])
        return tuple(map(sum, zip(held, _by_coordinate(order, [block.standing for block in stages]))))

    def _caps(self, order: Order, stages: Sequence[Block]) -> tuple[int, ...]:
        """The turns of its stages for which each coordinate has bytes."""
        free = [self.budget] * self.coordinates
        size = [1.0] * self.coordinates
        for r, block in zip(order.place, stages):
            free[r] -= block.standing
            size[r] = max(size[r], block.saved, block.kept if _is_split(order) else 0.0)
        return tuple(int(min(max(f, 0.0) // s, self.turns * order.stages)) for f, s in zip(free, size))

    def choice(self, one: _Tried) -> Choice:
        prices, _ = self.atoms.prices(one.cut)
        run = simulated(one.order, prices)
        each = len(one.cut) // self.coordinates
        lower = bound(
            self.atoms, self.coordinates, self.turns, run.saved if each == 1 else None, _is_split(one.order), each
        )
        return Choice(one.cut, one.name, one.order, run, one.sizes, lower, one.seconds <= self.open)


def _is_split(order: Order) -> bool:
    return any(action.kind == "I" for action in order.at(0))


def _by_coordinate(order: Order, amounts: Sequence[float]) -> list[float]:
    """Sums of what the stages of each coordinate have."""
    sums = [0.0] * order.coordinates
    for r, amount in zip(order.place, amounts):
        sums[r] += amount
    return sums
