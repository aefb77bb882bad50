"""`AutoparStrategy` for lightning.fabric.Fabric: a script for one device trains in parallel.

    fabric = Fabric(strategy=AutoparStrategy(batch, parallel="fsdp"), devices=2)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)

`batch` is what the model's forward takes, of the batch of all ranks: a dict or a tuple of tensors (meta ones are
enough), or a function that returns it. With `inputs="global"`, the default, every rank reads the whole batch, and each
number of the script is that of one device. With `inputs="local"` the script is one for DistributedDataParallel: a
rank's rows in, a rank's rows out, and fabric.all_reduce goes over the ranks.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

import autopar
from autopar.integrations.adapting import Moves, agreed, random_states, whole, with_rows_of_rank_0
from autopar.letters import NotServed
from autopar.module.checkpoint_folder import writer_over
from autopar.module.checkpoint_planner import GridPlanner

_REST = "rest.pt"  # file of a checkpoint's folder


class AutoparStrategy(DDPStrategy):
    """Models run in parallel as autopar plans them; `planning` are arguments of `autopar.autoparallelize`."""

    def __init__(self, batch: Any, *, inputs: str = "global", **planning: Any) -> None:
        super().__init__()
        self._batch = batch
        self._is_global = inputs == "global"
        self._planning = planning
        self._how = {"inputs": inputs, "outputs": "full" if self._is_global else "local"}
        self._backward_sync_control = _Waits()
        self._moves = Moves()
        self._parallel = list[Any]()

    # -- models and optimizers

    def setup_module(self, module: nn.Module) -> nn.Module:
        before = dict(module.named_parameters())
        batch = self._batch() if callable(self._batch) else self._batch
        made = autopar.autoparallelize(module, batch, **{**self._how, **self._planning})
        self._moves.between(before, made)
        self._parallel.append(made)
        return made

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return self._moves.move(optimizer)

    def module_to_device(self, module: nn.Module) -> None:
        """Does nothing: the part of each rank is moved when it is made."""

    def module_init_context(self, empty_init: bool | None = None) -> Any:
        stack = contextlib.ExitStack()
        stack.enter_context(self.precision.module_init_context())
        if empty_init:
            stack.enter_context(torch.device("meta"))  # filled part by part
        return stack

    # -- batches

    @property
    def distributed_sampler_kwargs(self) -> Any:
        if self._is_global:
            return None
        if not self._parallel:
            raise NotServed("data loaders that are set up before the model", advice="fabric.setup(model) first")
        sampler = self._parallel[0].sampler(range(1))
        return {"num_replicas": sampler.num_replicas, "rank": sampler.rank}

    def process_dataloader(self, dataloader: Any) -> Any:
        if not self._is_global:
            return dataloader
        worker = dataloader.worker_init_fn  # Fabric seeds workers by rank, and here all read the same rows
        if isinstance(worker, partial) and worker.func is pl_worker_init_function:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=0)
        return with_rows_of_rank_0(dataloader)

    # -- over ranks

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return whole(tensor) if self._is_global else super().all_reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        return whole(tensor) if self._is_global else super().all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return agreed(decision, self.root_device, everyone=all)

    def clip_gradients_norm(self, *args: Any, **how: Any) -> torch.Tensor:
        return whole(super().clip_gradients_norm(*args, **how))

    # -- checkpoints: a folder with the parts of sharded tensors, and a file with all other states

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        path = Path(self.broadcast(path))
        shown = self._convert_stateful_objects_in_state(state, filter=filter or {})
        parts = {k: v for k, v in shown.items() if isinstance(state[k], (nn.Module, Optimizer))}
        dcp.save({**parts, **random_states(self._parallel)}, storage_writer=writer_over(path), planner=GridPlanner())
        if self.is_global_zero:
            torch.save({k: v for k, v in shown.items() if k not in parts}, path / _REST)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, weights_only: Any = None) -> Any:
        path = Path(self.broadcast(path))
        if not state:
            raise NotServed("a checkpoint that is read into nothing", advice='fabric.load(path, {"model": model, ...})')
        rest = torch.load(path / _REST, weights_only=weights_only)
        objects = {k: v for k, v in state.items() if isinstance(v, (nn.Module, Optimizer))}
        parts = {**self._convert_stateful_objects_in_state(objects, filter={}), **random_states(self._parallel)}
        dcp.load(parts, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=not strict))
        for name, value in objects.items():
            if isinstance(value, Optimizer):
                set_optimizer_state_dict(self._model_of(value), value, parts[name])
            else:
                set_model_state_dict(value, parts[name])
        for name in [k for k in state if k not in objects]:
            if name not in rest:
                if strict:
                    raise KeyError(f"{path} has no {name!r}")
            elif hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(rest.pop(name))
            else:
                state[name] = rest.pop(name)
        return rest

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return get_model_state_dict(module)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return get_optimizer_state_dict(self._model_of(optimizer), optimizer)

    def _model_of(self, optimizer: Optimizer) -> nn.Module:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return next(model for model in self._parallel if not held.isdisjoint(map(id, model.parameters())))


class _Waits:
    """The object that Fabric uses for `no_backward_sync`."""

    def no_backward_sync(self, module: Any, enabled: bool) -> Any:
        return module.no_sync() if enabled else contextlib.nullcontext()
