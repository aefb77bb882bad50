"""Values of a padded program: which of their elements padding reaches, and which are known before it runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar.graph.graph import type_of

# Factors of one dim, major first: the size of each in the unpadded and in the longer call.
Factors = tuple[tuple[int, int], ...]
LOW = -1e9  # a score to which this or less is added is hidden
MOST = 2**28  # most elements of a value that is looked at in full


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """The reach of padding in one value of the longer program.

    The tensors have the value's dims, with size one where all along a dim is alike.
    """

    dims: tuple[Factors, ...]
    pad: Tensor  # whether it is padding, or depends on padding
    known: Tensor  # whether it is known before anything runs
    value: Tensor  # the value where it is known, else 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(longer_size, self.dims))

    @property
    def is_reached(self) -> bool:
        """Whether an element that the unpadded call has too depends on padding."""
        return bool((self.pad & ~beyond(self.dims)).any())

    def is_(self, value: Any) -> Tensor:
        """A mask of the elements known to have this value."""
        return self.known & (self.value == value)

    def full(self, tensor: Tensor) -> Tensor:
        return tensor.expand(self.shape)


class Unclear(Exception):
    """Raised where nothing can be said of an output, which then counts as reached everywhere."""


def number(value: Any) -> Reach:
    return Reach((), torch.tensor(False), torch.tensor(True), torch.tensor(value))


def unknown(dims: tuple[Factors, ...], dtype: torch.dtype, pad: bool | Tensor = False) -> Reach:
    ones = (1,) * len(dims)
    pads = pad if isinstance(pad, Tensor) else torch.full(ones, pad)
    return reach_of(dims, pads, torch.zeros(ones, dtype=torch.bool), torch.zeros(ones, dtype=dtype))


def given_value(exact: fx.Node, node: fx.Node, fill: float | None) -> Reach:
    """The reach of a parameter or buffer (`fill` None), or of an input whose padding is `fill`."""
    dims = tuple(tidy(((e, n),)) for e, n in zip(type_of(exact).shape, type_of(node).shape, strict=True))
    dtype = type_of(node).torch_dtype
    padding = beyond(dims)
    if fill is None:
        return unknown(dims, dtype)
    return reach_of(dims, padding, padding, torch.full(padding.shape, fill).to(dtype))


def reach_of(dims: tuple[Factors, ...], pad: Tensor, known: Tensor, value: Tensor) -> Reach:
    """The reach of a value, with all elements that the unpadded call does not have as padding."""
    value = torch.where(known, value, torch.zeros((), dtype=value.dtype))
    return Reach(dims, narrowed(pad | beyond(dims)), narrowed(known), narrowed(value))


def narrowed(tensor: Tensor) -> Tensor:
    """The tensor with size one in each dim along which all elements are equal."""
    for d in range(tensor.dim()):
        if tensor.shape[d] > 1 and (not tensor.stride(d) or bool((tensor == tensor.narrow(d, 0, 1)).all())):
            tensor = tensor.narrow(d, 0, 1)
    return tensor


def tidy(factors: Factors) -> Factors:
    """The factors of a dim with unpadded neighbours merged, and those of size one dropped."""
    found: list[tuple[int, int]] = []
    for e, n in factors:
        if e == n and found and found[-1][0] == found[-1][1]:
            found[-1] = (found[-1][0] * e, found[-1][1] * n)
        else:
            found.append((e, n))
    found = [f for f in found if f != (1, 1)]
    return tuple(found) if len(found) == len(factors) else tidy(tuple(found))


def is_padded(dims: Sequence[Factors]) -> bool:
    return any(e != n for factors in dims for e, n in factors)


def is_plain(factors: Factors) -> bool:
    """Whether the elements of the unpadded call are the first ones along this dim."""
    return len(factors) < 2 or not is_padded([factors])


def exact_size(factors: Factors) -> int:
    """The size of a dim in the unpadded call."""
    return math.prod(exact for exact, _ in factors)


def longer_size(factors: Factors) -> int:
    """The size of a dim in the longer program."""
    return math.prod(longer for _, longer in factors)


def exact_shape(reach: Reach) -> tuple[int, ...]:
    return tuple(map(exact_size, reach.dims))


def beyond(dims: tuple[Factors, ...]) -> Tensor:
    """A mask of the places that the unpadded call does not have."""
    found = torch.zeros((1,) * len(dims), dtype=torch.bool)
    for d, factors in enumerate(dims):
        if is_padded([factors]):
            along = torch.zeros(1, dtype=torch.bool)
            for e, n in factors:
                along = (along[:, None] | (torch.arange(n) >= e)).flatten()
            sizes = [1] * len(dims)
            sizes[d] = -1
            found = found | along.view(sizes)
    return found


def exactly(tensor: Tensor, dims: Sequence[Factors]) -> Tensor:
    """The elements that the unpadded call has too."""
    for d, factors in enumerate(dims):
        if is_padded([factors]) and tensor.shape[d] > 1:
            tensor = tensor.index_select(d, (~beyond((factors,))).nonzero().flatten())
    return tensor


def need(reach: Reach | None) -> Reach:
    if reach is None:
        raise Unclear
    return reach


def _with_rank(reach: Reach, rank: int) -> Reach:
    """The value with leading dims of size one, as broadcasting adds them."""
    more = rank - len(reach.dims)
    tensors = [t.reshape((1,) * more + t.shape) for t in (reach.pad, reach.known, reach.value)]
    return Reach(((),) * more + reach.dims, *tensors)


def lined_up(reaches: Sequence[Reach]) -> tuple[tuple[Factors, ...], list[Reach]]:
    """The broadcast dims of several values, and the values brought to one rank."""
    rank = max(len(r.dims) for r in reaches)
    found = []
    for r in reaches:
        found.append(_with_rank(r, rank))
    dims = []
    for d in range(rank):
        kinds = {r.dims[d] for r in found if r.dims[d]}
        if len(kinds) > 1:
            raise Unclear
        dims.append(kinds.pop() if kinds else ())
    return tuple(dims), found


def any_of(tensors: Sequence[Tensor]) -> Tensor:
    found = tensors[0]
    for t in tensors[1:]:
        found = found | t
    return found


def all_of(tensors: Sequence[Tensor]) -> Tensor:
    found = tensors[0]
    for t in tensors[1:]:
        found = found & t
    return found
