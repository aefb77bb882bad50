"""`gather`: the plain model back, for inference, generation and export."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.letters import NotServed
from autopar.module.checkpoint import whole
from autopar.module.parallel import ParallelModule
from autopar.module.state import ModelState
from autopar.runtime.agreement import agree


def gather(model: nn.Module, rank: int | None = None) -> nn.Module | None:
    """A copy of a parallel model as it was before: of its own class, every tensor whole, in the same mode.

    All ranks call it. Each gets the copy; or `rank` alone does, and the others None. The parallel model stays as it is,
    and the two share nothing.
    """
    if not isinstance(model, ParallelModule):
        raise NotServed(
            f"this {type(model).__name__} is not parallel", advice="the model that autoparallelize returned"
        )
    ranks = dist.get_world_size()
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks):
        raise NotServed(f"rank={rank!r} is none of the {ranks} ranks", advice="rank=0, or None for all")
    state: ModelState = model._own
    agree((state.original.__name__, "gather", rank), "calls autopar.gather", is_call=False)
    takes = rank is None or rank == dist.get_rank()
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        full = whole(tensor.detach()).clone()  # one after the other: every rank takes part
        if takes:
            memo[id(tensor)] = _like(tensor, full)
    if not takes:
        return None
    with state.as_before(model), torch.no_grad():
        found = copy.deepcopy(model, memo)
    del found._autopar
    return found


def _like(tensor: Tensor, full: Tensor) -> Tensor:
    """A parameter for a parameter, a buffer for a buffer."""
    if not isinstance(tensor, nn.Parameter):
        return full
    return nn.Parameter(full, requires_grad=tensor.requires_grad)
