"""A summed cross entropy over a cut vocabulary: each device reads its logits once, and two numbers a row are reduced.

Between the two reductions and behind them stands a kernel each.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from autopar.kernels import backend
from autopar.kernels.backend import jit, tl
from autopar.kernels.buffer_reuse import written_over
from autopar.kernels.cross_entropy import (
    READ_ONCE,
    WRITTEN,
    as_float32_rows,
    forward_kernel,
    gradient_of_rows,
    is_served,
    log_sums,
    patterns_of,
)
from autopar.kernels.custom_ops import custom_op
from autopar.kernels.family import Family, through
from autopar.runtime.forms import cross_entropy_part as form
from autopar.runtime.forms import reduced
from autopar.runtime.random import Cuts, start_of

ROWS, WARPS = 256, 2  # rows of a program between and after the reductions


def reference(x: Tensor, target: Tensor, ignored: int, smoothing: float, cuts: Cuts, classes: int) -> Tensor:
    """The ops of the group."""
    return form(as_float32_rows(x), target, cuts, classes, None, ignored, smoothing)


@jit
def shares_kernel(MOST, REST, TOP, OUT, rows, ROWS: tl.constexpr):
    """The sum of this device's exponentials, relative to the largest logit of all devices."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    most = tl.load(MOST + row, mask=inside, other=0.0)
    log = tl.load(REST + 3 * row, mask=inside, other=0.0)
    tl.store(OUT + row, tl.exp(most - tl.load(TOP + row, mask=inside, other=0.0) + log), mask=inside)


@jit
def losses_kernel(T, REST, TOP, TOTAL, LSE, LOSS, rows, ignored, of_target, of_all, classes, ROWS: tl.constexpr):
    """Write a program's sums over its rows: of this device's share of the loss, and of log-sum-exps.

    One device alone counts the log-sum-exps. A target that is no class gives NaN.
    """
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    target = tl.load(T + row, mask=inside, other=ignored)
    counts = target != ignored
    top = tl.load(TOP + row, mask=inside, other=0.0)
    log = tl.log(tl.load(TOTAL + row, mask=inside, other=1.0))
    right = tl.load(REST + 3 * row + 1, mask=inside, other=0.0)
    whole = tl.load(REST + 3 * row + 2, mask=inside, other=0.0)
    right = tl.where(right == right, right, 0.0)  # NaN where another device holds the target
    here = -of_target * right - tl.where(counts, of_all * whole, 0.0)
    is_class = (target >= 0) & (target < classes)
    logs = tl.where(counts, tl.where(is_class, top + log, float("nan")), 0.0)
    tl.store(LSE + 2 * row, top, mask=inside)
    tl.store(LSE + 2 * row + 1, log, mask=inside)
    tl.store(LOSS + program, tl.sum(tl.where(inside, here, 0.0)))
    tl.store(LOSS + tl.num_programs(0) + program, tl.sum(tl.where(inside, logs, 0.0)))


def _two_numbers_and_three(x: Tensor, target: Tensor, start: Tensor, ignored: int, sums: bool) -> tuple[Tensor, Tensor]:
    made = x.new_empty((*target.shape, 3), dtype=torch.float32)
    return made.new_empty(target.shape), made


@custom_op("autopar::cross_entropy_rows", fake=_two_numbers_and_three)
def rows_of_part(x: Tensor, target: Tensor, start: Tensor, ignored: int, sums: bool) -> tuple[Tensor, Tensor]:
    """For each row this device's largest logit; and log-sum, target's logit and sum of logits, [rows, 3].

    The log-sum is that of exponentials relative to the largest logit here. The target's logit is NaN where the target
    has no column here; the sum of logits is computed with `sums` only.
    """
    columns = x.shape[-1]
    rows = target.numel()
    if not backend.runs(x):
        wide = x.to(torch.float32).reshape(-1, columns)
        place = target - start
        most, log = log_sums(wide)
        is_column = (target != ignored) & (place >= 0) & (place < columns)
        right = wide.gather(1, torch.where(is_column, place, 0)[:, None])[:, 0]
        whole = wide.sum(-1) if sums else torch.zeros_like(most)
        return most, torch.stack([log, torch.where(is_column, right, torch.nan), whole], -1)
    most = torch.empty((rows,), dtype=torch.float32, device=x.device)
    rest = torch.empty((rows, 3), dtype=torch.float32, device=x.device)
    if rows:
        given = (x.contiguous(), target.contiguous(), start, most, rest, rest, columns, ignored, 1.0, 0.0)
        forward_kernel[(rows,)](*given, IS_WHOLE=False, SUMS=sums, **READ_ONCE)
    return most, rest


