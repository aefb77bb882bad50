"""Let the ranks of a job agree before any of them deviates: runs another program, lowers, saves.

    agree       a rank that is about to deviate writes so into the job's store, and waits until all ranks have written
                the same; where they write different things, every rank raises a letter
    wait_for    a rank that runs on as before writes nothing, and so pays nothing. It may be waiting in a collective to
                which the others do not come: a wait that lasts looks into the store

All ranks count their calls since the last agreement. If a rank waits in a call that another has not begun, while that
other asks for an agreement, they would wait forever: the first writes so into the store, and both raise a letter.
Collectives in flight by then cannot be called back, so every later call raises that letter, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from autopar.letters import Disagreement, Letter, Lost
from autopar.runtime import failure_log
from autopar.runtime.private import job_store

_PATIENCE = timedelta(seconds=1)  # how long a wait lasts before it looks into the store
_BEGINS, _ASKS, _RUNS, _IS_DONE = range(4)  # where in a call a rank is
_ADVICE = (
    "the same calls, modes, attributes, hooks and shapes on every rank; save_pretrained on all, or with state_dict="
)


@dataclass(slots=True)
class Standing:
    """How far this rank is, in agreements and calls, compared with the other ranks of its job."""

    store: Any = None  # the job's store, by which a new job is told from the last
    agreements: int = 0  # number of agreements so far
    calls: int = 0  # number of calls begun since the last agreement
    where: int = _IS_DONE
    is_patient: bool = False  # whether this thread itself waits in collectives
    limit_s: float = 600.0
    broken: Letter | None = None  # ranks have parted ways for good
    written: list[str] = field(default_factory=list)  # keys of the last agreement

    @property
    def place(self) -> int:
        """A number that grows along the program of a rank."""
        return 4 * self.calls + self.where


_HERE = Standing()


def _standing() -> Standing | None:
    """State of this rank; None where ranks are not processes that wait for one another."""
    if not dist.is_initialized() or dist.get_backend() not in ("gloo", "nccl") or dist.get_world_size() == 1:
        return None
    if _HERE.store is not (store := job_store()):  # another world than before
        _HERE.store, _HERE.agreements, _HERE.calls, _HERE.where = store, 0, 0, _IS_DONE
        _HERE.broken, _HERE.written = None, []
    return _HERE


def wait_at_most(seconds: float) -> None:
    """Set the seconds that a rank waits for others to come to an agreement."""
    _HERE.limit_s = seconds


def begin_call() -> None:
    """Note that this rank calls a parallel model; raises the letter of an agreement that failed for good."""
    here = _standing()
    _HERE.is_patient = here is not None and dist.get_backend() == "gloo"  # with NCCL it is a GPU that waits
    if here is not None:
        if here.broken is not None:
            raise here.broken
        here.calls, here.where = here.calls + 1, _BEGINS


def run_program() -> None:
    """Note that this rank has found the program of its call and runs it."""
    _HERE.where = _RUNS


def agree(what: object, said: str, is_call: bool = True) -> None:
    """Wait until all ranks are about to do `what`; raise a letter on all of them where some are not.

    `said` is text that says what this rank is about to do.
    """
    here = _standing()
    if here is None:
        return
    if here.broken is not None:
        raise here.broken
    here.where = _ASKS if is_call else _IS_DONE
    store, rank, ranks, k = here.store, dist.get_rank(), dist.get_world_size(), here.agreements
    mine = hashlib.sha256(repr(what).encode()).hexdigest()
    store.set(_key(k, rank), said)
    store.add(_key(k, mine), 1)
    if store.add(_key(k, "came"), 1) == ranks:  # the last one sees what all have said
        differ = ""
        if store.add(_key(k, mine), 0) < ranks:
            differ = failure_log.by_text(enumerate(store.get(_key(k, r)).decode() for r in range(ranks)))
        _judge(store, k, differ, False)
    _await_verdict(here, said)
    differ, is_final = json.loads(store.get(_key(k, "verdict")))
    here.agreements, here.calls = k + 1, 0
    _tidy(here, k, mine)
    if differ:
        raise _letter(here, differ, is_final)


def wait_for(work: Any) -> None:
    """Wait for a collective; if that takes long, check whether another rank asks for an agreement."""
    if work is None:
        return
    if not _HERE.is_patient:
        work.wait()
        return
    while True:
        try:
            work.wait(_PATIENCE)
            return
        except RuntimeError:
            has_ended = work.is_completed()  # it has failed, or has come to its end just now
            with contextlib.suppress(RuntimeError):  # the store may be gone with rank 0
                _look(_HERE)
            if has_ended:
                work.wait()
                return


def _look(here: Standing) -> None:
    """Raise if another rank asks for an agreement that this rank has passed by, or if a verdict is out."""
    store, k = here.store, here.agreements
    if store.check([_key(k, "verdict")]):
        differ, is_final = json.loads(store.get(_key(k, "verdict")))
        raise _letter(here, differ, is_final)
    if not store.check([_key(k, "asked")]):
        return
    place, asker, said = json.loads(store.get(_key(k, "asked")))
    if here.place > place:
        differ = f"rank {asker} {said}, and rank {dist.get_rank()} runs its call as before"
        _judge(store, k, differ, True)
        raise _letter(here, differ, True)


def _await_verdict(here: Standing, said: str) -> None:
    """Wait until the verdict is out; raise where a rank has failed, or where time is up."""
    store, k, end = here.store, here.agreements, time.monotonic() + here.limit_s
    has_asked = False
    while True:
        try:
            store.wait([_key(k, "verdict")], _PATIENCE)
            return
        except RuntimeError:
            if store.check([_key(k, "verdict")]):
                return
        if not has_asked:  # aloud, for those who wait in collectives
            store.set(_key(k, "asked"), json.dumps([here.place, dist.get_rank(), said]))
            has_asked = True
        others = [r for r in range(dist.get_world_size()) if not store.check([_key(k, r)])]
        if what := failure_log.errors(failure_log.heard(others)):
            here.broken = Lost(what, at=f"rank {dist.get_rank()}, which {said}", advice="the log of that rank")
            raise here.broken
        if time.monotonic() > end:
            here.broken = Lost(
                f"rank {', '.join(map(str, others))} did not come to an agreement: it hangs, has ended, or does "
                "something else",
                at=f"rank {dist.get_rank()}, which {said}",
                advice=f"{_ADVICE}; timeout_s= for how long others wait",
            )
            raise here.broken


def _judge(store: Any, k: int, differ: str, is_final: bool) -> None:
    """Write the verdict, unless another rank has written one."""
    if store.add(_key(k, "judges"), 1) == 1:
        store.set(_key(k, "verdict"), json.dumps([differ, is_final]))


def _letter(here: Standing, differ: str, is_final: bool) -> Disagreement:
    letter = Disagreement(f"ranks do different things: {differ}", advice=_ADVICE)
    here.broken = letter if is_final else None
    return letter


def _tidy(here: Standing, k: int, mine: str) -> None:
    """Delete this rank's keys of the agreement before this one, which all ranks have read."""
    for key in here.written:
        here.store.delete_key(key)
    names = (0, mine, "came", "judges", "asked", "verdict") if dist.get_rank() == 0 else (dist.get_rank(),)
    here.written = [_key(k, name) for name in names]


def _key(k: int, name: object) -> str:
    return f"autopar/agreement/{k}/{name}"
