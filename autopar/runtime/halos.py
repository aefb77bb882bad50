"""Halos: keys of other devices that a device's queries see through a window, brought in one message an axis.

Keys are cut together with queries, as in a ring, but no device sees all of them. So each has all that it sees before
it computes, and every row of the result is made in one call:

    places                        0 ..... n ..... 2n .... 3n
    queries of device 2                           | own |
    keys that it has                       | halo | own |      a window of n places

Gradients of a halo go back to the devices that have its keys, which add them to their own. Several axes exchange one
after the other: after the first one a device has what is seen by any device that differs from it on later axes alone.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from autopar.runtime.collectives import Axis
from autopar.runtime.dealing import Cutting, Setup, coordinates, empty_rows
from autopar.runtime.sees import FAR, Sees, ranges_of
from autopar.runtime.wires import EXCHANGING, Exchanging, Wire, wires_of


class Block(NamedTuple):
    """Rows that stay next to each other: where they begin among those before an exchange, and among those after."""

    before: int
    after: int
    size: int

    @property
    def turned(self) -> Block:
        return Block(self.after, self.before, self.size)


class Stage(NamedTuple):
    """One exchange along an axis.

    What is sent, and what comes, is listed by the other device of the axis. Of blocks that are sent it is known where
    they begin before, of those that come where they begin after.
    """

    axis: str
    before: int  # rows of this device
    after: int
    stays: list[Block]
    sends: list[list[Block]]
    comes: list[list[Block]]

    @property
    def turned(self) -> Stage:
        """The exchange by which gradients return."""
        stays = [block.turned for block in self.stays]
        return Stage(self.axis, self.after, self.before, stays, _turned(self.comes), _turned(self.sends))


def _turned(blocks: list[list[Block]]) -> list[list[Block]]:
    return [list(map(operator.attrgetter("turned"), of)) for of in blocks]


def has_halo(how: Setup) -> bool:
    """Whether keys are cut with queries and lie as they are, and no device sees all of them."""
    return bool(how.rings) and not how.dealt and _is_partial(_anywhere(how))


@functools.lru_cache(maxsize=256)
def _is_partial(how: Setup) -> bool:
    return not any(_is_seen(how, places).all() for places in _places(how.rings))


def keys_held(how: Setup) -> np.ndarray:
    """The keys that a device has once its halo has come, in ascending order."""
    return np.flatnonzero(_is_seen(how, tuple(ring.place for ring in how.rings)))


def largest_halo(how: Setup) -> tuple[int, dict[str, int]]:
    """The most keys that any device has at once, and that any receives along each axis."""
    return _largest(_anywhere(how))


@functools.lru_cache(maxsize=64)
def _largest(how: Setup) -> tuple[int, dict[str, int]]:
    most = 0
    comes = dict.fromkeys([ring.axis for ring in how.rings], 0)
    for places in _places(how.rings):
        held = [_held(how, places, done) for done in range(len(how.rings) + 1)]
        most = max(most, int(held[-1].sum()))
        for ring, before, after in zip(how.rings, held, held[1:], strict=False):
            comes[ring.axis] = max(comes[ring.axis], int((after & ~before).sum()))
    return most, comes


@functools.lru_cache(maxsize=64)
def stages_of(how: Setup) -> list[Stage]:
    """The exchanges that bring a device its halo."""
    here = tuple(ring.place for ring in how.rings)
    found = []
    for i, ring in enumerate(how.rings):
        before = _held(how, here, i)
        after = _held(how, here, i + 1)
        sends = []
        comes = []
        for place in range(ring.parts):
            there = (*here[:i], place, *here[i + 1 :])
            is_other = there != here
            sends.append(_blocks(is_other & before & _held(how, there, i + 1), before, before))
            comes.append(_blocks(is_other & after & _held(how, there, i), after, after))
        stays = _blocks(before & after, before, after)
        found.append(Stage(ring.axis, int(before.sum()), int(after.sum()), stays, sends, comes))
    return found


def _blocks(rows: np.ndarray, before: np.ndarray, after: np.ndarray) -> list[Block]:
    """The blocks that some rows make up among those before and those after, all given as masks."""
    return [
        Block(int(before[:first].sum()), int(after[:first].sum()), stop - first)
        for first, stop in ranges_of(np.flatnonzero(rows))
    ]


def _places(cuts: Sequence[Cutting]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(cut.parts) for cut in cuts))


def _anywhere(how: Setup) -> Setup:
    """The setup of the first device: what holds for all devices is found once."""
    firsts = {cut.axis: cut._replace(place=0) for cut in how.cuts}
    return replace(how, cuts=tuple(firsts.values()), rings=tuple(firsts[ring.axis] for ring in how.rings))


def _held(how: Setup, places: tuple[int, ...], done: int) -> np.ndarray:
    """Whether a device at these places has each key once so many axes have exchanged."""
    is_held: np.ndarray = np.ones(how.keys, bool)
    if done:
        later = _places(how.rings[done:])
        is_held = np.logical_or.reduce([_is_seen(how, (*places[:done], *rest)) for rest in later])
    lies = coordinates(how.keys, how.rings)
    for ring, place in zip(how.rings[done:], places[done:], strict=True):
        is_held &= lies[ring.axis] == place
    return is_held


def _is_seen(how: Setup, places: tuple[int, ...]) -> np.ndarray:
    """Whether a device at these places of the rings, wherever on other axes, sees each key by its place."""
    by_axis = {ring.axis: place for ring, place in zip(how.rings, places, strict=True)}
    others = [cut for cut in how.cuts if cut.axis not in by_axis]
    is_seen: np.ndarray = np.zeros(how.keys, bool)
    for rest in _places(others):
        by_axis.update({cut.axis: place for cut, place in zip(others, rest, strict=True)})
        start = 0
        size = how.queries
        for cut in how.cuts:
            step = -(-size // cut.parts)
            first = min(size, step * by_axis[cut.axis])
            start += first
            size = min(step, size - first)
        if size:
            is_seen[_seen_by(Sees.of(how.sees), start, start + size)] = True
    return is_seen


def _seen_by(sees: Sees, first: int, stop: int) -> slice:
    """The places that a range of queries sees."""
    left, right = sees.band
    chunk = sees.chunk or FAR
    begin = max(first - left, first // chunk * chunk, 0)
    end = min(stop + right, -(-stop // chunk) * chunk)
    return slice(begin, max(0, end))


# -- the exchange


def fetched(tensors: Sequence[Tensor], how: Setup, wires: dict[str, Wire]) -> list[Tensor]:
    """Keys and values [b, heads, rows, width] that this device sees, from those that lie on it."""
    held = list(tensors)
    for stage in stages_of(how):
        made = _staying(held, stage)
        for into, part in _arrived(held, made, stage, wires):
            into.copy_(part)
        held = made
    return held


def returned(gradients: Sequence[Tensor], how: Setup, wires: dict[str, Wire]) -> list[Tensor]:
    """Gradients of the keys and values that lie on this device, summed over all devices that see them."""
    held = list(gradients)
    for stage in reversed(stages_of(how)):
        back = stage.turned
        is_all_seen = _size(back.stays) == back.after
        made = _staying(held, back, is_zero=not is_all_seen)
        for into, part in _arrived(held, made, back, wires):
            into.add_(part)
        held = made
    return held


def _staying(held: Sequence[Tensor], stage: Stage, is_zero: bool = False) -> list[Tensor]:
    """Tensors for the rows after an exchange, with those that were there before."""
    made = [empty_rows(x, stage.after, x.shape[3]) for x in held]
    for x in made if is_zero else ():
        x.zero_()
    for before, after, n in stage.stays:
        for x, y in zip(made, held, strict=True):
            x[:, :, after : after + n] = y[:, :, before : before + n]
    return made


def _arrived(
    held: Sequence[Tensor], made: Sequence[Tensor], stage: Stage, wires: dict[str, Wire]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows that other devices send, each with its place in the tensors that are made."""
    if stage.axis not in wires:
        return
    sends = list(map(_size, stage.sends))
    sent = held[0].new_empty(sum(sends), sum(x.shape[0] * x.shape[1] * x.shape[3] for x in held))
    for x, block, rows in _in_message(sent, held, stage.sends):
        rows.copy_(x[:, :, block.before : block.before + block.size])
    arrived = wires[stage.axis].rows(sent, sends, list(map(_size, stage.comes)))
    del sent
    for x, block, rows in _in_message(arrived, made, stage.comes):
        yield x[:, :, block.after : block.after + block.size], rows


