"""`Trainer`: transformers' Trainer, with a model that runs in parallel.

    trainer = autopar.integrations.huggingface.Trainer(model=model, args=args, train_dataset=data, planning={...})
    trainer.train()                                     # under torchrun, or on one process

The model is planned for the batch of all ranks, when training or evaluation first asks: a batch is the rows of one
device times the ranks, as with transformers' own Trainer, and every rank reads all of them, so that the plan may lay
them out as it likes. Loss, gradients and clipping are those of one device with that batch, means over tokens included.
Checkpoints hold the whole model as `save_pretrained` writes it, and parameters, states and random numbers as
torch.distributed.checkpoint does, to be resumed on another mesh.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers

import autopar
from autopar.integrations.accelerate import WholeBatches
from autopar.integrations.adapting import keeping_random_states, set_states, states_of, whole
from autopar.letters import NotServed
from autopar.module import ParallelModule
from autopar.module.checkpoint_folder import writer_over
from autopar.runtime.world import world_size

_FOLDER = "autopar"  # subfolder of a checkpoint
_SCHEDULER = "scheduler.pt"
_INSTEAD = {  # arguments of training that are not served, and what is
    "fp16": 'planning={"precision": "fp16"}',
    "bf16": 'planning={"precision": "bf16"}',
    "torch_compile": 'planning={"compile": True}',
    "auto_find_batch_size": 'planning={"microbatches": "auto"}',
    "fsdp": 'planning={"parallel": "fsdp"}',
    "deepspeed": 'planning={"parallel": "zero3"}',
    "label_smoothing_factor": "a model whose own loss smooths labels",
    "load_best_model_at_end": "train(resume_from_checkpoint=...) of trainer.state.best_model_checkpoint",
}


class Trainer(transformers.Trainer):
    """A Trainer whose model runs in parallel; `planning` are arguments of `autopar.autoparallelize`."""

    model: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any

    def __init__(self, *args: Any, planning: Mapping[str, Any] | None = None, **how: Any) -> None:
        super().__init__(*args, **how)
        self.planning = dict(planning or {})
        for name, instead in _INSTEAD.items():
            if getattr(self.args, name, None):
                raise NotServed(f"TrainingArguments({name}=...) beside a plan", advice=instead)
        if self.compute_loss_func is not None:
            raise NotServed("compute_loss_func beside a plan", advice="a model that returns its loss")
        self.args.average_tokens_across_devices = False  # every rank counts the tokens of the whole batch

    # -- the model

    def train(self, *args: Any, **how: Any) -> Any:
        self._make_parallel(self.get_train_dataloader)
        return super().train(*args, **how)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **how: Any) -> Any:
        with self._batches_of_all_ranks():
            self._make_parallel(lambda: self.get_eval_dataloader(eval_dataset))
            return super().evaluate(eval_dataset, *args, **how)

    def predict(self, test_dataset: Any, *args: Any, **how: Any) -> Any:
        with self._batches_of_all_ranks():
            self._make_parallel(lambda: self.get_test_dataloader(test_dataset))
            return super().predict(test_dataset, *args, **how)

    @contextlib.contextmanager
    def _batches_of_all_ranks(self) -> Iterator[None]:
        """Set the evaluation batch size to that of all ranks, as evaluation weighs a batch's loss by it."""
        of_one = self.args.per_device_eval_batch_size
        self.args.per_device_eval_batch_size = of_one * world_size()
        try:
            yield
        finally:
            self.args.per_device_eval_batch_size = of_one

    def _make_parallel(self, loader: Any) -> None:
        if isinstance(self.model, ParallelModule):
            return
        with keeping_random_states():
            batch = self._as_called(self._prepare_inputs(next(iter(loader()))))
        self.model = self.model_wrapped = autopar.autoparallelize(self.model.train(), batch, **self.planning)

    def _as_called(self, batch: Any) -> Any:
        """The arguments with which the trainer calls the model for a batch."""
        if self.model_accepts_loss_kwargs and "labels" in batch:
            return {**batch, "num_items_in_batch": self._get_num_items_in_batch([batch], self.args.device)}
        return batch

    # -- batches

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = WholeBatches

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, **how: Any) -> Any:
        ranks = world_size() if description == "Training" else 1  # evaluation's is that of all ranks already
        return super()._get_dataloader(dataset, description, batch_size * ranks, *args, **how)

    def prediction_step(self, *args: Any, **how: Any) -> Any:
        return whole(super().prediction_step(*args, **how))

    def _clip_grad_norm(self, model: Any) -> Any:
        return whole(super()._clip_grad_norm(model))

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return whole(super()._get_grad_norm(model, grad_norm))

    # -- checkpoints

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if not isinstance(self.model, ParallelModule):
            return super()._save(output_dir, state_dict)
        folder = str(output_dir or self.args.output_dir)
        self.model.save_pretrained(folder)  # all ranks: each has a part
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, "training_args.bin"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        dcp.save(self._states(), storage_writer=writer_over(os.path.join(output_dir, _FOLDER)))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check the folder; the weights are loaded with the optimizer's states, once the optimizer exists."""
        if not os.path.isdir(os.path.join(resume_from_checkpoint, _FOLDER)):
            raise NotServed(
                f"{resume_from_checkpoint} is not a checkpoint that this Trainer wrote",
                advice="a folder of its own, or from_pretrained for the weights alone",
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        states = self._states()
        dcp.load(states, checkpoint_id=os.path.join(checkpoint, _FOLDER))
        set_states(self.model, [self.optimizer.optimizer], states)
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True))

    def _states(self) -> dict[str, Any]:
        return {**states_of(self.model, [self.optimizer.optimizer]), "random": self.model.random_state}
