"""Bound cuts: the seconds that no cut of blocks into stages goes below, in whatever order, and cuts by their bound.

With one stage a coordinate, f, g and w the seconds of a stage's forward, of what the stage before waits for, and of
the rest, sums over the stages before it written "before" and over those behind it "behind", no order of n turns that
holds at most k between F and B or I takes less than

    f before + n (f + g + w)                                                     a coordinate's own work
    f before + n (f + g) + g before                                              ... and its last gradient's way back
    f before + f + f behind + g behind + (n - k) f + n (g + w)                   no gradient comes before the first
    f before + f + f behind + g behind + (n - k) f + n g + g before
    f before + ceil(n / k) (f + f behind + g behind + g) + g before              k turns at a time go there and back

The transfers on these ways come on top, and the first stage's w where the last gradient ends there. All of it depends
on a stage and the blocks before it alone. So the least bound over all cuts is a dynamic program over stages and blocks
so far, which also lists cuts by their bound, least first.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

from autopar.stages.actions import Prices, StagePrices
from autopar.stages.limits import LIMITS


@dataclass(frozen=True, slots=True)
class Block:
    """Seconds of one block and turn, and bytes: that stand, that a turn saves from F to B or I, and from I to W."""

    forward: float = 0.0
    inward: float = 0.0
    weights: float = 0.0
    standing: float = 0.0
    saved: float = 0.0
    kept: float = 0.0

    def __add__(self, other: Block) -> Block:
        return Block(*(getattr(self, name) + getattr(other, name) for name in _FIELDS))

    def __sub__(self, other: Block) -> Block:
        return Block(*(getattr(self, name) - getattr(other, name) for name in _FIELDS))


_FIELDS = [field.name for field in fields(Block)]


@dataclass(frozen=True, slots=True)
class Atoms:
    """The blocks that cuts part, the transfer across the border behind each, and how many at first are not trained.

    What stands before the first block and behind the last, such as a table and a head, is part of these blocks. A stage
    before which nothing is trained gives no gradient: all of its backward is `weights`.
    """

    blocks: tuple[Block, ...]
    transfer: float | tuple[float, ...] = 0.0
    frozen: int = 0

    @staticmethod
    def alike(count: int, block: Block, first: Block, last: Block, transfer: float = 0.0) -> Atoms:
        """Atoms of `count` blocks that are alike, between two ends."""
        blocks = [block] * count
        blocks[0] += first
        blocks[-1] += last
        return Atoms(tuple(blocks), transfer)

    def prices(self, cut: Sequence[int]) -> tuple[Prices, list[Block]]:
        """Prices of the stages that have these numbers of blocks, and each stage as one block."""
        ends = list(accumulate(cut, initial=0))
        before = [Block(*amounts) for amounts in zip(*map(self.sums, _FIELDS))]
        stages = [before[z] - before[a] for a, z in pairwise(ends)]
        prices = [StagePrices(s.forward, *self.backward(a, s.inward, s.weights)) for a, s in zip(ends, stages)]
        at = self.transfer
        return Prices(tuple(prices), tuple(at[z - 1] for z in ends[1:-1]) if isinstance(at, tuple) else at), stages

    def backward(self, before: int, inward: float, weights: float) -> tuple[float, float]:
        """Seconds of both parts of the backward of a stage that begins after `before` blocks."""
        return (inward, weights) if before > self.frozen else (0.0, inward + weights)

    def sums(self, field: str) -> list[float]:
        """A field of the blocks before each border added up, from none to all of them."""
        return list(accumulate((getattr(block, field) for block in self.blocks), initial=0.0))

    @property
    def least_transfer(self) -> float:
        return min(self.transfer, default=0.0) if isinstance(self.transfer, tuple) else self.transfer


def bound(
    atoms: Atoms,
    coordinates: int,
    turns: int,
    caps: Sequence[int] | None = None,
    is_split: bool = True,
    stages_each: int = 1,
) -> float:
    """Seconds that every cut takes in every order that holds at most `caps` turns between F and B or I.

    With `is_split` false, in those whose backwards are whole. With several stages a coordinate: that the busiest
    coordinate works, and that one turn takes.
    """
    if stages_each > 1:
        forward, inward, weights = (atoms.sums(kind)[-1] for kind in ("forward", "inward", "weights"))
        turn = forward + inward + (0.0 if is_split else weights)
        return max(turns * least_busiest(atoms.blocks, coordinates), turn)
    condition = condition_of(atoms, coordinates, turns, is_split)
    held = caps or (turns,) * coordinates
    return CutsByBound(len(atoms.blocks), coordinates, lambda r, a, z: condition(r, a, z, held[r])).least[0][0]


def least_busiest(blocks: Sequence[Block], coordinates: int) -> float:
    """Seconds of a turn that the busiest coordinate works at least, whichever whole blocks each has.

    In some seconds a coordinate has room for no more blocks than for smallest ones, and that of the largest block for
    fewer beside it. There has to be room for all.
    """
    *others, largest = sorted(block.forward + block.inward + block.weights for block in blocks)
    sums = list(accumulate(others, initial=0.0))

    def has_room(limit: float) -> bool:
        with_rounding = limit * (1 + LIMITS.rounding)
        each, beside = (bisect_right(sums, free) - 1 for free in (with_rounding, with_rounding - largest))
        return beside >= 0 and (coordinates - 1) * each + beside >= len(others)

    limits = sorted((*sums, *(largest + seconds for seconds in sums)))
    return max((sums[-1] + largest) / coordinates, limits[bisect_left(limits, True, key=has_room)])


def condition_of(atoms: Atoms, p: int, n: int, is_split: bool) -> Callable[[int, int, int, float], float]:
    """The bound by one stage, as a function of its number, its first and last border, and its cap."""
    fs, gs, ws = map(atoms.sums, ("forward", "inward", "weights"))
    if not is_split:
        gs = [g + w for g, w in zip(gs, ws)]
        ws = [0.0] * len(ws)
    hop = atoms.least_transfer
    ends_with = ws[min(atoms.frozen + 1, len(atoms.blocks))] - ws[min(atoms.frozen, len(atoms.blocks))]

    def condition(r: int, a: int, z: int, k: float) -> float:
        f = fs[z] - fs[a]
        g = gs[z] - gs[a]
        w = ws[z] - ws[a]
        back = gs[a] + ends_with + hop * r
        if is_split:
            g, w = atoms.backward(a, g, w)
        head = fs[a] + hop * r
        if z <= atoms.frozen:
            return head + n * (f + g + w)
        first = fs[-1] + gs[-1] - gs[z] + hop * (2 * p - 2 - r)
        late = max(0.0, n - k) * f
        trip = f + g + fs[-1] - fs[z] + gs[-1] - gs[z] + 2 * hop * (p - 1 - r)
        back = back if a > atoms.frozen else 0.0
        own = n * g + max(n * w, back)
        return max(head + n * f + own, first + late + own, head + math.ceil(n / k) * trip + max(w, back))

    return condition


class CutsByBound:
    """Cuts of blocks into stages by the largest condition of their stages, and then by the sum of squares of all."""

    def __init__(self, blocks: int, stages: int, condition: Callable[[int, int, int], float]) -> None:
        self.stages = stages
        self.costs: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
        self.least = [[math.inf] * (blocks + 1) for _ in range(stages + 1)]
        self.least[stages][blocks] = 0.0
        for r in reversed(range(stages)):
            behind = stages - 1 - r  # each of them needs a block
            for a in range(r, blocks - behind) if r else (0,):
                for z in range(a + 1, blocks - behind + 1) if behind else (blocks,):
                    cost = condition(r, a, z)
                    self.costs[r, a].append((z, cost))
                    self.least[r][a] = min(self.least[r][a], max(cost, self.least[r + 1][z]))
        self.squares = self._squares(blocks)

    def _squares(self, blocks: int) -> list[list[float]]:
        """The least sum of squares of the stages from one on that keep to the least bound, if any do.

        The sums of all would lead a search for cuts of that bound to stages that have no such end.
        """
        squares = [[math.inf] * (blocks + 1) for _ in range(self.stages + 1)]
        squares[self.stages][blocks] = 0.0
        for (r, a), stages in self.costs.items():  # the last stage first
            most = max(self.least[0][0], self.least[r][a])
            sums = (cost * cost + squares[r + 1][z] for z, cost in stages if max(cost, self.least[r + 1][z]) <= most)
            squares[r][a] = min(sums, default=math.inf)
        return squares

    def __iter__(self) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Bound and cut, least first: a search by what any completion costs at least.

        Where blocks are alike, very many cuts have the same sum of squares, but for rounding: what is nearer to its end
        goes first, so that not all of them are begun before one is whole.
        """
        step = self.squares[0][0] * 1e-9
        heap: list[tuple[float, float, int, tuple[int, ...], float, float]]
        heap = [(self.least[0][0], 0.0, 0, (0,), 0.0, 0.0)]
        while heap:
            worst, _, _, ends, most, squares = heapq.heappop(heap)
            r = len(ends) - 1
            if worst == math.inf:
                return
            if r == self.stages:
                yield worst, tuple(z - a for a, z in pairwise(ends))
                continue
            for z, cost in self.costs[r, ends[-1]]:
                new = max(most, cost)
                square = squares + cost * cost
                whole = square + self.squares[r + 1][z]
                near = whole // step if step and whole < math.inf else whole
                heapq.heappush(heap, (max(new, self.least[r + 1][z]), near, -r, (*ends, z), new, square))
