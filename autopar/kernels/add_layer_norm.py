"""A sum and its layer norm: a residual, and what the next block reads of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.kernels import backend, layer_norm
from autopar.kernels.family import Family, summed, through_sum
from autopar.kernels.patterns import Match, Pattern
from autopar.kernels.rows import gradients_of_rows, normalised_rows


def reference(first: Tensor, second: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The ops of the group: the sum, and its layer norm."""
    sum_ = first + second
    return sum_, layer_norm.reference(sum_, weight, bias, eps)


@torch.library.custom_op("autopar::add_layer_norm", mutates_args=())
def normalised(first: Tensor, second: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Custom op: the sum, and its layer norm."""
    if not backend.runs(first):
        sum_, y = reference(first, second, weight, bias, eps)
        return sum_.contiguous(), y.contiguous()
    return normalised_rows(first, second, weight, bias, eps, rounds=False)


@normalised.register_fake
def _(first: Tensor, second: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return first.new_empty(first.shape), first.new_empty(first.shape)


@torch.library.custom_op("autopar::add_layer_norm_backward", mutates_args=())
def normalised_backward(
    ds: Tensor | None, dy: Tensor, sum_: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of either operand, which are equal, of the weight and of the bias.

    `ds` is the gradient of the sum from its other readers, or None.
    """
    if not backend.runs(dy):
        dx, dw, db = through_sum(lambda x, w, b: layer_norm.reference(x, w, b, eps), ds, dy, sum_, weight, bias)
        return dx, dw, db
    dx, (dw, db) = gradients_of_rows(dy, ds, sum_, weight, eps, means=True)
    return dx, dw, db


@normalised_backward.register_fake
def _(
    ds: Tensor | None, dy: Tensor, sum_: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return sum_.new_empty(sum_.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, weight, bias, ctx.eps = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[0], weight, bias)


def _gradients(
    ctx: Any, ds: Tensor | None, dy: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
    if dy is None:
        return ds, ds, None, None, None
    dx, dw, db = normalised_backward(ds, dy, *ctx.saved_tensors, ctx.eps)
    return dx, dx, dw, db, None


normalised.register_autograd(_gradients, setup_context=_remember)


def add_layer_norm(first: Tensor, second: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The group by its kernel, or by its ops where a program holds no custom ops."""
    function = normalised if backend.is_traced(first.device.type) else reference
    return function(first, second, weight, bias, eps)


def _arguments(found: Match) -> Mapping[str, Any] | None:
    """Arguments of the call, or None unless both operands have the sum's shape and dtype."""
    return summed(found, layer_norm.arguments(found))


FAMILY = Family(
    "add_layer_norm",
    tuple(Pattern.of(f"x = add(input=first, other=second)\n{text}\nx, y") for text in layer_norm.WRITTEN),
    add_layer_norm,
    reference,
    _arguments,
)
