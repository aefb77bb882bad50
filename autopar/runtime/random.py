"""Random numbers by position, the same under every plan: functions of seed, step, random op, and place in the tensor.

    key(seed, step)     = seed + step * 0x9E3779B97F4A7C15, modulo 2^64, signed
    op_key              = mix(mix(low(key) ^ op * 0x85EBCA77) ^ high(key))
    row_key(row)        = mix(mix(high(row) ^ op_key) ^ low(row)), of the place in all dims but the last
    bits(row, column)   = mix(row_key(row) + column * 0x9E3779B9), of 32 bits
    kept                  where bits, taken as signed, >= floor(p * 2^32) - 2^31
    uniform             = the upper 24 bits / 2^24, of float64 all 32 / 2^32: from [0, 1)
    normal              = sqrt(-2 log(1 - u)) cos(2 pi v), of two uniforms u and v

`mix` is the finalizer of MurmurHash3 for 32 bits, whose published vectors are mix(1) = 0x514E28B7 and mix(0xFFFFFFFF) =
0x81F16F39.

It costs six passes over the positions, or one by a kernel (`kernels/draws.py`), and needs no state: recomputing,
another mesh, or one device give the same bits.

In a program a draw is one op, `autopar::bits_at` or `autopar::kept_at`; `IN_TORCH_OPS` maps each to a function of plain
torch ops, which a compiler can fuse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Cuts = Sequence[tuple[str, int]]  # the axes that cut a dim, major first, each with the dim's size before it
_GOLDEN = 0x9E3779B97F4A7C15
_MOST = {torch.float16: 1 - 2.0**-11, torch.bfloat16: 1 - 2.0**-8}  # the largest number below one
SECOND = 1 << 24  # added to the number of a random op: its second stream


@dataclass
class RandomState:
    """Seed and step of a parallel model's random numbers.

    The seed is drawn once from torch's generator on rank 0, so `torch.manual_seed` governs it.
    """

    seed: int  # negative until a program that draws is lowered
    step: int = 0

    def state_dict(self) -> dict[str, int]:
        """Seed and step, for a checkpoint."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.step = int(state["seed"]), int(state["step"])

    def next_key(self) -> int:
        """The key of one forward; advances the step."""
        key = key_of(self.seed, self.step)
        self.step += 1
        return key


def key_of(seed: int, step: int) -> int:
    return _signed((seed + step * _GOLDEN) % 2**64, 64)


def kept(key: Tensor, op: int, p: float, shape: Sequence[int], cuts: Sequence[Cuts], local: Sequence[int]) -> Tensor:
    """Dropout mask of this device's part of a tensor: True for kept elements, with probability 1 - p."""
    if p >= 1.0:
        return torch.zeros(tuple(local), dtype=torch.bool, device=key.device)
    return kept_at(key, op, p, list(shape), places_of(key, cuts, local))


def places_of(key: Tensor, cuts: Sequence[Cuts], local: Sequence[int]) -> list[Tensor]:
    """For each dim, the indices of this device's part."""
    places = [torch.arange(n, dtype=torch.int64, device=key.device) for n in local]
    return [at + start_of(key, cut) if cut else at for at, cut in zip(places, cuts, strict=True)]


