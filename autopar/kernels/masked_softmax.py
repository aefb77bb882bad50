"""A softmax of scores with the ops before it: scores are scaled, capped by a tanh, and masked by a sum."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels import backend
from autopar.kernels.backend import jit, tl
from autopar.kernels.custom_ops import call_of, custom_op
from autopar.kernels.family import FLOATS, Family, are_alike, through
from autopar.kernels.patterns import Match, Pattern

MOST_COLUMNS = 16384  # longest row that a program holds


def reference(
    x: Tensor, mask: Tensor | None, scale: float | None, cap: float | None, is_wide: bool, dtype: torch.dtype
) -> Tensor:
    """The ops of the group."""
    x = _capped(x, scale, cap)
    x = x if mask is None else x + mask
    return torch.softmax(x, -1, dtype=torch.float32 if is_wide else None).to(dtype)


def _capped(x: Tensor, scale: float | None, cap: float | None) -> Tensor:
    x = x if scale is None else x * scale
    return x if cap is None else torch.tanh(x / cap) * cap


@jit
def _tanh(x):
    """tanh by an exponential; near zero, where that would cancel, by its series."""
    square = x * x
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    series = 0.13333333333333333 + square * (-0.053968253968253968 + square * 0.021869488536155203)
    near = x * (1.0 + square * (-0.33333333333333333 + square * series))
    return tl.where(square < 0.04, near, tl.where(x < 0, -far, far))


@jit
def forward_kernel(X, MASK, Y, columns, heads, queries, of_batch, of_head, of_query, of_key, scale, cap,
                   SCALES: tl.constexpr, CAPS: tl.constexpr, MASKS: tl.constexpr, ROWS: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """Compute the masked softmax of some queries of one head per program.

    Programs of all heads follow each other, as their masks are often the same. The mask is then cached; it is read by
    its strides. Scores are rounded after each step, as they are by ops.
    """
    at = tl.arange(0, BLOCK)[None, :]
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    tiles = tl.cdiv(queries, ROWS)
    query = tile % tiles * ROWS + tl.arange(0, ROWS)[:, None]
    batch = (tile // tiles).to(tl.int64)
    row = (batch * heads + head) * queries + query
    inside = (query < queries) & (at < columns)
    x = tl.load(X + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    if SCALES:
        x = (x * scale).to(X.dtype.element_ty).to(tl.float32)
    if CAPS:
        x = _tanh((x / cap).to(X.dtype.element_ty).to(tl.float32)).to(X.dtype.element_ty).to(tl.float32)
        x = (x * cap).to(X.dtype.element_ty).to(tl.float32)
    if MASKS:
        place = batch * of_batch + head.to(tl.int64) * of_head + query.to(tl.int64) * of_query
        mask = tl.load(MASK + place + at * of_key, mask=inside, other=0.0).to(tl.float32)
        x = (x + mask).to(X.dtype.element_ty).to(tl.float32)
    x = tl.where(at < columns, x, -float("inf"))
    e = tl.exp(x - tl.max(x, 1)[:, None])
    tl.store(Y + row * columns + at, (e / tl.sum(e, 1)[:, None]).to(Y.dtype.element_ty), mask=inside)


@jit
def backward_kernel(DY, X, Y, DX, rows, columns, scale, cap, SCALES: tl.constexpr, CAPS: tl.constexpr,
                    ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Some rows per program; the derivative of the cap is recomputed from the scores."""
    at = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (at < columns)
    dy = tl.load(DY + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(Y + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, 1)[:, None])
    if CAPS:
        x = tl.load(X + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        if SCALES:
            x *= scale
        t = _tanh(x / cap)
        dx *= 1.0 - t * t
    if SCALES:
        dx *= scale
    tl.store(DX + row * columns + at, dx.to(DX.dtype.element_ty), mask=inside)


def held(columns: int, rows: int) -> dict[str, int]:
    """The tile that a program holds of so many rows and columns, and its warps: one for short rows."""
    block = 1 << max(4, (columns - 1).bit_length())
    most = 1 << (rows - 1).bit_length()
    warps = 1 if block <= 1024 else block // 512
    return {"ROWS": min(most, max(1, 1024 // block)), "BLOCK": block, "num_warps": warps}


def _numbers(scale: float | None, cap: float | None) -> tuple[float, float]:
    """Scale and cap as the kernels take them; one where there is none, which is not read."""
    return 1.0 if scale is None else scale, 1.0 if cap is None else cap


def _of_dtype(x: Tensor, *arguments: Any) -> Tensor:
    """An empty result of the dtype that is the last argument."""
    return x.new_empty(x.shape, dtype=arguments[-1])


@custom_op("autopar::masked_softmax", fake=_of_dtype)
def shares(
    x: Tensor, mask: Tensor | None, scale: float | None, cap: float | None, is_wide: bool, dtype: torch.dtype
) -> Tensor:
    """The softmax along the last dim, in `dtype`."""
    if not backend.runs(x):
        return reference(x, mask, scale, cap, is_wide, dtype).contiguous()
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if y.numel():
        x = x.contiguous()
        columns = x.shape[-1]
        batches, heads, queries, _ = whole = (1,) * (4 - x.dim()) + tuple(x.shape)
        strides = (0, 0, 0, 0) if mask is None else mask.expand(whole).stride()
        given = (x, x if mask is None else mask, y, columns, heads, queries, *strides)
        flags = {"SCALES": scale is not None, "CAPS": cap is not None, "MASKS": mask is not None}
        tile = held(columns, queries)
        grid = (batches * heads * -(-queries // tile["ROWS"]),)
        forward_kernel[grid](*given, *_numbers(scale, cap), **flags, **tile)
    return y


@custom_op("autopar::masked_softmax_backward", fake=_of_dtype)
def shares_backward(
    dy: Tensor, x: Tensor | None, y: Tensor, scale: float | None, cap: float | None, dtype: torch.dtype
) -> Tensor:
    """The gradient of the scores in their dtype; `x`, the scores, is needed where they were capped."""
    if not backend.runs(dy):
        wide = y.to(torch.float32)
        ds = torch.ops.aten._softmax_backward_data(dy.to(torch.float32), wide, -1, dtype)
        if x is None:
            return (ds if scale is None else ds * scale).contiguous()
        return through(lambda x: _capped(x, scale, cap), ds, x)[0]
    dx = torch.empty(y.shape, dtype=dtype, device=y.device)
    if dx.numel():
        columns = y.shape[-1]
        y = y.contiguous()
        rows = y.numel() // columns
        given = (dy.contiguous(), y if x is None else x.contiguous(), y, dx, rows, columns)
        flags = {"SCALES": scale is not None, "CAPS": cap is not None}
        tile = held(columns, rows)
        backward_kernel[(-(-rows // tile["ROWS"]),)](*given, *_numbers(scale, cap), **flags, **tile)
    return dx


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, ctx.scale, ctx.cap, _, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(output, *(() if ctx.cap is None else (x,)))


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None, None]:
    y, *x = ctx.saved_tensors
    dx = shares_backward(dy, x[0] if x else None, y, ctx.scale, ctx.cap, ctx.dtype)
    return dx, None, None, None, None, None


shares.register_autograd(_gradients, setup_context=_remember)
masked_softmax = call_of(shares, reference)


def _is_served(found: Match) -> bool:
    """Whether a row of the last dim fits a program and the mask is untrained."""
    x = found["x"]
    mask = found.bound.get("mask")
    about, result = type_of(x), type_of(found.result)
    is_row = 0 < len(about.shape) <= 4 and found["DIM"] in (-1, len(about.shape) - 1)
    is_held = is_row and about.shape[-1] <= MOST_COLUMNS
    are_floats = are_alike([n for n in (x, mask) if n is not None]) and result.dtype in FLOATS
    is_trained = mask is not None and type_of(mask).requires_grad
    return is_held and are_floats and result.shape == about.shape and not is_trained


def _keeps(found: Match) -> list[Any]:
    """The values that backward reads: the result, and the scores where they were capped."""
    return [found.result, *([found["x"]] if "CAP" in found.bound else [])]


_SCALED = "{to} = mul(input={of}, other=SCALE)\n"
_CAPPED = "less = div(input={of}, other=CAP)\nbent = tanh(input=less)\n{to} = mul(input=bent, other=CAP)\n"
_MASKED = "{to} = add(input={of}, other=mask)\n"


def _patterns() -> list[Pattern]:
    """The patterns, those with more ops first; a softmax with nothing before or behind it stays an op."""
    found = []
    for is_cast, is_wide, *has in itertools.product((True, False), (True, False), *[(True, False)] * 3):
        text = ""
        of = "x"
        for there, step, to in zip(has, (_SCALED, _CAPPED, _MASKED), ("scaled", "capped", "masked"), strict=True):
            if there:
                text += step.format(of=of, to=to)
                of = to
        wide = ", dtype=torch.float32" if is_wide else ""
        text += f"{'s' if is_cast else 'y'} = softmax(input={of}, dim=DIM{wide})\n"
        text += "y = to(input=s, dtype=DTYPE)\n" if is_cast else ""
        if is_cast or any(has):
            found.append(Pattern.of(text, is_wide=is_wide))
    return sorted(found, key=lambda pattern: -len(pattern.steps))


FAMILY = Family(
    "masked_softmax",
    tuple(_patterns()),
    masked_softmax,
    reference,
    _is_served,
    others=lambda found: {"dtype": type_of(found.result).torch_dtype},
    keeps=_keeps,
)
