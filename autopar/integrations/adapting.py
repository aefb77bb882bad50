"""What adapters share: optimizers that move to a parallel model, rows in one order, states of checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Sampler

from autopar.letters import NotServed

_ROWS_AT_ONCE = 2**16  # of a sampler, in one message


class Moves:
    """Parameters as they were before a model became parallel, and what has come of them.

    Trainers build an optimizer first, and give model and optimizer to be prepared together.
    """

    def __init__(self) -> None:
        self._to: dict[int, tuple[Tensor, Tensor]] = {}  # the old ones are held, so that an id stays theirs

    def between(self, before: Mapping[str, Tensor], after: nn.Module) -> None:
        """Remember what has come of these parameters of a model."""
        now = dict(after.named_parameters())
        self._to.update({id(old): (old, now[name]) for name, old in before.items()})

    def move(self, optimizer: Any) -> Any:
        """Let an optimizer that has made no step hold the parameters of the parallel model."""
        if any(id(p) in self._to for p in optimizer.state):
            raise NotServed(
                f"this {type(optimizer).__name__} has made steps before its model became parallel",
                advice="load its state after it is prepared",
            )
        for group in optimizer.param_groups:
            group["params"] = [self._to.get(id(p), (p, p))[1] for p in group["params"]]
        return optimizer


class RowsOfRank0(Sampler):
    """Rows in the order that rank 0 draws, on every rank: samplers draw from the generator of their own."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self.sampler)
        while True:  # one may never end
            box: list[Any] = [list(itertools.islice(rows, _ROWS_AT_ONCE))]
            if dist.is_initialized():
                dist.broadcast_object_list(box, 0)
            yield from box[0]
            if len(box[0]) < _ROWS_AT_ONCE:
                return

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


def with_rows_of_rank_0(loader: Any) -> Any:
    """The same data loader, which gives every rank the rows that rank 0 would read."""
    batches: Any = getattr(loader, "batch_sampler", None)
    if isinstance(loader, DataLoader) and hasattr(batches, "sampler") and not isinstance(batches.sampler, RowsOfRank0):
        batches.sampler = RowsOfRank0(batches.sampler)
    return loader


def whole(value: Any) -> Any:
    """Tensors that lie over ranks, gathered; what is inside containers too."""
    return pytree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, value)


def agreed(decision: bool, device: torch.device, everyone: bool) -> bool:
    """The decision of all ranks: yes where every one says so, or where any does."""
    if not dist.is_initialized():
        return decision
    told = torch.tensor(int(decision), device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MIN if everyone else dist.ReduceOp.MAX)
    return bool(told)


def states_of(model: nn.Module, optimizers: Iterable[Any]) -> dict[str, Any]:
    """Parameters, buffers and states, as torch.distributed.checkpoint saves them and reads into them."""
    of_model, of_optimizer = get_state_dict(model, list(optimizers))
    return {"model": of_model, "optimizer": of_optimizer}


def set_states(model: nn.Module, optimizers: Iterable[Any], states: Mapping[str, Any]) -> None:
    """Give a model and its optimizers what was read."""
    set_state_dict(model, list(optimizers), model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def random_states(models: Iterable[Any]) -> dict[str, Any]:
    """Random numbers of parallel models, for the top of what torch.distributed.checkpoint is given.

    Deeper they would be read, and not set.
    """
    return {f"random {k}": model.random_state for k, model in enumerate(models)}
