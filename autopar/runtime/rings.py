"""Rings: keys of a sequence that axes cut go from device to device, one step ahead of the kernels that read them.

Several rings nest: the inner one goes to and fro, so that each step moves keys along one axis. Backward sends keys and
values round once more, and their gradients with them and home.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from autopar.runtime.collectives import Axis
from autopar.runtime.dealing import Owners, Setup, deal_of
from autopar.runtime.halos import has_halo, keys_held
from autopar.runtime.wires import wires_of


class Step(NamedTuple):
    """Keys of other devices: how far before this one they belong on each axis of the rings."""

    offsets: tuple[int, ...]

    def moves(self, to: Step) -> list[tuple[int, int]]:
        """The axes along which keys move to the next step, and how far."""
        ways = enumerate(zip(self.offsets, to.offsets, strict=True))
        return [(i, there - here) for i, (here, there) in ways if here != there]


@functools.lru_cache(maxsize=64)
def steps_of(how: Setup) -> list[Step]:
    """The steps of the rings, from this device's own keys on; where these have a halo, that is all.

    Where several axes are rings, the inner one goes to and fro, so that each step moves keys along one axis.
    """
    ways: list[tuple[int, ...]] = [()]
    for ring in how.rings:
        there = range(1 if has_halo(how) else ring.parts)
        ways = [(*way, i) for k, way in enumerate(ways) for i in (reversed(there) if k % 2 else there)]
    return [Step(way) for way in ways]


@functools.lru_cache(maxsize=64)
def messages_of_ring(setup: str) -> dict[str, tuple[int, int]]:
    """Messages along each axis: of keys on their way, and of gradients on the last part of theirs."""
    how = Setup.of(setup)
    steps = steps_of(how)
    found = {ring.axis: [0, 0] for ring in how.rings}
    for step, after in itertools.pairwise(steps):
        for i, _ in step.moves(after):
            found[how.rings[i].axis][0] += 1
    for i, _ in steps[-1].moves(steps[0]):
        found[how.rings[i].axis][1] += 1
    return {axis: (there, home) for axis, (there, home) in found.items()}


def axes_of_rings(how: Setup) -> tuple[str, ...]:
    """The axes along which keys go round while they are computed with."""
    return () if has_halo(how) else tuple(ring.axis for ring in how.rings)


class Keys:
    """The keys that a device reads: its own and its halo, or those of all devices of its rings, one after the other."""

    def __init__(self, how: Setup, owners: Owners | None, axes: Sequence[Axis]) -> None:
        self.how = how
        self.wires = list(wires_of(axes_of_rings(how), axes).values())
        self.deal = deal_of(how.text(), owners, True)
        self.steps = steps_of(how)

    def rows(self, step: Step) -> np.ndarray:
        """The rows of the keys that this device has at a step."""
        if has_halo(self.how):
            return keys_held(self.how)
        here = {
            ring.axis: (ring.place - offset) % ring.parts
            for ring, offset in zip(self.how.rings, step.offsets, strict=True)
        }
        return self.deal.held(here)

    def move(self, x: Tensor, step: Step, to: Step, dim: int = -2) -> Callable[[], Tensor]:
        """Begin to send what belongs to the keys of a step on, and to receive that of another step."""
        moves = step.moves(to)
        for i, by in moves[:-1]:
            step = step._replace(offsets=tuple(to.offsets[k] if k == i else o for k, o in enumerate(step.offsets)))
            x = self.wires[i].passed_on(x, by, self._shape(x, step))()
        i, by = moves[-1]
        return self.wires[i].passed_on(x, by, self._shape(x, to))

    def _shape(self, x: Tensor, step: Step) -> list[int]:
        return [*x.shape[:-2], len(self.rows(step)), x.shape[-1]]

    def blocks(self, packed: Tensor) -> Iterator[tuple[Step, Tensor]]:
        """Keys and values step by step; the next ones are on their way meanwhile."""
        packed = packed[:, :, : len(self.rows(self.steps[0]))]
        for step, after in itertools.pairwise(self.steps):
            comes = self.move(packed, step, after)
            yield step, packed
            packed = comes()
            del comes  # It holds what was sent.
        yield self.steps[-1], packed
