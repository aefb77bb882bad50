"""Types of values: how a value lies on the mesh, seen from what one device holds.

Along each mesh axis a value is whole, or cut along a dim, or a partial sum, or a candidate for a maximum; or nothing is
known of it there (`open`): what a local form makes of its place on an axis does not follow from types.

A dim is a run of atoms, outer ones first: `(8, ("tp",))` are eight rows of a dim that `tp` cuts, and `(3, ()), (8,
("tp",))` three blocks, of each of which a device has eight rows. A free dim has no claim: a constant is as good a part
as it is a whole, so that it takes the shape of what it meets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

Atom = tuple[int, tuple[str, ...]]  # local rows, and the axes that cut them, major first
Dim = tuple[Atom, ...]
FREE = ("*",)  # stands for the axes of repeated rows
_NONE: frozenset[str] = frozenset()


class Refused(Exception):
    """Raised where a type does not follow: what was seen, and what was expected."""

    def __init__(self, seen: str, expected: str) -> None:
        super().__init__(f"{seen}; {expected}")
        self.seen = seen
        self.expected = expected


@dataclass(frozen=True, slots=True)
class Type:
    """How a value lies on the mesh."""

    dims: tuple[Dim, ...]
    sums: frozenset[str] = _NONE  # axes along which it is a partial sum
    most: frozenset[str] = _NONE  # axes along which it is a candidate for a maximum
    open: frozenset[str] = _NONE  # axes along which nothing is known
    places: frozenset[str] = _NONE  # open axes along which only the start of a part is unknown
    is_zero: bool = False
    is_start: bool = False  # the index at which the device's part begins; it combines with constants

    def __str__(self) -> str:
        said = [f"S({d})@{axis}" for d, dim in enumerate(self.dims) for axis in axes_of([dim])]
        said += [f"P(sum)@{a}" for a in sorted(self.sums)] + [f"P(max)@{a}" for a in sorted(self.most)]
        said += [f"unknown@{a}" for a in sorted(self.open)]
        return ", ".join(said) or "R"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size(dim) for dim in self.dims)

    @property
    def known(self) -> frozenset[str]:
        """The axes along which the value is not whole."""
        return self.sums | self.most | self.open | frozenset(axes_of(self.dims))

    def consistent(self) -> Type:
        """The type, opened along axes that cut two dims, or a dim of a value that is a partial sum over them."""
        cuts = axes_of(self.dims)
        if len(set(cuts)) == len(cuts) and not (self.sums | self.most).intersection(cuts):
            return self
        return self.opened(a for a in cuts if cuts.count(a) > 1 or a in self.sums | self.most)

    def settled(self, axes: frozenset[str]) -> Type:
        """The type, whole along these axes and in repeated dims."""

        def settled(dim: Dim) -> Dim:
            return joined((n, () if own == FREE else own) for n, own in without(dim, axes))

        return replace(self, dims=tuple(map(settled, self.dims)))

    def opened(self, axes: Iterable[str]) -> Type:
        """The type, with nothing known along these axes any more."""
        more = frozenset(axes)
        if not more:
            return self
        dims = tuple(without(dim, more) for dim in self.dims)
        return replace(self, dims=dims, sums=self.sums - more, most=self.most - more, open=self.open | more)


def plain(shape: Sequence[int]) -> tuple[Dim, ...]:
    return tuple(whole(n) for n in shape)


def whole(n: int) -> Dim:
    """A dim that no axis cuts."""
    return ((n, ()),) if n != 1 else ()


def free(shape: Sequence[int]) -> tuple[Dim, ...]:
    return tuple(((n, FREE),) for n in shape)


def size(dim: Dim) -> int:
    return math.prod(n for n, _ in dim)


def is_free(dim: Dim) -> bool:
    return any(axes == FREE for _, axes in dim)


def axes_of(dims: Iterable[Dim]) -> list[str]:
    return [axis for dim in dims for _, axes in dim if axes != FREE for axis in axes]


def without(dim: Dim, axes: frozenset[str]) -> Dim:
    """The dim, no longer cut by these axes."""
    if not any(a in axes for _, own in dim for a in own):
        return dim

    def left(own: tuple[str, ...]) -> tuple[str, ...]:
        return own if own == FREE else tuple(axis for axis in own if axis not in axes)

    return joined((n, left(own)) for n, own in dim)


def joined(atoms: Iterable[Atom]) -> Dim:
    """Atoms in normal form: whole rows inside another atom, and single rows around one, are merged."""
    found: list[Atom] = []
    for n, axes in atoms:
        if n == 1 and not axes:
            continue
        if found and (not axes or (axes == FREE and found[-1][1] == FREE)) and (not axes) != (found[-1][1] == FREE):
            found[-1] = (found[-1][0] * n, found[-1][1])
        elif found and found[-1][0] == 1 and FREE not in (axes, found[-1][1]):
            found[-1] = (n, (*found[-1][1], *axes))
        else:
            found.append((n, axes))
    return tuple(found)


def same(one: Dim, other: Dim) -> bool:
    """Whether two dims of the same rows lie alike."""
    return joined(one) == joined(other)


def lie_alike(x: Type, other: Type) -> bool:
    """Whether two values have the same rows, cut alike by the axes that are known of `x`."""
    return other.open <= x.open and x.settled(x.open).dims == other.settled(x.open).dims


def lies_as(found: Type, wanted: Type) -> bool:
    """Whether a value lies as it has to on every axis that is known of it, parts of a sum included.

    One row of a cut dim is also a part of the sum over the dim, and may stand in any dim that has one row. Repeated
    rows are as good as parts, and zeros as good as parts of a sum.
    """
    doubtful = found.open | wanted.open
    ones = [d for d, dim in enumerate(found.dims) if size(dim) == 1]
    rest = [d for d, dim in enumerate(found.dims) if size(dim) != 1 and not is_free(dim)]
    parts = frozenset(axes_of(found.dims[d] for d in ones)) - doubtful
    due = frozenset(axes_of(wanted.dims[d] for d in ones)) - doubtful
    sums = (found.sums | (parts & wanted.sums)) ^ wanted.sums
    if not found.is_zero and (found.most or sums - doubtful or parts - due - wanted.sums):
        return False
    if due - parts and not any(is_free(found.dims[d]) for d in ones):
        return False
    return all(
        axes_of([without(found.dims[d], doubtful)]) == axes_of([without(wanted.dims[d], doubtful)]) for d in rest
    )
