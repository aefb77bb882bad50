"""Norms of rows: the kernels that `rms_norm` and `layer_norm` have in common, and their launches.

A row of up to MOST_COLUMNS is held in registers and, except for the longest, read once in forward and in backward;
backward meanwhile sums what its rows add to the gradients of weight and bias. Wider rows are read block by block, once
more for each sum that the next one needs; the gradients of their weights take a second pass over columns, in
`weights_kernel`.

Constants say what a kernel does: MEANS, for layer_norm, subtracts the mean of each row; ROUNDS, for rms_norm as models
write it, rounds a row to its dtype before the weight; ADDS is a sum with its norm; EVEN, that columns fill a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.kernels import backend
from autopar.kernels.backend import jit, tl

MOST_COLUMNS = 16384  # longest row that a program holds
WIDE, WIDE_WARPS = 4096, 8  # columns of a wider row that a program holds at a time
COLUMNS, ROWS, WARPS = 128, 32, 4  # tile of a program of the second pass
_PROGRAMS = 64  # programs of the second pass per multiprocessor
FOLDED = 32, 32  # parts and columns that a program of the fold holds


@jit
def forward_kernel(X, R, W, B, S, Y, rows, columns, eps, MEANS: tl.constexpr, ROUNDS: tl.constexpr,
                   ADDS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Some rows per program.

    A sum is rounded before it is normalised, and variance is taken after the mean is subtracted.
    """
    at = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    place = row.to(tl.int64) * columns + at
    inside = row < rows
    if not EVEN:
        inside = inside & (at < columns)
    x = tl.load(X + place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(R + place, mask=inside, other=0.0).to(tl.float32)
        sum_ = x.to(S.dtype.element_ty)
        tl.store(S + place, sum_, mask=inside)
        x = sum_.to(tl.float32)
    if MEANS:
        x = tl.where(inside, x - (tl.sum(x, 1) / columns)[:, None], 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / columns + eps)[:, None]
    if ROUNDS:
        y = y.to(Y.dtype.element_ty).to(tl.float32)
    y *= tl.load(W + at, mask=at < columns, other=0.0).to(tl.float32)
    if MEANS:
        y += tl.load(B + at, mask=at < columns, other=0.0).to(tl.float32)
    tl.store(Y + place, y.to(Y.dtype.element_ty), mask=inside)


@jit
def backward_kernel(DY, DS, X, W, DX, DW, DB, rows, columns, eps, programs, MEANS: tl.constexpr, ADDS: tl.constexpr,
                    EVEN: tl.constexpr, AGAIN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """A strided share of the rows per program, and their sums for the gradients of weight and bias.

    Sums that do not depend on each other are made at once, as their exchange between threads is the bottleneck. Long
    rows do not fit into registers: with AGAIN their operands are read again after the sums, from the cache.
    """
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)[None, :]
    dw = tl.zeros((1, BLOCK), tl.float32)
    db = tl.zeros((1, BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        place = row.to(tl.int64) * columns + at
        inside = row < rows
        if not EVEN:
            inside = inside & (at < columns)
        x = tl.load(X + place, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(DY + place, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(W + at, mask=at < columns, other=0.0).to(tl.float32)  # not held from row to row: registers
        weighed = dy * w
        if MEANS:
            sum_, less = tl.split(tl.sum(tl.join(x, weighed), 1))
            x = tl.where(inside, x - (sum_ / columns)[:, None], 0.0)
        squares, along = tl.split(tl.sum(tl.join(x * x, weighed * x), 1))
        root = tl.rsqrt(squares / columns + eps)
        if AGAIN:  # The cache modifier keeps these loads from being merged with those above.
            x = tl.load(X + place, mask=inside, other=0.0, cache_modifier=".ca").to(tl.float32)
            dy = tl.load(DY + place, mask=inside, other=0.0, cache_modifier=".ca").to(tl.float32)
            weighed = dy * tl.load(W + at, mask=at < columns, other=0.0, cache_modifier=".ca").to(tl.float32)
            if MEANS:
                x = tl.where(inside, x - (sum_ / columns)[:, None], 0.0)
        even = x * root[:, None]
        dw += tl.sum(dy * even, 0)[None, :]
        dx = weighed - even * (along * root / columns)[:, None]
        if MEANS:
            db += tl.sum(dy, 0)[None, :]
            dx -= (less / columns)[:, None]
        dx *= root[:, None]
        if ADDS:
            dx += tl.load(DS + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + place, dx.to(DX.dtype.element_ty), mask=inside)
    tl.store(DW + program * columns + at, dw, mask=at < columns)
    if MEANS:
        tl.store(DB + program * columns + at, db, mask=at < columns)


@jit
def fold_kernel(DW, DB, TO_W, TO_B, parts, columns, MEANS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums over all programs, for some columns, of the gradients of a weight and a bias, in a fixed order."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    dw = tl.zeros((ROWS, COLUMNS), tl.float32)
    db = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, parts, ROWS):
        part = start + tl.arange(0, ROWS)[:, None]
        inside = (part < parts) & (column < columns)
        dw += tl.load(DW + part * columns + column, mask=inside, other=0.0)
        if MEANS:
            db += tl.load(DB + part * columns + column, mask=inside, other=0.0)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(TO_W + at, tl.sum(dw, 0).to(TO_W.dtype.element_ty), mask=at < columns)
    if MEANS:
        tl.store(TO_B + at, tl.sum(db, 0).to(TO_B.dtype.element_ty), mask=at < columns)


@jit
def _mean_and_root(X, columns, eps, MEANS: tl.constexpr, BLOCK: tl.constexpr):
    """Mean of a wide row, zero unless MEANS, and one over the root of the mean square of the rest."""
    at = tl.arange(0, BLOCK)
    mean = 0.0
    if MEANS:
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            sums += tl.load(X + start + at, mask=start + at < columns, other=0.0).to(tl.float32)
        mean = tl.sum(sums) / columns
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + at < columns
        x = tl.where(inside, tl.load(X + start + at, mask=inside, other=0.0).to(tl.float32) - mean, 0.0)
        squares += x * x
    return mean, tl.rsqrt(tl.sum(squares) / columns + eps)


@jit
def wide_forward_kernel(X, R, W, B, S, Y, columns, eps, MEANS: tl.constexpr, ROUNDS: tl.constexpr,
                        ADDS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One wide row per program."""
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, BLOCK)
    if ADDS:
        for start in range(0, columns, BLOCK):
            inside = start + at < columns
            x = tl.load(X + row + start + at, mask=inside, other=0.0).to(tl.float32)
            x += tl.load(R + row + start + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(S + row + start + at, x.to(S.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # the sum is read by other threads than wrote it
    mean, root = _mean_and_root(S + row, columns, eps, MEANS, BLOCK)
    for start in range(0, columns, BLOCK):
        inside = start + at < columns
        y = (tl.load(S + row + start + at, mask=inside, other=0.0).to(tl.float32) - mean) * root
        if ROUNDS:
            y = y.to(Y.dtype.element_ty).to(tl.float32)
        y *= tl.load(W + start + at, mask=inside, other=0.0).to(tl.float32)
        if MEANS:
            y += tl.load(B + start + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(Y + row + start + at, y.to(Y.dtype.element_ty), mask=inside)


@jit
def wide_backward_kernel(DY, DS, X, W, DX, MEAN, ROOT, columns, eps, MEANS: tl.constexpr, ADDS: tl.constexpr,
                         BLOCK: tl.constexpr):  # fmt: skip
    """One wide row per program; its mean and root are written for the second pass."""
    program = tl.program_id(0)
    row = program.to(tl.int64) * columns
    at = tl.arange(0, BLOCK)
    mean, root = _mean_and_root(X + row, columns, eps, MEANS, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + at < columns
        dy = tl.load(DY + row + start + at, mask=inside, other=0.0).to(tl.float32)
        dy *= tl.load(W + start + at, mask=inside, other=0.0).to(tl.float32)
        sums += dy
        products += dy * (tl.load(X + row + start + at, mask=inside, other=0.0).to(tl.float32) - mean) * root
    less = tl.sum(sums) / columns if MEANS else 0.0
    along = tl.sum(products) / columns
    for start in range(0, columns, BLOCK):
        inside = start + at < columns
        dy = tl.load(DY + row + start + at, mask=inside, other=0.0).to(tl.float32)
        dy *= tl.load(W + start + at, mask=inside, other=0.0).to(tl.float32)
        even = (tl.load(X + row + start + at, mask=inside, other=0.0).to(tl.float32) - mean) * root
        dx = (dy - less - even * along) * root
        if ADDS:
            dx += tl.load(DS + row + start + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + row + start + at, dx.to(DX.dtype.element_ty), mask=inside)
    tl.store(MEAN + program, mean)
    tl.store(ROOT + program, root)


@jit
def weights_kernel(
    DY, X, MEAN, ROOT, DW, DB, rows, columns, share, MEANS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Some columns of the gradients of a weight and a bias, summed over a share of the rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    part = tl.program_id(1)
    dw = tl.zeros((COLUMNS,), tl.float32)
    db = tl.zeros((COLUMNS,), tl.float32)
    for start in range(part * share, min(rows, (part + 1) * share), ROWS):
        row = start + tl.arange(0, ROWS)
        there = row < min(rows, (part + 1) * share)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        both = there[:, None] & inside[None, :]
        x = tl.load(X + at, mask=both, other=0.0).to(tl.float32)
        dy = tl.load(DY + at, mask=both, other=0.0).to(tl.float32)
        if MEANS:
            x -= tl.load(MEAN + row, mask=there, other=0.0)[:, None]
            db += tl.sum(dy, 0)
        dw += tl.sum(dy * x * tl.load(ROOT + row, mask=there, other=0.0)[:, None], 0)
    tl.store(DW + part * columns + column, dw, mask=inside)
    if MEANS:
        tl.store(DB + part * columns + column, db, mask=inside)


def held(columns: int) -> dict[str, Any]:
    """The tile that a program of forward holds of rows of so many columns, and its number of warps.

    Short rows take one warp.
    """
    block = _block(columns)
    rows = max(1, 1024 // block)
    warps = 1 if block <= 1024 else block // 512
    return {"ROWS": rows, "BLOCK": block, "EVEN": columns == block, "num_warps": warps}


def held_backward(columns: int, dtype: torch.dtype, means: bool, adds: bool, shared: int) -> dict[str, Any]:
    """The tile, warps and stages of a program of backward, as was fastest on an H200.

    Loads run some stages ahead, as far as the `shared` bytes of shared memory of a block allow: loads under way lie
    there, and what threads exchange.
    """
    block = _block(columns)
    is_half = dtype.itemsize == 2
    if block <= 1024:
        elements = 4096 if is_half and not means else 2048
        stages = 4
    elif block == 2048:
        elements = 4096
        stages = 3
    elif block <= 8192:
        elements = 8192
        stages = 4 if means else 3
    else:
        elements = block
        stages = 1
    ahead = (shared - 4 * elements) // ((2 + adds) * elements * dtype.itemsize)
    tile = {"ROWS": max(1, elements // block), "BLOCK": block, "EVEN": columns == block, "AGAIN": block > 8192}
    warps = elements // 1024 if elements <= 8192 else 32
    return {**tile, "STAGES": max(1, min(stages, 4 if is_half else 2, 1 + ahead)), "num_warps": warps}


def most_columns(dtype: torch.dtype, means: bool) -> int:
    """The longest row, in columns, that backward holds.

    It is half as long in single precision, and with a mean, which takes more sums.
    """
    return MOST_COLUMNS if dtype.itemsize == 2 and not means else MOST_COLUMNS // 2


def _block(columns: int) -> int:
    return 1 << max(4, (columns - 1).bit_length())


def normalised_rows(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, rounds: bool
) -> tuple[Tensor, Tensor]:
    """The sum of `x` and `added`, if given, and its norm: layer norm with a bias, else RMS norm."""
    columns = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sum_ = x if added is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        rows = x.contiguous()
        count = y.numel() // columns
        other, s = (rows, rows) if added is None else (added.contiguous(), sum_)
        weights = weight.contiguous(), (weight if bias is None else bias).contiguous()
        how = {"MEANS": bias is not None, "ROUNDS": rounds, "ADDS": added is not None}
        if columns <= MOST_COLUMNS:
            tile = held(columns)
            programs = -(-count // tile["ROWS"])
            forward_kernel[(programs,)](rows, other, *weights, s, y, count, columns, eps, **how, **tile)
        else:
            wide_forward_kernel[(count,)](
                rows, other, *weights, s, y, columns, eps, **how, BLOCK=WIDE, num_warps=WIDE_WARPS
            )
    return sum_, y


def fold(sums: Sequence[Tensor], to: Sequence[Tensor]) -> None:
    """Add up the rows that programs of backward left, for the gradients of a weight and, if given, a bias."""
    programs, columns = sums[0].shape
    constants = {"MEANS": len(sums) > 1, "ROWS": FOLDED[0], "COLUMNS": FOLDED[1], "num_warps": WARPS}
    fold_kernel[(-(-columns // FOLDED[1]),)](sums[0], sums[-1], to[0], to[-1], programs, columns, **constants)


def gradients_of_rows(
    dy: Tensor, beside: Tensor | None, x: Tensor, weight: Tensor, eps: float, means: bool
) -> tuple[Any, ...]:
    """The gradient of `x`, plus `beside` where given; and those of the weight and, with `means`, the bias.

    Each program sums some of the rows; the programs' sums are added up here, in a fixed order.
    """
    columns = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = dx.numel() // columns
    if not rows:
        return dx, *(torch.zeros_like(weight) for _ in range(1 + means))
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    ds = dy if beside is None else beside.contiguous()
    how = {"MEANS": means, "ADDS": beside is not None}
    tile = held_backward(columns, x.dtype, means, beside is not None, backend.shared_bytes(x))
    is_held = columns <= most_columns(x.dtype, means)
    at_once = backend.units(x) * max(1, 8 // tile["num_warps"])
    blocks = -(-columns // COLUMNS)
    share = -(-rows // max(1, backend.units(x) * _PROGRAMS // blocks))  # rows of a program of the second pass
    programs = min(-(-rows // tile["ROWS"]), at_once) if is_held else -(-rows // share)
    parts = [torch.empty((programs, columns), dtype=torch.float32, device=x.device) for _ in range(1 + means)]
    dw, db = parts[0], parts[-1]
    if is_held:
        given = (dy, ds, x, weight, dx, dw, db, rows, columns, eps, programs)
        backward_kernel[(programs,)](*given, **how, **tile)
    else:
        mean, root = (torch.empty((rows,), dtype=torch.float32, device=x.device) for _ in range(2))
        wide_backward_kernel[(rows,)](
            dy, ds, x, weight, dx, mean, root, columns, eps, **how, BLOCK=WIDE, num_warps=WIDE_WARPS
        )
        constants = {"MEANS": means, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
        weights_kernel[(blocks, programs)](dy, x, mean, root, dw, db, rows, columns, share, **constants)
    folded = [torch.empty_like(weight) for _ in parts]
    fold(parts, folded)
    return dx, *folded
