"""The ranks of a job: starting them, and making sure that they hold the same thing before any of them waits for another."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.letters import Disagreement
from autopar.sharding.mesh import DeviceMesh

T = TypeVar("T")


def start_world(timeout_s: float = 600.0) -> str:
    """Make sure that a process group exists; the device type that its ranks compute on.

    Under torchrun it joins the job; without one it is a world of one process. In a world that is made here nobody waits longer than the time-out.
    """
    if not dist.is_initialized():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        backend = "nccl" if device == "cuda" else "gloo"
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        else:
            dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
        return device
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def coordinate(mesh: DeviceMesh) -> Sequence[int]:
    """Where this rank stands."""
    return mesh.coordinate(dist.get_rank())


def from_rank_0(make: Callable[[], T]) -> T:
    """What `make` gives on rank 0, on every rank; its error too."""
    if not _ranks_can_talk():
        return make()
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [make()]
        except Exception as e:
            box = [e]
    dist.broadcast_object_list(box, 0)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def all_ranks_hold(what: str, value: Any) -> None:
    """Compare a hash; a letter on every rank names those that differ from rank 0."""
    if not _ranks_can_talk():
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digest_of(value))
    if others := [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]:
        raise Disagreement(f"ranks hold different {what}: {others} differ from rank 0", advice="the same model, inputs and plan on every rank")


def digest_of(value: Any) -> str:
    """A hash of values: of tensors what they hold, of anything else how it is written."""
    mine = hashlib.sha256()
    for piece in value if isinstance(value, (tuple, list)) else [value]:
        mine.update(piece.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if isinstance(piece, torch.Tensor) else repr(piece).encode())
    return mine.hexdigest()


def _ranks_can_talk() -> bool:
    """A fake group, where one process plays every rank, has nobody to talk to."""
    return dist.get_world_size() > 1 and dist.get_backend() != "fake"
