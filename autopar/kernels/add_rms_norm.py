"""A sum and its RMS norm: a residual, and what the next block reads of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.kernels import backend, rms_norm
from autopar.kernels.family import Family, summed, through_sum
from autopar.kernels.patterns import Match, Pattern
from autopar.kernels.rows import gradients_of_rows, normalised_rows


def reference(first: Tensor, second: Tensor, weight: Tensor, eps: float, rounds: bool) -> tuple[Tensor, Tensor]:
    """The ops of the group: the sum, and its RMS norm."""
    sum_ = first + second
    return sum_, rms_norm.reference(sum_, weight, eps, rounds)


@torch.library.custom_op("autopar::add_rms_norm", mutates_args=())
def normalised(first: Tensor, second: Tensor, weight: Tensor, eps: float, rounds: bool) -> tuple[Tensor, Tensor]:
    """Custom op: the sum, and its RMS norm; with `rounds` it is rounded to its dtype before the weight."""
    if not backend.runs(first):
        sum_, y = reference(first, second, weight, eps, rounds)
        return sum_.contiguous(), y.contiguous()
    return normalised_rows(first, second, weight, None, eps, rounds)


@normalised.register_fake
def _(first: Tensor, second: Tensor, weight: Tensor, eps: float, rounds: bool) -> tuple[Tensor, Tensor]:
    return first.new_empty(first.shape), first.new_empty(first.shape)


@torch.library.custom_op("autopar::add_rms_norm_backward", mutates_args=())
def normalised_backward(
    ds: Tensor | None, dy: Tensor, sum_: Tensor, weight: Tensor, eps: float, rounds: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of either operand, which are equal, and of the weight.

    `ds` is the gradient of the sum from its other readers, or None.
    """
    if not backend.runs(dy):
        dx, dw = through_sum(lambda x, w: rms_norm.reference(x, w, eps, rounds), ds, dy, sum_, weight)
        return dx, dw
    dx, (dw,) = gradients_of_rows(dy, ds, sum_, weight, eps, means=False)
    return dx, dw


@normalised_backward.register_fake
def _(ds: Tensor | None, dy: Tensor, sum_: Tensor, weight: Tensor, eps: float, rounds: bool) -> tuple[Tensor, Tensor]:
    return sum_.new_empty(sum_.shape), weight.new_empty(weight.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *_, weight, ctx.eps, ctx.rounds = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[0], weight)


def _gradients(
    ctx: Any, ds: Tensor | None, dy: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
    if dy is None:
        return ds, ds, None, None, None
    dx, dw = normalised_backward(ds, dy, *ctx.saved_tensors, ctx.eps, ctx.rounds)
    return dx, dx, dw, None, None


normalised.register_autograd(_gradients, setup_context=_remember)


def add_rms_norm(first: Tensor, second: Tensor, weight: Tensor, eps: float, rounds: bool) -> tuple[Tensor, Tensor]:
    """The group by its kernel, or by its ops where a program holds no custom ops."""
    function = normalised if backend.is_traced(first.device.type) else reference
    return function(first, second, weight, eps, rounds)


def _arguments(found: Match) -> Mapping[str, Any] | None:
    """Arguments of the call, or None unless both operands have the sum's shape and dtype."""
    return summed(found, rms_norm.arguments(found))


FAMILY = Family(
    "add_rms_norm",
    tuple(
        Pattern.of(f"x = add(input=first, other=second)\n{text.strip()}\nx, scaled", **variant)
        for text, variant in rms_norm.WRITTEN
    ),
    add_rms_norm,
    reference,
    _arguments,
)
