"""An RMS norm with a weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels import backend
from autopar.kernels.family import Family, are_alike, through
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


@torch.library.custom_op("autopar::rms_norm", mutates_args=())
def normalised(x: Tensor, weight: Tensor, eps: float, rounds: bool) -> Tensor:
    """Custom op: the RMS norm over the last dim, with `rounds` rounded to x's dtype before the weight."""
    if not backend.runs(x):
        return reference(x, weight, eps, rounds).contiguous()
    return normalised_rows(x, None, weight, None, eps, rounds)[1]


@normalised.register_fake
def _(x: Tensor, weight: Tensor, eps: float, rounds: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("autopar::rms_norm_backward", mutates_args=())
def normalised_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float, rounds: bool) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and of the weight."""
    if not backend.runs(x):
        dx, dw = through(lambda x, w: reference(x, w, eps, rounds), dy, x, weight)
        return dx, dw
    dx, (dw,) = gradients_of_rows(dy, None, x, weight, eps, means=False)
    return dx, dw


@normalised_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, eps: float, rounds: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps, ctx.rounds = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return *normalised_backward(dy, *ctx.saved_tensors, ctx.eps, ctx.rounds), None, None


normalised.register_autograd(_gradients, setup_context=_remember)


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounds: bool) -> Tensor:
    """The group by its kernel, or by its ops where a program holds no custom ops."""
    return normalised(x, weight, eps, rounds) if backend.is_traced(x.device.type) else reference(x, weight, eps, rounds)


def arguments(found: Match) -> Mapping[str, Any] | None:
    """Arguments of the call; None unless it normalises the last dim and rounds only to the input's dtype."""
    x, weight, eps = found["x"], found["weight"], found["EPS"]
    variant = found.pattern.variant
    if not type_of(x).shape:
        return None
    width = type_of(x).shape[-1]
    is_served = are_alike([x, weight]) and type_of(weight).shape == (width,)
    if variant["wide"]:
        is_served &= type_of(found.result).dtype == type_of(x).dtype and found["DTYPE"] is type_of(x).torch_dtype
    elif variant["rounds"]:
        is_served &= type_of(x).dtype == "float32"
    if variant["rounds"]:
        is_served &= found["WIDTH"] == width
    else:
        is_served &= tuple(found["SHAPE"]) == (width,) and eps is not None
    return {"x": x, "weight": weight, "eps": eps, "rounds": variant["rounds"]} if is_served else None


_WEIGHED = "round = to(input=even, dtype=DTYPE)\nscaled = mul(input=weight, other=round)"
WRITTEN: tuple[tuple[str, dict[str, bool]], ...] = (  # spellings on rows x
    (f"wide = to(input=x, dtype=torch.float32){_ROOT}{_WEIGHED}", {"wide": True, "rounds": True}),
    (f"{_ROOT.replace('wide', 'x')}scaled = mul(input=weight, other=even)", {"wide": False, "rounds": True}),
    (
        "scaled = rms_norm(input=x, normalized_shape=SHAPE, weight=weight, eps=EPS)",
        {"wide": False, "rounds": False},
    ),
)
FAMILY = Family(
    "rms_norm", tuple(Pattern.of(text, **variant) for text, variant in WRITTEN), rms_norm, reference, arguments
)
