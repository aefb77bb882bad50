"""`AutoparStrategy` for lightning.Trainer: a LightningModule for one device trains in parallel.

    trainer = lightning.Trainer(strategy=AutoparStrategy(parallel="fsdp"), devices=2)
    trainer.fit(module, loader)

The LightningModule itself runs in parallel where it has a forward, else its one child with parameters, else the module
that `part` names. It is planned for its first call: a step is begun on the first batch of the loader and stopped at
that call. Every rank reads the whole batch, in the order of rank 0: the numbers of a step, and what is logged, are
those of one device with the same loader.
"""

from __future__ import annotations

import contextlib
import inspect
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import autopar
from autopar.integrations.adapting import agreed, keeping_random_states, random_states, whole, with_rows_of_rank_0
from autopar.letters import NotServed
from autopar.module import ParallelModule
from autopar.module.checkpoint_folder import writer_over

_REST = "rest.pt"  # file of a checkpoint's folder


class AutoparStrategy(DDPStrategy):
    """A part of a LightningModule runs in parallel; `planning` are arguments of `autopar.autoparallelize`."""

    def __init__(self, batch: Any = None, *, part: str | None = None, **planning: Any) -> None:
        super().__init__()
        self._batch = batch
        self._part = part
        self._planning = planning

    # -- the model

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        trainer._accelerator_connector.use_distributed_sampler = False  # every rank reads all rows
        for metric in self.lightning_module.modules():
            if hasattr(metric, "sync_on_compute"):  # a metric of torchmetrics; every rank has seen all rows
                metric.sync_on_compute = False
        if not isinstance(self.parallel, ParallelModule):
            given = self._batch if self._batch is not None else _first_call(trainer, self.parallel)
            autopar.autoparallelize(self.parallel, given, **{"outputs": "full", **self._planning})
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @property
    def parallel(self) -> nn.Module:
        """The module that runs in parallel."""
        module = self.lightning_module
        assert module is not None
        if self._part is not None:
            named = dict(module.named_modules())
            if self._part not in named:
                known = ", ".join(name for name, _ in module.named_children())
                what = f"part={self._part!r}, which the LightningModule does not have"
                raise NotServed(what, advice=f"one of its parts: {known}")
            return named[self._part]
        if type(module).forward is not pl.LightningModule.forward or isinstance(module, ParallelModule):
            return module
        parts = [child for child in module.children() if next(child.parameters(), None) is not None]
        if len(parts) != 1:
            raise NotServed(
                f"a LightningModule without a forward, of whose parts {len(parts)} have parameters",
                advice="AutoparStrategy(part=...), the name of the part that runs in parallel",
            )
        return parts[0]

    def model_to_device(self) -> None:
        """Does nothing: the part of each rank is moved when it is made."""

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.parallel.no_sync():
            yield

    # -- batches, and over ranks: every rank has all rows

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    def process_dataloader(self, dataloader: Any) -> Any:
        return with_rows_of_rank_0(dataloader)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return whole(tensor)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        return whole(tensor)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return agreed(decision, self.root_device, everyone=all)

    # -- checkpoints: a folder with the parts of sharded tensors, and a file with all other states

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.lightning_module)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return get_optimizer_state_dict(self.lightning_module, getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        path = Path(self.broadcast(filepath))
        parts = self._parts(checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states", []))
        dcp.save(parts, storage_writer=writer_over(path))
        if self.is_global_zero:
            torch.save(checkpoint, path / _REST)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        rest = torch.load(path / _REST, weights_only=weights_only)
        states = [self.optimizer_state(optimizer) for optimizer in self.optimizers]
        parts = self._parts(self.lightning_module_state_dict(), states)
        dcp.load(parts, checkpoint_id=path)
        return {
            **rest,
            "state_dict": parts["model"],
            "optimizer_states": [parts[f"optimizer {k}"] for k in range(len(states))],
        }

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        set_model_state_dict(self.lightning_module, checkpoint["state_dict"])

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            set_optimizer_state_dict(self.lightning_module, getattr(optimizer, "_optimizer", optimizer), state)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            shutil.rmtree(filepath, ignore_errors=True)

    def _parts(self, model: Any, optimizers: Any) -> dict[str, Any]:
        states = {f"optimizer {k}": state for k, state in enumerate(optimizers)}
        return {"model": model, **states, **random_states([self.parallel])}


class _Called(Exception):
    """Raised when a step has reached the call to plan."""


def _first_call(trainer: pl.Trainer, part: nn.Module) -> Any:
    """Arguments of a module's call in a step on the first batch, found without advancing random states."""
    module = trainer.lightning_module
    step, loop = {
        TrainerFn.FITTING: ("training_step", trainer.fit_loop),
        TrainerFn.VALIDATING: ("validation_step", trainer.validate_loop),
        TrainerFn.TESTING: ("test_step", trainer.test_loop),
        TrainerFn.PREDICTING: ("predict_step", trainer.predict_loop),
    }[trainer.state.fn]
    if module.example_input_array is not None and part is module:
        return module.example_input_array
    called: list[Any] = []

    def stop(_: Any, args: Any, kwargs: Any) -> None:
        called.append(_as_inputs(part, args, kwargs))
        raise _Called

    handle = part.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with keeping_random_states(), contextlib.suppress(_Called):
            loop.setup_data()
            batch = trainer.strategy.batch_to_device(next(iter(loop._combined_loader))[0])
            loop._combined_loader = None  # training sets it up again, and draws the same rows
            getattr(module, step)(batch, 0)
    finally:
        handle.remove()
    if not called:
        raise NotServed(f"{step} does not call the part that runs in parallel", advice="AutoparStrategy(part=...)")
    return called[0]


def _as_inputs(part: nn.Module, args: Any, kwargs: Any) -> Any:
    """Positional arguments by their names, where others are named."""
    if not kwargs:
        return args
    return {**dict(zip(inspect.signature(part.forward).parameters, args, strict=False)), **kwargs}