def _size(blocks: Sequence[Block]) -> int:
    return sum(block.size for block in blocks)


def _in_message(
    message: Tensor, tensors: Sequence[Tensor], blocks: Sequence[Sequence[Block]]
) -> Iterator[tuple[Tensor, Block, Tensor]]:
    """Each block of each tensor, and its rows in a message, which has one tensor beside the other."""
    widths = [x.shape[0] * x.shape[1] * x.shape[3] for x in tensors]
    first = 0
    for block in itertools.chain.from_iterable(blocks):
        columns = message[first : first + block.size].split(widths, 1)
        for x, rows in zip(tensors, columns, strict=True):
            yield x, block, rows.unflatten(1, (x.shape[0], x.shape[1], x.shape[3])).movedim(0, 2)
        first += block.size


def halo(tensors: Sequence[Tensor], axes: Sequence[Axis], setup: str, is_back: bool) -> list[Tensor]:
    """Keys and values that this device sees; or back, the gradients of those that lie on it."""
    how = Setup.of(setup)
    return (returned if is_back else fetched)(tensors, how, wires_of(axes_of_halo(how), axes))


def axes_of_halo(how: Setup) -> list[str]:
    """The axes along which some device receives keys."""
    return [axis for axis, most in largest_halo(how)[1].items() if most] if has_halo(how) else []


def rows_of_halo(setup: str, is_back: bool) -> int:
    """Keys of a device, as they lie or with what other devices send."""
    how = Setup.of(setup)
    return int(_held(how, tuple(ring.place for ring in how.rings), 0 if is_back else len(how.rings)).sum())


@torch.library.custom_op("autopar::halo", mutates_args=())
def halo_op(tensors: Sequence[Tensor], setup: str, is_back: bool) -> list[Tensor]:
    return halo(tensors, (), setup, is_back)


@halo_op.register_fake
def _(tensors: Sequence[Tensor], setup: str, is_back: bool) -> list[Tensor]:
    return [empty_rows(x, rows_of_halo(setup, is_back), x.shape[3]) for x in tensors]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, *ctx.how = inputs


def _goes_back(ctx: Any, gradients: Sequence[Tensor]) -> tuple[Any, ...]:
    setup, is_back = ctx.how
    return halo_op([g.contiguous() for g in gradients], setup, not is_back), None, None


halo_op.register_autograd(_goes_back, setup_context=_remember)


def _axes(_: Any, setup: str, is_back: bool) -> tuple[str, ...]:
    return tuple(axes_of_halo(Setup.of(setup)))


def _sent(*arguments: Any) -> Iterator[tuple[str, str, int]]:
    return ((axis, "send", 1) for axis in _axes(*arguments))


EXCHANGING[torch.ops.autopar.halo.default] = Exchanging(halo, _axes, _sent)