@custom_op("autopar::cross_entropy_shares")
def shares(most: Tensor, rest: Tensor, top: Tensor) -> Tensor:
    """For each row the sum of this device's exponentials, relative to the largest logit of all devices."""
    if not backend.runs(most):
        return (most - top + rest[:, 0]).exp()
    found = torch.empty(most.shape, dtype=most.dtype, device=most.device)
    rows = most.numel()
    if rows:
        shares_kernel[(-(-rows // ROWS),)](most, rest, top.contiguous(), found, rows, ROWS=ROWS, num_warps=WARPS)
    return found


def _sums_and_numbers(x: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty((2,), dtype=torch.float32), x.new_empty((*target.shape, 2), dtype=torch.float32)


@custom_op("autopar::cross_entropy_part", fake=_sums_and_numbers)
def less_here(
    x: Tensor,
    target: Tensor,
    start: Tensor,
    rest: Tensor,
    top: Tensor,
    total: Tensor,
    ignored: int,
    smoothing: float,
    classes: int,
) -> tuple[Tensor, Tensor]:
    """Two sums that make up the loss; and for backward the two parts of each row's log-sum-exp.

    The first sum is this device's share of the loss, from its logits of targets and of all classes; the second is that
    of all rows' log-sum-exps, which one device counts. The backward of the first sum is that of the whole loss: it
    includes each logit's share of the log-sum-exps.
    """
    rows = target.numel()
    if not backend.runs(x):
        counts = target != ignored
        log = total.log()
        right, whole = rest[:, 1], rest[:, 2]
        here = torch.where(right.isnan(), 0, right) * (smoothing - 1.0)
        here = here - torch.where(counts, whole * (smoothing / classes), 0)
        logs = torch.where((target >= 0) & (target < classes), top + log, torch.nan)
        sums = torch.stack([here, torch.where(counts, logs, 0)])
        return sums.sum(-1), torch.stack([top, log], -1)
    programs = -(-rows // ROWS)
    losses = torch.empty((2, programs), dtype=torch.float32, device=x.device)
    lse = torch.empty((rows, 2), dtype=torch.float32, device=x.device)
    if rows:
        given = (target.contiguous(), rest, top.contiguous(), total.contiguous(), lse, losses, rows, ignored)
        counts_of = (1.0 - smoothing, smoothing / classes, classes)
        losses_kernel[(programs,)](*given, *counts_of, ROWS=ROWS, num_warps=WARPS)
    return losses.sum(-1), lse


@custom_op("autopar::cross_entropy_part_backward")
def less_here_backward(
    x: Tensor, dy: Tensor, target: Tensor, start: Tensor, lse: Tensor, ignored: int, smoothing: float, classes: int
) -> Tensor:
    """The gradient of this device's logits in their dtype, from that of either sum."""
    if backend.runs(x):
        return gradient_of_rows(x, dy, target, start, lse, ignored, smoothing, classes)

    def sums(x: Tensor) -> Tensor:
        wide = x.to(torch.float32).reshape(-1, x.shape[-1])
        counts = target != ignored
        place = target - start
        here = counts & (place >= 0) & (place < x.shape[-1])
        right = wide.gather(1, torch.where(here, place, 0)[:, None])[:, 0]
        share = torch.exp(wide.detach() - lse[:, :1] - lse[:, 1:])  # the slope of the logarithm of the sum
        total = (torch.where(share > 0, wide, 0) * share).sum(-1)  # a logit that is masked has no share
        total = total - wide.sum(-1) * (smoothing / classes) if smoothing else total
        return (torch.where(counts, total, 0) - torch.where(here, right, 0) * (1.0 - smoothing)).sum()

    return through(sums, dy, x)[0]


written_over(less_here_backward, functools.partial(gradient_of_rows, over=True))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, target, start, _, _, _, *ctx.numbers = inputs
    ctx.save_for_backward(x, target, start, output[1])


def _gradients(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, *rest = ctx.saved_tensors
    dx = less_here_backward(x, dy[0], *rest, *ctx.numbers)
    return dx, *(None,) * (5 + len(ctx.numbers))


less_here.register_autograd(_gradients, setup_context=_remember)


def cross_entropy_part(x: Tensor, target: Tensor, ignored: int, smoothing: float, cuts: Cuts, classes: int) -> Tensor:
    """The fused loss as P(sum), by its kernels and two reductions, or by its ops.

    Ops compute it where a program holds no custom ops.
    """
    if not backend.is_traced(x.device.type):
        return reference(x, target, ignored, smoothing, cuts, classes)
    axes = [axis for axis, _ in cuts]
    start = start_of(x, cuts) if cuts else target.new_zeros(())
    most, rest = rows_of_part(x.detach(), target, start, ignored, smoothing > 0)
    top = reduced(most, "all_reduce_max", axes)
    total = reduced(shares(most, rest, top), "all_reduce", axes)
    sums = less_here(x, target, start, rest, top, total, ignored, smoothing, classes)[0]
    return sums[0] + reduced(sums[1].detach(), "lodge", axes)  # one device counts the logarithms


FAMILY = Family(
    "cross_entropy_part",
    patterns_of("cross_entropy_part(input={logits}, target=target, cuts=CUTS, classes=CLASSES{options})"),
    cross_entropy_part,
    reference,
    is_served,
    over="x",
    of_graphs=WRITTEN,
    forms={"cross_entropy": "cross_entropy_part"},
)
