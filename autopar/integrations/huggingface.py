"""`Trainer`: transformers' Trainer, with a model that runs in parallel.

    trainer = autopar.integrations.huggingface.Trainer(model=model, args=args, train_dataset=data, planning={...})
    trainer.train()                                     # under torchrun, or on one process

The model is planned for the batch of all ranks, when training or evaluation first asks: a batch is the rows of one
device times the ranks, as with transformers' own Trainer, and every rank reads all of them, so that the plan may lay
them out as it likes. Loss, gradients and clipping are those of one device with that batch, means over tokens included.
Checkpoints are those of transformers' own Trainer, which resumes them, as this one resumes its. Beside its files they
hold parameters, states and random numbers as torch.distributed.checkpoint writes them, to be read in parts.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from accelerate.utils import convert_to_fp32
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import safe_globals

import autopar
from autopar.integrations.accelerate import WholeBatches
from autopar.integrations.adapting import (
    generator_states,
    keeping_random_states,
    set_generator_states,
    set_states,
    set_whole_states,
    states_of,
    whole,
    whole_states,
)
from autopar.letters import NotServed
from autopar.module import ParallelModule
from autopar.module.checkpoint_folder import writer_over
from autopar.module.checkpoint_planner import GridPlanner
from autopar.module.step_log import StepLog
from autopar.runtime.brief_patches import transformers_in_two_groups
from autopar.runtime.world import world_size
from autopar.tracer.precision import Precision

_FOLDER = "autopar"  # subfolder of a checkpoint
_OPTIMIZER = "optimizer.pt"
_SCHEDULER = "scheduler.pt"
_RANDOM = "rng_state.pth", "rng_state_0.pth"  # One device writes the first name, rank 0 of several the second.
_INSTEAD = {  # arguments of training that are not served, and what is
    "torch_compile_mode": 'planning={"compile": "inductor"}, whose programs are compiled in the default mode',
    "auto_find_batch_size": 'planning={"microbatches": "auto"}',
    "fsdp": 'planning={"parallel": "fsdp"}',
    "deepspeed": 'planning={"parallel": "zero3"}',
}


class Trainer(transformers.Trainer):
    """A Trainer whose model runs in parallel; `planning` are arguments of `autopar.autoparallelize`."""

    model: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any
    label_smoother: Any
    compute_loss_func: Any
    model_accepts_loss_kwargs: bool
    loss_is_scaled_for_ga: bool | None

    def __init__(self, *args: Any, planning: Mapping[str, Any] | None = None, **how: Any) -> None:
        super().__init__(*args, **how)
        self.planning = dict(planning or {})
        for name, instead in _INSTEAD.items():
            if getattr(self.args, name, None):
                raise NotServed(f"TrainingArguments({name}=...) beside a plan", advice=instead)
        self.args.average_tokens_across_devices = False  # every rank counts the tokens of the whole batch
        self._put_loss_into_model()

    def _put_loss_into_model(self) -> None:
        """Let the model return the loss that the trainer would make of its outputs: both are planned."""
        smoother, of_user = self.label_smoother, self.compute_loss_func
        if smoother is None and of_user is None:
            return
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        if of_user is not None:
            _return_loss(model, self._in_float32(of_user))
            self.model_accepts_loss_kwargs = True  # the number of items goes to the model, which hands it on
            self.loss_is_scaled_for_ga = True
        else:
            shifts = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            _return_loss(model, self._in_float32(functools.partial(smoother, shift_labels=shifts)))
        self.label_smoother = self.compute_loss_func = None

    def _in_float32(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """A loss whose outputs are widened to single precision under mixed precision, as Accelerate does."""

        def widened(outputs: Any, *args: Any, **how: Any) -> Any:
            return loss(convert_to_fp32(outputs) if self.accelerator.native_amp else outputs, *args, **how)

        return widened

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
        planning = {**self.planning, **self._planning_of_arguments()}
        self.model = self.model_wrapped = autopar.autoparallelize(self.model.train(), batch, **planning)

    def create_optimizer(self, *args: Any, **how: Any) -> Any:
        with transformers_in_two_groups():
            return super().create_optimizer(*args, **how)

    def _planning_of_arguments(self) -> dict[str, Any]:
        """Arguments of planning that `bf16`, `fp16` and `torch_compile` stand for."""
        said = dict[str, Any]()
        if self.args.torch_compile and "compile" not in self.planning:
            said["compile"] = self.args.torch_compile_backend
        if self.accelerator.native_amp:  # False for float16 on a CPU, which leaves the model as it is.
            said["precision"] = self._precision(self.accelerator.mixed_precision)
        return said

    def _precision(self, name: str) -> Precision:
        given = self.planning.get("precision", name)
        precision = given if isinstance(given, Precision) else Precision(given)
        if precision.param != Precision(name).param:
            what = f"TrainingArguments({name}=True) beside a plan of another precision"
            raise NotServed(what, seen=f"{precision}", advice="one of both")
        return precision

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
        found = whole(super().prediction_step(*args, **how))
        return convert_to_fp32(found) if self.accelerator.native_amp else found

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
        dcp.save(self._states(), storage_writer=writer_over(os.path.join(output_dir, _FOLDER)), planner=GridPlanner())
        of_optimizer = whole_states(self.optimizer.optimizer)
        if self.args.should_save:
            torch.save(of_optimizer, os.path.join(output_dir, _OPTIMIZER))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _save_rng_state(self, output_dir: str) -> None:
        """Write those of one rank: all read the same rows, and draw alike."""
        if self.args.should_save:
            torch.save(generator_states(), os.path.join(output_dir, _RANDOM[0]))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights that another trainer wrote; own ones come with the optimizer's states, once it exists."""
        if _is_own(resume_from_checkpoint):
            return
        for name in (_OPTIMIZER, _SCHEDULER):
            if not os.path.isfile(os.path.join(resume_from_checkpoint, name)):
                raise NotServed(
                    f"{resume_from_checkpoint} has no {name}: training would start again from its weights",
                    advice="a folder of a Trainer's checkpoint, or from_pretrained for the weights alone",
                )
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if _is_own(checkpoint):
            states = self._states()
            dcp.load(states, checkpoint_id=os.path.join(checkpoint, _FOLDER))
            set_states(self.model, [self.optimizer.optimizer], states)
        else:
            path = os.path.join(checkpoint, _OPTIMIZER)
            set_whole_states(self.optimizer.optimizer, torch.load(path, "cpu", weights_only=True, mmap=True))
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        paths = [os.path.join(checkpoint, name) for name in _RANDOM] if checkpoint is not None else []
        if there := [path for path in paths if os.path.isfile(path)]:
            with safe_globals():
                set_generator_states(torch.load(there[0], weights_only=True))

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        if not _is_own(best):
            return super()._load_best_model()
        states = {"model": get_model_state_dict(self.model)}
        dcp.load(states, checkpoint_id=os.path.join(best, _FOLDER))
        set_model_state_dict(self.model, states["model"])

    def _states(self) -> dict[str, Any]:
        return {**states_of(self.model, [self.optimizer.optimizer]), "random": self.model.random_state}