def keys_of_rows(key: Tensor, op: int, shape: list[int], places: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The key of each row of a part, and the column indices; both broadcast over the part."""
    places = [p.reshape((-1,) + (1,) * (len(places) - 1 - d)) for d, p in enumerate(places)]
    op_key = mix(mix(_low(key) ^ number_of(op)) ^ _low(key >> 32))
    row = torch.zeros((1,) * max(1, len(places)), dtype=torch.int64, device=key.device)
    for size, at in zip(shape[:-1], places[:-1], strict=True):
        row = row * size + at
    row_key = mix(mix(_low(row >> 32) ^ op_key) ^ _low(row))
    return row_key, _low(places[-1] if places else row)


def number_of(op: int) -> int:
    """The 32 bits that a random op mixes into its key."""
    return _signed(op * 0x85EBCA77 % 2**32, 32)


def _bits_at(key: Tensor, op: int, shape: list[int], places: list[Tensor]) -> Tensor:
    row_key, column = keys_of_rows(key, op, shape, places)
    return mix(row_key + column * _signed(0x9E3779B9, 32)).reshape([p.numel() for p in places])


def threshold(p: float) -> int:
    """The least signed bits for which an element is kept."""
    return int(p * 2**32) - 2**31


def _kept_at(key: Tensor, op: int, p: float, shape: list[int], places: list[Tensor]) -> Tensor:
    return _bits_at(key, op, shape, places) >= threshold(p)


@torch.library.custom_op("autopar::bits_at", mutates_args=())
def bits_at(key: Tensor, op: int, shape: list[int], places: list[Tensor]) -> Tensor:
    """32 random bits for each element of a part, given by its indices in each dim."""
    return _bits_at(key, op, shape, places)


@torch.library.custom_op("autopar::kept_at", mutates_args=())
def kept_at(key: Tensor, op: int, p: float, shape: list[int], places: list[Tensor]) -> Tensor:
    """Dropout mask of a part, given by its indices in each dim."""
    return _kept_at(key, op, p, shape, places)


@bits_at.register_fake
def _(key: Tensor, op: int, shape: list[int], places: list[Tensor]) -> Tensor:
    return key.new_empty([p.numel() for p in places], dtype=torch.int32)


@kept_at.register_fake
def _(key: Tensor, op: int, p: float, shape: list[int], places: list[Tensor]) -> Tensor:
    return key.new_empty([p.numel() for p in places], dtype=torch.bool)


IN_TORCH_OPS = {torch.ops.autopar.bits_at.default: _bits_at, torch.ops.autopar.kept_at.default: _kept_at}


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws of a random op for each element of this device's part of a tensor."""

    key: Tensor
    op: int
    shape: Sequence[int]  # shape of the whole tensor
    cuts: Sequence[Cuts]
    local: Sequence[int]  # shape of the part

    def bits(self, stream: int = 0) -> Tensor:
        """32 random bits for each element, from one of the op's streams."""
        places = places_of(self.key, self.cuts, self.local)
        return bits_at(self.key, self.op + stream * SECOND, list(self.shape), places)

    def whole_numbers(self) -> Tensor:
        """Signed integers of 64 random bits."""
        first, second = (self.bits(stream).to(torch.int64) for stream in (0, 1))
        return (first << 32) | (second & 0xFFFFFFFF)

    def uniform(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers from [0, 1)."""
        return as_uniform(self.bits(), dtype)

    def normal(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal numbers."""
        return as_normal(self.bits(), self.bits(1), dtype)


def as_uniform(drawn: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bits as numbers in [0, 1), none of which rounds to one in this dtype."""
    drawn = drawn.to(torch.int64) & 0xFFFFFFFF
    if dtype == torch.float64:
        return drawn.to(torch.float64) * 2.0**-32
    made = (drawn >> 8).to(torch.float32) * 2.0**-24
    return made.clamp(max=_MOST[dtype]) if dtype in _MOST else made


def as_normal(first: Tensor, second: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Two tensors of bits as standard normal numbers."""
    exact = wide(dtype)
    return (-2 * torch.log1p(-as_uniform(first, exact))).sqrt() * torch.cos(2 * math.pi * as_uniform(second, exact))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which draws are computed that are stored in this one."""
    return dtype if dtype == torch.float64 else torch.float32


def mix(h: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer, on int32 that wraps."""
    h = (h ^ ((h >> 16) & 0xFFFF)) * _signed(0x85EBCA6B, 32)
    h = (h ^ ((h >> 13) & 0x7FFFF)) * _signed(0xC2B2AE35, 32)
    return h ^ ((h >> 16) & 0xFFFF)


def start_of(like: Tensor, cuts: Cuts) -> Tensor | int:
    """Start of this device's part of a dim."""
    start: Tensor | int = 0
    for axis, size in cuts:
        start = start + torch.ops.autopar.start(like, axis, size)
    return start


def _low(x: Tensor) -> Tensor:
    """The low 32 bits."""
    x = x & 0xFFFFFFFF
    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)


def _signed(x: int, width: int) -> int:
    return x - 2**width if x >= 2 ** (width - 1) else x
