"""Bytes that an attention of a device makes, counted: its own functions run on meta tensors, and send nothing.

    keys along a ring of any length     as along one of four devices: then each step has its like
    many heads, many rows of a batch    as of two, and their multiple, where no tensor has scores

Devices differ in what they see. Most is held by the one that is last along the ring and first elsewhere, or, where a
kernel has no windows or keys are whole, by the last of all; under a window near the one at whose queries it leaves the
first key; and where parts differ in size, or scores are in memory, by any along the ring.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.runtime.attention import AttentionOnDevice
from autopar.runtime.collectives import Axis
from autopar.runtime.dealing import Cutting, Deal, Setup, coordinates, room_of
from autopar.runtime.halos import has_halo, rows_of_halo
from autopar.runtime.private import TorchDispatchMode
from autopar.runtime.rings import Step, axes_of_rings
from autopar.runtime.sees import SIZES, Sees, Tile
from autopar.runtime.segments import Segments


class Shapes(NamedTuple):
    """Shapes of queries, keys and values [batch, heads, rows, width] on a device; rows are not read."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]


class MostBytes(TorchDispatchMode):
    """The most bytes of storages that are alive at once, of those that kernels on meta make."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._now = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _writes(func) and isinstance(args[0], Tensor) and args[0].is_meta:
            return args[0]  # Nothing is made.
        result = _like_operands(args) if func in _ARITHMETIC and not kwargs else None
        if result is None:
            result = func(*args, **(kwargs or {}))
        for x in () if _is_view(func) else result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.count(x)
        return result

    def count(self, x: Tensor) -> None:
        """Count a tensor's storage for as long as something holds it."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            nbytes = storage.nbytes()
            self._alive.add(key)
            self._now += nbytes
            self.most = max(self.most, self._now)
            weakref.finalize(storage, self._end, key, nbytes)

    def _end(self, key: int, nbytes: int) -> None:
        self._alive.discard(key)
        self._now -= nbytes


