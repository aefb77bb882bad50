"""A sum and its layer norm: a residual, and what the next block reads of it."""

from __future__ import annotations

from torch import Tensor

from autopar.kernels import backend, layer_norm
from autopar.kernels.custom_ops import backward_of, call_of, custom_op
from autopar.kernels.family import Family, is_sum_served, through_sum, with_sum
from autopar.kernels.rows import gradients_of_rows, normalised_rows


def reference(first: Tensor, second: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The ops of the group: the sum, and its layer norm."""
    sum_ = first + second
    return sum_, layer_norm.reference(sum_, weight, bias, eps)


@custom_op("autopar::add_layer_norm", like="first first")
def normalised(first: Tensor, second: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, and its layer norm."""
    if not backend.runs(first):
        sum_, y = reference(first, second, weight, bias, eps)
        return sum_.contiguous(), y.contiguous()
    return normalised_rows(first, second, weight, bias, eps, rounds=False)


@backward_of(normalised, "first+second weight bias", results="sum_ y")
def normalised_backward(
    ds: Tensor | None, dy: Tensor, sum_: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of either operand, which are equal, of the weight and of the bias.

    `ds` is the gradient of the sum from its other readers, or None.
    """
    if not backend.runs(dy):
        return through_sum(lambda x, w, b: layer_norm.reference(x, w, b, eps), ds, dy, sum_, weight, bias)
    return gradients_of_rows(dy, ds, sum_, weight, eps, means=True)


add_layer_norm = call_of(normalised, reference)
FAMILY = Family(
    "add_layer_norm",
    with_sum(layer_norm.WRITTEN, "y"),
    add_layer_norm,
    reference,
    lambda found: layer_norm.is_served(found) and is_sum_served(found),
)
