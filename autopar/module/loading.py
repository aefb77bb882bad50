"""`load`: read a checkpoint that `save` has written, under any plan, on any mesh, or on one device.

Parameters are read in place. Optimizer states are read into tensors that lie as their parameters do, so no optimizer
has to make a step first.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from autopar.letters import BadWeights, NotServed
from autopar.module.checkpoint_folder import REST, checkpoints, expect_one_process, is_complete, refuse_unseen, telling
from autopar.module.checkpoint_values import (
    Stored,
    listed,
    names_of,
    set_state,
    split,
    state_of,
    unwrapped,
    word_of,
)
from autopar.module.parallel import ParallelModule
from autopar.module.saving import finish_writing
from autopar.runtime.agreement import agree
from autopar.runtime.world import from_rank_0

log = logging.getLogger("autopar")
T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """What `load` has read."""

    step: int = 0  # The step to go on with.
    more: dict[str, Any] = field(
        default_factory=dict
    )  # All that was saved by name and that `load` was not given an object for.
    path: Path | None = None  # None where the run has no checkpoint yet.


def load(folder: str | Path, model: nn.Module, optimizer: Any = None, scheduler: Any = None, **more: Any) -> Checkpoint:
    """Load the newest complete checkpoint of a run, on all ranks together.

    `folder` is what `save` was given, or one of its `step-N`. The model, the optimizer and the scheduler (or lists of
    them) and the objects that are passed by name take their states. Returned is the step to go on with, and in `more`
    what else was saved by name, its tensors whole. A run that has no checkpoint yet starts at step 0.
    """
    finish_writing()
    agree(("load", str(folder)), "calls autopar.load", is_call=False)
    path = from_rank_0(lambda: _found(Path(folder)))
    if path is None:
        log.info("autopar.load: %s has no checkpoint, the run starts at step 0", folder)
        return Checkpoint()
    refuse_unseen(path)
    reading = _Reading(path)
    model = unwrapped(model)
    of_model = reading.model(model)
    optimizers = [] if optimizer is None else listed(optimizer)
    of_optimizers = [reading.optimizer(model, each) for each in optimizers]
    if scheduler is not None:
        reading.refuse_missing("scheduler", reading.rest["scheduler"])
    of_more = reading.more(more)
    reading.read()
    model.load_state_dict(reading.filled(of_model))
    for each, states in zip(optimizers, of_optimizers, strict=True):
        each.load_state_dict(reading.filled(states))
    set_state(scheduler, reading.filled(reading.rest["scheduler"]))
    saved = reading.filled(of_more)
    for name, value in more.items():
        set_state(value, saved.pop(name))
    for name, value in {"model": model, **more}.items():
        if isinstance(value, ParallelModule) and name in reading.rest["random"]:
            value.random_state.load_state_dict(reading.rest["random"][name])
    log.info("autopar.load: %s", path)
    return Checkpoint(reading.rest["step"], saved, path)


class _Reading:
    """The values of a checkpoint, and the tensors into which those that are asked for are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = dcp.FileSystemReader(path)
        try:
            self.rest = torch.load(path / REST, map_location="cpu", weights_only=False)
            self.stored = self.reader.read_metadata().state_dict_metadata
        except Exception as e:
            raise BadWeights(
                f"{path} is not a checkpoint of autopar.save",
                seen=f"{type(e).__name__}: {e}",
                advice="torch.distributed.checkpoint.load for folders that others have written",
            ) from e
        self.into: dict[str, Tensor] = {}

    def refuse_missing(self, what: str, saved: Any) -> None:
        if saved is None:
            raise BadWeights(f"{self.path} has no {what}", advice=f"autopar.load without {what}, or another checkpoint")

    def model(self, model: nn.Module) -> dict[str, Any]:
        """The state of a model, to be read in place."""
        live = model.state_dict()
        saved = self.rest["model"]
        for names, what in (
            (live.keys() - saved.keys(), "lacks"),
            (saved.keys() - live.keys(), "has beside the model's"),
        ):
            if names:
                some = ", ".join(sorted(names)[:5])
                raise BadWeights(
                    f"{self.path} {what} {some}{', ...' if len(names) > 5 else ''}", advice="the same model"
                )
        for name, tensor in live.items():
            if isinstance(tensor, Tensor):
                self._take(saved[name], tensor, name)
        live.update(saved)  # Updated in place: torch keeps the versions of modules in an attribute of it.
        return live

    def _take(self, stored: Stored, tensor: Tensor, name: str) -> None:
        """Let a tensor be read in place."""
        if (size := tuple(self.stored[stored.name].size)) != tuple(tensor.shape):
            raise BadWeights(
                f"{name} has another shape than the model's", seen=f"{size} in {self.path}, {tuple(tensor.shape)} in it"
            )
        self.into[stored.name] = tensor.detach()

    def optimizer(self, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer by places of parameters, as it loads it."""
        self.refuse_missing("optimizer", saved := self.rest["optimizer"])
        names = names_of(model)
        states = dict[int, Any]()
        groups = []
        for group in optimizer.param_groups:
            own = [names.get(id(p), "a parameter that is not the model's") for p in group["params"]]
            places = range(len(states), len(states) + len(own))
            groups.append({**self._options(own, group), "params": list(places)})
            for place, name, parameter in zip(places, own, group["params"], strict=True):
                states[place] = saved["state"].get(name, {})
                self._make_states(states[place], parameter)
        return {"state": {place: its for place, its in states.items() if its}, "param_groups": groups}

    def _options(self, own: list[str], group: Mapping[str, Any]) -> dict[str, Any]:
        """The saved options of a group of parameters; a group without any keeps its own."""
        if not own:
            return dict(group)
        there = [saved for saved in self.rest["optimizer"]["param_groups"] if not set(own).isdisjoint(saved["params"])]
        if len(there) != 1 or not set(own) <= set(there[0]["params"]):
            known = set().union(*(saved["params"] for saved in there))
            missing = [name for name in own if name not in known]
            what = f"{', '.join(missing[:5])} apart" if missing else f"in {len(there)} groups"
            raise BadWeights(
                f"{self.path} has the parameters of one group of the optimizer {what}",
                advice="the groups of parameters with which it was saved",
            )
        return dict(there[0])

    def _make_states(self, states: Any, parameter: Tensor) -> None:
        """Make the tensors into which the states of a parameter are read: those of its shape lie as it does."""
        for path, leaf in pytree.tree_leaves_with_path(states):
            if not isinstance(leaf, Stored):
                continue
            size, dtype = self.stored[leaf.name].size, self.stored[leaf.name].properties.dtype
            is_like = size == parameter.shape and word_of(path[-1]) != "step"
            self.into[leaf.name] = (
                _made_like(parameter, size, dtype) if is_like or len(size) else torch.empty((), dtype=dtype)
            )

    def more(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """All that was saved by name: DTensors of objects are read in place, other tensors whole."""
        saved = self.rest["more"]
        for name, value in objects.items():
            self.refuse_missing(name, saved.get(name))
            if value is None or state_of(value) is value:
                raise NotServed(
                    f"autopar.load({name}={value!r}), which has no load_state_dict",
                    advice=f"autopar.load(...).more[{name!r}] for values",
                )
        _, live = split({"more": {name: state_of(value) for name, value in objects.items()}})
        for leaf in pytree.tree_leaves(saved):
            if isinstance(leaf, Stored):
                tensor = live.get(leaf.name)
                if isinstance(tensor, DTensor):
                    self._take(leaf, tensor, leaf.name)
                else:
                    stored = self.stored[leaf.name]
                    self.into[leaf.name] = torch.empty(stored.size, dtype=stored.properties.dtype)
        return dict(saved)

    def read(self) -> None:
        """Read all tensors that were asked for."""
        expect_one_process()
        with telling(self.path, "read"):
            dcp.load(dict(self.into), storage_reader=self.reader)

    def filled(self, tree: T) -> T:
        """A tree of saved values with the tensors that were read."""

        def fill(leaf: Any) -> Any:
            return self.into[leaf.name] if isinstance(leaf, Stored) else leaf

        found: T = pytree.tree_map(fill, tree)
        return found


def _made_like(parameter: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor of the parameter's device, which lies as the parameter where it has its shape."""
    with torch.no_grad():
        if tuple(size) == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        made = torch.empty(tuple(size), dtype=dtype, device=parameter.device)
        if not isinstance(parameter, DTensor):
            return made
        mesh = parameter.device_mesh
        return DTensor.from_local(made, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _found(folder: Path) -> Path | None:
    """The checkpoint that a folder is or holds: the newest; None where it holds none."""
    if is_complete(folder):
        return folder
    there = checkpoints(folder)
    if there:
        return there[max(there)]
    if folder.name.startswith("step-"):  # Who names a checkpoint does not want to start without it.
        there = checkpoints(folder.parent)
        raise BadWeights(
            f"{folder} is not a complete checkpoint",
            seen=f"complete: {', '.join(path.name for path in there.values()) or 'none'}",
            advice=f"autopar.load({str(folder.parent)!r}, ...), which takes the newest, or starts at step 0",
        )
    return None
