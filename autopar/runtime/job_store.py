"""The store that the ranks of a job share, used so that a late or lost rank costs the others few operations.

connection  the store, over a connection of this rank's own
key         the name of an entry, in a world of its own
settle      writes an entry unless there is one, and returns what is there
await_key   waits until an entry is there: one operation, however long that takes
RollCall    which ranks have come: one operation to come, and one for every 30 ranks to read
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from autopar.runtime.private import job_store

_TICK_S = 0.01  # the precision of torch's time-outs
_SHARE = 30  # ranks that share one counter of 63 bits, two each
_CAME = sum(1 << 2 * i for i in range(_SHARE))  # the lower bits of all of them
_MARKED = 1 << 32  # added for a full counter with a marked rank; the lower bits count full counters


@dataclass(slots=True)
class _Connected:
    store: Any = None  # the job's store, by which a new job is told from the last
    own: Any = None
    job: int = 0  # number of the job among those that have this store


_CONNECTED = _Connected()


def connection() -> Any:
    """The job's store, over a connection of this rank's own.

    A wait holds its connection until it ends, and torch's own threads need theirs.
    """
    if _CONNECTED.store is not (store := job_store()):
        _CONNECTED.own = store.clone()
        _CONNECTED.store = store
        # a group that is made again may have the store of the last one, and its entries
        _CONNECTED.job = (_CONNECTED.own.add("autopar/ranks", 1) - 1) // dist.get_world_size()
    return _CONNECTED.own


def key(*names: object) -> str:
    """The name of an entry."""
    return "/".join(map(str, ("autopar", _CONNECTED.job, *names)))


def settle(store: Any, name: str, value: str) -> str:
    """Write an entry unless there is one; returns what is there."""
    there: bytes = store.compare_set(name, "", value)
    return there.decode()


def await_key(store: Any, name: str, seconds: float) -> bool:
    """Wait until an entry is there; returns whether it is. Raises where the store does not answer.

    The server answers as soon as it is: nobody asks again meanwhile, and torch logs a wait only if its time runs out.
    The wait is another thread's, as torch's own lets no signal of Python through until it ends.
    """
    end = time.monotonic() + seconds
    errors = list[RuntimeError]()

    def wait() -> None:
        try:
            store.wait([name], timedelta(seconds=max(seconds, _TICK_S)))  # 0 is without end
        except RuntimeError as e:
            errors.append(e)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join()
    if errors and time.monotonic() < end - _TICK_S:
        raise errors[0]
    return not errors


class RollCall:
    """Which ranks have come, and which of them are marked, as bits of counters that 30 ranks share."""

    def __init__(self, store: Any, name: str, ranks: int) -> None:
        self.store = store
        self.name = name
        self.ranks = ranks
        self.counters = -(-ranks // _SHARE)
        self.full = f"{name}/full"  # counts counters that are full

    @property
    def keys(self) -> list[str]:
        """Names of its entries."""
        counters = [f"{self.name}/{i}" for i in range(self.counters)]
        return [*counters, self.full] if self.counters > 1 else counters

    def come(self, rank: int, is_marked: bool = False) -> tuple[bool, bool]:
        """Note that a rank has come; returns whether it is the last, and if so, whether any is marked."""
        counter, place = divmod(rank, _SHARE)
        held = self.store.add(f"{self.name}/{counter}", (3 if is_marked else 1) << 2 * place)
        all_of_these = _CAME & (1 << 2 * (self.ranks - counter * _SHARE)) - 1
        if held & all_of_these != all_of_these:
            return False, False
        has_marks = held != all_of_these
        if self.counters == 1:
            return True, has_marks
        full = self.store.add(self.full, 1 + _MARKED * has_marks)
        return full % _MARKED == self.counters, full >= _MARKED

    def came(self) -> Iterator[tuple[int, bool]]:
        """The ranks that have come, and for each whether it is marked."""
        for counter in range(self.counters):
            held = self.store.add(f"{self.name}/{counter}", 0)
            for place in range(_SHARE):
                if held >> 2 * place & 1:
                    yield counter * _SHARE + place, bool(held >> 2 * place & 2)
