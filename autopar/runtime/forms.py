"""Local forms: functions for ops that compute something else on a part than on the whole, or that draw by position.

    embedding_part            the vocabulary is cut: a token that lies elsewhere looks up zero
    cross_entropy_part        the classes are cut: maximum and sum are reduced, the target's logit counts where it lies
    amax_part, logsumexp_part  the reduced dim is cut: partial results are reduced over devices
    dropout_by_position       the mask is a function of the place in the whole tensor; so are all draws that follow
    attention_by_position     attention with dropout, written out; without it, where queries are cut:
                              runtime/attention.py
    arange_part               a count that begins where the part does
    cumsum_part               a running sum that begins with the totals of the parts before it

`cuts` name the axes that cut a dim, major first, each with the size of the dim before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.collectives import TIME
from autopar.runtime.private import dirichlet_grad, standard_gamma_grad
from autopar.runtime.random import Cuts, Draws, kept, places_of, start_of, wide
from autopar.runtime.sampling import gamma_at, poisson_at


def literal(data: Any, dtype: torch.dtype, device: str) -> Tensor:
    """A constant that the model writes out, such as torch.tensor([1, 2])."""
    return torch.tensor(data, dtype=dtype, device=device)


def embedding_part(
    input: Tensor, weight: Tensor, cuts: Cuts, padding_idx: int | None = None, sums: Sequence[str] = ()
) -> Tensor:
    """Rows of this device's part of the vocabulary, zero for tokens that lie elsewhere: P(sum).

    The weight may be a part of a sum itself, over the axes `sums`.
    """
    place = input - start_of(weight, cuts)
    here = (place >= 0) & (place < weight.shape[0])
    rows = F.embedding(torch.where(here, place, 0), weight)
    if padding_idx is not None:  # the padding row is read, but gets no gradient
        rows = torch.where((input != padding_idx).unsqueeze(-1), rows, rows.detach())
    words = cuts[0][1] if cuts else weight.shape[0]
    # an index out of range: torch raises an error on the host; one device of several can only give NaN
    none = torch.where((input < 0) | (input >= words), torch.nan, 0.0).to(weight.dtype)
    elsewhere = reduced(none, "lodge", [*(axis for axis, _ in cuts), *sums])  # one device counts it
    return torch.where(here.unsqueeze(-1), rows, elsewhere.unsqueeze(-1))


def cross_entropy_part(
    input: Tensor,
    target: Tensor,
    cuts: Cuts,
    classes: int,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Summed cross entropy of this device's part of the classes; the sum over devices is the loss: P(sum).

    `classes` is the number of all classes.
    """
    axes = [axis for axis, _ in cuts]
    e = label_smoothing
    top = reduced(input.detach().amax(1, keepdim=True), "all_reduce_max", axes)
    total = reduced((input - top).exp().sum(1, keepdim=True), "all_reduce", axes)
    log_sum = reduced((top + total.log()).squeeze(1), "lodge", axes)  # one device counts it
    target = target.long()
    place = target - start_of(input, cuts)
    counts = target != ignore_index
    here = counts & (place >= 0) & (place < input.shape[1])
    place = torch.where(here, place, 0)
    picked = input.gather(1, place.unsqueeze(1)).squeeze(1)
    if weight is None:
        of_target, of_all = here.to(input.dtype) * (1.0 - e), counts.to(input.dtype)
        spread = input.sum(1) if e else None
    else:
        of_target = torch.where(here, weight[place], 0) * (1.0 - e)
        of_all = reduced(of_target, "all_reduce", axes)
        if e:
            of_all = of_all + torch.where(counts, reduced(weight.sum(), "all_reduce", axes) * (e / classes), 0)
        spread = (input * weight.view(1, -1, *[1] * (input.dim() - 2))).sum(1) if e else None
    loss = torch.where(counts, log_sum * of_all, 0) - torch.where(here, picked * of_target, 0)
    if spread is not None:
        loss = loss - torch.where(counts, spread * (e / classes), 0)
    # a target out of range: torch raises an error on the host; one device of several can only give NaN
    is_none = counts & ((target < 0) | (target >= classes))
    return (loss + torch.where(is_none, torch.nan, 0.0).to(loss.dtype)).sum()