@functools.cache
def _writes(func: Any) -> bool:
    """Whether a kernel writes to its first operand."""
    written: bool = func._schema.is_mutable
    return written


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether all that a kernel gives shares memory with its operands for sure."""
    return not func._schema.is_mutable and all(r.alias_info is not None for r in func._schema.returns)


_ARITHMETIC = {torch.ops.aten.logaddexp.default, torch.ops.aten.sub.Tensor, torch.ops.aten.mul.Tensor}


def _like_operands(args: Sequence[Any]) -> Tensor | None:
    """The result of arithmetic on two tensors that are alike, for which torch takes long; else None."""
    a, b = args
    is_alike = isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)
    return torch.empty_like(a) if is_alike else None


class _OnMeta(AttentionOnDevice):
    """An attention of tensors on meta, by the kernel of another device."""

    def __init__(self, tensors: Sequence[Tensor], setup: Setup, kernel: str) -> None:
        axes = [Axis(ring.axis, ring.parts, ring.place, None) for ring in setup.rings]
        super().__init__(tensors, axes, setup.text())
        self.kernel = kernel

    def calls(self, step: Step) -> Iterator[Segments]:
        """The calls of a step without those that are like two before: these make no more."""
        alike = Counter[Any]()
        for call in super().calls(step):
            kind = tuple(map(_kind, call.tiles))
            alike[kind] += 1
            if alike[kind] <= 2:
                yield call


def _kind(tile: Tile) -> tuple[Any, ...]:
    """All of a tile but where it lies."""
    rows, keys = tile.queries, tile.keys
    return rows.stop - rows.start, keys.stop - keys.start, tile.first is None, tile.last is None, tile.is_square


def bytes_of_attention(shapes: Shapes, dtype: torch.dtype, how: Setup, kernel: str) -> tuple[int, int]:
    """Temporary bytes of an attention on the fullest device, forward and backward.

    Results and gradients are not among them.
    """
    shorter = _with_short_ring(_renamed(how))
    times = 1.0
    if kernel and not (kernel == "cpu" and Sees.of(how.sees).left is not None):
        shapes, times = _of_two(shapes)
    counted = [_counted(shapes, dtype, at.text(), kernel) for at in _fullest(shorter, kernel)]
    forward, backward = (int(times * max(ways)) for ways in zip(*counted, strict=True))
    return forward, backward


def _of_two(shapes: Shapes) -> tuple[Shapes, float]:
    """Shapes with at most two rows of a batch and groups of heads, and how many make up the whole.

    With one of both, heads before rows would be contiguous, and not be copied.
    """
    groups = math.gcd(*(shape[1] for shape in shapes))
    batch = shapes.query[0]
    few = min(batch, 2), min(groups, 2)
    made = Shapes(*((few[0], shape[1] // groups * few[1], *shape[2:]) for shape in shapes))
    return made, batch * groups / math.prod(few)


def _renamed(how: Setup) -> Setup:
    """A setup whose axes have numbers for names."""
    names = {cut.axis: str(i) for i, cut in enumerate(how.cuts)}
    return _changed(how, lambda cut: cut._replace(axis=names[cut.axis]))


def _changed(how: Setup, change: Callable[[Cutting], Cutting]) -> Setup:
    """A setup with each of its axes changed."""
    return replace(how, cuts=tuple(map(change, how.cuts)), rings=tuple(map(change, how.rings)))


def _with_short_ring(how: Setup) -> Setup:
    """A setup in which each device has as many rows, with few devices along its ring."""
    if not axes_of_rings(how) or how.rings[0].parts <= SIZES.ring:
        return how
    name = how.rings[0].axis

    made = _changed(how, lambda cut: cut._replace(parts=SIZES.ring) if cut.axis == name else cut)
    is_uneven = bool(how.queries % how.parts or how.keys % how.parts)
    rows, keys = (-(-size // how.parts) * made.parts - is_uneven for size in (how.queries, how.keys))
    return replace(made, queries=rows, keys=keys)


def _fullest(how: Setup, kernel: str) -> set[Setup]:
    """The setups of the devices of which one holds most."""
    first = {cut.axis: 0 for cut in how.cuts}
    last = {cut.axis: cut.parts - 1 for cut in how.cuts}
    along = [{ring.axis: place} for ring in how.rings[:1] for place in range(ring.parts)]
    found = [first | (along[-1] if along else {})]
    if not along or kernel == "cpu" or not kernel:
        found.append(last)
    if how.keys % how.parts or not kernel:
        found += [others | place for others in (first, last) for place in along]
    if (left := Sees.of(how.sees).left) is not None:
        lies = coordinates(how.queries, how.cuts)
        part = max(1, how.queries // how.parts)
        near = range(how.parts) if how.parts <= 2 * SIZES.ring else (left // part + i for i in (-1, 0, 1))
        for i in near:
            row = min(max(0, i * part), how.queries - 1)
            found.append({axis: int(place[row]) for axis, place in lies.items()})
    return {_at(how, places) for places in found}


def _at(how: Setup, places: Mapping[str, int]) -> Setup:
    """The setup of a device at these places."""
    return _changed(how, lambda cut: cut._replace(place=places[cut.axis]))


def _rows_of(how: Setup) -> tuple[int, int]:
    """Queries and keys of a device as its attention takes them."""
    text = how.text()
    if how.dealt:
        return room_of(text, False, False), room_of(text, True, False) if how.rings else how.keys
    queries = len(Deal(how, None, False).here)
    if has_halo(how):
        return queries, rows_of_halo(text, False)
    return queries, len(Deal(how, None, True).here)


@functools.lru_cache(maxsize=1024)
def _counted(shapes: Shapes, dtype: torch.dtype, setup: str, kernel: str) -> tuple[int, int]:
    """Temporary bytes on the device of a setup, forward and backward."""
    how = Setup.of(setup)
    queries, keys = _rows_of(how)

    def laid(shape: Sequence[int], rows: int) -> Tensor:
        return torch.empty(shape[0], rows, shape[1], shape[3], dtype=dtype, device="meta").transpose(1, 2)

    given = [laid(shapes.query, queries), laid(shapes.key, keys), laid(shapes.value, keys)]
    gradient = laid((*shapes.query[:3], shapes.value[3]), queries)
    if how.given[2]:
        given.append(torch.empty(shapes.query[1], dtype=dtype, device="meta"))
    forward = MostBytes()
    _count_all(forward, [*given, gradient])
    before = forward.most
    with forward:
        made = _OnMeta(given, how, kernel).forward()
    of_forward = forward.most - before - sum(x.nbytes for x in made)
    backward = MostBytes()
    _count_all(backward, [*given, gradient, *made])
    before = backward.most
    with backward:
        gradients = _OnMeta(given, how, kernel).backward(*made, gradient)
    of_backward = backward.most - before - sum(x.nbytes for x in gradients)
    return max(0, of_forward), max(0, of_backward)


def _count_all(counted: MostBytes, tensors: Iterable[Tensor]) -> None:
    for x in tensors:
        counted.count(x)
