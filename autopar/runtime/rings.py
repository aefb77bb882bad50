"""Rings: keys of a sequence that axes cut go from device to device, one step ahead of the kernels that read them.

Along one axis keys go round. Where more axes cut them, those of the others are gathered in each step, so that what goes
round is what a device has, and a kernel reads all keys of a step:

    devices     (0, 0) (0, 1)     (1, 0) (1, 1)        axes of 2 devices: the first goes round, the second gathers
    step 0       0, 1   0, 1       2, 3   2, 3         parts of the keys, of which a device has one
    step 1       2, 3   2, 3       0, 1   0, 1

Backward sends keys and values round once more, and their gradients with them and home; those of a step are summed over
the other axes before.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from autopar.runtime.collectives import Axis
from autopar.runtime.dealing import Owners, Setup, deal_of
from autopar.runtime.halos import has_halo, keys_held
from autopar.runtime.wires import wires_of


class Step(NamedTuple):
    """Keys of other devices: how far before this one they belong on the axis along which keys go round."""

    offset: int


def steps_of(how: Setup) -> list[Step]:
    """The steps of a ring, from this device's own keys on; where these have a halo, that is all."""
    return [Step(i) for i in range(how.rings[0].parts if axes_of_rings(how) else 1)]


class Messages(NamedTuple):
    """Numbers of messages of a call along an axis, of one kind: those beside kernels, and those in line.

    In backward there are keys and values, and on their way home their gradients.
    """

    kind: str
    forward: tuple[int, int]
    backward: tuple[int, int]
    home: tuple[int, int] = (0, 0)


@functools.lru_cache(maxsize=64)
def messages_of_ring(setup: str) -> dict[str, list[Messages]]:
    """Messages along each axis of keys and values on their way, and of their gradients.

    Where axes gather, the first keys of another device have to be there before the first step.
    """
    how = Setup.of(setup)
    if not axes_of_rings(how):
        return {}
    ring, *others = how.rings
    n = ring.parts
    early = bool(others)
    sends = n - 1 - early, int(early)
    found = {ring.axis: [Messages("send", sends, sends, (sends[0], early + 1))]}
    for other in others:
        found[other.axis] = [
            Messages("all_gather", (n - 1, 1), (n - 1, 1)),
            Messages("all_to_all", (0, 0), (0, 0), (n - 1, 1)),
        ]
    return found


def axes_of_rings(how: Setup) -> tuple[str, ...]:
    """The axes along which keys are exchanged while they are computed with."""
    return () if has_halo(how) else tuple(ring.axis for ring in how.rings)


