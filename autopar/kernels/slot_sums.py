"""The weighted sum of the slots of each row in one kernel: `slot_sums` of `runtime/slots.py`.

Every row of a slot is read once and every sum written once; on a GPU with Triton it is what experts run, once this is
imported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.kernels.activations import BLOCK, WARPS
from autopar.kernels.backend import jit, tl, triton
from autopar.kernels.family import FLOATS
from autopar.runtime import slots


@jit
def kernel(MADE, PLACES, WEIGHTS, BEFORE, OUT, columns, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Some columns of one row per program; slots are added in their order.

    Weights and earlier sums may be None.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    sum_ = tl.zeros((BLOCK,), tl.float32)
    if BEFORE is not None:
        sum_ += tl.load(BEFORE + row * columns + column, mask=inside, other=0.0)
    for j in tl.static_range(SLOTS):
        place = tl.load(PLACES + row * SLOTS + j)
        x = tl.load(MADE + place * columns + column, mask=inside & (place >= 0), other=0.0).to(tl.float32)
        if WEIGHTS is not None:
            x *= tl.load(WEIGHTS + row * SLOTS + j).to(tl.float32)
        sum_ += x
    tl.store(OUT + row * columns + column, sum_.to(OUT.dtype.element_ty), mask=inside)


def sums(made: Tensor, places: Tensor, weights: Tensor | None, before: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sums over the slots of each row, rounded to `dtype` once."""
    if not is_served(made, weights):
        return slots.sums_in_steps(made, places, weights, before, dtype)
    rows, count = places.shape
    columns = made.shape[1]
    out = torch.empty(rows, columns, dtype=dtype, device=made.device)
    if out.numel():
        block = min(BLOCK, 1 << max(4, (columns - 1).bit_length()))
        shares = None if weights is None else weights.contiguous()
        given = (made.contiguous(), places.contiguous(), shares, before, out, columns)
        kernel[(rows, -(-columns // block))](*given, SLOTS=count, BLOCK=block, num_warps=WARPS)
    return out


def is_served(made: Tensor, weights: Tensor | None) -> bool:
    """Whether the kernel adds up in as wide a dtype as the ops do."""
    dtypes = {made.dtype} if weights is None else {made.dtype, weights.dtype}
    return all(str(dtype).removeprefix("torch.") in FLOATS for dtype in dtypes)


if triton is not None:
    slots.KERNELS["cuda"] = sums
