"""Rotary position embedding: each pair of an element of the first half and one of the second turns by an angle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels import backend
from autopar.kernels.backend import jit, tl
from autopar.kernels.custom_ops import backward_of, call_of, custom_op
from autopar.kernels.family import Family, are_alike, through
from autopar.kernels.patterns import Match, Pattern

WARPS = 4
_TILE = 512  # elements of a half that a program holds
TURN = """
straight{n} = mul(input={x}, other=cos)
first{n} = narrow(input={x}, dim=DIM, start=0, length=HALF)
second{n} = narrow(input={x}, dim=DIM, start=HALF, length=HALF)
back{n} = neg(input=second{n})
turned{n} = cat(tensors=[back{n}, first{n}], dim=-1)
across{n} = mul(input=turned{n}, other=sin)
y{n} = add(input=straight{n}, other=across{n})
"""


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The ops of the group."""
    half = x.shape[-1] // 2
    straight = x * cos
    first = x.narrow(-1, 0, half)
    second = x.narrow(-1, half, half)
    return straight + torch.cat([-second, first], -1) * sin


@jit
def _turn(X, C, S, Y, part, batch, place, heads, x_batch, x_head, x_place, c_batch, c_place, y_batch, y_head, y_place,
          HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, IS_BACK: tl.constexpr):  # fmt: skip
    """Rotates HEADS heads of one position, which share its angles; the other way round in backward."""
    at = tl.arange(0, BLOCK)
    head = part * HEADS + tl.arange(0, HEADS)
    is_angle = at < HALF
    inside = (head < heads)[:, None] & is_angle[None, :]
    angles = batch * c_batch + place * c_place + at
    c1 = tl.load(C + angles, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(C + angles + HALF, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(S + angles, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(S + angles + HALF, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    x = batch * x_batch + place * x_place + head[:, None] * x_head + at[None, :]
    x1 = tl.load(X + x, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(X + x + HALF, mask=inside, other=0.0).to(tl.float32)
    if IS_BACK:
        y1 = x1 * c1 + x2 * s2
        y2 = x2 * c2 - x1 * s1
    else:
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
    y = batch * y_batch + place * y_place + head[:, None] * y_head + at[None, :]
    tl.store(Y + y, y1.to(Y.dtype.element_ty), mask=inside)
    tl.store(Y + y + HALF, y2.to(Y.dtype.element_ty), mask=inside)


@jit
def kernel(X, Y, K, L, C, S, places, c_batch, c_place,
           x_heads, x_batch, x_head, x_place, y_batch, y_head, y_place,
           k_heads, k_batch, k_head, k_place, l_batch, l_head, l_place, parts,
           HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, IS_BACK: tl.constexpr,
           IS_PAIR: tl.constexpr):  # fmt: skip
    """Turn some heads of one position per program: X in `parts` programs, then K in others where IS_PAIR."""
    row = tl.program_id(0).to(tl.int64)
    place = row % places
    batch = row // places
    part = tl.program_id(1)
    if IS_PAIR:
        if part >= parts:
            _turn(K, C, S, L, part - parts, batch, place, k_heads, k_batch, k_head, k_place, c_batch, c_place,
                  l_batch, l_head, l_place, HALF, BLOCK, HEADS, IS_BACK)  # fmt: skip
        else:
            _turn(X, C, S, Y, part, batch, place, x_heads, x_batch, x_head, x_place, c_batch, c_place,
                  y_batch, y_head, y_place, HALF, BLOCK, HEADS, IS_BACK)  # fmt: skip
    else:
        _turn(X, C, S, Y, part, batch, place, x_heads, x_batch, x_head, x_place, c_batch, c_place,
              y_batch, y_head, y_place, HALF, BLOCK, HEADS, IS_BACK)  # fmt: skip


def heads_of(half: int, heads: int) -> tuple[int, int]:
    """The block of half a head, and the heads that a program turns: as many as registers allow."""
    block = 1 << max(4, (half - 1).bit_length())
    return block, min(1 << (heads - 1).bit_length(), max(1, _TILE // block))


def room_for(x: Tensor) -> Tensor:
    """An empty tensor laid out like `x`, but with its last dim contiguous: the kernel goes along it."""
    room = torch.empty_like(x)
    return room if room.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def launch(xs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, is_back: bool) -> tuple[Any, ...]:
    """Run the kernel on one or two tensors of (batch, heads, positions, width), whatever their strides."""
    ys = tuple(map(room_for, xs))
    batch, _, places, width = xs[0].shape
    xs = tuple(x if x.stride(3) == 1 else x.contiguous() for x in xs)
    cos, sin = (t.expand(t.shape[0], 1, places, width).contiguous() for t in (cos, sin))
    c_batch = cos.stride(0) if cos.shape[0] > 1 else 0
    if batch * places and any(y.numel() for y in ys):
        heads = [x.shape[1] for x in xs]
        block, together = heads_of(width // 2, max(heads))
        parts = [-(-n // together) for n in heads]
        strides = [(n, *x.stride()[:3], *y.stride()[:3]) for n, x, y in zip(heads, xs, ys)]
        tensors = xs[0], ys[0], xs[-1], ys[-1], cos, sin
        how = {"HALF": width // 2, "BLOCK": block, "HEADS": together, "IS_BACK": is_back, "IS_PAIR": len(xs) > 1}
        kernel[(batch * places, sum(parts))](
            *tensors, places, c_batch, cos.stride(2), *strides[0], *strides[-1], parts[0], **how, num_warps=WARPS
        )
    return ys


def _laid_out_like(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return room_for(x)


@custom_op("autopar::rotary", fake=_laid_out_like)
def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each head of each position, rotated by its angles; laid out like `x`."""
    if backend.runs(x):
        return launch((x,), cos, sin, is_back=False)[0]
    return room_for(x).copy_(reference(x, cos, sin))


@backward_of(rotated, "x", fake=_laid_out_like)
def rotated_backward(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of the rotated tensor; laid out like `dy`."""
    if backend.runs(dy):
        return launch((dy,), cos, sin, is_back=True)[0]
    return room_for(dy).copy_(through(lambda x: reference(x, cos, sin), dy, dy)[0])


rotary = call_of(rotated, reference)


def are_served(found: Match, x: Any) -> bool:
    """Whether the kernel can rotate `x`: angles need no gradient, and are the same for all heads."""
    cos, sin = found["cos"], found["sin"]
    shape = type_of(x).shape
    angles = type_of(cos).shape
    is_served = are_alike([x, cos, sin]) and not type_of(cos).requires_grad and not type_of(sin).requires_grad
    is_served &= len(shape) == 4 and found["DIM"] in (3, -1) and 2 * found["HALF"] == shape[3]
    is_served &= angles == type_of(sin).shape and len(angles) == 4
    return is_served and angles[1:] == (1, *shape[2:]) and angles[0] in (1, shape[0])


FAMILY = Family(
    "rotary",
    (Pattern.of(TURN.format(x="x", n="")),),
    rotary,
    reference,
    lambda found: are_served(found, found["x"]),
)
