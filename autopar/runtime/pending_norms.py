"""Let sums and lists of pending norms be what they are of norms.

DTensor leaves the norm of a cut tensor pending: each rank has the norm of its part. torch 2.11 to 2.13

    adds pending norms up as if they were pending sums           w.norm(dim=0).sum()
    loses the sign of what stands in a list beside one           torch.stack([w.norm(), -loss])
    has no gradient of a norm to which a pending sum arrives     (w.norm(dim=0) * w.sum(0)).sum().backward()

The first two are wrong without a word. All of them are of any DTensors, and what replaces them is right for any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from autopar.runtime.patches import STANDING, handlers
from autopar.runtime.private import REDUCTIONS, PendingNorm, hold_part, local_part


def let_norms_be_summed() -> None:
    """Patch DTensor so that pending norms are reduced before they are summed, and keep signs beside them."""
    STANDING.put(REDUCTIONS, "common_reduction_strategy", _reducing_norms_first)
    STANDING.put(PendingNorm, "_pre_reduce_transform", lambda theirs: _power)
    STANDING.put(PendingNorm, "_post_reduce_transform", lambda theirs: _root)
    STANDING.put(handlers(), torch.ops.aten.masked_fill_.Scalar, lambda theirs: _filled)


def _reducing_norms_first(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def ours(input_strategy: Any, reduce_dims: Any, keep_dim: bool = False, *args: Any, **how: Any) -> Any:
        placements = (p for each in input_strategy.strategies for p in each.output_spec.placements)
        if any(isinstance(p, PendingNorm) for p in placements):
            args = (False, *args[1:])
            how = {name: value for name, value in how.items() if name != "reduction_linear"}
        return theirs(input_strategy, reduce_dims, keep_dim, *args, **how)

    return ours


def _filled(op: Any, args: tuple[Any, ...], how: dict[str, Any]) -> DTensor:
    """Fill a DTensor where a mask is true, in place; one that is pending is reduced first.

    The gradient of a norm does so where the norm is zero.
    """
    x, mask, value = args
    if not isinstance(x, DTensor) or not isinstance(mask, DTensor):
        raise RuntimeError(f"{op}: got mixed torch.Tensor and DTensor")
    if any(p.is_partial() for p in x.placements):
        made = x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])
        hold_part(x, made.to_local(), made)
    here = mask.expand(x.shape).redistribute(x.device_mesh, x.placements).to_local()
    local_part(x).masked_fill_(here, value)
    return x


def _power(norm: Any, tensor: Tensor) -> Tensor:
    return _with_sign(tensor, norm.norm_type)


def _root(norm: Any, tensor: Tensor) -> Tensor:
    return _with_sign(tensor, 1.0 / norm.norm_type)


def _with_sign(tensor: Tensor, exponent: float) -> Tensor:
    """A power of the absolute values, with the signs of the values.

    Norms have no signs; other values of the same list may have them.
    """
    power = tensor.abs() ** exponent
    return torch.where(tensor < 0, -power, power)
