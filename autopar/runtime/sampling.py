"""Gamma and Poisson draws by position, each as one op, since a draw takes several tries.

`places` are the indices of this device's part in each dim of a tensor of shape `shape`.
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
    """Gamma draws of scale 1 in float64, by the method of Marsaglia and Tsang.

    A draw is the first accepted one of several tries, each with random streams of its own. For a shape below one, the
    draw is made for that shape plus one and scaled by a power of a uniform draw.
    """

    def u(stream: int) -> Tensor:
        return _uniform(key, op + stream * SECOND, shape, places)

    alpha = alpha.double()
    d = torch.where(alpha < 1, alpha + 1, alpha) - 1 / 3
    c = (9 * d).rsqrt()
    found = d.clone()
    is_kept = torch.zeros_like(d, dtype=torch.bool)
    for k in range(_TRIES):
        first, second = (bits_at(key, op + (3 * k + i) * SECOND, shape, places) for i in (0, 1))
        x = as_normal(first, second, torch.float64)
        v = (1 + c * x) ** 3
        fits = (v > 0) & (torch.log1p(-u(3 * k + 2)) < 0.5 * x * x + d - d * v + d * v.log())
        found = torch.where(fits & ~is_kept, d * v, found)
        is_kept = is_kept | fits
    return torch.where(alpha < 1, found * (1 - u(3 * _TRIES)) ** (1 / alpha), found)


@torch.library.custom_op("autopar::poisson_at", mutates_args=())
def poisson_at(rate: Tensor, key: Tensor, op: int, shape: list[int], places: list[Tensor]) -> Tensor:
    """Poisson draws in float64, by inverting the distribution function.

    A draw is the least count whose cumulative probability exceeds a uniform draw, found by bisection.
    """
    rate = rate.double()
    drawn = _uniform(key, op, shape, places)
    reach = 10 * rate.sqrt() + 50  # further than 32 bits of a draw see
    low, high = (rate - reach).clamp(min=0).floor() - 1, (rate + reach).ceil()
    for _ in range(_HALVINGS):  # the draw is more than `low`, and at most `high`
        middle = ((low + high) / 2).floor()
        is_more = (middle >= 0) & (torch.special.gammaincc(middle.clamp(min=0) + 1, rate) > drawn)
        low, high = torch.where(is_more, low, middle), torch.where(is_more, middle, high)
    return torch.where(rate > 0, high, torch.where(rate == 0, 0.0, math.nan))


@gamma_at.register_fake
@poisson_at.register_fake
def _(parameter: Tensor, key: Tensor, op: int, shape: list[int], places: list[Tensor]) -> Tensor:
    return parameter.new_empty(parameter.shape, dtype=torch.float64)
