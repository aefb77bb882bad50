"""What masks choose whose values are known in a capture: as many places as they have true elements.

    before    y = x[:, mask]                        # mask = torch.ones(8, 8).triu(1) > 0
    after     at = nonzero_static(mask, size=28)
              y = x[:, at[:, 0], at[:, 1]]

A mask is known if it depends on no input, parameter, buffer or draw, as the pairs of different rows in a contrastive
loss. Its places are found in each call again; how many there are is part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Count = Callable[[Tensor], int]  # the number of true elements of a mask; raises a letter where it is not known


def places_of(mask: Tensor, count: Count) -> tuple[Tensor, ...]:
    """The places of a mask's true elements, one tensor for each of its dims."""
    return torch.nonzero_static(mask, size=count(mask)).unbind(1)


def nonzero(count: Count, input: Tensor, *, as_tuple: bool = False) -> Any:
    """torch.nonzero of a known tensor."""
    places = torch.nonzero_static(input, size=count(input))
    return places.unbind(1) if as_tuple else places


def masked_select(count: Count, input: Tensor, mask: Tensor) -> Tensor:
    """torch.masked_select by a known mask."""
    if input.shape[input.dim() - mask.dim() :] != mask.shape or not mask.dim():  # else leading dims may be cut
        shape = torch.broadcast_shapes(input.shape, mask.shape)
        input, mask = input.expand(shape), mask.expand(shape)
    index = (..., *places_of(mask, count))
    return input[index].flatten()


def where(count: Count, condition: Tensor) -> tuple[Tensor, ...]:
    """torch.where of a known condition alone: its places."""
    return places_of(condition, count)


def _has_dims(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call gives a new tensor, of operands of which one has dims."""
    return "out" not in kwargs and any(isinstance(x, Tensor) and x.dim() for x in (*args, *kwargs.values()))


def _stands_alone(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether torch.where has a condition and nothing to choose."""
    return len(args) + len(kwargs) == 1


# Functions that choose by a mask, how they are spelled, and which calls of them.
BY_MASK: dict[Any, tuple[Callable[..., Any], Callable[[Sequence[Any], dict[str, Any]], bool]]] = {
    **dict.fromkeys((torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere), (nonzero, _has_dims)),
    **dict.fromkeys((torch.masked_select, Tensor.masked_select), (masked_select, _has_dims)),
    torch.where: (where, _stands_alone),
}
