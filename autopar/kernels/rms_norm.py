"""An RMS norm with a weight."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels import backend
from autopar.kernels.custom_ops import backward_of, call_of, custom_op
from autopar.kernels.family import Family, Written, are_alike, through
from autopar.kernels.patterns import Match, Pattern
from autopar.kernels.rows import gradients_of_rows, normalised_rows

_ROOT = """
square = pow(input=wide, exponent=2)
sum_ = sum(input=square, dim=-1, keepdim=True)
mean = div(input=sum_, other=WIDTH)
above = add(input=mean, other=EPS)
root = rsqrt(input=above)
even = mul(input=wide, other=root)
"""


def reference(x: Tensor, weight: Tensor, eps: float, rounds: bool) -> Tensor:
    """The ops of the group."""
    if not rounds:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.to(torch.float32)
    even = wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return weight * even.to(x.dtype)


@custom_op("autopar::rms_norm")
def normalised(x: Tensor, weight: Tensor, eps: float, rounds: bool) -> Tensor:
    """The RMS norm over the last dim, with `rounds` rounded to x's dtype before the weight."""
    if not backend.runs(x):
        return reference(x, weight, eps, rounds).contiguous()
    return normalised_rows(x, None, weight, None, eps, rounds)[1]


@backward_of(normalised, "x weight")
def normalised_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float, rounds: bool) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and of the weight."""
    if not backend.runs(x):
        return through(lambda x, w: reference(x, w, eps, rounds), dy, x, weight)
    return gradients_of_rows(dy, None, x, weight, eps, means=False)


rms_norm = call_of(normalised, reference)


def is_served(found: Match) -> bool:
    """Whether it normalises the last dim and rounds only to the input's dtype."""
    x, weight = found["x"], found["weight"]
    variant = found.pattern.variant
    if not type_of(x).shape:
        return False
    width = type_of(x).shape[-1]
    is_right = are_alike([x, weight]) and type_of(weight).shape == (width,)
    if variant["wide"]:
        is_right &= type_of(found.result).dtype == type_of(x).dtype and found["DTYPE"] is type_of(x).torch_dtype
    elif variant["rounds"]:
        is_right &= type_of(x).dtype == "float32"
    if variant["rounds"]:
        return is_right and found["WIDTH"] == width
    return is_right and tuple(found["SHAPE"]) == (width,) and found["EPS"] is not None


_WEIGHED = "round = to(input=even, dtype=DTYPE)\nscaled = mul(input=weight, other=round)"
WRITTEN: tuple[Written, ...] = (  # spellings on rows x
    (f"wide = to(input=x, dtype=torch.float32){_ROOT}{_WEIGHED}", {"wide": True, "rounds": True}),
    (f"{_ROOT.replace('wide', 'x')}scaled = mul(input=weight, other=even)", {"wide": False, "rounds": True}),
    (
        "scaled = rms_norm(input=x, normalized_shape=SHAPE, weight=weight, eps=EPS)",
        {"wide": False, "rounds": False},
    ),
)
PATTERNS = tuple(Pattern.of(text, **variant) for text, variant in WRITTEN)
FAMILY = Family("rms_norm", PATTERNS, rms_norm, reference, is_served)