class Keys:
    """The keys that a device reads: its own and its halo, or those of all devices of its rings, step by step."""

    def __init__(self, how: Setup, owners: Owners | None, axes: Sequence[Axis]) -> None:
        self.how = how
        self.wires = list(wires_of(axes_of_rings(how), axes).values())
        self.deal = deal_of(how.text(), owners, True)
        self.steps = steps_of(how)

    def rows(self, step: Step) -> np.ndarray:
        """The keys that this device computes with at a step."""
        if has_halo(self.how):
            return keys_held(self.how)
        others = itertools.product(*(range(ring.parts) for ring in self.how.rings[1:]))
        return np.concatenate([self._lies(step, other) for other in others])

    def _lies(self, step: Step, others: Sequence[int]) -> np.ndarray:
        """Keys of the device of a step at these places of the axes that gather."""
        if not self.how.rings:
            return self.deal.held({})
        ring = self.how.rings[0]
        places = (ring.place - step.offset) % ring.parts, *others
        return self.deal.held({cut.axis: place for cut, place in zip(self.how.rings, places, strict=True)})

    def _own(self, step: Step) -> np.ndarray:
        return self._lies(step, [ring.place for ring in self.how.rings[1:]])

    def move(self, x: Tensor, step: Step, to: Step) -> Callable[[], Tensor]:
        """Begin to send what belongs to the keys of a step on, and to receive that of another step."""
        shape = [*x.shape[:2], len(self._own(to)), x.shape[3]]
        return self.wires[0].passed_on(x, to.offset - step.offset, shape)

    def blocks(self, packed: Tensor) -> Iterator[tuple[Step, Tensor]]:
        """Keys and values step by step; the next ones are on their way meanwhile."""
        own = packed[:, :, : len(self._own(self.steps[0]))]
        return self._gathered_blocks(own) if len(self.wires) > 1 else self._passed_blocks(own)

    def _passed_blocks(self, own: Tensor) -> Iterator[tuple[Step, Tensor]]:
        for step, after in itertools.pairwise(self.steps):
            comes = self.move(own, step, after)
            yield step, own
            own = comes()
            del comes  # It holds what was sent.
        yield self.steps[-1], own

    def _gathered_blocks(self, own: Tensor) -> Iterator[tuple[Step, Tensor]]:
        """Keys step by step where other axes gather them, one step ahead of kernels; messages are two ahead."""
        comes = self.move(own, self.steps[0], self.steps[1])
        gathers = self._gathered(own, self.steps[0])
        for i, step in enumerate(self.steps):
            whole = gathers()
            if after := self.steps[i + 1 : i + 3]:
                own = comes()
                if len(after) > 1:
                    comes = self.move(own, *after)
                gathers = self._gathered(own, after[0])
            yield step, whole
            del whole

    def _gathered(self, x: Tensor, step: Step) -> Callable[[], Tensor]:
        """Begin to gather keys of a step over the axes behind the first, of which the last is the minor one."""
        places = [ring.place for ring in self.how.rings[1:]]
        wait: Callable[[], Tensor] = x.movedim(2, 0).contiguous
        for i in reversed(range(len(places))):
            wait = self.wires[1 + i].collected(wait(), self._counts(step, places, i))
        return lambda: wait().movedim(0, 2)

    def shared_out(self, rows: Tensor, step: Step) -> Callable[[], Tensor]:
        """Begin to sum rows of a step over the axes that gather; a device gets those that it sends on."""
        places = [ring.place for ring in self.how.rings[1:]]
        wait: Callable[[], Tensor] = rows.contiguous
        for i in range(len(places)):
            wait = self.wires[1 + i].shared_out(wait(), self._counts(step, places, i))
        return lambda: wait().movedim(0, 2)

    def _counts(self, step: Step, places: Sequence[int], i: int) -> list[int]:
        """Keys of each device of an axis that gathers, with those that later axes have gathered."""
        later = [range(ring.parts) for ring in self.how.rings[2 + i :]]
        counts = []
        for place in range(self.how.rings[1 + i].parts):
            others = ((*places[:i], place, *rest) for rest in itertools.product(*later))
            counts.append(sum(len(self._lies(step, other)) for other in others))
        return counts


class Homing:
    """Gradients of keys on their way: a device adds its share to what arrives, passes it on, and the last hop is home.

    Where axes gather, a share is summed over them beside the next step, and passed on a step later.
    """

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.shares: Callable[[], Tensor] | None = None
        self.comes: Callable[[], Tensor] | None = None

    def take(self, totals: list[Tensor], step: Step) -> None:
        """Take this device's share of the gradients of a step's keys and values, and empty the list."""
        if len(self.keys.wires) == 1:
            share = torch.cat(totals, -1)
            totals.clear()
            self._pass_on(share, step)
            return
        share = torch.cat([x.movedim(2, 0) for x in totals], -1)
        totals.clear()
        if (summed := self._summed()) is not None:
            self._pass_on(summed, self.keys.steps[step.offset - 1])
        self.shares = self.keys.shared_out(share, step)

    def _summed(self) -> Tensor | None:
        """The share of the step before, summed over the axes that gather."""
        found = self.shares() if self.shares is not None else None
        self.shares = None
        return found

    def _pass_on(self, share: Tensor, step: Step) -> None:
        if self.comes is not None:
            share.add_(self.comes())
            self.comes = None  # It holds what was sent.
        after = self.keys.steps[(step.offset + 1) % len(self.keys.steps)]
        self.comes = self.keys.move(share, step, after)

    def home(self) -> Tensor:
        """The gradients of the keys that lie on this device."""
        if (summed := self._summed()) is not None:
            self._pass_on(summed, self.keys.steps[-1])
        assert self.comes is not None
        return self.comes()
