"""`Layout`: what each device holds of a tensor, however the sharding is spelled. Conversions search among layouts.

A dim is read as a number with digits, major first, and an axis that cuts it reads one of them:

    S(0)@dp, S(0)@tp        of 32 rows on (2, 2)      dp:2  tp:2  8
    S(0, (16, 16))@tp                                 2  tp:2  8          what is left when dp is gathered
    S(0)@dp, S(0, (8, 8, 8, 8))@tp                    dp:2  2  tp:2  4    dp cuts batches, tp the sequence in each

Two shardings with the same digits are the same layout. Dims that are cut unevenly, or by blocks of several sizes, have
no digits: they are told by the axes in their order, and the innermost is gathered first.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Sharding, every_part_holds_something, part

Blocks = tuple[int, ...]
NOBODY = -1  # reads a digit that every device holds all of


@dataclass(frozen=True, slots=True)
class CutDim:
    """How one dim is cut: its digits, or where it has none the axes that cut it, major first, and the blocks."""

    size: int
    digits: tuple[tuple[int, int], ...] = ()  # (axis, how many values), of a dim cut evenly
    nested: tuple[tuple[int, int], ...] = ()  # (axis, its size), of any other
    blocks: Blocks = ()

    @staticmethod
    @functools.lru_cache(maxsize=1 << 16)
    def whole(size: int) -> CutDim:
        return CutDim(size, ((NOBODY, size),) if size > 1 else ())

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(a for a, _ in (self.nested or self.digits) if a != NOBODY))

    def cut(self, axis: int, n: int, blocks: Blocks = ()) -> CutDim | None:
        """The row with one more axis inside, which cuts each of the blocks separately.

        None where a device would hold nothing, or the parts of a block would be unequal.
        """
        return _cut(self, axis, n, blocks)

    def without(self, axis: int) -> CutDim | None:
        """The row with an axis gathered; None where the axis does not read one run of digits."""
        return _without(self, axis)

    def _cut(self, axis: int, n: int, blocks: Blocks) -> CutDim | None:
        if sum(blocks) not in (0, self.size):
            return None
        if not self.nested and len(set(blocks)) < 2:
            row = self._read(axis, n, max(1, len(blocks)))
            if row is not None:
                return row
        inner = self._as_nested(blocks)
        if inner is None:
            return None
        nested = (*inner, (axis, n))
        parts = [k for _, k in nested]
        if blocks:
            fits = len(set(blocks)) > 1 and all(b % math.prod(parts) == 0 for b in blocks)
        else:
            fits = every_part_holds_something(self.size, parts)
        return CutDim(self.size, nested=nested, blocks=blocks) if fits else None

    def _without(self, axis: int) -> CutDim | None:
        if self.nested:
            if self.nested[-1][0] != axis:
                return None
            row: CutDim | None = CutDim.whole(self.size)
            for a, n in self.nested[:-1]:
                row = row.cut(a, n, self.blocks) if row else None
            return row
        mine = [i for i, (a, _) in enumerate(self.digits) if a == axis]
        if any(a == NOBODY for a, _ in self.digits[mine[0] : mine[-1]]):
            return None
        return replace(self, digits=_tidy([(NOBODY if a == axis else a, n) for a, n in self.digits]))

    def met(self, axis: int, local: int) -> Blocks:
        """The blocks that an axis cuts on a device, where the ungathered dim has `local` rows; () for one."""
        if self.nested:
            return tuple(b * local // self.size for b in self.blocks)
        before = itertools.takewhile(lambda digit: digit[0] != axis, self.digits)
        count = math.prod(n for a, n in before if a == NOBODY)
        return (local // count,) * count if count > 1 else ()

    def local(self, mesh: DeviceMesh, coordinate: Sequence[int]) -> int:
        """The number of rows that the device at `coordinate` holds."""
        size = self.size
        for axis, n in self.nested:
            size = part(size, n, coordinate[axis])[1]
        is_split = size and not self.nested  # a dim of no rows has no digits, as one of one row
        return math.prod(n for a, n in self.digits if a == NOBODY) if is_split else size

    def _read(self, axis: int, n: int, blocks: int) -> CutDim | None:
        """The row in which the axis reads the major free digits behind those that count the blocks, or None."""
        digits = list(self.digits)
        at = 0
        left = blocks
        while left > 1:
            if at == len(digits) or not _divide(digits, at, left):
                return None
            left //= digits[at][1]
            at += 1
        left = n
        while left > 1:
            if at == len(digits):
                return None
            if digits[at][0] == NOBODY:
                if not _divide(digits, at, left):
                    return None
                left //= digits[at][1]
                digits[at] = (axis, digits[at][1])
            at += 1
        return replace(self, digits=_tidy(digits))

    def _as_nested(self, blocks: Blocks) -> tuple[tuple[int, int], ...] | None:
        """The axes that cut the dim, major first, where each simply cuts inside the one before; else None."""
        if self.nested:
            return self.nested if self.blocks == blocks else None
        axes = [(a, n) for a, n in self.digits if a != NOBODY]
        again: CutDim | None = CutDim.whole(self.size)
        for a, n in axes:
            again = again.cut(a, n) if again else None
        return tuple(axes) if not axes or (again == self and not blocks) else None


# rows are small, and shared by every tensor with a dim of their size
_cut = functools.lru_cache(maxsize=1 << 16)(CutDim._cut)
_without = functools.lru_cache(maxsize=1 << 16)(CutDim._without)


def _divide(digits: list[tuple[int, int]], at: int, wanted: int) -> bool:
    """Split a digit in place so that its number of values divides `wanted`; False where that cannot be."""
    axis, n = digits[at]
    if wanted % n == 0:
        return True
    if n % wanted == 0:
        digits[at : at + 1] = [(axis, wanted), (axis, n // wanted)]
        return True
    return False


def _tidy(digits: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Digits with neighbours of one reader merged, and without those of a single value."""
    merged: list[tuple[int, int]] = []
    for axis, n in digits:
        if merged and merged[-1][0] == axis:
            merged[-1] = axis, merged[-1][1] * n
        else:
            merged.append((axis, n))
    return tuple(digit for digit in merged if digit[1] > 1)


