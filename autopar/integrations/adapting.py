"""Shared parts of adapters: optimizers that move to a parallel model, rows in one order, states of checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Sampler

from autopar.letters import NotServed
from autopar.module.storage import Storage

_ROWS_AT_ONCE = 2**16  # rows of a sampler in one message


class Moves:
    """Maps parameters from before a model became parallel to those after.

    Trainers build an optimizer first, and pass model and optimizer to be prepared together.
    """

    def __init__(self) -> None:
        self._to: dict[int, tuple[Tensor, Tensor]] = {}  # holds the old ones, so that their ids are not used again

    def between(self, before: Mapping[str, Tensor], after: nn.Module) -> None:
        """Remember the new parameters of a model, by the names of the old ones."""
        now = dict(after.named_parameters())
        self._to.update({id(old): (old, now[name]) for name, old in before.items()})

    def move(self, optimizer: Any) -> Any:
        """Give an optimizer that has made no step the parameters of the parallel model."""
        if any(id(p) in self._to for p in optimizer.state):
            raise NotServed(
                f"this {type(optimizer).__name__} has made steps before its model became parallel",
                advice="load its state after it is prepared",
            )
        for group in optimizer.param_groups:
            group["params"] = [self._to.get(id(p), (p, p))[1] for p in group["params"]]
        return optimizer


class RowsOfRank0(Sampler):
    """A sampler that gives every rank the rows of rank 0, as samplers may draw from a generator of their own."""

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


@contextlib.contextmanager
def keeping_random_states() -> Iterator[None]:
    """Restore random states after the block: a batch that is looked at changes none of those to come."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def with_rows_of_rank_0(loader: Any) -> Any:
    """Change a data loader in place so that every rank reads the rows of rank 0; returns it."""
    batches: Any = getattr(loader, "batch_sampler", None)
    if isinstance(loader, DataLoader) and hasattr(batches, "sampler") and not isinstance(batches.sampler, RowsOfRank0):
        batches.sampler = RowsOfRank0(batches.sampler)
    return loader


def whole(value: Any) -> Any:
    """A value with all its DTensors gathered, also inside containers."""
    return pytree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, value)


def agreed(decision: bool, device: torch.device, everyone: bool) -> bool:
    """The decision of all ranks: yes where all say so (`everyone`), or where any does."""
    if not dist.is_initialized():
        return decision
    told = torch.tensor(int(decision), device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MIN if everyone else dist.ReduceOp.MAX)
    return bool(told)


def states_of(model: nn.Module, optimizers: Iterable[Any]) -> dict[str, Any]:
    """Parameters, buffers and optimizer states, as torch.distributed.checkpoint saves and loads them."""
    of_model, of_optimizer = get_state_dict(model, list(optimizers))
    return {"model": of_model, "optimizer": of_optimizer}


def set_states(model: nn.Module, optimizers: Iterable[Any], states: Mapping[str, Any]) -> None:
    """Set the loaded states of a model and its optimizers."""
    set_state_dict(model, list(optimizers), model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def random_states(models: Iterable[Any]) -> dict[str, Any]:
    """Random states of parallel models, for the top level of what torch.distributed.checkpoint is given.

    Deeper they would be read, but not set.
    """
    return {f"random {k}": model.random_state for k, model in enumerate(models)}


# -- states as a trainer on one device writes and reads them


def whole_states(optimizer: Any) -> dict[str, Any]:
    """The state dict of an optimizer of one device, on rank 0's CPU; on other ranks its tensors are empty.

    All ranks gather it together, one tensor at a time.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0

    def gathered(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        full = whole(value.detach())
        return full.cpu() if is_first else torch.empty(0)

    found = optimizer.state_dict()
    return {**found, "state": pytree.tree_map(gathered, found["state"])}


def set_whole_states(optimizer: Any, states: Mapping[str, Any]) -> None:
    """Set the states of an optimizer of one device; each rank keeps its parts of them."""
    numbers = [number for group in states["param_groups"] for number in group["params"]]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = dict(zip(numbers, held, strict=False))  # load_state_dict raises where groups differ in size

    def part(parameter: Any, name: str, value: Any) -> Any:
        is_like = isinstance(value, Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape
        if not is_like or name == "step":
            return value
        return Storage.like(parameter).take(value.to(parameter.device), False)

    cut = dict[Any, Any]()
    for number, of_one in states["state"].items():
        cut[number] = {name: part(parameters.get(number), name, value) for name, value in of_one.items()}
    optimizer.load_state_dict({**states, "state": cut})


def generator_states() -> dict[str, Any]:
    """The states of this process's random numbers, under the names that transformers gives them."""
    found = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.random.get_rng_state()
    return found


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Continue random numbers from states of any process, as ranks that read the same rows draw alike."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        of_devices = states["cuda"]  # one, or a list of those that the process saw
        torch.cuda.random.set_rng_state(of_devices if isinstance(of_devices, Tensor) else of_devices[0])
