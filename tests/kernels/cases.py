"""Calls of each family on awkward shapes, with the same function in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.kernels import (
    add_layer_norm,
    add_rms_norm,
    bias_gelu,
    cross_entropy,
    cross_entropy_part,
    dropout,
    gated,
    gelu_tanh,
    layer_norm,
    masked_softmax,
    rms_norm,
    rotary,
    rotary_pair,
)
from autopar.kernels.family import Family
from autopar.runtime import random


@dataclass(frozen=True)
class Case:
    """Shapes of the operands, those of them that get no gradient, and numbers that the call takes besides."""

    module: Any
    shapes: tuple[tuple[int, ...], ...]
    numbers: tuple[Any, ...] = ()
    still: int = 0  # so many of the last operands get no gradient
    lies: Callable[[torch.Tensor], torch.Tensor] = lambda x: x  # how the first operand lies
    places: tuple[int, ...] = ()  # targets, the last operand

    @property
    def family(self) -> Family:
        return self.module.FAMILY

    def operands(self, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
        dice = torch.Generator().manual_seed(0)
        made = [torch.randn(shape, generator=dice).to(device, dtype) for shape in self.shapes]
        made[0] = self.lies(made[0])
        made = [x.requires_grad_(i < len(made) - self.still) for i, x in enumerate(made)]
        return [*made, torch.tensor(self.places, device=device)] if self.places else made

    def reference(self, *operands: torch.Tensor) -> torch.Tensor:
        return self.module.reference(*operands, *self.besides(operands[0]))

    def in_double(self, *operands: torch.Tensor) -> torch.Tensor:
        """The same function without any rounding between its ops."""
        return _EXACT[self.family.name](*operands, *self.besides(operands[0]))

    def call(self, *operands: torch.Tensor) -> torch.Tensor:
        return self.family.call(*operands, *self.besides(operands[0]))

    def besides(self, x: torch.Tensor) -> list[Any]:
        """The numbers, where the first operand is."""
        found = [n.to(x.device) if isinstance(n, torch.Tensor) else n for n in self.numbers]
        return [*found[:-1], x.dtype] if self.family.name == "masked_softmax" else found


def _growing(x: torch.Tensor) -> torch.Tensor:
    """The largest numbers last."""
    return (x * torch.linspace(0.1, 4.0, x.shape[-1], device=x.device)).to(x.dtype)


def _exact_gate(gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    F = torch.nn.functional
    return up * (F.silu(gate), F.gelu(gate), *2 * (F.gelu(gate, approximate="tanh"),))[kind]


def _exact_turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat(
        [
            first * cos.chunk(2, -1)[0] - second * sin.chunk(2, -1)[0],
            second * cos.chunk(2, -1)[1] + first * sin.chunk(2, -1)[1],
        ],
        -1,
    )


def _by_root(x: torch.Tensor, w: torch.Tensor, eps: float, rounds: bool) -> torch.Tensor:
    return x * w / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _by_variance(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, eps: float) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + eps).sqrt() * w + b


def _exact_drop(x, added, key, op, shape, cuts, p):
    places = [torch.arange(n, device=x.device) for n in shape]
    left = x * random._kept_at(key, op, p, list(shape), places) / (1 - p)
    return left if added is None else left + added


def _exact_softmax(x, *given):
    mask, scale, cap, _, _ = given if len(given) == 5 else (None, *given)
    x = x * (1.0 if scale is None else scale)
    x = x if cap is None else cap * torch.tanh(x / cap)
    return (x if mask is None else x + mask).softmax(-1)


# in the words of torch, not in those of the families
_EXACT: dict[str, Callable[..., Any]] = {
    "rms_norm": _by_root,
    "add_rms_norm": lambda x, r, *given: (x + r, _by_root(x + r, *given)),
    "layer_norm": _by_variance,
    "add_layer_norm": lambda x, r, *given: (x + r, _by_variance(x + r, *given)),
    "dropout": _exact_drop,
    "masked_softmax": _exact_softmax,
    "gated": _exact_gate,
    "bias_gelu": lambda x, bias, kind: torch.nn.functional.gelu(
        x + bias - bias.detach(), approximate="none" if kind == 1 else "tanh"
    ),
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "rotary": _exact_turn,
    "rotary_pair": lambda q, k, *angles: (_exact_turn(q, *angles), _exact_turn(k, *angles)),
    "cross_entropy": lambda x, t, ignored, smoothing: torch.nn.functional.cross_entropy(
        x.flatten(0, -2), t, reduction="sum", ignore_index=ignored, label_smoothing=smoothing
    ),
    "cross_entropy_part": lambda x, t, ignored, smoothing, cuts, classes: torch.nn.functional.cross_entropy(
        x.flatten(0, -2), t, reduction="sum", ignore_index=ignored, label_smoothing=smoothing
    ),
}


def drawn_whole(*first: Any, shape: tuple[int, ...], p: float = 0.1) -> tuple[Any, ...]:
    """The numbers of a call of dropout on all of a tensor."""
    return *first, torch.tensor(0x1234_5678_9ABC), 7, shape, ((),) * len(shape), p


def _halves(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as every other column of a wider tensor."""
    return torch.stack([x, x], -1).flatten(-2)[..., ::2]


