"""`DimBlocks`: the blocks by which dims of values may be cut.

Where several values stand end to end in one dim, that dim may be cut by blocks. So may every dim that is the same
factor of some op, up and down the graph: a fused weight learns from the split behind it that it may be cut by heads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from autopar.graph.graph import info
from autopar.ops.entry import facts_of
from autopar.sharding.notation import Binding
from autopar.space.bindings import Bindings
from autopar.space.wiring import outputs_of

Sizes = tuple[int, ...]  # sizes of blocks
Place = tuple[fx.Node, int]  # a dim of a value


@dataclass(frozen=True, slots=True)
class _Joint:
    """Dims of a call's values that share their blocks: those of one factor, or one dim with blocks of its own."""

    places: tuple[tuple[int, int], ...]  # (index among operands and then outputs, dim)
    factor: str = ""  # factor that may be cut by blocks
    passes_on: bool = False
    blocks: tuple[Sizes, ...] = ()


class DimBlocks:
    """The blocks by which dims may be cut, for all values of a graph."""

    def __init__(self, bindings: Bindings) -> None:
        self.bindings = bindings
        self.joints: dict[int, tuple[_Joint, ...]] = {}  # one entry per kind of call
        for node, binding in bindings.rules.items():
            if binding is not None and bindings.kinds[node] not in self.joints:
                self.joints[bindings.kinds[node]] = _joints(node, binding)
        self.blocks: dict[Place, set[Sizes]] = {}
        if any(joint.blocks for joints in self.joints.values() for joint in joints):
            self._spread()

    def _spread(self) -> None:
        meets: dict[Place, list[list[Place]]] = {}
        for node, binding in self.bindings.rules.items():
            if binding is None:
                continue
            held = self._held(node)
            for joint in self.joints[self.bindings.kinds[node]]:
                places = [(value, dim) for at, dim in joint.places if (value := held[at]) is not None]
                for place in places:
                    if joint.blocks:
                        self.blocks.setdefault(place, set()).update(joint.blocks)
                    elif joint.passes_on:
                        meets.setdefault(place, []).append(places)
        waiting = [place for place, blocks in self.blocks.items() if blocks]
        while waiting:
            place = waiting.pop()
            for places in meets.get(place, ()):
                for other in places:
                    if not self.blocks[place] <= self.blocks.setdefault(other, set()):
                        self.blocks[other] |= self.blocks[place]
                        waiting.append(other)

    def _held(self, node: fx.Node) -> Sequence[fx.Node | None]:
        return (*self.bindings.tensors[node], *outputs_of(node))

    def of_factors(self, node: fx.Node) -> tuple[tuple[str, tuple[Sizes, ...]], ...]:
        """The blocks by which factors of an op may be cut, as sorted pairs of a factor and its blocks."""
        if not self.blocks or self.bindings.rules[node] is None:
            return ()
        held = self._held(node)
        found: dict[str, set[Sizes]] = {}
        for joint in self.joints[self.bindings.kinds[node]]:
            if joint.factor:
                for at, dim in joint.places:
                    value = held[at]
                    if value is not None and (blocks := self.blocks.get((value, dim))):
                        found.setdefault(joint.factor, set()).update(blocks)
        return tuple((f, tuple(sorted(b))) for f, b in sorted(found.items()))

    def even(self, value: fx.Node, rank: int) -> dict[int, set[Sizes]]:
        """Blocks of one size, by dim of a value: the ones that torch's placements can state."""
        blocks = [self.blocks.get((value, d), set()) for d in range(rank)]
        return {d: set(filter(_is_even, of_dim)) for d, of_dim in enumerate(blocks)}


def _is_even(blocks: Sizes) -> bool:
    return len(set(blocks)) == 1


def _joints(node: fx.Node, binding: Binding) -> tuple[_Joint, ...]:
    own: list[_Joint] = []
    single: dict[str, list[tuple[int, int]]] = {}
    passed: dict[str, list[tuple[int, int]]] = {}
    for at, row in enumerate(binding.rows):
        for i, dim in enumerate(row):
            if dim.joined == "|":
                own.append(_Joint(((at, i),), blocks=(tuple(binding.sizes[f] for f in dim.factors),)))
            elif dim.joined == "*":
                minor = [binding.blocks_of(dim, f) for f in dim.factors if f in binding.minor]
                if blocks := tuple(filter(None, minor)):
                    own.append(_Joint(((at, i),), blocks=blocks))
            elif dim.factors:
                passed.setdefault(dim.factor, []).append((at, i))
            if len(dim.factors) == 1 and not counts(node, dim.factor):
                single.setdefault(dim.factor, []).append((at, i))
    joined = {f for row in binding.rows for dim in row if dim.joined for f in dim.factors}
    spread = [f for f in passed if f not in joined and f not in binding.whole and not counts(node, f)]
    return (
        *own,
        *(_Joint(tuple(places), f) for f, places in single.items()),
        *(_Joint(tuple(passed[f]), passes_on=True) for f in spread),
    )


def counts(node: fx.Node, factor: str) -> bool:
    """Whether an op's local form counts positions along this factor, so that each part must be one range.

    An op that draws random numbers counts along all factors.
    """
    return info(node).random >= 0 or re.fullmatch(facts_of(node.target.name).counts or "$.", factor) is not None
