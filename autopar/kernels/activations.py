"""Activations inside kernels, with their derivatives; and the kernel of one alone.

They are numbered: 0 silu, 1 gelu, 2 gelu by a tanh, 3 the same gelu as models write it out in ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.kernels import backend
from autopar.kernels.backend import jit, tl

BLOCK, WARPS = 2048, 4
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


BY_OPS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.nn.functional.silu,
    torch.nn.functional.gelu,
    lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    gelu_tanh_by_ops,
)


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
    """An activation and its derivative.

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


@jit
def forward_kernel(X, Y, count, KIND: tl.constexpr, IS_HALF: tl.constexpr, BLOCK: tl.constexpr):
    """A block of elements per program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    a, _ = activated(tl.load(X + at, mask=inside, other=0.0).to(tl.float32), KIND, IS_HALF)
    tl.store(Y + at, a.to(Y.dtype.element_ty), mask=inside)


def variant_of(x: Tensor, kind: int) -> dict[str, Any]:
    """Constants of a launch that choose the activation."""
    return {"KIND": kind, "IS_HALF": x.dtype.itemsize == 2}


def activation(x: Tensor, kind: int) -> Tensor:
    """The activation of each element, contiguous: by the kernel where it runs, else by its ops."""
    if not backend.runs(x):
        return BY_OPS[kind](x).contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        grid = (-(-y.numel() // BLOCK),)
        forward_kernel[grid](x.contiguous(), y, y.numel(), **variant_of(x, kind), BLOCK=BLOCK, num_warps=WARPS)
    return y
