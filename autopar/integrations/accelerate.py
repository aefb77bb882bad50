"""`Accelerator`: accelerate's Accelerator, with models that run in parallel.

    accelerator = autopar.integrations.accelerate.Accelerator(planning={"parallel": "fsdp"})
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

The rest of a script stays as it is. A batch is that of one process times the processes, as with accelerate's own, or
that of the loader with split_batches; every rank reads all of it in the order of rank 0. So losses, norms and metrics
are those of one device with that batch, and nothing is left to gather. The model is planned for the first batch of the
first loader that is prepared with it: for `model(**batch)`, or for what the function `inputs` makes of the batch.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import accelerate
import torch
import torch.distributed.checkpoint as dcp
from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import autopar
from autopar.integrations.adapting import (
    Moves,
    RowsOfRank0,
    keeping_random_states,
    random_states,
    set_states,
    states_of,
    whole,
)
from autopar.letters import NotServed
from autopar.module import ParallelModule
from autopar.module.checkpoint_folder import writer_over
from autopar.module.checkpoint_planner import GridPlanner

_FOLDER = "autopar"  # subfolder of a checkpoint


class WholeBatches(accelerate.Accelerator):
    """An accelerator that leaves a parallel model as it is, and gives every rank the whole batch."""

    _models: list[Any]
    _optimizers: list[Any]

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        if not isinstance(model, ParallelModule):
            return super().prepare_model(model, device_placement, evaluation_mode)
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        made = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=None,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(made)
        return made

    def gather(self, tensor: Any) -> Any:
        """The value itself, with DTensors made whole: every rank has all rows already."""
        return whole(tensor)


class Accelerator(WholeBatches):
    """An accelerator whose models run in parallel; `planning` are arguments of `autopar.autoparallelize`."""

    def __init__(
        self,
        *args: Any,
        planning: Mapping[str, Any] | None = None,
        inputs: Callable[[Any], Any] | None = None,
        **how: Any,
    ) -> None:
        super().__init__(*args, **how)
        if self.mixed_precision != "no":
            raise NotServed("mixed_precision beside a plan", advice='planning={"precision": "bf16"}')
        if how.get("split_batches") and not self.split_batches:
            raise NotServed(
                "split_batches=True, which this release of Accelerate takes and does not read",
                advice="dataloader_config=DataLoaderConfiguration(split_batches=True)",
            )
        self.planning = dict(planning or {})
        self._inputs = inputs
        self._moves = Moves()
        self._loader: Any = None  # the loader that is prepared together with the model

    # -- what is prepared

    def prepare(self, *args: Any, **how: Any) -> Any:
        self._loader = next((a for a in args if isinstance(a, DataLoader)), None)
        made = super().prepare(*args, **how)
        for optimizer in self._optimizers:
            self._moves.move(optimizer.optimizer)
        return made

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        if not isinstance(model, ParallelModule):
            before = dict(model.named_parameters())
            autopar.autoparallelize(model, self._first_call(), **{"outputs": "full", **self.planning})
            self._moves.between(before, model)
        return super().prepare_model(model, device_placement, evaluation_mode)

    def _first_call(self) -> Any:
        """The arguments of the model's first call, read without advancing random states."""
        if self._loader is None:
            raise NotServed("no data loader is prepared with the model", advice="accelerator.prepare(model, loader)")
        with keeping_random_states():
            batch = next(iter(self._joined(self._loader)))
        given = self._inputs(batch) if self._inputs is not None else batch
        return pytree.tree_map(lambda x: x.to(self.device) if isinstance(x, torch.Tensor) else x, given)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        if data_loader in self._dataloaders:
            return data_loader
        return super().prepare_data_loader(self._joined(data_loader), device_placement, slice_fn_for_dispatch)

    def _joined(self, loader: Any) -> DataLoader:
        if getattr(loader, "batch_sampler", None) is None:
            raise NotServed("a data loader that has no rows by number", advice="a dataset with a length")
        kept = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
        more = ("generator", "prefetch_factor", "persistent_workers", "pin_memory_device")
        joined = Joined(loader.batch_sampler, 1 if self.split_batches else self.num_processes)
        return DataLoader(loader.dataset, batch_sampler=joined, **{n: getattr(loader, n) for n in kept + more})

    # -- over ranks: every one has all rows

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        return whole(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return whole(tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        return whole(tensor)

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        return whole(super().clip_grad_norm_(parameters, max_norm, norm_type))

    # -- checkpoints: accelerate's own, and beside it a folder of torch.distributed.checkpoint

    def save_state(self, output_dir: Any = None, *args: Any, **how: Any) -> Any:
        with self._others_alone():
            folder = super().save_state(output_dir, *args, **how)
        dcp.save(self._states(), storage_writer=writer_over(os.path.join(folder, _FOLDER)), planner=GridPlanner())
        return folder

    def load_state(self, input_dir: Any = None, *args: Any, **how: Any) -> None:
        found = list[str]()
        handle = self.register_load_state_pre_hook(lambda _, folder: found.append(folder))
        try:
            with self._others_alone():
                super().load_state(input_dir, *args, **how)
        finally:
            handle.remove()
        states = self._states()
        dcp.load(states, checkpoint_id=os.path.join(found[0], _FOLDER))
        for k, (model, optimizers) in enumerate(self._parallel()):
            set_states(model, optimizers, states[f"model {k}"])

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        if not isinstance(model, ParallelModule):
            return super().get_state_dict(model, unwrap)
        # empty beside rank 0, where None would ask save_pretrained to gather
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def _parallel(self) -> list[tuple[nn.Module, list[Any]]]:
        """Each parallel model with the optimizers of its parameters."""
        found = []
        for model in self._models:
            if isinstance(model, ParallelModule):
                ids = {id(p) for p in model.parameters()}
                held = [o.optimizer for o in self._optimizers if id(o.param_groups[0]["params"][0]) in ids]
                found.append((model, held))
        return found

    def _states(self) -> dict[str, Any]:
        parallel = self._parallel()
        found = {f"model {k}": states_of(model, optimizers) for k, (model, optimizers) in enumerate(parallel)}
        return {**found, **random_states(model for model, _ in parallel)}

    @contextlib.contextmanager
    def _others_alone(self) -> Iterator[None]:
        """Inside the block parallel models and their optimizers are left out, as rank 0 could not write them."""
        before = self._models, self._optimizers
        spread = {id(o) for _, held in self._parallel() for o in held}
        self._models = [m for m in self._models if not isinstance(m, ParallelModule)]
        self._optimizers = [o for o in self._optimizers if id(o.optimizer) not in spread]
        try:
            yield
        finally:
            self._models, self._optimizers = before


class Joined:
    """Joins `ranks` batches of rank 0 into one: those that as many ranks would read side by side."""

    def __init__(self, batches: Any, ranks: int) -> None:
        self.batches = batches
        self.ranks = ranks
        self.sampler = getattr(batches, "sampler", None)
        self.drop_last = getattr(batches, "drop_last", False)
        self.batch_size = (getattr(batches, "batch_size", None) or 1) * ranks

    def __len__(self) -> int:
        return -(-len(self.batches) // self.ranks)

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(RowsOfRank0(self.batches))
        while together := list(itertools.islice(batches, self.ranks)):
            yield [row for batch in together for row in batch]
