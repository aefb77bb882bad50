"""`AutoparStrategy` for lightning.Trainer: a LightningModule for one device trains in parallel.

    trainer = lightning.Trainer(strategy=AutoparStrategy(parallel="fsdp"), devices=2)
    trainer.fit(module, loader)

The LightningModule itself runs in parallel where it has a forward, else each child with parameters, or the modules that
`part` names. Where it optimizes by hand, a forward is only one of several calls, and the children are taken too. Each
part is planned for its first call: a step is begun on the first batch of the loader and stopped at the last of these
calls. Every rank reads the whole batch, in the order of rank 0: the numbers of a step, and what is logged, are those of
one device with the same loader.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
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
from autopar.integrations.adapting import (
    agreed,
    generator_states,
    random_states,
    set_generator_states,
    whole,
    with_rows_of_rank_0,
)
from autopar.integrations.lightning_calls import first_calls
from autopar.letters import NotServed
from autopar.module import ParallelModule
from autopar.module.checkpoint_folder import writer_over
from autopar.module.checkpoint_planner import GridPlanner

_REST = "rest.pt"  # file of a checkpoint's folder


class AutoparStrategy(DDPStrategy):
    """Parts of a LightningModule run in parallel; `planning` are arguments of `autopar.autoparallelize`.

    `batch` is what the one part takes, where it is not to be found by beginning a step.
    """

    def __init__(self, batch: Any = None, *, part: str | Sequence[str] | None = None, **planning: Any) -> None:
        super().__init__()
        self._batch = batch
        self._part = (part,) if isinstance(part, str) else part
        self._planning = planning
        self._is_rehearsing = False  # whether a step runs to find the calls of the parts

    # -- the model

    def setup_distributed(self) -> None:
        """Begin the process group; every rank goes on with the random numbers of rank 0, not with a new seed."""
        before = generator_states()
        super().setup_distributed()
        set_generator_states(self.broadcast(before))

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        trainer._accelerator_connector.use_distributed_sampler = False  # every rank reads all rows
        for metric in self.lightning_module.modules():
            if hasattr(metric, "sync_on_compute"):  # a metric of torchmetrics; every rank has seen all rows
                metric.sync_on_compute = False
        parts = {name: part for name, part in self.parts.items() if not isinstance(part, ParallelModule)}
        calls = self._calls(trainer, parts) if parts else {}
        for name, part in parts.items():
            autopar.autoparallelize(part, calls[name], **{"outputs": "full", **self._planning})
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @property
    def parts(self) -> dict[str, nn.Module]:
        """The modules that run in parallel, by name; the LightningModule itself has none."""
        module = self.lightning_module
        assert module is not None
        if self._part is not None:
            named = dict(module.named_modules())
            if missing := [name for name in self._part if name not in named]:
                known = ", ".join(name for name, _ in module.named_children())
                what = f"part={missing[0]!r}, which the LightningModule does not have"
                raise NotServed(what, advice=f"one of its parts: {known}")
            return {name: named[name] for name in self._part}
        has_forward = type(module).forward is not pl.LightningModule.forward
        if isinstance(module, ParallelModule) or (has_forward and module.automatic_optimization):
            return {"": module}
        children = module.named_children()
        return {name: child for name, child in children if next(child.parameters(), None) is not None}

    def _calls(self, trainer: pl.Trainer, parts: Mapping[str, nn.Module]) -> dict[str, Any]:
        """The arguments of each part's first call."""
        if self._batch is None:
            return self._rehearsed(trainer, parts)
        if len(parts) > 1:
            raise NotServed(
                f"AutoparStrategy(batch) beside {len(parts)} parts: {', '.join(parts)}",
                advice="part=..., the name of the one that takes this batch, or no batch: a step is begun to find it",
            )
        return dict.fromkeys(parts, self._batch)

    def _rehearsed(self, trainer: pl.Trainer, parts: Mapping[str, nn.Module]) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
            self.setup_optimizers(trainer)  # A step asks for them; those that train come later, of parallel parts.
        self._is_rehearsing = True
        try:
            return first_calls(trainer, parts)
        finally:
            self._is_rehearsing = False

    def backward(self, closure_loss: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        return closure_loss if self._is_rehearsing else super().backward(closure_loss, *args, **how)

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **how: Any) -> Any:
        return closure() if self._is_rehearsing else super().optimizer_step(optimizer, closure, *args, **how)

    def model_to_device(self) -> None:
        """Does nothing: the part of each rank is moved when it is made."""

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for part in self.parts.values():
                stack.enter_context(part.no_sync())
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
        dcp.save(parts, storage_writer=writer_over(path), planner=GridPlanner())
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
        return {"model": model, **states, **random_states(self.parts.values())}
