"""CTC loss of each sequence, as an op whose shapes do not depend on lengths.

torch's own op reads the lengths to shape what it saves for backward. Here lengths are read when the op runs, in forward
and in backward, and backward recomputes the sums over paths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.runtime.private import ctc_loss, ctc_loss_backward

_Context = Any


@torch.library.custom_op("autopar::ctc_losses", mutates_args=())
def ctc_losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Tensor:
    """Negative log-likelihood of each sequence; with `zero_infinity` an infinite one has no gradient."""
    if log_probs.shape[1] == 0:
        return log_probs.new_zeros(0)
    lengths = input_lengths.tolist(), target_lengths.tolist()
    return ctc_loss(log_probs, targets.contiguous(), *lengths, blank, zero_infinity)[0].clone()


@ctc_losses.register_fake
def _(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@torch.library.custom_op("autopar::ctc_gradient", mutates_args=())
def ctc_gradient(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Gradient of the log-probabilities from the gradients of the losses."""
    if log_probs.shape[1] == 0:
        return torch.zeros_like(log_probs)
    given = log_probs, targets.contiguous(), input_lengths.tolist(), target_lengths.tolist()
    losses, paths = ctc_loss(*given, blank, zero_infinity)
    made = ctc_loss_backward(gradient.contiguous(), *given, losses, paths, blank, zero_infinity)
    return torch.empty_like(log_probs).copy_(made)  # laid out as it was said to be


@ctc_gradient.register_fake
def _(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    return torch.empty_like(log_probs)


def _remember(ctx: _Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: _Context, gradient: Tensor) -> tuple[Any, ...]:
    return ctc_gradient(gradient, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity), None, None, None, None, None


ctc_losses.register_autograd(_backward, setup_context=_remember)
