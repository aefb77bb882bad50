"""Readings of a view: which dims of its result have the rows and the cuts of which dims of its operand.

A device sees only its own rows. A part of one row may belong to several dims of the result, and what is repeated may be
a part or a whole: the shapes of whole values decide, where they can.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.certificate.types import FREE, Atom, Dim, axes_of, is_free, joined, plain, same, size

Dims = tuple[Dim, ...]
_MOST_READINGS, _MOST_DIMS = 64, 5


@dataclass(frozen=True, slots=True)
class Wholes:
    """Shapes of the whole values of which a view may give a part."""

    shapes: Sequence[tuple[int, ...]]
    unknown: frozenset[str]  # axes that may cut any dim
    sizes: Mapping[str, int]  # axis -> its size
    inside: Sequence[tuple[int, ...]] = ()  # shapes of all that the op makes of whole operands, in order

    def differ_in(self, rank: int) -> bool:
        """Whether there are several whole shapes of this rank.

        Equal local shapes may then be parts of different whole shapes.
        """
        return len({shape for shape in self.shapes if len(shape) == rank}) > 1

    def have(self, dims: Sequence[Dim]) -> bool:
        """Whether these dims may be parts of one of the shapes, in any order of its dims, as ops permute them."""
        shapes = {turned for shape in self.shapes if len(shape) == len(dims) for turned in _turned(shape)}
        return any(all(map(self._has_part, dims, shape)) for shape in shapes)

    def are_made(self, dims: Sequence[Dim]) -> bool:
        """Whether these dims are parts of a value that the op makes inside."""
        return any(len(shape) == len(dims) and all(map(self._has_part, dims, shape)) for shape in self.inside)

    def have_some(self, dims: Sequence[Dim], places: Sequence[int]) -> bool:
        """Whether the dims at these places may be parts of the dims of one of the shapes at the same places."""

        def may_be_parts_of(shape: tuple[int, ...]) -> bool:
            return all(self._has_part(dims[d], shape[d]) for d in places)

        return any(len(shape) == len(dims) and may_be_parts_of(shape) for shape in self.shapes)

    def have_like(self, dims: Sequence[Dim]) -> bool:
        """Whether the dims may be parts of one of the shapes once neighbouring dims of either are merged.

        The shape's dims may be in any order, as ops permute them.
        """
        for shape in {turned for one in self.shapes for turned in _turned(one)}:
            for sizes in _merged(shape, len(dims)):
                if all(map(self._has_part, dims, map(math.prod, sizes))):
                    return True
            for runs in _merged(tuple(dims), len(shape)):
                merged = (joined(itertools.chain(*run)) for run in runs)
                if all(map(self._has_part, merged, shape)):
                    return True
        return False

    def _parts(self, axis: str) -> int:
        return self.sizes.get(axis, 1)  # Beside axes stands the name of a deal, whose rows have an order of their own.

    def _has_part(self, dim: Dim, whole: int) -> bool:
        """Whether these rows may be one of the parts of a dim of size `whole`."""
        if is_free(dim):
            return True
        run = [(n, tuple(map(self._parts, axes))) for n, axes in dim] or [(1, ())]
        others = list(map(self._parts, self.unknown))
        more = [some for k in range(len(others) + 1) for some in itertools.combinations(others, k)]
        return any(
            _are_parts((*run[:k], (run[k][0], (*run[k][1], *some)), *run[k + 1 :]), whole)
            for k in range(len(run))
            for some in more
        )


@functools.cache
def _turned(shape: tuple[int, ...]) -> frozenset[tuple[int, ...]]:
    """The shape with its dims in every order; for many dims only in its own."""
    return frozenset(itertools.permutations(shape) if len(shape) <= _MOST_DIMS else [shape])


@functools.cache
def _are_parts(run: tuple[tuple[int, tuple[int, ...]], ...], whole: int) -> bool:
    """Whether a dim may be cut into a run of atoms, each with its local rows and the sizes of its axes."""
    if not run:
        return whole == 1
    rows, counts = run[0]
    rest = run[1:]
    if not counts:
        return whole % rows == 0 and _are_parts(rest, whole // rows)
    wholes = _divisors(whole) if rest else (whole,)
    return any(_is_part(rows, n, counts) and _are_parts(rest, whole // n) for n in wholes)


@functools.cache
def _is_part(rows: int, whole: int, counts: tuple[int, ...]) -> bool:
    """Whether a device may have `rows` of the `whole` rows of a dim that axes of these sizes cut.

    Rows may be cut in groups of one size, of which there must be more than one.
    """
    return any(
        whole > unit and rows // unit in _parts(whole // unit, counts) for unit in _divisors(math.gcd(rows, whole))
    )


@functools.cache
def _divisors(whole: int) -> tuple[int, ...]:
    small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0]
    return tuple({*small, *(whole // n for n in small)})


@functools.cache
def _parts(whole: int, counts: tuple[int, ...]) -> frozenset[int]:
    """The numbers of rows that a device may have of a dim that axes of these sizes cut, major first."""
    if not counts:
        return frozenset({whole})
    most = -(-whole // counts[0])
    rows = {max(0, min(most, whole - k * most)) for k in range(counts[0])}  # the last have fewer
    return frozenset(n for one in rows for n in _parts(one, counts[1:]))


def _merged(values: tuple[Any, ...], count: int) -> Iterator[list[tuple[Any, ...]]]:
    """Every way to split the values into so many runs of neighbours."""
    if 0 < count <= len(values):
        for inner in itertools.combinations(range(1, len(values)), count - 1):
            ends = (0, *inner, len(values))
            yield [values[a:b] for a, b in itertools.pairwise(ends)]


def regrouped(dims: Sequence[Dim], shape: Sequence[int], wholes: Wholes | None = None) -> tuple[Dims, frozenset[str]]:
    """The dims of a view, and the axes along which they do not follow (`FREE` for all axes)."""
    given = frozenset(axes_of(dims))
    atoms = [atom for dim in dims for atom in dim]
    if 0 in shape:
        return plain(shape), given
    if [size(dim) for dim in dims] == list(shape):
        return tuple(dims), _lost_where_alike(tuple(dims), atoms, shape, wholes)
    if any(n == 1 and axes == FREE for n, axes in atoms):  # a row that may be a part is lost among others
        return plain(shape), frozenset(FREE)
    are_mixed = any(axes == FREE for _, axes in atoms) and not _keeps_rows_apart(dims, shape)
    if are_mixed:  # is it all of what is repeated that is mixed with other rows?
        atoms = [(n, () if axes == FREE else axes) for n, axes in atoms]
    found = _read(atoms, shape)
    found += [dims for dims in _moved(atoms, shape) if dims not in found]
    if wholes is not None:
        found = _meant(found, atoms, shape, wholes, are_mixed)
    if are_mixed and (wholes is None or len(found) != 1):
        return plain(shape), frozenset(FREE)
    if not found or len(found) >= _MOST_READINGS:
        return plain(shape), given
    differ = _differing(found)
    return tuple(map(joined, found[0])), frozenset(axes_of(reading[d] for reading in found for d in differ))


def _lost_where_alike(dims: Dims, atoms: Sequence[Atom], shape: Sequence[int], wholes: Wholes | None) -> frozenset[str]:
    """The axes that may cut a view in another dim, though it has the local shape of its operand.

    The whole may have another shape: (rows, heads x width) that is cut by heads looks like (rows x heads, width) where
    each device has one head.
    """
    if wholes is None or not wholes.differ_in(len(shape)):
        return frozenset()
    found = [dims, *(other for other in _read(atoms, shape, is_wide=True) if wholes.have(other))]
    return frozenset(axes_of(reading[d] for reading in found for d in _differing(found)))


def _keeps_rows_apart(dims: Sequence[Dim], shape: Sequence[int]) -> bool:
    """Whether the rows of every dim are those of one dim of the view."""
    return [size(dim) for dim in dims if size(dim) != 1 or axes_of([dim])] == [n for n in shape if n != 1]


def _meant(
    found: list[Dims], atoms: Sequence[Atom], shape: Sequence[int], wholes: Wholes, are_mixed: bool
) -> list[Dims]:
    """The readings that agree with whole shapes.

    Where none does, a cut of several rows may end the dim before; and a view may be of a value whose shape is not among
    them, such as one of its rows. Shapes that the op makes inside come first, as their dims are in order.
    """
    for readings in (found, _read(atoms, shape, is_wide=True) if wholes.inside else ()):
        if made := [dims for dims in readings if wholes.are_made(dims)]:
            return made
    if meant := [dims for dims in found if wholes.have(dims)]:
        return meant
    # A sum may have removed a dim that is cut to one row, where no merged dims explain the view.
    rows = [] if any(map(wholes.have_like, found)) else [atom for atom in atoms if atom[0] != 1]
    wide = [dims for dims in (*_read(atoms, shape, is_wide=True), *_read(rows, shape)) if wholes.have(dims)]
    if are_mixed:
        return wide
    differ = _differing(found)
    narrow = [dims for dims in found if wholes.have_some(dims, differ)] or found
    if not wide and len(narrow) > 1:
        narrow = [dims for dims in found if wholes.have_like(dims)] or narrow
    return narrow + wide


def _differing(readings: Sequence[Dims]) -> list[int]:
    """The dims in which readings differ."""

    def are_alike(dims: Sequence[Dim]) -> bool:
        return all(same(dims[0], other) for other in dims[1:])

    return [d for d, dims in enumerate(zip(*readings)) if not are_alike(dims)]


def _read(atoms: Sequence[Atom], shape: Sequence[int], is_wide: bool = False) -> list[Dims]:
    """Readings of a view; wide ones may leave rows of a dim inside what an axis cuts in the dim before."""
    return list(itertools.islice(_readings(_pieces(atoms, is_wide), tuple(shape)), _MOST_READINGS))


def _moved(atoms: Sequence[Atom], shape: Sequence[int]) -> Iterator[Dims]:
    """Readings in which parts of one row stand in other dims: for one row the memory is the same anywhere."""
    cuts = [(n, axes) for n, axes in atoms if n == 1 and axes and axes != FREE]
    places = [d for d, n in enumerate(shape) if n == 1] if cuts else []
    for dims in _read([atom for atom in atoms if atom not in cuts], shape) if places else ():
        for chosen in itertools.product(places, repeat=len(cuts)):
            with_cuts = [list(dim) for dim in dims]
            for cut, place in zip(cuts, chosen):
                with_cuts[place].append(cut)
            yield tuple(map(tuple, with_cuts))


# an atom in pieces: ("cut", axis, whether it may end a dim) and ("rows", number, whether they are free)
_Piece = tuple[str, Any, bool]


def _pieces(atoms: Iterable[Atom], is_wide: bool) -> tuple[_Piece, ...]:
    found: list[_Piece] = []
    for n, axes in atoms:
        found += [("cut", axis, is_wide or n == 1) for axis in axes if axes != FREE]
        if n != 1:
            found.append(("rows", n, axes == FREE))
    return tuple(found)


def _readings(pieces: tuple[_Piece, ...], shape: tuple[int, ...]) -> Iterator[Dims]:
    """Every way to distribute these rows and cuts over the dims of a shape, in order."""
    if not shape:
        if not pieces:
            yield ()
        return
    for dim, rest in _first_dim(pieces, shape[0]):
        for others in _readings(rest, shape[1:]):
            yield (dim, *others)


def _first_dim(pieces: tuple[_Piece, ...], n: int) -> Iterator[tuple[Dim, tuple[_Piece, ...]]]:
    """Ways to take a dim of `n` rows from the first pieces, each with the pieces that are left."""
    atoms: list[Atom] = []
    left = list(pieces)
    while n > 1:
        cuts = []
        while left and left[0][0] == "cut":
            cuts.append(left.pop(0)[1])
        if not left:
            return
        _, rows, are_free = left.pop(0)
        if rows > n:
            if rows % n:
                return
            left.insert(0, ("rows", rows // n, are_free))
            rows = n
        if n % rows or (are_free and cuts):
            return
        atoms.append((rows, FREE if are_free else tuple(cuts)))
        n //= rows
    ends = bool(atoms)  # after rows only what was cut to one row may stand
    cuts = []
    yield tuple(atoms), tuple(left)
    while left and left[0][0] == "cut" and (left[0][2] or not ends):
        cuts.append(left.pop(0)[1])
        yield (*atoms, (1, tuple(cuts))), tuple(left)