def amax_part(
    input: Tensor, axes: Sequence[str], dim: Any = None, keepdim: bool = False, least: bool = False
) -> Tensor:
    """Maximum (or minimum, with `least`) over what all devices of the axes hold.

    The gradient is shared equally among all elements that attain it, as torch does.
    """
    dims = list(range(input.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    floats = input.is_floating_point()
    signed = input if floats else input.long()
    signed = -signed if least else signed
    value = top = reduced(signed.detach().amax(dims, keepdim=True), "all_reduce_max", axes)
    if floats:
        mine = signed.detach() == top
        # a maximum over devices may drop a NaN, which a sum keeps
        counted = torch.where(signed.detach().isnan(), torch.nan, mine.to(input.dtype))
        count = reduced(counted.sum(dims, keepdim=True), "all_reduce", axes)
        slope = torch.where(mine & signed.isfinite(), signed - signed.detach(), 0)  # zero, but carries the gradient
        value = top + slope.sum(dims, keepdim=True) / count
    value = (-value if least else value).to(input.dtype)
    return value if keepdim else value.squeeze(dims)


def logsumexp_part(input: Tensor, axes: Sequence[str], dim: Any, keepdim: bool = False) -> Tensor:
    """log(sum(exp)) over what all devices of the axes hold."""
    dims = [dim] if isinstance(dim, int) else list(dim)
    top = reduced(input.detach().amax(dims, keepdim=True), "all_reduce_max", axes)
    top = torch.where(top.isfinite(), top, 0)
    value = top + reduced((input - top).exp().sum(dims, keepdim=True), "all_reduce", axes).log()
    return value if keepdim else value.squeeze(dims)


def _seen(query: Tensor, key: Tensor, cuts: Cuts) -> Tensor:
    places = torch.arange(query.shape[-2], device=query.device) + start_of(query, cuts)
    return places.unsqueeze(1) >= torch.arange(key.shape[-2], device=query.device)


def batch_norm_part(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    axes: Sequence[str],
    count: int,
    updates: bool,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Batch norm with the statistics of the whole batch, of which each device holds a part.

    `count` is the number of values per channel in the whole batch. With `updates` the new running statistics come
    beside the output.
    """
    y, mean, var = BatchNormPart.apply(input, weight, bias, tuple(axes), count, eps)
    if not updates:
        return y
    assert running_mean is not None and running_var is not None
    new_mean = running_mean * (1 - momentum) + momentum * mean
    new_var = running_var * (1 - momentum) + momentum * var * (count / max(1, count - 1))
    return y, new_mean.to(running_mean.dtype), new_var.to(running_var.dtype)


class BatchNormPart(torch.autograd.Function):
    """Autograd function of `batch_norm_part`: it saves its input, as torch does, and communicates once in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        axes: tuple[str, ...],
        count: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dims, shape = _over_channels(input)
        x = _wide(input)
        mean = exchanged(x.sum(dims), axes) / count
        centred = x - mean.view(shape)
        var = exchanged((centred * centred).sum(dims), axes) / count
        scale = (var + eps).rsqrt()
        y = centred * scale.view(shape)
        if weight is not None:
            y = y * weight.view(shape)
        if bias is not None:
            y = y + bias.view(shape)
        ctx.save_for_backward(input, weight, mean, scale)
        ctx.axes = axes
        ctx.count = count
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(mean, var)
        return y.to(input.dtype), mean, var

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
        input, weight, mean, scale = ctx.saved_tensors
        dims, shape = _over_channels(input)
        g = _wide(gradient)
        y = (_wide(input) - mean.view(shape)) * scale.view(shape)
        of_bias, of_weight = g.sum(dims), (g * y).sum(dims)
        shared = exchanged(torch.stack([of_bias, of_weight]), ctx.axes) / ctx.count
        x = g - shared[0].view(shape) - y * shared[1].view(shape)
        x = x * (scale if weight is None else scale * weight).view(shape)
        return (
            x.to(input.dtype),
            None if weight is None else of_weight.to(weight.dtype),
            of_bias if ctx.has_bias else None,
            None,
            None,
            None,
        )


def _over_channels(x: Tensor) -> tuple[list[int], list[int]]:
    """The dims that a batch norm sums over, and the shape in which a value per channel broadcasts to `x`."""
    return [d for d in range(x.dim()) if d != 1], [1, -1, *[1] * (x.dim() - 2)]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def dropout_by_position(
    input: Tensor, key: Tensor, op: int, shape: Sequence[int], cuts: Sequence[Cuts], p: float = 0.5
) -> Tensor:
    """Dropout whose mask does not depend on how the tensor is cut."""
    keep = kept(key, op, p, shape, cuts, input.shape)
    return torch.where(keep, input if p >= 1.0 else input * (1.0 / (1.0 - p)), 0)


def channel_dropout_by_position(
    input: Tensor, key: Tensor, op: int, shape: Sequence[int], cuts: Sequence[Cuts], p: float = 0.5
) -> Tensor:
    """Dropout of whole channels: one draw for each place in the leading dims, whose sizes `shape` gives."""
    keep = _over_the_rest(kept(key, op, p, shape, cuts, input.shape[: len(shape)]), input)
    return torch.where(keep, input if p >= 1.0 else input * (1.0 / (1.0 - p)), 0)


def alpha_dropout_by_position(
    input: Tensor, key: Tensor, op: int, shape: Sequence[int], cuts: Sequence[Cuts], p: float = 0.5
) -> Tensor:
    """Dropout to the lowest value of selu, scaled and shifted so that mean and variance stay."""
    if p >= 1.0:
        return input * 0
    low = -1.7580993408473766  # the lowest value of selu
    scale = ((low * low * p + 1) * (1 - p)) ** -0.5
    keep = _over_the_rest(kept(key, op, p, shape, cuts, input.shape[: len(shape)]), input)
    return torch.where(keep, input * scale, low * scale) - low * scale * p


def _over_the_rest(draws: Tensor, input: Tensor) -> Tensor:
    """Draws for the leading dims of a tensor, which broadcast over its other dims."""
    return draws.view(*draws.shape, *[1] * (input.dim() - draws.dim()))


def drawn_by_position(
    kind: str,
    key: Tensor,
    op: int,
    shape: Sequence[int],
    cuts: Sequence[Cuts],
    local: Sequence[int],
    dtype: torch.dtype,
    a: float | None = None,
    b: float | None = None,
) -> Tensor:
    """Draws of a distribution, as torch's in-place method `kind` makes them with parameters `a` and `b`."""
    draws = Draws(key, op, shape, cuts, local)

    def u() -> Tensor:
        return draws.uniform(wide(dtype))

    def whole_numbers() -> Tensor:
        if a is None:
            first, last = 0, _whole_numbers_of(dtype)
        else:
            first, last = (0, int(a)) if b is None else (int(a), int(b))
        if last - first <= 2**32:
            return (draws.uniform(torch.float64) * (last - first)).floor() + first
        drawn = draws.whole_numbers()
        return (drawn & (last - 1)) if last - first == 2**63 else drawn.remainder(last - first) + first

    kinds: dict[str, Callable[[], Tensor]] = {
        "uniform": lambda: draws.uniform(dtype) * ((1.0 if b is None else b) - (a or 0.0)) + (a or 0.0),
        "normal": lambda: draws.normal(dtype) * (1.0 if b is None else b) + (a or 0.0),
        "exponential": lambda: -torch.log1p(-u()) / (1.0 if a is None else a),
        "log_normal": lambda: (draws.normal(dtype) * (2.0 if b is None else b) + (1.0 if a is None else a)).exp(),
        "cauchy": lambda: torch.tan(math.pi * (u() - 0.5)) * (1.0 if b is None else b) + (a or 0.0),
        "geometric": lambda: (torch.log1p(-u()) / math.log1p(-(a or 0.0))).floor() + 1,
        "random": whole_numbers,
    }
    return kinds[kind]().to(dtype)


def _whole_numbers_of(dtype: torch.dtype) -> int:
    """Number of integers from 0 from which `random_` draws where no range is given."""
    if dtype.is_floating_point:  # up to the largest below which every integer is representable
        return 2 ** (1 - round(math.log2(torch.finfo(dtype).eps))) + 1
    return 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1


def bernoulli_by_position(
    input: Tensor, key: Tensor, op: int, shape: Sequence[int], cuts: Sequence[Cuts], p: Any = None
) -> Tensor:
    """Ones with probability `p`, or with the probabilities in `input`."""
    draws = Draws(key, op, shape, cuts, input.shape).uniform(torch.float64)
    drawn = (draws < (input.detach() if p is None else p)).to(input.dtype)
    return _of_no_slope(drawn, input) if p is None else drawn


def multinomial_by_position(
    input: Tensor,
    key: Tensor,
    op: int,
    shape: Sequence[int],
    cuts: Sequence[Cuts],
    num_samples: int,
    replacement: bool = False,
) -> Tensor:
    """Categories drawn by their weights: independent draws, or those whose exponential clocks ring first.

    The latter is drawing without replacement.
    """
    weights = input.detach().double()
    if not replacement:
        clocks = -torch.log1p(-Draws(key, op, shape, cuts, weights.shape).uniform(torch.float64)) / weights
        return clocks.topk(num_samples, largest=False).indices
    edges = weights.cumsum(-1)
    draws = Draws(key, op, (*shape[:-1], num_samples), (*cuts[:-1], ()), (*weights.shape[:-1], num_samples))
    places = draws.uniform(torch.float64) * edges[..., -1:]
    return torch.searchsorted(edges, places, right=True).clamp(max=weights.shape[-1] - 1)


def normal_by_position(
    mean: Any,
    key: Tensor,
    op: int,
    shape: Sequence[int],
    cuts: Sequence[Cuts],
    local: Sequence[int],
    dtype: torch.dtype,
    std: Any = 1.0,
) -> Tensor:
    """Normal draws, each with its own mean and standard deviation."""
    numbers = [x.detach() if isinstance(x, Tensor) else x for x in (mean, std)]
    draws = Draws(key, op, shape, cuts, local).normal(dtype)
    return _of_no_slope((draws * numbers[1] + numbers[0]).to(dtype), mean, std)


def _of_no_slope(drawn: Tensor, *operands: Any) -> Tensor:
    """The draws, with zero gradients instead of none for their distribution's parameters, as in torch."""
    for operand in operands:
        if isinstance(operand, Tensor) and operand.requires_grad:
            drawn = torch.where(torch.zeros((), dtype=torch.bool, device=drawn.device), operand, drawn)
    return drawn


def permutation_by_position(n: int, key: Tensor, op: int, dtype: torch.dtype) -> Tensor:
    """A random permutation: the order of 64 random bits per place."""
    return Draws(key, op, (n,), ((),), (n,)).whole_numbers().argsort(stable=True).to(dtype)


def rrelu_by_position(
    input: Tensor,
    key: Tensor,
    op: int,
    shape: Sequence[int],
    cuts: Sequence[Cuts],
    lower: float = 1 / 8,
    upper: float = 1 / 3,
) -> Tensor:
    """Scale each element that is not positive by a random slope of its own."""
    slope = Draws(key, op, shape, cuts, input.shape).uniform(wide(input.dtype)) * (upper - lower) + lower
    return torch.where(input > 0, input, input * slope.to(input.dtype))


def poisson_by_position(input: Tensor, key: Tensor, op: int, shape: Sequence[int], cuts: Sequence[Cuts]) -> Tensor:
    """Poisson draws with the rates in `input`."""
    drawn = poisson_at(input.detach(), key, op, list(shape), places_of(key, cuts, input.shape))
    return _of_no_slope(drawn.to(input.dtype), input)


def gamma_by_position(input: Tensor, key: Tensor, op: int, shape: Sequence[int], cuts: Sequence[Cuts]) -> Tensor:
    """Gamma draws of scale 1 with the shapes in `input`; the gradient is torch's."""
    sample = gamma_at(input.detach(), key, op, list(shape), places_of(key, cuts, input.shape)).to(input.dtype)
    return _Gamma.apply(input, sample.clamp(min=torch.finfo(input.dtype).tiny))


def dirichlet_by_position(input: Tensor, key: Tensor, op: int, shape: Sequence[int], cuts: Sequence[Cuts]) -> Tensor:
    """Dirichlet draws along the last dim: gamma draws as shares of their sum."""
    parts = gamma_at(input.detach(), key, op, list(shape), places_of(key, cuts, input.shape))
    share = parts / parts.sum(-1, keepdim=True)
    about = torch.finfo(input.dtype)
    return _Dirichlet.apply(input, share.to(input.dtype).clamp(about.tiny, 1 - about.eps / 2))


class _Sample(torch.autograd.Function):
    """A sample with a gradient of its distribution's parameters, which each class computes from both."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor, sample: Tensor) -> Tensor:
        ctx.save_for_backward(alpha, sample)
        return sample.clone()


class _Gamma(_Sample):
    """A gamma sample with the gradient of its shape parameter."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        alpha, sample = ctx.saved_tensors
        return gradient * standard_gamma_grad(alpha, sample), None


class _Dirichlet(_Sample):
    """A Dirichlet sample with the gradient of its concentrations."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        alpha, sample = ctx.saved_tensors
        total = alpha.sum(-1, keepdim=True).expand_as(alpha).contiguous()
        along = dirichlet_grad(sample, alpha.contiguous(), total)
        return along * (gradient - (sample * gradient).sum(-1, keepdim=True)), None


def arange_part(start: float, step: float, length: int, cuts: Cuts, dtype: torch.dtype) -> Tensor:
    """This device's part of an arange."""
    if not dtype.is_floating_point:  # torch too truncates the arguments before it counts
        start, step = int(start), int(step)
    places = torch.arange(length)
    places = places + start_of(places, cuts)
    if isinstance(start, float) or isinstance(step, float):
        places = places.double()
    return (places * step + start).to(dtype)


def cumsum_part(input: Tensor, dim: int, cuts: Cuts, dtype: torch.dtype | None = None) -> Tensor:
    """Running sum of this device's part of a dim; `cuts` are those of a dim of one number a part."""
    here = input.cumsum(dim, dtype=dtype)
    places = torch.arange(cuts[0][1], device=input.device).view([-1 if d == dim else 1 for d in range(input.dim())])
    own = start_of(input, cuts)
    total = torch.where(places == own, input.sum(dim, keepdim=True, dtype=here.dtype), 0)
    totals = exchanged(total, [axis for axis, _ in cuts])
    return here + torch.where(places < own, totals, 0).sum(dim, keepdim=True, dtype=here.dtype)


def rows_of_turn(input: Tensor, dim: int, turns: int, size: int) -> Tensor:
    """The rows of a value that belong to the current turn, out of each block of `size` rows."""
    places = torch.arange(size // turns, device=input.device)
    places = places + start_of(places, ((TIME, size),))
    if input.shape[dim] == size:
        return input.index_select(dim, places)
    return input.unflatten(dim, (-1, size)).index_select(dim + 1, places).flatten(dim, dim + 1)


def value_of_first_turn(input: Tensor, turns: int) -> Tensor:
    """The value in the first turn and zeros in the others, so that the sum over turns is the value."""
    turn = start_of(input, ((TIME, turns),))
    return torch.where(turn == 0, input, torch.zeros((), dtype=input.dtype, device=input.device))


def attention_by_position(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    random_key: Tensor,
    op: int,
    shape: Sequence[int],
    cuts: Sequence[Cuts],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with dropout, written out: scores, mask, softmax, dropout by position, product.

    `shape` is that of the whole scores.
    """
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = _seen(query, key, cuts[-2])
    if attn_mask is not None:
        scores = (
            scores.masked_fill(attn_mask.logical_not(), -torch.inf)
            if attn_mask.dtype == torch.bool
            else scores + attn_mask
        )
    blind = (scores == -torch.inf).all(-1, keepdim=True)  # a query that sees nothing attends to nothing
    weights = torch.where(blind, 0, torch.where(blind, 0, scores).softmax(-1))
    return dropout_by_position(weights, random_key, op, shape, cuts, dropout_p) @ value


def exchanged(x: Tensor, axes: Sequence[str]) -> Tensor:
    """Sum over several axes, in forward and for the gradient: each device makes something else of the sum."""
    steps = "; ".join(f"all_reduce@{a}" for a in axes)
    return torch.ops.autopar.convert(x, steps, steps, list(x.shape))


def reduced(x: Tensor, step: str, axes: Sequence[str]) -> Tensor:
    """Apply a step over several axes, whose gradient needs none: it is whole on each of them already."""
    return torch.ops.autopar.convert(x, "; ".join(f"{step}@{a}" for a in axes), "", list(x.shape)) if axes else x
