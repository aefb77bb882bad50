"""Replacements for functions of torch that read values or draw inside, and for calls that no rule of their op covers.

    cov, corrcoef      torch checks whether weights are integers, and the sign of the divisor
    combinations       torch makes a mask and counts it
    ctc_loss           torch reads the lengths
    gaussian_nll_loss  torch checks for negative variances, and clamps behind autograd
    linear             with a bias that is not a vector of its columns: a product and a sum
    repeat_interleave  of a dim by a number: a dim more, which is merged, so that heads stay cut
    lstm, gru, rnn     with dropout between layers: a layer at a time
    _foreach_...       lists of tensors: `lists.py`
    Gamma              torch lifts the smallest draws through a detached view
    BatchNorm          with momentum=None: torch reads the number of batches

They compute what torch computes, and draw in the same order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions.gamma import Gamma
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.runtime.private import standard_gamma
from autopar.tracer.lists import FOR_EACH


def cov(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """Covariance of rows; columns are observations."""
    rows = input.view(1, -1) if input.dim() < 2 else input
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    if weights is None:
        count: Any = rows.shape[1]
        centred = rows - (rows.sum(1) / count).unsqueeze(1)
        divisor: Any = max(count - correction, 0)
        weighted = centred
    else:
        count = weights.sum()
        centred = rows - ((rows * weights).sum(1) / count).unsqueeze(1)
        taken = correction if aweights is None or correction == 0 else correction * (weights * aweights).sum() / count
        divisor = (count - taken).clamp(min=0)
        weighted = centred * weights
    return (torch.mm(centred, weighted.t().conj()) / divisor).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """Correlation of rows: covariance scaled to [-1, 1]."""
    c = cov(input)
    if c.dim() == 0:
        return c / c
    deviation = torch.diagonal(c).sqrt()
    return (c / deviation.view(-1, 1) / deviation.view(1, -1)).clamp(-1, 1)


def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """Every choice of r elements of a vector, as rows."""
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = list(choose(range(input.shape[0]), r))
    if not places or not r:
        return input.new_empty((0,) if not r else (0, r))
    return input[torch.tensor(places)]


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: Any = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """CTC loss; lengths are tensors, lists or tuples."""
    reduction = {0: "none", 1: "mean", 2: "sum"}.get(reduction, reduction)
    if log_probs.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled("cpu"):
        log_probs = log_probs.float()
    is_batch = log_probs.dim() == 3
    batch = log_probs if is_batch else log_probs.unsqueeze(1)
    rows = targets if is_batch or targets.dim() == 2 else targets.unsqueeze(0)
    lengths = [x if isinstance(x, Tensor) else torch.tensor(x) for x in (input_lengths, target_lengths)]
    read, wanted = (x.reshape(-1) for x in lengths)
    losses = torch.ops.autopar.ctc_losses(batch, rows, read, wanted, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == float("inf"), 0, losses)
    if reduction == "mean":
        return (losses / wanted.clamp(min=1).to(losses.dtype)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses if is_batch else losses.squeeze(0)


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Negative log-likelihood of a mean and a variance; a negative variance gives NaN, where torch raises."""
    if isinstance(var, float):
        var = var * torch.ones_like(input)
    if input.shape[:-1] == var.shape != input.shape:
        var = var.unsqueeze(-1)
    differ = [n for n, m in zip(input.shape, var.shape, strict=False) if n != m]
    if input.dim() != var.dim() or len(differ) > 1:
        raise ValueError("var is of incorrect size")
    least = torch.where(var < eps, var - var.detach() + eps, var)  # a clamp that autograd does not see
    least = torch.where(var < 0, torch.nan, least)
    loss = 0.5 * (least.log() + (input - target) ** 2 / least)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def by_layers(recurrent: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrent function as one call per layer, with dropout between layers."""

    def call(
        input: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        has_many = isinstance(hx, (tuple, list))  # a state and a cell
        held = hx if has_many else (hx,)
        directions = 2 if bidirectional else 1
        each = len(params) // num_layers
        values = input.transpose(0, 1) if batch_first else input
        ends = []
        for layer in range(num_layers):
            states = [h.narrow(0, layer * directions, directions) for h in held]
            weights = params[layer * each : (layer + 1) * each]
            how = has_biases, 1, 0.0, train, bidirectional, False
            values, *after = recurrent(values, states if has_many else states[0], weights, *how)
            ends.append(after)
            if layer + 1 < num_layers:
                values = F.dropout(values, dropout, True)
        return values.transpose(0, 1) if batch_first else values, *(torch.cat(end) for end in zip(*ends, strict=True))

    return call


def gamma_rsample(distribution: Gamma, sample_shape: Any = ()) -> Tensor:
    """Gamma draws; too small ones are lifted to the least normal number, and keep their gradient."""
    shape = distribution._extended_shape(torch.Size(sample_shape))
    value = standard_gamma(distribution.concentration.expand(shape)) / distribution.rate.expand(shape)
    least = torch.finfo(value.dtype).tiny
    return torch.where(value < least, value + (least - value.detach()), value)


def cumulative_batch_norm(module: _BatchNorm, input: Tensor) -> Tensor:
    """Batch norm whose running statistics are the mean over all batches so far."""
    module._check_input_dim(input)
    module.num_batches_tracked.add_(1)
    running = [t for t in (module.running_mean, module.running_var) if t is not None]
    before = [t.clone() for t in running]
    statistics = module.running_mean, module.running_var
    result = F.batch_norm(input, *statistics, module.weight, module.bias, True, 1.0, module.eps)
    # A momentum of 1 has set the running statistics to those of this batch.
    for now, old in zip(running, before, strict=True):
        share = 1.0 / module.num_batches_tracked.to(now.dtype)
        now.copy_(now * share + old * (1 - share))
    return result


def averages_over_all(module: _BatchNorm) -> bool:
    """Whether this batch norm averages its running statistics over all batches."""
    counts = module.track_running_stats and module.num_batches_tracked is not None
    return module.training and counts and module.momentum is None


def linear_and_sum(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer whose bias is broadcast like any operand."""
    return F.linear(input, weight) + bias


def repeated_in_place(input: Tensor, repeats: int, dim: int, *, output_size: int | None = None) -> Tensor:
    """repeat_interleave: each row of a dim a few times, one beside the other."""
    dim %= input.dim()
    sizes = (*input.shape[: dim + 1], repeats, *input.shape[dim + 1 :])
    return input.unsqueeze(dim + 1).expand(sizes).flatten(dim, dim + 1)


def repeats_rows(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a repeat_interleave repeats the rows of one dim by a number, so that the result is a copy."""
    given: dict[str, Any] = dict(zip(("input", "repeats", "dim"), args, strict=False)) | kwargs
    x, repeats, dim = given.get("input"), given.get("repeats"), given.get("dim")
    if not isinstance(x, Tensor) or not isinstance(repeats, int) or not isinstance(dim, int):
        return False
    return repeats > 1 and -x.dim() <= dim < x.dim() and x.shape[dim] > 1


def adds_no_vector(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a linear has a bias that is not one number per column."""
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    bias = given.get("bias")
    weight = given["weight"]
    return isinstance(bias, Tensor) and weight.dim() == 2 and tuple(bias.shape) != (weight.shape[0],)


def drops_between(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call of a recurrent function drops between layers.

    Calls with packed sequences have their arguments in another order, and are left out.
    """
    is_plain = len(args) == 9 and isinstance(args[2], (tuple, list))
    return is_plain and args[4] > 1 and bool(args[5]) and bool(args[6])


def _always(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return True


# What is spelled otherwise, how, and which calls of it.
RESPELLED: dict[Any, tuple[Callable[..., Any], Callable[..., bool]]] = {
    **dict.fromkeys((torch.cov, Tensor.cov), (cov, _always)),
    **dict.fromkeys((torch.corrcoef, Tensor.corrcoef), (corrcoef, _always)),
    **dict.fromkeys((torch.ctc_loss, F.ctc_loss), (ctc_loss, _always)),
    torch.combinations: (combinations, _always),
    F.gaussian_nll_loss: (gaussian_nll_loss, _always),
    F.linear: (linear_and_sum, adds_no_vector),
    **dict.fromkeys((torch.repeat_interleave, Tensor.repeat_interleave), (repeated_in_place, repeats_rows)),
    **{f: (calls, _always) for f, calls in FOR_EACH.items()},
    **{f: (by_layers(f), drops_between) for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
}
