"""Draws by position that take many tries, each one op in a program: gamma and Poisson distributions.

`places` are those of this device's part in each dim of a tensor of shape `shape`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.runtime.random import SECOND, as_normal, as_uniform, bits_at

_TRIES = 12  # each keeps at least 95 of 100 draws
_HALVINGS = 24  # enough for rates up to 10^10


def _uniform(key: Tensor, op: int, shape: list[int], places: list[Tensor]) -> Tensor:
    return as_uniform(bits_at(key, op, shape, places), torch.float64)


@torch.library.custom_op("autopar::gamma_at", mutates_args=())
def gamma_at(alpha: Tensor, key: Tensor, op: int, shape: list[int], places: list[Tensor]) -> Tensor:
    """Gamma variates of scale 1 in float64, by Marsaglia and Tsang.

    The first of several tries that is kept. Each try has streams of its own. Below a shape of one, of a shape that is
    larger by one, brought down by a power of a uniform draw.
    """

    def u(stream: int) -> Tensor:
        return _uniform(key, op + stream * SECOND, shape, places)

    alpha = alpha.double()
    d = torch.where(alpha < 1, alpha + 1, alpha) - 1 / 3
    c = (9 * d).rsqrt()
    found, is_kept = d.clone(), torch.zeros_like(d, dtype=torch.bool)
    for k in range(_TRIES):
        first, second = (bits_at(key, op + (3 * k + i) * SECOND, shape, places) for i in (0, 1))
        x = as_normal(first, second, torch.float64)
        v = (1 + c * x) ** 3
        fits = (v > 0) & (torch.log1p(-u(3 * k + 2)) < 0.5 * x * x + d - d * v + d * v.log())
        found, is_kept = torch.where(fits & ~is_kept, d * v, found), is_kept | fits
    return torch.where(alpha < 1, found * (1 - u(3 * _TRIES)) ** (1 / alpha), found)


@torch.library.custom_op("autopar::poisson_at", mutates_args=())
def poisson_at(rate: Tensor, key: Tensor, op: int, shape: list[int], places: list[Tensor]) -> Tensor:
    """Poisson variates in float64.

    The least count up to which probabilities add up to more than a uniform draw. It is found by halving the range that
    holds it.
    """
    rate, drawn = rate.double(), _uniform(key, op, shape, places)
    reach = 10 * rate.sqrt() + 50  # further than 32 bits of a draw see
    low, high = (rate - reach).clamp(min=0).floor() - 1, (rate + reach).ceil()
    for _ in range(_HALVINGS):  # at `low` it is not more, at `high` it is
        middle = ((low + high) / 2).floor()
        is_more = (middle >= 0) & (torch.special.gammaincc(middle.clamp(min=0) + 1, rate) > drawn)
        low, high = torch.where(is_more, low, middle), torch.where(is_more, middle, high)
    return torch.where(rate > 0, high, torch.where(rate == 0, 0.0, math.nan))


@gamma_at.register_fake
@poisson_at.register_fake
def _(parameter: Tensor, key: Tensor, op: int, shape: list[int], places: list[Tensor]) -> Tensor:
    return parameter.new_empty(parameter.shape, dtype=torch.float64)
