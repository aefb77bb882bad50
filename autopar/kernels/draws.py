"""Bits by position in one pass: what `runtime/random.py` makes of a key, a random op and places, bit for bit.

The keys of rows are made by torch's ops; a kernel makes the bits of their elements, or the mask of those that survive,
and writes nothing else. On a GPU with Triton it is what the custom ops of draws run, once this is imported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.kernels.backend import jit, tl, triton
from autopar.runtime import random

BLOCK, WARPS = 1024, 4


@jit
def bits_of(key, column):
    """The bits of some columns of a row, by its key."""
    h = key.to(tl.uint32, bitcast=True) + column.to(tl.uint32, bitcast=True) * 0x9E3779B9
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return (h ^ (h >> 16)).to(tl.int32, bitcast=True)


@jit
def kernel(KEY, COLUMN, OUT, columns, least, IS_MASK: tl.constexpr, BLOCK: tl.constexpr):
    """A block of a row a program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    bits = bits_of(tl.load(KEY + row), tl.load(COLUMN + at, mask=inside, other=0))
    if IS_MASK:
        tl.store(OUT + row * columns + at, (bits >= least).to(tl.int8), mask=inside)
    else:
        tl.store(OUT + row * columns + at, bits, mask=inside)


def bits_at(key: Tensor, op: int, shape: list[int], places: list[Tensor]) -> Tensor:
    """32 random bits for each element of a part that lies at these places of each dim."""
    return _launched(key, op, shape, places, torch.int32, 0)


def kept_at(key: Tensor, op: int, p: float, shape: list[int], places: list[Tensor]) -> Tensor:
    """The elements that survive in a part that lies at these places of each dim."""
    return _launched(key, op, shape, places, torch.int8, random.threshold(p)).view(torch.bool)


def _launched(key: Tensor, op: int, shape: list[int], places: list[Tensor], dtype: torch.dtype, least: int) -> Tensor:
    local = [p.numel() for p in places]
    out = torch.empty(local, dtype=dtype, device=key.device)
    if out.numel():
        columns = local[-1] if local else 1
        row_key, column = random.keys_of_rows(key, op, shape, places)
        rows = row_key.expand([*local[:-1], 1] if local else [1]).contiguous()
        grid = out.numel() // columns, -(-columns // BLOCK)
        how = {"IS_MASK": dtype == torch.int8, "BLOCK": BLOCK, "num_warps": WARPS}
        kernel[grid](rows, column.contiguous(), out, columns, least, **how)
    return out


if triton is not None:
    random.bits_at.register_kernel("cuda")(bits_at)
    random.kept_at.register_kernel("cuda")(kept_at)
