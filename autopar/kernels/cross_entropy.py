"""A summed cross entropy of rows of logits that reads half precision as it is, without a copy in single precision."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels import backend
from autopar.kernels.backend import jit, tl
from autopar.kernels.buffer_reuse import written_over
from autopar.kernels.custom_ops import backward_of, custom_op
from autopar.kernels.family import Family, are_alike, through
from autopar.kernels.patterns import Match, Pattern

BLOCK, WARPS = 4096, 4  # columns at a time where a row is read once
READ_ONCE = {"BLOCK": BLOCK, "num_warps": WARPS}
BACK, WARPS_BACK = 16384, 16  # most columns at a time where the gradient of a row is written
_IGNORED = -100  # torch's default


def reference(x: Tensor, target: Tensor, ignored: int, smoothing: float) -> Tensor:
    """The ops of the group."""
    return torch.nn.functional.cross_entropy(
        as_float32_rows(x), target, reduction="sum", ignore_index=ignored, label_smoothing=smoothing
    )


def as_float32_rows(x: Tensor) -> Tensor:
    """Logits as the ops of a group take them: float32, one row per target."""
    wide = x.to(torch.float32)
    return wide if wide.dim() == 2 else wide.view(-1, x.shape[-1])


@jit
def forward_kernel(X, T, START, MOST, REST, LOSS, columns, ignored, of_target, of_all, IS_WHOLE: tl.constexpr,
                   SUMS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write each row's largest logit and the logarithm of its sum of exponentials relative to that.

    A program reads one row, once. The two numbers stay apart, as their sum would round. For a whole row they are
    written side by side, with its loss. For a part of the columns, which starts at START, REST gets the logarithm, the
    target's logit and, where labels are smoothed, the sum of all logits.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(T + row)
    counts = target != ignored
    place = target
    if not IS_WHOLE:
        place -= tl.load(START)
    is_column = counts & (place >= 0) & (place < columns)
    right = tl.load(X + row * columns + place, mask=is_column, other=float("nan")).to(tl.float32)
    most = -float("inf")
    total = 0.0
    whole = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = X + row * columns + at
        x = tl.load(here, mask=at < columns, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
        larger = tl.maximum(most, tl.max(x))
        above = tl.where(larger == -float("inf"), 0.0, larger)  # logits that are masked have no distance to it
        total = total * tl.exp(most - above) + tl.sum(tl.exp(x - above))
        most = larger
        if SUMS:
            whole += tl.sum(tl.where(at < columns, x, 0.0))
    if IS_WHOLE:
        tl.store(REST + 2 * row, most)
        tl.store(REST + 2 * row + 1, tl.log(total))
        loss = of_target * (most - right) + tl.log(total)
        if SUMS:
            loss += of_all * (most - whole / columns)
        tl.store(LOSS + row, tl.where(counts, loss, 0.0))
    else:
        tl.store(MOST + row, most)
        tl.store(REST + 3 * row, tl.log(total))
        tl.store(REST + 3 * row + 1, right)
        tl.store(REST + 3 * row + 2, whole)


@jit
def backward_kernel(DY, X, T, START, LSE, DX, columns, ignored, of_target, of_all, IS_WHOLE: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """A block of columns of a row: softmax minus the smoothed target, times the gradient of the loss."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    target = tl.load(T + row)
    dy = tl.where(target == ignored, 0.0, tl.load(DY).to(tl.float32))
    if not IS_WHOLE:
        target -= tl.load(START)
    x = tl.load(X + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.exp(x - tl.load(LSE + 2 * row) - tl.load(LSE + 2 * row + 1)) - of_all
    dx = tl.where(at == target, share - of_target, share) * dy
    tl.store(DX + row * columns + at, dx.to(DX.dtype.element_ty), mask=inside)


def written(columns: int) -> dict[str, int]:
    """The tile of a row of so many columns that a program of backward writes, and its warps."""
    block = min(BACK, 1 << max(9, (columns - 1).bit_length()))
    return {"BLOCK": block, "num_warps": min(WARPS_BACK, max(1, block // 1024))}


def gradient_of_rows(
    x: Tensor,
    dy: Tensor,
    target: Tensor,
    start: Tensor | None,
    lse: Tensor,
    ignored: int,
    smoothing: float,
    classes: int,
    over: bool = False,
) -> Tensor:
    """The gradient of the logits in their dtype, by the kernel.

    `start` is the first class of a part of the classes; None for all classes. With `over` the gradient is written over
    the logits, which must be contiguous: a program only reads what it writes.
    """
    columns = x.shape[-1]
    rows = target.numel()
    dx = x if over else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows and columns:
        target = target.contiguous()
        begins = target if start is None else start
        given = (dy, x.contiguous(), target, begins, lse.contiguous(), dx, columns, ignored)
        tile = written(columns)
        grid = rows, -(-columns // tile["BLOCK"])
        backward_kernel[grid](*given, 1.0 - smoothing, smoothing / classes, IS_WHOLE=start is None, **tile)
    return dx


def log_sums(wide: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, and the logarithm of the sum of exponentials relative to it, by ops."""
    most = wide.amax(-1)
    return most, torch.logsumexp(wide - torch.where(most == -torch.inf, 0, most)[:, None], -1)


def _loss_and_numbers(x: Tensor, target: Tensor, ignored: int, smoothing: float) -> tuple[Tensor, Tensor]:
    return x.new_empty((), dtype=torch.float32), x.new_empty((*target.shape, 2), dtype=torch.float32)


@custom_op("autopar::cross_entropy", fake=_loss_and_numbers)
def entropies(x: Tensor, target: Tensor, ignored: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """The loss summed over rows; and for backward each row's largest logit and log-sum-exp relative to it."""
    if not backend.runs(x):
        lse = torch.stack(log_sums(x.to(torch.float32).reshape(-1, x.shape[-1])), -1)
        return reference(x, target, ignored, smoothing), lse
    columns = x.shape[-1]
    rows = target.numel()
    lse = torch.empty((rows, 2), dtype=torch.float32, device=x.device)
    losses = torch.empty((rows,), dtype=torch.float32, device=x.device)
    if rows:
        target = target.contiguous()
        given = (x.contiguous(), target, target, lse, lse, losses, columns, ignored, 1.0 - smoothing, smoothing)
        forward_kernel[(rows,)](*given, IS_WHOLE=True, SUMS=smoothing > 0, **READ_ONCE)
    return losses.sum(), lse


def _launched(
    x: Tensor, dy: Tensor, target: Tensor, lse: Tensor, ignored: int, smoothing: float, over: bool = False
) -> Tensor:
    return gradient_of_rows(x, dy, target, None, lse, ignored, smoothing, x.shape[-1], over)


@backward_of(entropies, "x", results="loss lse")
def entropies_backward(x: Tensor, dy: Tensor, target: Tensor, lse: Tensor, ignored: int, smoothing: float) -> Tensor:
    """The gradient of the logits, in their dtype."""
    if not backend.runs(x):
        return through(lambda x: reference(x, target, ignored, smoothing), dy, x)[0]
    return _launched(x, dy, target, lse, ignored, smoothing)


written_over(entropies_backward, functools.partial(_launched, over=True))


def cross_entropy(x: Tensor, target: Tensor, ignored: int, smoothing: float) -> Tensor:
    """The group by its kernel, or by its ops where a program holds no custom ops."""
    if not backend.is_traced(x.device.type):
        return reference(x, target, ignored, smoothing)
    return entropies(x, target, ignored, smoothing)[0]


def is_served(found: Match) -> bool:
    """Whether targets are class indices, one per row."""
    x, target = found["x"], found["target"]
    columns = type_of(x).shape[-1]
    are_classes = type_of(target).dtype == "int64" and len(type_of(target).shape) == 1 and are_alike([x])
    if "flat" in found.bound:
        return are_classes and type_of(found["flat"]).shape[1:] == (columns,)
    is_exact = found.pattern.variant["wide"] or type_of(x).dtype == "float32"
    return are_classes and is_exact and len(type_of(x).shape) == 2


def patterns_of(call: str) -> tuple[Pattern, ...]:
    """Patterns that end in `call`: with logits as they are, or cast, or cast and viewed, before.

    Ignored targets and label smoothing may be torch's defaults or others.
    """
    found = []
    for before, logits in (
        ("wide = to(input=x, dtype=torch.float32)\nflat = view(input=wide, size=SIZE)\n", "flat"),
        ("wide = to(input=x, dtype=torch.float32)\n", "wide"),
        ("", "x"),
    ):
        for ignored, smoothing in itertools.product(
            (", ignore_index=IGNORED", ""), (", label_smoothing=SMOOTHING", "")
        ):
            text = f"loss = {call.format(logits=logits, options=ignored + smoothing)}"
            found.append(Pattern.of(before + text, wide=bool(before), ignored=_IGNORED, smoothing=0.0))
    return tuple(found)


WRITTEN = patterns_of("cross_entropy(input={logits}, target=target{options}, reduction='sum')")
FAMILY = Family("cross_entropy", WRITTEN, cross_entropy, reference, is_served, over="x")