CASES = {
    "rms_norm, one row": Case(rms_norm, ((1, 64), (64,)), (1e-6, True)),
    "rms_norm, odd columns": Case(rms_norm, ((3, 5, 57), (57,)), (1e-5, True)),
    "rms_norm, more rows than programs": Case(rms_norm, ((137, 1030), (1030,)), (1e-5, True)),
    "rms_norm of torch": Case(rms_norm, ((2, 9, 100), (100,)), (1e-5, False)),
    "rms_norm, no rows": Case(rms_norm, ((0, 32), (32,)), (1e-5, True)),
    "rms_norm, every other column": Case(rms_norm, ((6, 40), (40,)), (1e-5, True), lies=_halves),
    "rms_norm, columns of a block": Case(rms_norm, ((67, 256), (256,)), (1e-5, True)),
    "rms_norm, read again": Case(rms_norm, ((13, 8200), (8200,)), (1e-5, True)),
    "rms_norm, wide": Case(rms_norm, ((3, 16400), (16400,)), (1e-5, True)),
    "layer_norm, wide": Case(layer_norm, ((100, 8200), (8200,), (8200,)), (1e-5,)),
    "add_rms_norm": Case(add_rms_norm, ((3, 5, 57), (3, 5, 57), (57,)), (1e-5, True)),
    "add_rms_norm of torch, wide": Case(add_rms_norm, ((2, 16385), (2, 16385), (16385,)), (1e-5, False)),
    "add_layer_norm, wide": Case(add_layer_norm, ((5, 8300), (5, 8300), (8300,), (8300,)), (1e-5,)),
    "add_rms_norm, no rows": Case(add_rms_norm, ((0, 16), (0, 16), (16,)), (1e-5, True)),
    "add_layer_norm": Case(add_layer_norm, ((37, 48), (37, 48), (48,), (48,)), (1e-5,), lies=_halves),
    "layer_norm, one row": Case(layer_norm, ((1, 48), (48,), (48,)), (1e-5,)),
    "layer_norm, odd columns": Case(layer_norm, ((4, 7, 99), (99,), (99,)), (1e-5,)),
    "layer_norm, no rows": Case(layer_norm, ((0, 3, 16), (16,), (16,)), (1e-5,)),
    "dropout": Case(dropout, ((3, 5, 57),), drawn_whole(None, shape=(3, 5, 57))),
    "dropout, most of it, more columns than a block": Case(
        dropout, ((2, 3000),), drawn_whole(None, shape=(2, 3000), p=0.9)
    ),
    "dropout of every other column": Case(dropout, ((6, 40),), drawn_whole(None, shape=(6, 40), p=0.5), lies=_halves),
    "dropout, and a sum": Case(dropout, ((7, 130), (7, 130)), drawn_whole(shape=(7, 130))),
    "dropout of one row, and a sum": Case(dropout, ((64,), (64,)), drawn_whole(shape=(64,))),
    "dropout of nothing": Case(dropout, ((0, 8),), drawn_whole(None, shape=(0, 8))),
    "masked_softmax": Case(masked_softmax, ((2, 3, 5, 37), (2, 1, 5, 37)), (0.125, None, True, None), still=1),
    "masked_softmax, capped": Case(masked_softmax, ((2, 3, 4, 64), (1, 1, 4, 64)), (0.25, 5.0, True, None), still=1),
    "masked_softmax of a mask a key": Case(
        masked_softmax, ((2, 2, 3, 40), (2, 1, 1, 40)), (None, None, False, None), still=1
    ),
    "masked_softmax, no mask, more columns than a tile": Case(
        masked_softmax, ((3, 1030),), (None, 0.5, None, True, None)
    ),
    "masked_softmax, turned": Case(
        masked_softmax, ((2, 5, 4, 24), (2, 1, 4, 24)), (3.0, 50.0, True, None), still=1, lies=lambda x: _transposed(x)
    ),
    "masked_softmax, scaled by nothing": Case(
        masked_softmax, ((2, 1, 3, 20), (2, 1, 3, 20)), (0.0, None, True, None), still=1
    ),
    "masked_softmax of nothing": Case(masked_softmax, ((0, 2, 3, 8), (1, 1, 3, 8)), (0.5, None, True, None), still=1),
    "gated by silu": Case(gated, ((3, 7, 130), (3, 7, 130)), (0,)),
    "gated by gelu": Case(gated, ((5, 411), (5, 411)), (1,)),
    "gated by gelu tanh": Case(gated, ((2, 1024), (2, 1024)), (2,)),
    "gated by the ops of a gelu": Case(gated, ((1, 1, 33), (1, 1, 33)), (3,), lies=_halves),
    "gated by a half of a tensor": Case(
        gated, ((3, 4, 70), (3, 4, 70)), (0,), lies=lambda x: torch.cat([x, x], -1)[..., :70]
    ),
    "gated by every second row": Case(
        gated, ((4, 5, 64), (4, 5, 64)), (0,), lies=lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)
    ),
    "gated, nothing": Case(gated, ((0, 8), (0, 8)), (0,)),
    "bias_gelu": Case(bias_gelu, ((37, 150), (150,)), (1,)),
    "bias_gelu by a tanh, of a batch": Case(bias_gelu, ((3, 50, 300), (300,)), (2,)),
    "bias_gelu by the ops of a gelu, every other column": Case(bias_gelu, ((6, 40), (40,)), (3,), lies=_halves),
    "bias_gelu, more rows than programs": Case(bias_gelu, ((1100, 20), (20,)), (1,)),
    "bias_gelu of nothing": Case(bias_gelu, ((0, 24), (24,)), (1,)),
    "gelu_tanh": Case(gelu_tanh, ((3, 700),)),
    "gelu_tanh, one element": Case(gelu_tanh, ((1,),)),
    "rotary": Case(rotary, ((2, 3, 5, 16), (1, 1, 5, 16), (1, 1, 5, 16)), still=2),
    "rotary_pair, fewer keys": Case(rotary_pair, ((2, 6, 5, 16), (2, 3, 5, 16), (1, 1, 5, 16), (1, 1, 5, 16)), still=2),
    "rotary_pair, many heads, an angle a row": Case(
        rotary_pair,
        ((2, 71, 2, 24), (2, 2, 2, 24), (2, 1, 2, 24), (2, 1, 2, 24)),
        still=2,
        lies=lambda x: _transposed(x),
    ),
    "rotary, many heads of which some are left over": Case(
        rotary, ((1, 71, 2, 32), (1, 1, 2, 32), (1, 1, 2, 32)), still=2
    ),
    "rotary, an angle a row, transposed": Case(
        rotary, ((2, 7, 4, 24), (2, 1, 4, 24), (2, 1, 4, 24)), still=2, lies=lambda x: _transposed(x)
    ),
    "rotary, its width before its places": Case(
        rotary, ((2, 3, 6, 16), (1, 1, 6, 16), (1, 1, 6, 16)), still=2, lies=lambda x: _turned(x)
    ),
}


