"""`save`: write a checkpoint of a training loop of one's own.

    start = autopar.load("runs/a", model, optimizer, scheduler)  # the newest complete one; at first step 0
    for step in range(start.step, steps):
        ...
        if (step + 1) % 100 == 0:
            autopar.save("runs/a", model, optimizer, scheduler, step=step + 1, keep=3)

All values make one tree. Its tensors go to torch.distributed.checkpoint, each rank's parts by that rank, under the
names that torch's own `get_state_dict` gives them; the rest, with a `Stored` in the place of each tensor, is one file.
"""

from __future__ import annotations

import atexit
import functools
import io
import logging
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.letters import NotServed
from autopar.module.checkpoint_folder import (
    BesideWriter,
    expect_one_process,
    folder_of,
    make_room,
    refuse_unseen,
    telling,
)
from autopar.module.checkpoint_planner import GridPlanner
from autopar.module.checkpoint_values import listed, split, state_of, states_by_name, unwrapped
from autopar.module.parallel import ParallelModule
from autopar.runtime.agreement import agree
from autopar.runtime.private import like_part, local_part
from autopar.runtime.world import from_rank_0

log = logging.getLogger("autopar")
_WRITING: list[tuple[Path, Future[Any]]] = []  # Saves with wait=False that are not waited for yet, one at most.
_GROUPS: list[tuple[Any, Any]] = []  # The world, and the group of its ranks that writes in the background.


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    step: int,
    keep: int | None = None,
    wait: bool = True,
    **more: Any,
) -> None:
    """Save a training run to `folder/step-N`, on all ranks together.

    Saved are parameters, buffers, the model's random state, the states of the optimizer and of the scheduler (or of
    lists of them), and what is passed by name: the state_dict of objects that have one, such as a GradScaler, a data
    loader or an averaged model, and other values as rank 0 has them. `load` reads it under any plan, on any mesh and
    on one device, where `save` also writes it: plain models and plain optimizers are served alike.

    The folder appears when it is complete. `keep` is how many checkpoints stay, this one included. With `wait=False`
    the call returns when all is copied to the host, and the copy is written while training goes on. The next `save` or
    `load` waits for it and raises its error; the end of the process waits for it and logs its error.
    """
    run = _checked(folder, step, keep)
    finish_writing()
    agree(("save", str(run), step), "calls autopar.save", is_call=False)
    model = unwrapped(model)
    named = {"model": model, **more}
    rest, tensors = split(
        {
            "step": step,
            "model": model.state_dict(),
            "optimizer": None if optimizer is None else states_by_name(model, listed(optimizer)),
            "scheduler": state_of(scheduler),
            "more": {name: state_of(value) for name, value in more.items()},
            "random": {n: m.random_state.state_dict() for n, m in named.items() if isinstance(m, ParallelModule)},
        }
    )
    place = folder_of(run, step)
    written, beside = from_rank_0(lambda: (_pickled(rest), make_room(place)))
    refuse_unseen(beside)
    writer = _Writer(place, beside, written, keep)
    expect_one_process()
    if wait:
        with telling(place, "written"):
            dcp.save(tensors, storage_writer=writer, planner=_Planner())
    else:
        _watch_the_end()
        future: Any = dcp.async_save(tensors, storage_writer=writer, planner=_Planner(), process_group=_group())
        _WRITING.append((place, future))


def _checked(folder: str | Path, step: int, keep: int | None) -> Path:
    if not str(folder):
        raise NotServed("autopar.save was given no folder", advice='autopar.save("checkpoints", model, step=step + 1)')
    if "://" in str(folder):
        raise NotServed(
            f"autopar.save to {folder}, which is not a folder of a file system",
            advice="a folder that all nodes share, and a copy of it",
        )
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise NotServed(f"step={step!r} is not a number of steps", advice="step=step + 1 after a step")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise NotServed(f"keep={keep!r} is not a number of checkpoints", advice="keep=3, or None for all")
    return Path(folder)


def _pickled(rest: Any) -> bytes:
    written = io.BytesIO()
    try:
        torch.save(rest, written)
    except Exception as e:
        raise NotServed(
            f"autopar.save cannot write what it was given: {e}",
            advice="values that can be pickled, or their state_dict",
        ) from e
    return written.getvalue()


class _Planner(GridPlanner):
    """Lets rank 0 alone write tensors that every rank has in full, so that all of them are of one rank."""

    def create_local_plan(self) -> dcp.SavePlan:
        plan = super().create_local_plan()
        if self.is_coordinator:
            return plan
        parts = [item for item in plan.items if isinstance(self.state_dict[item.index.fqn], DTensor)]
        return replace(plan, items=parts)


class _Writer(BesideWriter):
    """Stages for `dcp.async_save` copies on the host of this rank's parts."""

    def stage(self, state_dict: Any) -> Any:
        return {name: _copied(tensor) for name, tensor in state_dict.items()}


def _copied(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return like_part(local_part(tensor).to("cpu", copy=True), tensor)
    return tensor.to("cpu", copy=True)


# -- in the background


def finish_writing() -> None:
    """Wait for what is written in the background, and raise its error."""
    while _WRITING:
        place, future = _WRITING.pop()
        with telling(place, "written"):
            future.result()


@functools.cache
def _watch_the_end() -> None:
    """Look once at the end of the process at what was written last."""
    atexit.register(_tell_at_exit)


def _tell_at_exit() -> None:
    """Log the error of what was written last; threads have ended when this is called."""
    try:
        finish_writing()
    except BaseException as e:
        log.error("autopar.save: the checkpoint that was being written is lost: %s", e)


def _group() -> Any:
    """All ranks as a group of the host: the background may not meet the collectives of training."""
    if not dist.is_initialized():
        return None
    if not _GROUPS or _GROUPS[0][0] is not dist.group.WORLD:
        _GROUPS[:] = [(dist.group.WORLD, dist.new_group(backend="gloo"))]
    return _GROUPS[0][1]
