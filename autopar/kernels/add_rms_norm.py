"""A sum and its RMS norm: a residual, and what the next block reads of it."""

from __future__ import annotations

from torch import Tensor

from autopar.kernels import backend, rms_norm
from autopar.kernels.custom_ops import backward_of, call_of, custom_op
from autopar.kernels.family import Family, is_sum_served, through_sum, with_sum
from autopar.kernels.rows import gradients_of_rows, normalised_rows


def reference(first: Tensor, second: Tensor, weight: Tensor, eps: float, rounds: bool) -> tuple[Tensor, Tensor]:
    """The ops of the group: the sum, and its RMS norm."""
    sum_ = first + second
    return sum_, rms_norm.reference(sum_, weight, eps, rounds)


@custom_op("autopar::add_rms_norm", like="first first")
def normalised(first: Tensor, second: Tensor, weight: Tensor, eps: float, rounds: bool) -> tuple[Tensor, Tensor]:
    """The sum, and its RMS norm; with `rounds` it is rounded to its dtype before the weight."""
    if not backend.runs(first):
        sum_, y = reference(first, second, weight, eps, rounds)
        return sum_.contiguous(), y.contiguous()
    return normalised_rows(first, second, weight, None, eps, rounds)


@backward_of(normalised, "first+second weight", results="sum_ y")
def normalised_backward(
    ds: Tensor | None, dy: Tensor, sum_: Tensor, weight: Tensor, eps: float, rounds: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of either operand, which are equal, and of the weight.

    `ds` is the gradient of the sum from its other readers, or None.
    """
    if not backend.runs(dy):
        return through_sum(lambda x, w: rms_norm.reference(x, w, eps, rounds), ds, dy, sum_, weight)
    return gradients_of_rows(dy, ds, sum_, weight, eps, means=False)


add_rms_norm = call_of(normalised, reference)
FAMILY = Family(
    "add_rms_norm",
    with_sum(rms_norm.WRITTEN, "scaled"),
    add_rms_norm,
    reference,
    lambda found: rms_norm.is_served(found) and is_sum_served(found),
)
