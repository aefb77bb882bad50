"""Random bits by position in one kernel: bit for bit those of `runtime/random.py`.

A kernel makes the bits of elements, or a dropout mask, and writes nothing else. On a GPU with Triton it is what the
custom ops of draws run, once this is imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.kernels.backend import jit, tl, triton
from autopar.runtime import random

ELEMENTS, BLOCK, WARPS = 4096, 1024, 4  # elements of a program, and the most of them in one row
_MOST = 3  # dims before the last, whose places a kernel reads


@jit
def _mix(h):
    """`mix` of `runtime/random.py`."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@jit
def bits_of(KEY, COLUMN, FIRST, SECOND, THIRD, op, row, at, rows, columns, of_second, of_third, second, third,
            DIMS: tl.constexpr):  # fmt: skip
    """The random bits of some columns of some rows, which are counted in the part.

    FIRST, SECOND, THIRD and COLUMN hold indices in the whole tensor. The part has DIMS dims before its columns, of
    which the second and third have `second` and `third` indices here, and sizes `of_second` and `of_third` in the
    whole.
    """
    there = row < rows
    number = row.to(tl.int64) * 0
    if DIMS == 1:
        number = tl.load(FIRST + row, mask=there, other=0)
    if DIMS == 2:
        number = tl.load(FIRST + row // second, mask=there, other=0) * of_second
        number += tl.load(SECOND + row % second, mask=there, other=0)
    if DIMS == 3:
        before = row // third
        number = tl.load(FIRST + before // second, mask=there, other=0) * of_second
        number += tl.load(SECOND + before % second, mask=there, other=0)
        number = number * of_third + tl.load(THIRD + row % third, mask=there, other=0)
    key = tl.load(KEY + row * 0)
    of_op = _mix(_mix(key.to(tl.uint32) ^ op.to(tl.uint32)) ^ (key >> 32).to(tl.uint32))
    of_row = _mix(_mix((number >> 32).to(tl.uint32) ^ of_op) ^ number.to(tl.uint32))
    column = tl.load(COLUMN + at, mask=at < columns, other=0).to(tl.uint32)
    return _mix(of_row + column * 0x9E3779B9).to(tl.int32, bitcast=True)


def given_places(
    key: Tensor, op: int, shape: list[int], places: list[Tensor]
) -> tuple[tuple[Any, ...], dict[str, int]]:
    """The first arguments of `bits_of`, pointers and the op's number; and those about dims, by name."""
    *before, column = [p.contiguous() for p in places] or [key.reshape(1) * 0]
    sizes = list(shape[:-1])
    while len(before) > _MOST:
        first, second, *rest = before
        before = [(first[:, None] * sizes[1] + second).reshape(-1), *rest]
        sizes = [sizes[0] * sizes[1], *sizes[2:]]
    first, second, third = (*before, *(column,) * (_MOST - len(before)))
    more = [1] * (_MOST - len(sizes))
    _, of_second, of_third = (*sizes, *more)
    dims = {"of_second": of_second, "of_third": of_third, "second": second.numel(), "third": third.numel()}
    return (key, column, first, second, third, random.number_of(op)), {**dims, "DIMS": len(before)}


def held(columns: int) -> dict[str, int]:
    """The tile of rows of so many columns that a program holds, and its warps."""
    block = min(BLOCK, 1 << max(4, (columns - 1).bit_length()))
    return {"ROWS": ELEMENTS // block, "BLOCK": block, "num_warps": WARPS}


def grid(rows: int, columns: int) -> tuple[int, int]:
    """The grid of programs for a part of so many rows and columns."""
    tile = held(columns)
    return -(-rows // tile["ROWS"]), -(-columns // tile["BLOCK"])


@jit
def kernel(KEY, COLUMN, FIRST, SECOND, THIRD, op, OUT, rows, columns, least, of_second, of_third, second, third,
           DIMS: tl.constexpr, IS_MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A tile of elements per program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    bits = bits_of(
        KEY, COLUMN, FIRST, SECOND, THIRD, op, row, at, rows, columns, of_second, of_third, second, third, DIMS
    )
    place = row.to(tl.int64) * columns + at
    inside = (row < rows) & (at < columns)
    if IS_MASK:
        tl.store(OUT + place, (bits >= least).to(tl.int8), mask=inside)
    else:
        tl.store(OUT + place, bits, mask=inside)


def bits_at(key: Tensor, op: int, shape: list[int], places: list[Tensor]) -> Tensor:
    """32 random bits for each element of a part, given by its indices in each dim."""
    return _launched(key, op, shape, places, torch.int32, 0)


def kept_at(key: Tensor, op: int, p: float, shape: list[int], places: list[Tensor]) -> Tensor:
    """Dropout mask of a part, given by its indices in each dim."""
    return _launched(key, op, shape, places, torch.int8, random.threshold(p)).view(torch.bool)


def _launched(key: Tensor, op: int, shape: list[int], places: list[Tensor], dtype: torch.dtype, least: int) -> Tensor:
    local = [p.numel() for p in places]
    out = torch.empty(local, dtype=dtype, device=key.device)
    if out.numel():
        columns = local[-1] if local else 1
        rows = out.numel() // columns
        pointers, dims = given_places(key, op, shape, places)
        kernel[grid(rows, columns)](
            *pointers, out, rows, columns, least, **dims, IS_MASK=dtype == torch.int8, **held(columns)
        )
    return out


if triton is not None:
    random.bits_at.register_kernel("cuda")(bits_at)
    random.kept_at.register_kernel("cuda")(kept_at)
