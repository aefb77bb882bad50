"""A layer norm with weight and bias."""

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


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The op that the kernel stands for."""
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@torch.library.custom_op("autopar::layer_norm", mutates_args=())
def normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Custom op: the layer norm over the last dim."""
    if not backend.runs(x):
        return reference(x, weight, bias, eps).contiguous()
    return normalised_rows(x, None, weight, bias, eps, rounds=False)[1]


@normalised.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("autopar::layer_norm_backward", mutates_args=())
def normalised_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `x`, of the weight and of the bias."""
    if not backend.runs(x):
        dx, dw, db = through(lambda x, w, b: reference(x, w, b, eps), dy, x, weight, bias)
        return dx, dw, db
    dx, (dw, db) = gradients_of_rows(dy, None, x, weight, eps, means=True)
    return dx, dw, db


@normalised_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return *normalised_backward(dy, *ctx.saved_tensors, ctx.eps), None


normalised.register_autograd(_gradients, setup_context=_remember)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The op by its kernel, or as it is where a program holds no custom ops."""
    return normalised(x, weight, bias, eps) if backend.is_traced(x.device.type) else reference(x, weight, bias, eps)


def arguments(found: Match) -> Mapping[str, Any] | None:
    """Arguments of the call, or None unless it normalises the last dim alone."""
    x, weight, bias = found["x"], found["weight"], found["bias"]
    width = type_of(x).shape[-1]
    is_row = tuple(found["SHAPE"]) == (width,)
    eps = found["EPS"] if "EPS" in found.bound else 1e-5
    return {"x": x, "weight": weight, "bias": bias, "eps": eps} if is_row and are_alike([x, weight, bias]) else None


_CALL = "y = layer_norm(input=x, normalized_shape=SHAPE, weight=weight, bias=bias"
WRITTEN = (f"{_CALL}, eps=EPS)", f"{_CALL})")  # calls on rows x
FAMILY = Family("layer_norm", tuple(map(Pattern.of, WRITTEN)), layer_norm, reference, arguments)
