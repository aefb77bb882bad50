"""Start the ranks of a job, and check that they hold the same things before any of them waits for another."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.letters import Disagreement, Lost
from autopar.runtime.agreement import ADVICE, doing, wait_for
from autopar.runtime.collectives import gather_into
from autopar.runtime.failure_log import by_text
from autopar.runtime.private import plays_all_ranks, set_timeout
from autopar.sharding.mesh import DeviceMesh

T = TypeVar("T")


@dataclass(slots=True)
class _Made:
    """The group of all ranks, if it was made here, and how long its ranks wait in it."""

    group: Any = None
    start_s: float = 0.0  # seconds that ranks wait for each other to start, and for rank 0 to plan
    then_s: float | None = None  # seconds that they wait in a collective; None before the first plan

    def is_here(self) -> bool:
        return self.group is not None and self.group is dist.group.WORLD


_MADE = _Made()


def start_world(start_timeout_s: float = 600.0) -> str:
    """Make sure that a process group exists; returns the device type on which its ranks compute.

    Under torchrun it joins the job; else it makes a world of one process. In a world that is made here nobody waits
    longer than the time-out, until `limit_world` sets another.
    """
    if not dist.is_initialized():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        backend = "nccl" if device == "cuda" else "gloo"
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if _is_in_a_job():
            dist.init_process_group(backend, timeout=timedelta(seconds=start_timeout_s))
            _MADE.group = dist.group.WORLD
            _MADE.start_s = start_timeout_s
            _MADE.then_s = None
        else:
            dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
        _end_at_exit()
        return device
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


@functools.cache
def _end_at_exit() -> None:
    """End the world that was made here when the program ends; after an error, others may still wait in it."""
    atexit.register(_end)


def _end() -> None:
    if _MADE.is_here() and not hasattr(sys, "last_value"):
        _MADE.group = None
        dist.destroy_process_group()
        time.sleep(0.1)  # a thread of gloo that lets go of a tensor once Python has ended aborts the process


def limit_world(seconds: float) -> None:
    """Set the longest wait of collectives of all ranks from here on, if their group was made here."""
    if _MADE.is_here():
        _MADE.then_s = seconds
        set_timeout(_MADE.group, timedelta(seconds=seconds))


@contextlib.contextmanager
def as_long_as_a_start() -> Iterator[None]:
    """Let collectives of all ranks wait as long as for a start: another rank plans or lowers meanwhile."""
    if not _MADE.is_here() or _MADE.then_s is None:
        yield
        return
    set_timeout(_MADE.group, timedelta(seconds=max(_MADE.start_s, _MADE.then_s)))
    try:
        yield
    finally:
        set_timeout(_MADE.group, timedelta(seconds=_MADE.then_s))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank_here() -> int:
    """The rank of this process; `get_rank` of one that plays all ranks is not a number."""
    group: Any = dist.group.WORLD
    return int(group.rank())


def plays_several_ranks() -> bool:
    """Whether several ranks are in this process, as threads or as the parts of LocalTensors."""
    return (dist.get_backend() == "threaded" and dist.get_world_size() > 1) or plays_all_ranks()


def coordinate(mesh: DeviceMesh) -> Sequence[int]:
    """The coordinate of this rank on a mesh."""
    return mesh.coordinate(rank_here())


def from_rank_0(make: Callable[[], T]) -> T:
    """Make a value on rank 0 and send it to every rank; an error, too."""
    if not ranks_can_talk():
        return make()
    box: list[Any] = [None]
    with as_long_as_a_start():
        if dist.get_rank() == 0:
            try:
                box = [make()]
            except Exception as e:
                dist.broadcast_object_list([_sendable(e)], 0)
                raise
        dist.broadcast_object_list(box, 0)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def _sendable(error: Exception) -> Exception:
    """The error, or a RuntimeError with its text where it cannot be pickled and sent to other ranks."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a class may be local to a function, say, or take other arguments
        return RuntimeError(f"{type(error).__name__} on rank 0: {error}")
    return error


