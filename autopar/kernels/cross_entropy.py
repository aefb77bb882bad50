"""The sum of the cross-entropies of rows of logits, whose halves are read as they are: no copy of them is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels import backend
from autopar.kernels.backend import jit, tl
from autopar.kernels.family import Family, are_alike, through
from autopar.kernels.patterns import Found, Pattern

BLOCK = 4096
WARPS = 8
_IGNORED = -100  # torch's default


def reference(x: Tensor, target: Tensor, ignored: int) -> Tensor:
    """The ops of the group."""
    wide = x.to(torch.float32)
    wide = wide if wide.dim() == 2 else wide.view(target.shape[0], x.shape[-1])
    return torch.nn.functional.cross_entropy(wide, target, reduction="sum", ignore_index=ignored)


@jit
def forward_kernel(X, T, LOSS, LSE, columns, ignored, BLOCK: tl.constexpr):
    """One row a program, read once. A target that is no column gives a loss that is no number."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(T + row)
    most = -float("inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * columns + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(most, tl.max(x))
        total = total * tl.exp(most - larger) + tl.sum(tl.exp(x - larger))
        most = larger
    counts = target != ignored
    is_column = (target >= 0) & (target < columns)
    right = tl.load(X + row * columns + target, mask=counts & is_column, other=float("nan")).to(tl.float32)
    tl.store(LSE + 2 * row, most)  # apart: their sum would round what both are exact in
    tl.store(LSE + 2 * row + 1, tl.log(total))
    tl.store(LOSS + row, tl.where(counts, most - right + tl.log(total), 0.0))


@jit
def backward_kernel(DY, X, T, LSE, DX, columns, ignored, BLOCK: tl.constexpr):
    """A block of columns of a row: its shares of the sum, less one at the target."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    target = tl.load(T + row)
    dy = tl.where(target == ignored, 0.0, tl.load(DY).to(tl.float32))
    x = tl.load(X + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.exp(x - tl.load(LSE + 2 * row) - tl.load(LSE + 2 * row + 1))
    dx = tl.where(at == target, share - 1.0, share) * dy
    tl.store(DX + row * columns + at, dx.to(DX.dtype.element_ty), mask=inside)


@torch.library.custom_op("autopar::cross_entropy", mutates_args=())
def entropies(x: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """The sum over rows; and for backward each row's largest logit, and the logarithm of the sum of exponentials over
    that.
    """
    columns = x.shape[-1]
    if not backend.runs(x):
        wide = x.to(torch.float32).reshape(-1, columns)
        most = wide.amax(-1)
        return reference(x, target, ignored), torch.stack([most, torch.logsumexp(wide - most[:, None], -1)], -1)
    rows = target.numel()
    losses = torch.empty((rows,), dtype=torch.float32, device=x.device)
    lse = torch.empty((rows, 2), dtype=torch.float32, device=x.device)
    if rows:
        given = (x.contiguous(), target.contiguous(), losses, lse, columns, ignored)
        forward_kernel[(rows,)](*given, BLOCK=BLOCK, num_warps=WARPS)
    return losses.sum(), lse


@entropies.register_fake
def _(x: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    return x.new_empty((), dtype=torch.float32), x.new_empty((*target.shape, 2), dtype=torch.float32)


@torch.library.custom_op("autopar::cross_entropy_backward", mutates_args=())
def entropies_backward(dy: Tensor, x: Tensor, target: Tensor, lse: Tensor, ignored: int) -> Tensor:
    """The gradient of the logits, in their dtype."""
    if not backend.runs(x):
        return through(lambda x: reference(x, target, ignored), dy, x)[0]
    columns, rows = x.shape[-1], target.numel()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        given = (dy, x.contiguous(), target.contiguous(), lse, dx, columns, ignored)
        backward_kernel[(rows, -(-columns // BLOCK))](*given, BLOCK=BLOCK, num_warps=WARPS)
    return dx


@entropies_backward.register_fake
def _(dy: Tensor, x: Tensor, target: Tensor, lse: Tensor, ignored: int) -> Tensor:
    return x.new_empty(x.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, target, ctx.ignored = inputs
    ctx.save_for_backward(x, target, output[1])


def _gradients(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    return entropies_backward(dy, *ctx.saved_tensors, ctx.ignored), None, None


entropies.register_autograd(_gradients, setup_context=_remember)


def cross_entropy(x: Tensor, target: Tensor, ignored: int) -> Tensor:
    """One kernel in the place of the ops of the group."""
    return entropies(x, target, ignored)[0] if backend.is_traced(x) else reference(x, target, ignored)


def _arguments(found: Found) -> Mapping[str, Any] | None:
    """Those of the call, where targets are the places of columns, one a row."""
    x, target = found["x"], found["target"]
    columns = type_of(x).shape[-1]
    is_served = type_of(target).dtype == "int64" and len(type_of(target).shape) == 1 and are_alike([x])
    if "SIZE" in found.bound:
        is_served &= len(found["SIZE"]) == 2 and found["SIZE"][1] == columns
    elif not found.pattern.variant["wide"]:
        is_served &= type_of(x).dtype == "float32" and len(type_of(x).shape) == 2
    else:
        is_served &= len(type_of(x).shape) == 2
    ignored = found["IGNORED"] if "IGNORED" in found.bound else _IGNORED
    return {"x": x, "target": target, "ignored": ignored} if is_served else None


def _patterns() -> list[Pattern]:
    """Logits of single precision, or those that are cast, and viewed, before; ignored targets as torch's or another."""
    found = []
    for before, logits in (
        ("wide = to(input=x, dtype=torch.float32)\nflat = view(input=wide, size=SIZE)\n", "flat"),
        ("wide = to(input=x, dtype=torch.float32)\n", "wide"),
        ("", "x"),
    ):
        for ignored in (", ignore_index=IGNORED", ""):
            call = f"loss = cross_entropy(input={logits}, target=target{ignored}, reduction='sum')"
            found.append(Pattern.of(before + call, wide=bool(before)))
    return found


FAMILY = Family("cross_entropy", tuple(_patterns()), cross_entropy, reference, _arguments)
