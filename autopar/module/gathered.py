"""`gather`: turn a parallel model back into a plain one, for inference, generation and export."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.letters import NotServed
from autopar.module.checkpoint import whole
from autopar.module.parallel import ParallelModule
from autopar.module.state import ModelState
from autopar.runtime.agreement import agree

M = TypeVar("M", bound=nn.Module)


@overload
def gather(model: M, rank: None = None) -> M: ...


@overload
def gather(model: M, rank: int) -> M | None: ...


def gather(model: M, rank: int | None = None) -> M | None:
    """A plain copy of a parallel model: of its original class, every tensor whole, in the same mode.

    All ranks must call it. Each gets the copy; or only `rank` does, and the others get None. The parallel model stays
    as it is, and shares no memory with the copy.
    """
    if not isinstance(model, ParallelModule):
        raise NotServed(
            f"this {type(model).__name__} is not parallel", advice="the model that autoparallelize returned"
        )
    ranks = dist.get_world_size()
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks):
        raise NotServed(f"rank={rank!r} is none of the {ranks} ranks", advice="rank=0, or None for all")
    for path, name in _held_elsewhere(model):
        raise NotServed(
            f"the attribute {name!r} of {path or 'the model'} holds a parameter in a list or dictionary: there it has "
            "its values from before training",
            advice="model.save_pretrained, or torch.distributed.checkpoint",
        )
    state: ModelState = model._own
    agree((state.original.__name__, "gather", rank), "calls autopar.gather", is_call=False)
    takes = rank is None or rank == dist.get_rank()
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        with torch.inference_mode(False), torch.no_grad():
            full = whole(tensor.detach()).clone()  # one after the other: every rank takes part
            if takes:
                memo[id(tensor)] = _like(tensor, full)
    if not takes:
        return None
    try:
        with state.as_before(model), torch.inference_mode(False), torch.no_grad():
            found = copy.deepcopy(model, memo)
    except TypeError as e:
        raise NotServed(
            f"this {type(model).__name__} cannot be copied: {e}", advice="state_dict, and a model of it"
        ) from e
    del found._autopar
    return found


def _held_elsewhere(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Paths of modules and names of attributes that hold a parameter from before, inside a list or dict."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            if any(getattr(leaf, "_autopar_consumed", False) for leaf in pytree.tree_leaves(value)):
                yield path, name


def _like(tensor: Tensor, full: Tensor) -> Tensor:
    """A parameter for a parameter, a buffer for a buffer."""
    if not isinstance(tensor, nn.Parameter):
        return full
    return nn.Parameter(full, requires_grad=tensor.requires_grad)