def all_ranks_hold(what: str, value: Any, advice: str = "the same model, inputs and plan on every rank") -> None:
    """Compare a hash of a value; a letter on every rank names the ranks that differ from rank 0.

    Ranks that meet here may do different things, each of which compares something: then the letter says what each does.
    """
    if not ranks_can_talk():
        return
    numbers = [*numbers_of(what), *numbers_of(value)]
    everyone = exchanged(numbers, _device_of_messages())
    others = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if not others:
        return
    said: list[Any] = [None] * len(everyone)
    dist.all_gather_object(said, doing())  # all ranks have seen that they differ
    words = by_text(enumerate(said)) if len(set(said)) > 1 else ""
    if words and any(everyone[rank][:4] != everyone[0][:4] for rank in others):
        raise Disagreement(f"ranks do different things: {words}", advice=ADVICE)
    raise Disagreement(
        f"ranks hold different {what}: {others} differ from rank 0",
        seen=words,
        advice=advice,
    )


def reasons_of_all(reason: str) -> str:
    """The reasons of all ranks that have one, as text; "" where none has."""
    if not any(has for (has,) in exchanged([int(bool(reason))], _device_of_messages())):
        return ""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, reason)
    return by_text((rank, text) for rank, text in enumerate(said) if text)


def gathered_on_rank_0(mine: bytes) -> list[bytes]:
    """The bytes that ranks have to send, on rank 0; nothing is sent where none has any."""
    if not any(size for (size,) in exchanged([len(mine)], _device_of_messages())):
        return []
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone, 0)
    return [given for given in everyone or () if given]


def once_all_have(make: Callable[[], tuple[T, Mapping[str, str]]]) -> T:
    """Make a value on this rank, and return it once all ranks have theirs, so that none waits in vain.

    `make` also returns the arguments that it was given, as text by name: a letter on every rank says where they differ.
    An error on one rank is raised on all.
    """
    made = None
    error = None
    try:
        made = make()
    except Exception as e:
        error = e
        if not dist.is_initialized() and _is_in_a_job():  # others wait already
            start_world()
    if dist.is_initialized() and ranks_can_talk():
        said = None if made is None else dict(made[1])
        raised = "" if error is None else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (raised, said))
        if error is None:
            _refuse_differences(everyone)
    if error is not None:
        raise error
    assert made is not None
    return made[0]


def _refuse_differences(everyone: Sequence[tuple[str, dict[str, str] | None]]) -> None:
    raised = [f"rank {rank} has raised {text}" for rank, (text, _) in enumerate(everyone) if text]
    if raised:
        raise Lost(
            "; ".join(raised), at=f"rank {dist.get_rank()}", advice="the same model, inputs and arguments on every rank"
        )
    words = [said or {} for _, said in everyone]
    for name in dict.fromkeys(name for said in words for name in said):
        if others := [rank for rank, said in enumerate(words) if said.get(name) != words[0].get(name)]:
            seen = f"rank 0: {words[0].get(name)}, rank {others[0]}: {words[others[0]].get(name)}"
            raise Disagreement(
                f"ranks were given different {name}: {others} differ from rank 0",
                seen=seen,
                advice="the same on every rank",
            )


def exchanged(numbers: list[int], device: torch.device) -> list[list[int]]:
    """The numbers of every rank, by rank."""
    if not ranks_can_talk():
        return [numbers]
    everyone = torch.empty(dist.get_world_size() * len(numbers), dtype=torch.int64, device=device)
    wait_for(gather_into(everyone, torch.tensor(numbers, device=device), async_op=True))
    return everyone.view(-1, len(numbers)).tolist()


def numbers_of(value: Any) -> list[int]:
    """`digest_of` as four integers of 64 bits."""
    return [int(digest_of(value)[i : i + 16], 16) - 2**63 for i in range(0, 64, 16)]


def digest_of(value: Any) -> str:
    """A hash of values: tensors by what they hold, others by their repr."""
    mine = hashlib.sha256()
    for piece in value if isinstance(value, (tuple, list)) else [value]:
        mine.update(
            piece.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            if isinstance(piece, torch.Tensor)
            else repr(piece).encode()
        )
    return mine.hexdigest()


def _device_of_messages() -> torch.device:
    """The device on which ranks exchange numbers."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _is_in_a_job() -> bool:
    """Whether torchrun has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def ranks_can_talk() -> bool:
    """Whether there are several real ranks: in a fake group one process plays all of them."""
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"
