"""Search for cuts: which blocks make up each stage, with which order, within a budget of bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, permutations

import numpy as np

from autopar.letters import Infeasible
from autopar.stages.actions import Order, Prices, StagePrices
from autopar.stages.bounds import Atoms, Block, CutsByBound, bound, condition_of, least_busiest
from autopar.stages.chains import Chains
from autopar.stages.levels import InFlight, Levels, Picks
from autopar.stages.limits import LIMITS
from autopar.stages.orders import CAPPED, ON_A_V, order_of
from autopar.stages.simulate import Run, Steps, most_turns, simulated

__all__ = ["Atoms", "Block", "Choice", "best_cuts", "bound"]


class Slow(Exception):
    """Raised where stages that fit take as long as a plan that is known; no cut takes less than `bound` seconds."""

    def __init__(self, bound: float) -> None:
        super().__init__(f"{bound} s at least")
        self.bound = bound


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
    levels: Picks = ()  # the level of each stage


def best_cuts(
    atoms: Atoms,
    coordinates: int,
    turns: int,
    names: Sequence[str] = ("1f1b", "zero-bubble", "interleaved", "zb-v", "greedy"),
    stages_each: int = 0,
    budget: float = math.inf,
    levels: Sequence[Atoms] = (),
    known: float = math.inf,
) -> Choice:
    """Find the fastest cut by simulation, of some of least bound and those one block from the best.

    No coordinate holds more than `budget` bytes: an order that takes more is tried with fewer turns in flight first.
    `stages_each` is for the orders that have any number of stages a coordinate; of 0, one or two. The greedy order is
    made for the best cuts of the others. `levels` are the same blocks where they save less, one after the other: each
    stage has one of them. Raises `Slow` where those that fit are found to take `known` seconds or more.
    """
    least = turns * least_busiest(atoms.blocks, coordinates)
    if least >= known:
        raise Slow(least)
    search = _Search((atoms, *levels), coordinates, turns, budget, known)
    each = {"gpipe": stages_each or 1, "interleaved": stages_each or 2, **dict.fromkeys(ON_A_V, 2)}
    tried: list[_Tried] = []
    for name in names:
        tried += search.best(name, each.get(name, 1)) if name != "greedy" else []
    if "greedy" in names:
        cuts = [one.cut for one in tried] or [search.even(part) for part in ((stages_each,) if stages_each else (1, 2))]
        listed = [search.tried("greedy", cut, known) for cut in cuts if min(cut)]
        tried += [one for one in listed if one is not None and search.is_fast(one.seconds)]
    if not tried and search.is_slow:
        raise Slow(max(search.open, least))
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
    picks: Picks


class _Search:
    """Cuts in one order after the other, within one budget."""

    def __init__(self, levels: Sequence[Atoms], coordinates: int, turns: int, budget: float, known: float) -> None:
        self.atoms = levels[0]
        self.all_atoms = levels
        self.levels = Levels(levels)
        self.coordinates = coordinates
        self.turns = turns
        self.budget = budget
        self.known = known
        self.is_slow = False  # whether cuts that fit were left out, as they take the known seconds or more
        self.open = math.inf  # No cut that was not simulated is faster.
        self.chains = lru_cache(maxsize=None)(self._chains)

    def even(self, each: int) -> tuple[int, ...]:
        """The cut whose stages differ by one block at most."""
        stages = self.coordinates * each
        blocks = len(self.atoms.blocks)
        return tuple((s + 1) * blocks // stages - s * blocks // stages for s in range(stages))

    def best(self, name: str, each: int) -> list[_Tried]:
        """Find the fastest cut in one order, if any: least bound first, until no other can be faster.

        Of some cuts of least bound, the best is improved by moving blocks, unless it takes so much longer than what is
        known that this would not help.
        """
        tried: dict[tuple[int, ...], _Tried] = {}
        far = (1.0 + LIMITS.moves) * self.known
        least = far
        is_done = each == 1
        for k, (lower, cut) in enumerate(self._cuts(name, each)):
            if each == 1 and lower >= min(least, self.known):
                self.is_slow = True
                self.open = min(self.open, lower)
                break
            if k == LIMITS.cuts:
                is_done = False
                self.open = min(self.open, lower)
                break
            least = min(least, self._add(tried, name, cut, least))
        if each > 1 and self.coordinates * each <= len(self.atoms.blocks):
            self.open = min(self.open, bound(self.atoms, self.coordinates, self.turns, stages_each=each))
        while tried and not is_done:
            best = min(tried.values(), key=lambda one: one.seconds)
            if best.seconds >= far:
                break
            least = best.seconds
            for lower, cut in self._moved(name, best.cut):
                if lower >= least:
                    break
                if cut not in tried:
                    least = min(least, self._add(tried, name, cut, least))
            is_done = least >= best.seconds
        return [one for one in sorted(tried.values(), key=lambda one: one.seconds)[:1] if self.is_fast(one.seconds)]

    def _moved(self, name: str, cut: Sequence[int]) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Cuts with a block moved, and the seconds that each takes at least, the least first."""
        stages = len(cut)
        one: np.ndarray = np.eye(stages, dtype=int)
        moves = [one[b] - one[a] for a, b in permutations(range(stages), 2) if cut[a] > 1]
        if not moves:
            return
        cuts = np.array(cut) + np.array(moves)
        chains = self.chains(name, stages // self.coordinates, None, None)
        lowers = chains.least_of(self.levels.amounts_of(cuts, chains.steps.order.place))
        for k in np.argsort(lowers, kind="stable").tolist():
            yield float(lowers[k]), tuple(cuts[k].tolist())

    def is_fast(self, seconds: float) -> bool:
        """Whether a cut takes less than what is known."""
        self.is_slow |= seconds >= self.known
        return seconds < self.known

    def _add(self, tried: dict[tuple[int, ...], _Tried], name: str, cut: tuple[int, ...], below: float) -> float:
        """Try a cut that may take less than `below` seconds; gives its seconds, infinite if not tried."""
        one = self.tried(name, cut, below)
        if one is None:
            return math.inf
        tried[cut] = one
        return one.seconds

    def _cuts(self, name: str, each: int) -> CutsByBound | tuple[()]:
        """Cuts whose stages fit by themselves, by their bound, or by their seconds where it is for several."""
        if self.coordinates * each > len(self.atoms.blocks):
            return ()
        order = self.chains(name, each, None, None).steps.order
        held = most_turns(order, {"F": 1, "B": -1, "I": -1})
        least = 1 if each > 1 or name in CAPPED else 0
        costs = [self._costs(atoms, each, _is_split(order)) for atoms in self.all_atoms]
        saved = [atoms.sums("saved") for atoms in self.all_atoms]
        standing = self.atoms.sums("standing")

        def cost(r: int, a: int, z: int) -> float:
            free = self.budget - standing[z] + standing[a]
            if free < 0:
                return math.inf
            found = math.inf
            most = 0.0
            for of_level, sums in zip(costs, saved):  # the fastest first
                size = sums[z] - sums[a]
                k = held[r] if free >= held[r] * size else free // size  # size is not 0 then
                if k >= (least or held[r]) and k > most:
                    most = k
                    found = min(found, of_level(r, a, z, k))
                    if k == held[r] or each > 1:
                        break
            return found

        return CutsByBound(len(self.atoms.blocks), self.coordinates * each, cost)

    def _costs(self, atoms: Atoms, each: int, is_split: bool) -> Callable[[int, int, int, float], float]:
        """The bound by a stage at one level, or its seconds where there are several stages a coordinate."""
        if each == 1:
            return condition_of(atoms, self.coordinates, self.turns, is_split)
        spent = [sum(kinds) for kinds in zip(*map(atoms.sums, ("forward", "inward", "weights")))]
        return lambda r, a, z, k: self.turns * each * (spent[z] - spent[a])

    def _chains(self, name: str, each: int, prices: Prices | None, caps: tuple[int, ...] | None) -> Chains:
        return Chains(Steps(order_of(name, self.coordinates, self.turns, each, prices, caps)))

    def tried(self, name: str, cut: tuple[int, ...], below: float = math.inf) -> _Tried | None:
        """A cut in an order, at the levels that fit; with fewer turns in flight where none do, or None.

        None also where it is known without a simulation that it takes `below` seconds or more.
        """
        if self.turns * self.levels.longest(cut) >= below:  # No order has to be made to know that.
            self.is_slow = True
            return None
        each = len(cut) // self.coordinates
        used = self.atoms.prices(cut)[0] if name == "greedy" else None
        chains = self.chains(name, each, used, None)
        place = chains.steps.order.place
        picks: Picks = ()
        amounts = self.levels.amounts(cut, place)
        if max(self.turns * self.levels.busiest(cut, place), chains.least(amounts)) >= below:
            self.is_slow = True
            return None
        if math.isfinite(self.budget):
            fits = self.levels.within(chains.in_flight, cut, self.budget)
            if fits is None:
                caps = self._caps(chains.steps.order, self.levels.lowest(cut))
                if min(caps) < each or name not in CAPPED or (each > 1 and name != "greedy"):
                    return None
                chains = self.chains(name, each, used, caps)
                fits = self.levels.within(chains.in_flight, cut, self.budget)
            if fits is None:
                return None
            picks = fits
            amounts = self.levels.amounts(cut, place, picks)
            if chains.least(amounts) >= below:
                return None
        return _Tried(chains.run(amounts), cut, name, chains.steps.order, picks)

    def _caps(self, order: Order, stages: Sequence[Block]) -> tuple[int, ...]:
        """The turns of its stages for which each coordinate has bytes."""
        free = [self.budget] * self.coordinates
        size = [1.0] * self.coordinates
        for r, block in zip(order.place, stages):
            free[r] -= block.standing
            size[r] = max(size[r], block.saved, block.kept if _is_split(order) else 0.0)
        return tuple(int(min(max(f, 0.0) // s, self.turns * order.stages)) for f, s in zip(free, size))

    def choice(self, one: _Tried) -> Choice:
        stages = [Block(*stage) for stage in self.levels.blocks(one.cut, one.picks).T.tolist()]
        prices, _ = self.atoms.prices(one.cut)
        ends = accumulate(one.cut, initial=0)
        priced = (StagePrices(s.forward, *self.atoms.backward(a, s.inward, s.weights)) for a, s in zip(ends, stages))
        run = simulated(one.order, replace(prices, stages=tuple(priced)))
        each = len(one.cut) // self.coordinates
        lower = bound(
            self.atoms, self.coordinates, self.turns, run.saved if each == 1 else None, _is_split(one.order), each
        )
        sizes = self.levels.sizes(InFlight(one.order), one.cut, one.picks)
        picks = one.picks or (0,) * len(one.cut)
        return Choice(one.cut, one.name, one.order, run, sizes, lower, one.seconds <= self.open, picks)


def _is_split(order: Order) -> bool:
    return any(action.kind == "I" for action in order.at(0))
