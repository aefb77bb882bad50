"""`slot_sums`: for each row the weighted sum of what was made of its slots.

    out[t] = before[t] + sum over slots j of weights[t, j] * made[places[t, j]]        a place of -1 adds nothing

Slots are added one after the other, as atomic sums have no order. A device may have a kernel that reads each row once
(`kernels/slot_sums.py`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class SlotSums(Protocol):
    """The signature of `slot_sums`."""

    def __call__(
        self, made: Tensor, places: Tensor, weights: Tensor | None, before: Tensor | None, dtype: torch.dtype
    ) -> Tensor: ...


KERNELS: dict[str, SlotSums] = {}  # type of device -> what runs there


def slot_sums(
    made: Tensor, places: Tensor, weights: Tensor | None, before: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Sums over the slots of each row, rounded to `dtype` once.

    `before` is added, and may be written over.
    """
    return KERNELS.get(made.device.type, sums_in_steps)(made, places, weights, before, dtype)


def sums_in_steps(
    made: Tensor, places: Tensor, weights: Tensor | None, before: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`slot_sums`, in several ops for each slot."""
    wide = wide_of(made) if weights is None else wide_of(made, weights)
    out = torch.zeros(len(places), made.shape[1], dtype=wide, device=made.device) if before is None else before
    for j in range(places.shape[1]):
        share = made[places[:, j].clamp(min=0)].masked_fill_(places[:, j, None] < 0, 0)  # other rows are arbitrary
        if weights is None:
            out.add_(share)
        else:
            out.addcmul_(share, weights[:, j, None])
    return out.to(dtype)


def wide_of(*tensors: Tensor) -> torch.dtype:
    """The dtype in which results of several experts are added up."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype
