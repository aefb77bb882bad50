"""Dims of values by name, so that a value is told apart from the way in which it lies.

A dim is a tuple of `Atom`s, major first: the dim of size 12 that a view makes of [2, 6] has two, and
one of size 1 has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.fx as fx

from autopar.graph.graph import op_name, type_of

LAYOUTS = frozenset("view permute transpose t identity contiguous clone expand".split())


class Unread(Exception):
    """A part of a graph has not the form that is looked for."""


class Atom(NamedTuple):
    """A dim with a name."""

    name: str
    size: int


Dims = tuple[tuple[Atom, ...], ...]


def flat(dims: Dims) -> tuple[Atom, ...]:
    """The atoms of all dims, major first."""
    return tuple(atom for dim in dims for atom in dim)


def size_of(atoms: Iterable[Atom]) -> int:
    """The size of a dim that has these atoms."""
    return math.prod(atom.size for atom in atoms)


def of_shape(shape: Sequence[int], name: str) -> Dims:
    """Dims with names of their own; names count from the last dim."""
    rank = len(shape)
    return tuple(() if size == 1 else (Atom(f"{name}{rank - i}", size),) for i, size in enumerate(shape))


def laid_out(node: fx.Node, dims: Dims) -> Dims:
    """The dims of a node that gives its operand in another layout."""
    how: Any = node.kwargs
    name = op_name(node)
    rank = len(dims)
    if name == "view":
        return viewed(dims, type_of(node).shape)
    if name == "permute":
        return tuple(dims[d] for d in how["dims"])
    if name in ("transpose", "t"):
        first, second = (how["dim0"] % rank, how["dim1"] % rank) if name == "transpose" else (0, rank - 1)
        other = {first: second, second: first}
        return tuple(dims[other.get(d, d)] for d in range(rank))
    shape = type_of(node).shape
    if name == "expand" and math.prod(shape) != size_of(flat(dims)):
        raise Unread("a value is repeated")
    return ((),) * (len(shape) - rank) + dims


def viewed(dims: Dims, shape: Sequence[int]) -> Dims:
    """The dims of a view."""
    atoms = list(flat(dims))
    found = []
    for size in shape:
        dim: list[Atom] = []
        while size_of(dim) < size and atoms:
            dim.append(atoms.pop(0))
        if size_of(dim) != size:
            raise Unread("a view divides a dim")
        found.append(tuple(dim))
    return tuple(found)


def aligned(*several: Dims) -> Dims:
    """The dims of values that are broadcast together."""
    rank = max(map(len, several))
    padded = [((),) * (rank - len(dims)) + dims for dims in several]
    found = []
    for dims in zip(*padded, strict=True):
        filled = {dim for dim in dims if dim}
        if len(filled) > 1:
            raise Unread("unlike dims meet")
        found.append(filled.pop() if filled else ())
    return tuple(found)


def beside(dims: Dims, shape: Sequence[int]) -> Dims:
    """The dims of an operand that is broadcast with one of known dims; what that has not is named here."""
    own = of_shape(shape, "h")
    known = (((),) * (len(own) - len(dims)) + dims)[max(0, len(dims) - len(own)) :]
    found = tuple(dim if dim and size > 1 else name for dim, name, size in zip(known, own, shape, strict=True))
    if any(size_of(dim) != size for dim, size in zip(found, shape, strict=True)):
        raise Unread("unlike dims meet")
    return found


def without(dims: Dims, how: Any) -> Dims:
    """The dims of a reduction by an op's arguments."""
    given = how.get("dim")
    rank = len(dims)
    removed = set(range(rank))
    if given is not None and given != [] and given != ():
        removed = {d % rank for d in (given if isinstance(given, (tuple, list)) else [given])}
    if how.get("keepdim"):
        return tuple(() if i in removed else dim for i, dim in enumerate(dims))
    return tuple(dim for i, dim in enumerate(dims) if i not in removed)