@dataclass(frozen=True, slots=True)
class Layout:
    """What devices hold of a tensor: how each dim is cut, and the axes over which the tensor is a partial sum."""

    rows: tuple[CutDim, ...]
    partial: frozenset[int] = frozenset()

    @staticmethod
    @functools.lru_cache(maxsize=1 << 16)
    def of(shape: tuple[int, ...], sharding: Sharding, mesh: DeviceMesh) -> Layout | None:
        """The layout of a tensor of this shape; None where the sharding would leave a device without a part."""
        rows: list[CutDim | None] = [CutDim.whole(n) for n in shape]
        for dim, axes in sharding.cuts.items():
            if dim >= len(shape):
                return None
            for axis in axes:
                row = rows[dim]
                rows[dim] = row.cut(axis, mesh.shape[axis], sharding.placements[axis].blocks) if row else None
        found = [row for row in rows if row is not None]
        return Layout(tuple(found), frozenset(sharding.partial_axes)) if len(found) == len(rows) else None

    def cut_by(self, axis: int) -> int | None:
        """The dim that an axis cuts, or None."""
        return next((d for d, row in enumerate(self.rows) if axis in row.axes), None)

    def with_row(self, dim: int, row: CutDim | None) -> Layout | None:
        return None if row is None else replace(self, rows=(*self.rows[:dim], row, *self.rows[dim + 1 :]))

    def local_shape(self, mesh: DeviceMesh, coordinate: Sequence[int]) -> tuple[int, ...]:
        return tuple(row.local(mesh, coordinate) for row in self.rows)