_ROWS = tuple(-100 if row % 4 == 1 else row * 37 % 300 for row in range(9))
CASES |= {
    "cross_entropy, some ignored": Case(cross_entropy, ((9, 300),), (-100, 0.0), places=_ROWS),
    "cross_entropy, more columns than a block": Case(
        cross_entropy, ((2, 9000),), (-100, 0.0), places=(8999, 17), lies=_growing
    ),
    "cross_entropy, smoothed": Case(cross_entropy, ((9, 300),), (-100, 0.1), places=_ROWS),
    "cross_entropy of a batch, all ignored": Case(cross_entropy, ((2, 1, 33),), (7, 0.0), places=(7, 7)),
    "cross_entropy_part, all of it": Case(cross_entropy_part, ((9, 300),), (-100, 0.0, (), 300), places=_ROWS),
    "cross_entropy_part, smoothed": Case(cross_entropy_part, ((9, 300),), (-100, 0.2, (), 300), places=_ROWS),
}


def _transposed(x: torch.Tensor) -> torch.Tensor:
    """Batch, heads, places, width, as a projection gives them: places before heads in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _turned(x: torch.Tensor) -> torch.Tensor:
    """The last two dims the other way round in memory, as a product with a transpose leaves its gradient."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x


def results(function, operands, dtype=torch.float32):
    """A call's value, and the gradients of its operands for one that is drawn in a dtype: turned if it has 16 bits."""
    made = function(*operands)
    made, dice = made if isinstance(made, tuple) else (made,), torch.Generator().manual_seed(1)
    gradients = [torch.randn(y.shape, generator=dice).to(y.device, dtype).to(y.dtype) for y in made]
    gradients = gradients if dtype == torch.float32 else list(map(_turned, gradients))
    given = torch.autograd.grad(made, [x for x in operands if x.requires_grad], gradients)
    return [*(y.detach() for y in made), *given]


def is_near(case, dtype, device="cpu"):
    """Is each result at most twice as far from float64 as eager's, but for the last bit of the largest number?"""
    operands = case.operands(dtype, device)
    wide = [x.detach().double() if x.is_floating_point() else x for x in operands]
    wide = [x.requires_grad_() if one.requires_grad else x for x, one in zip(wide, operands, strict=True)]
    found = results(case.call, operands, dtype)
    eager = results(case.reference, operands, dtype)
    exact = results(case.in_double, wide, dtype)
    for kernel, plain, right in zip(found, eager, exact, strict=True):
        assert kernel.dtype == plain.dtype and kernel.shape == right.shape
        unit = torch.finfo(kernel.dtype).eps
        allowed = 2 * _error(plain, right) + unit * right.abs().max() if right.numel() else 0
        if right.numel() and not _error(kernel, right) <= allowed:
            return False
    return True


def _error(value, right):
    return (value.double() - right).abs().max()