class LogSteps(transformers.TrainerCallback):
    """Lines of `autopar.log` about the steps of a Trainer, which logs losses itself.

    Trainer(..., callbacks=[LogSteps(every=10)])
    """

    def __init__(self, every: int = 10, writer: Any = None) -> None:
        self.every = every
        self.writer = writer
        self.log: StepLog | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **how: Any) -> None:
        self.log = autopar.log(how["model"], self.every, start=state.global_step, writer=self.writer)

    def on_step_end(self, args: Any, state: Any, control: Any, **how: Any) -> None:
        if self.log is not None:
            self.log.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **how: Any) -> None:
        if self.log is not None:
            self.log.remove()


def _is_own(checkpoint: str) -> bool:
    """Whether a folder has parameters and states as torch.distributed.checkpoint writes them."""
    return os.path.isdir(os.path.join(checkpoint, _FOLDER))


def _return_loss(model: nn.Module, loss: Callable[..., Any]) -> None:
    """Let the model return `loss(outputs, labels, num_items_in_batch=)` where it is given labels."""
    cls = type(model)

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        outputs = cls.forward(self, *args, **kwargs)
        if labels is None:
            return outputs
        found = loss(outputs, labels, num_items_in_batch=num_items_in_batch)
        if not isinstance(outputs, dict):
            return found, *outputs
        outputs["loss"] = found
        return outputs

    model.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
