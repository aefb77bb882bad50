"""Messages in the job's store about how a rank's call ended, for other ranks that wait for it.

Ranks use three functions:

    begin       a call begins, and messages about an earlier one no longer hold
    say         this rank's call has ended so, or stands so
    heard       messages of others. An error in a call in which this rank raised one as well is left out: all ranks
                were given the same, and those who caught it go on
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

from autopar.runtime.private import job_store

RAISED = "raised"
_GOES_ON = "goes on"


@dataclass(slots=True)
class _Mine:
    """Messages that this rank has written."""

    calls: int = 0  # number of calls begun
    raised_in: int = -1  # number of the last call that raised an error
    is_said: bool = False  # whether a message stands in the store


_MINE = _Mine()


def begin() -> None:
    """Note that a call begins: a rank that has raised before, and whose error was caught, goes on."""
    _MINE.calls += 1
    if _MINE.is_said:
        _write(_GOES_ON)
        _MINE.is_said = False


def say(text: str) -> None:
    """Write how this rank's call ended, or where it waits."""
    if text.startswith(RAISED):
        _MINE.raised_in = _MINE.calls
    _MINE.is_said = True
    _write(text[:500])


def heard(ranks: Iterable[int]) -> dict[int, str]:
    """Messages of those of the ranks that have written one."""
    store, found = job_store(), dict[int, str]()
    for rank in ranks:
        if store.check([_key(rank)]):
            call, _, text = store.get(_key(rank)).decode().partition(" ")
            is_shared = text.startswith(RAISED) and int(call) == _MINE.raised_in
            if text != _GOES_ON and not is_shared:
                found[rank] = text
    return found


def errors(said: dict[int, str]) -> str:
    """Text about the errors that ranks raised; empty where there are none."""
    return "; ".join(f"rank {r} {text}" for r, text in sorted(said.items()) if text.startswith(RAISED))


def by_text(said: Iterable[tuple[int, str]]) -> str:
    """Text that lists for each message the ranks that wrote it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in said:
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, some))} {text}" for text, some in ranks.items())


def _key(rank: int) -> str:
    return f"autopar/ended/{rank}"


def _write(text: str) -> None:
    with contextlib.suppress(Exception):  # the store may be gone with rank 0
        job_store().set(_key(dist.get_rank()), f"{_MINE.calls} {text}")
