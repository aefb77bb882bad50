"""Activations inside kernels, with their derivatives, and a gelu that models write out in ops."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.kernels.backend import jit, tl

# The tanh form of GELU as Hugging Face models write it.
GELU_TANH = """
half = mul(input={x}, other=0.5)
cube = pow(input={x}, exponent=3.0)
small = mul(input=cube, other=0.044715)
sum_ = add(input={x}, other=small)
inner = mul(input=sum_, other=0.7978845608028654)
tanh_ = tanh(input=inner)
above = add(input=tanh_, other=1.0)
a = mul(input=half, other=above)
"""


def gelu_tanh_by_ops(x: Tensor) -> Tensor:
    """The gelu by a tanh, in the ops and in the order of `GELU_TANH`."""
    half = x * 0.5
    return half * (torch.tanh((x + torch.pow(x, 3.0) * 0.044715) * 0.7978845608028654) + 1.0)


@jit
def _normal(x):
    """Normal distribution function and density at x, by one exponential, to a relative error of 5e-6.

    The tail beyond |x| is that exponential times a polynomial in 1 / (1 + 0.31 |x|), fitted to relative errors: a
    difference from one would be inexact for small tails.
    """
    e = tl.exp2(x * x * -0.7213475204444817)
    root = tl.rsqrt(1.0 + 0.31 * tl.abs(x))  # cheaper than a quotient
    t = root * root
    p = 0.0157445480950169 + t * (0.1804504727500901 - t * 0.07392917472254408)
    beyond = e * t * (0.12386070308864683 + t * (0.12044125743058487 + t * (0.1334298727097773 + t * p)))
    return tl.where(x < 0, beyond, 1.0 - beyond), e * 0.3989422804014327


@jit
def activated(x, KIND: tl.constexpr, IS_HALF: tl.constexpr):
    """An activation and its derivative: 0 silu, 1 gelu, 2 and 3 gelu by a tanh.

    Where the result is rounded to half precision, the error function need not be exact in single precision.
    """
    if KIND == 0:
        s = tl.sigmoid(x)
        a = x * s
        slope = s * (1.0 + x * (1.0 - s))
    elif KIND == 1 and IS_HALF:
        share, density = _normal(x)
        a = x * share
        slope = share + x * density
    elif KIND == 1:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        a = x * share
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        # (1 + tanh(y)) / 2 is sigmoid(2 y); what it is short of one is counted, not subtracted
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        e = tl.exp(-tl.abs(inner))
        large = 1.0 / (1.0 + e)
        share = tl.where(inner < 0, e * large, large)
        less = tl.where(inner < 0, large, e * large)
        a = x * share
        slope = share + a * less * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return a, slope
