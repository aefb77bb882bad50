"""The cross-entropies of rows whose vocabulary is cut: each device reads its own logits once, and two numbers
a row are reduced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.kernels import backend
from autopar.kernels.cross_entropy import arguments_of, as_float32_rows, gradient_of_rows, patterns_of, statistics
from autopar.kernels.family import Family, through
from autopar.kernels.patterns import Found
from autopar.runtime.forms import cross_entropy_part as form
from autopar.runtime.forms import reduced
from autopar.runtime.random import Cuts, start_of

_NONE = -(2**31)  # a target that counts nowhere


def reference(x: Tensor, target: Tensor, ignored: int, smoothing: float, cuts: Cuts, classes: int) -> Tensor:
    """The ops of the group."""
    return form(as_float32_rows(x), target, cuts, classes, None, ignored, smoothing)


@torch.library.custom_op("autopar::cross_entropy_rows", mutates_args=())
def rows_of_part(x: Tensor, place: Tensor, sums: bool) -> Tensor:
    """The `statistics` of this device's logits."""
    return statistics(x, place, _NONE, sums)


@rows_of_part.register_fake
def _(x: Tensor, place: Tensor, sums: bool) -> Tensor:
    return x.new_empty((*place.shape, 4), dtype=torch.float32)


@torch.library.custom_op("autopar::cross_entropy_part", mutates_args=())
def less_here(x: Tensor, place: Tensor, rows: Tensor, lse: Tensor, smoothing: float, classes: int) -> Tensor:
    """The logits that this device takes from the sum of all rows' logarithms: of targets, and of all classes.

    Its gradient is that of the whole sum: each logit's share of it, by `lse`, is taken back here too.
    """
    right, whole = rows[:, 2], rows[:, 3]
    found = torch.where(right.isnan(), 0, right).mul(smoothing - 1.0).sum()
    return found - torch.where(place == _NONE, 0, whole).sum() * (smoothing / classes) if smoothing else found


@less_here.register_fake
def _(x: Tensor, place: Tensor, rows: Tensor, lse: Tensor, smoothing: float, classes: int) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("autopar::cross_entropy_part_backward", mutates_args=())
def less_here_backward(dy: Tensor, x: Tensor, place: Tensor, lse: Tensor, smoothing: float, classes: int) -> Tensor:
    """The gradient of this device's logits, in their dtype."""
    if backend.runs(x):
        return gradient_of_rows(dy, x, place, lse, _NONE, smoothing, classes)

    def sums(x: Tensor) -> Tensor:
        wide = x.to(torch.float32).reshape(-1, x.shape[-1])
        counts = place != _NONE
        here = counts & (place >= 0) & (place < x.shape[-1])
        right = wide.gather(1, torch.where(here, place, 0)[:, None])[:, 0]
        share = torch.exp(wide.detach() - lse[:, :1] - lse[:, 1:])  # the slope of the logarithm of the sum
        total = (torch.where(share > 0, wide, 0) * share).sum(-1)  # a logit that is masked has no share
        total = total - wide.sum(-1) * (smoothing / classes) if smoothing else total
        return (torch.where(counts, total, 0) - torch.where(here, right, 0) * (1.0 - smoothing)).sum()

    return through(sums, dy, x)[0]


@less_here_backward.register_fake
def _(dy: Tensor, x: Tensor, place: Tensor, lse: Tensor, smoothing: float, classes: int) -> Tensor:
    return x.new_empty(x.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, place, _, lse, ctx.smoothing, ctx.classes = inputs
    ctx.save_for_backward(x, place, lse)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None, None]:
    return less_here_backward(dy, *ctx.saved_tensors, ctx.smoothing, ctx.classes), None, None, None, None, None


less_here.register_autograd(_gradients, setup_context=_remember)


def cross_entropy_part(x: Tensor, target: Tensor, ignored: int, smoothing: float, cuts: Cuts, classes: int) -> Tensor:
    """Kernels in the place of the ops of the group: P(sum), as those give."""
    if not backend.is_traced(x.device.type):
        return reference(x, target, ignored, smoothing, cuts, classes)
    place = torch.where(target == ignored, _NONE, target - start_of(x, cuts))
    rows = rows_of_part(x.detach(), place, smoothing > 0)
    axes, most = [axis for axis, _ in cuts], rows[:, 0]
    top = reduced(most, "all_reduce_max", axes)
    log = reduced((most - top + rows[:, 1]).exp(), "all_reduce", axes).log()
    logs = torch.where(target == ignored, 0, top + log)
    logs = torch.where((target != ignored) & ((target < 0) | (target >= classes)), torch.nan, logs).sum()  # no class
    found = less_here(x, place, rows, torch.stack([top, log], -1), smoothing, classes)
    return found + reduced(logs, "lodge", axes)  # one device counts them


def _arguments(found: Found) -> Mapping[str, Any] | None:
    """Those of the call, where no class has a weight."""
    given = arguments_of(found)
    return None if given is None else {**given, "cuts": found["CUTS"], "classes": found["CLASSES"]}


FAMILY = Family(
    "cross_entropy_part",
    patterns_of("cross_entropy_part(input={logits}, target=target, cuts=CUTS, classes=CLASSES{options})"),
    cross_entropy_part,
    reference,
    _arguments,
)
