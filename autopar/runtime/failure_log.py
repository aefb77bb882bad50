"""Messages in the job's store about how a rank's call ended, for other ranks that wait for it.

Ranks use three functions:

    begin       a call begins, and messages about an earlier one no longer hold
    say         this rank's call has ended so, or stands so
    heard       messages of others. An error in a call in which this rank raised one as well is left out: all ranks
                were given the same, and those who caught it go on

The store also counts the ranks whose last word is an error: where there are none, nobody reads messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from autopar.runtime.job_store import connection, key

RAISED = "raised"
_GOES_ON = "goes on"


@dataclass(slots=True)
class _Mine:
    """Messages that this rank has written."""

    calls: int = 0  # number of calls begun
    raised_in: int = -1  # number of the last call that raised an error
    is_said: bool = False  # whether a message stands in the store
    losses: int = 0  # number of its collectives that have failed
    counted_in: Any = None  # the store that counts this rank's error


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


def raised_in() -> int:
    """Number of the last call in which this rank raised an error; -1 where it raised none."""
    return _MINE.raised_in


def errors_standing() -> int:
    """Number of the ranks whose last word is an error."""
    return int(connection().add(key("errors"), 0))


def heard(ranks: Iterable[int]) -> dict[int, str]:
    """Messages of those of the ranks that have written one."""
    store = connection()
    found = dict[int, str]()
    for rank in ranks:
        if store.check([key("ended", rank)]):
            call, _, text = store.get(key("ended", rank)).decode().partition(" ")
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


FIRST = "first"  # the entry of a loss that names the rank that has met it first


def begin_loss() -> str:
    """Note that a collective of this rank has failed; returns the prefix of the entries about that loss."""
    names = key("lost", _MINE.losses, "")
    _MINE.losses += 1
    return names


def is_lost_elsewhere() -> bool:
    """Whether a collective has failed on another rank, so that one of this rank may never end."""
    return bool(connection().check([key("lost", _MINE.losses, FIRST)]))


def _write(text: str) -> None:
    is_error = text.startswith(RAISED)
    with contextlib.suppress(Exception):  # the store may be gone with rank 0
        store = connection()
        store.set(key("ended", dist.get_rank()), f"{_MINE.calls} {text}")
        if is_error != (_MINE.counted_in is store):
            _MINE.counted_in = store if is_error else None
            store.add(key("errors"), 1 if is_error else -1)
