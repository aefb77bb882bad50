"""Folders of a run's checkpoints, `run/step-100`: each is complete, or is not there.

torch.distributed.checkpoint writes a folder beside its place, `run/.step-100.new`, and in it `.metadata` at last, when
all ranks have written their parts. Rank 0 then puts the folder in its place. A folder without `.metadata` is
incomplete: what is to be deleted loses that file first. A rank 0 that is killed between deleting and putting leaves
the complete folder beside, which counts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from autopar.letters import BadWeights, NotServed
from autopar.runtime.world import exchanged, world_size

REST = "autopar.pt"  # A file of each folder: all that is not a tensor.
_METADATA = ".metadata"
_STEP = re.compile(r"\.?step-(\d+)(\.new)?")


def folder_of(run: Path, step: int) -> Path:
    return run / f"step-{step}"


def is_complete(folder: Path) -> bool:
    return (folder / _METADATA).is_file()


def checkpoints(run: Path) -> dict[int, Path]:
    """The complete checkpoints of a run by step, the first step first."""
    found = dict[int, Path]()
    if run.is_dir():
        for path in sorted(run.iterdir()):  # Names with a dot come first, so that a folder in its place counts.
            if (name := _STEP.fullmatch(path.name)) and is_complete(path):
                found[int(name[1])] = path
    return dict(sorted(found.items()))


def make_room(place: Path) -> Path:
    """Make the empty folder beside `place` into which ranks write; returns it."""
    beside = place.with_name(f".{place.name}.new")
    if is_complete(beside) and not is_complete(place):
        _put(beside, place)
    _delete(beside)
    beside.mkdir(parents=True)
    return beside


def _put(beside: Path, place: Path) -> None:
    _delete(place)
    beside.rename(place)


def _delete(folder: Path) -> None:
    if folder.exists():
        (folder / _METADATA).unlink(missing_ok=True)
        shutil.rmtree(folder)


class BesideWriter(dcp.FileSystemWriter):
    """Writes parts of ranks into the folder that `make_room` has made, and at last puts it in its place.

    `rest` are the contents of the file `REST`. Of the other checkpoints of the run the last `keep - 1` stay, and all
    where `keep` is None.
    """

    def __init__(self, place: Path, beside: Path, rest: bytes, keep: int | None) -> None:
        super().__init__(beside)
        self.place = place
        self.beside = beside
        self.rest = rest
        self.keep = keep
        self.ranks = world_size()

    def finish(self, metadata: Any, results: Any) -> None:
        """Complete the folder: torch calls this on rank 0, when all ranks have written."""
        if len(results) != self.ranks:  # Without a process group torch takes each rank for a job of its own.
            raise NotServed(
                f"{self.place} was still being written when the process group was destroyed",
                advice="autopar.save(..., wait=True) for the last checkpoint of a run",
            )
        with open(self.beside / REST, "wb") as file:
            file.write(self.rest)
            file.flush()
            os.fsync(file.fileno())
        super().finish(metadata, results)
        _put(self.beside, self.place)
        self._tidy()

    def _tidy(self) -> None:
        """Put or delete what killed jobs have left beside, and delete checkpoints before the last ones."""
        run = self.place.parent
        for step, path in checkpoints(run).items():
            if path != folder_of(run, step):
                _put(path, folder_of(run, step))
        for path in list(run.iterdir()):
            if path.name.startswith(".") and _STEP.fullmatch(path.name):
                _delete(path)
        others = [path for path in checkpoints(run).values() if path != self.place]
        if self.keep is not None:
            for path in others[: max(0, len(others) - self.keep + 1)]:
                _delete(path)


def writer_over(path: str | os.PathLike[str]) -> dcp.FileSystemWriter:
    """A writer into a folder that may hold a checkpoint already, for all ranks to make together.

    torch warns on every rank where the folder is complete, so it is made incomplete first.
    """
    if not dist.is_initialized() or dist.get_rank() == 0:
        (Path(path) / _METADATA).unlink(missing_ok=True)
    if dist.is_initialized():
        dist.barrier()
    return dcp.FileSystemWriter(path)


def refuse_unseen(path: Path) -> None:
    """Raise on all ranks where some do not see a folder that rank 0 sees."""
    if not dist.is_initialized():
        return
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    sees = exchanged([int(path.is_dir())], device)
    if blind := [rank for rank, (is_there,) in enumerate(sees) if not is_there]:
        raise NotServed(
            f"{path} of rank 0 is not seen by the ranks {blind}", advice="a folder that all nodes share, such as NFS"
        )


def expect_one_process() -> None:
    """Let torch save and load in a process without a world: it warns each time that there is none."""
    if not dist.is_initialized():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@contextlib.contextmanager
def telling(path: Path, done: str) -> Iterator[None]:
    """Raise a letter for torch's error, which says what each rank has met and is not an Exception."""
    try:
        yield
    except dcp.CheckpointException as e:
        raise BadWeights(f"{path} could not be {done}", seen=_words(e)) from e


def _words(error: dcp.CheckpointException) -> str:
    met = [f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(error.failures.items())]
    return "\n".join(met)
