"""Let the ranks of a job agree before any of them deviates: runs another program, lowers, saves.

    agree       a rank that is about to deviate writes so into the job's store, and waits until all ranks have written
                the same; where they write different things, every rank raises a letter
    wait_for    a rank that runs on as before writes nothing, and so pays nothing. It may be waiting in a collective to
                which the others do not come: a wait that lasts looks into the store
    tell_error  a rank whose own code has raised wakes the others, who would wait for it

All ranks count their calls since the last agreement. If a rank waits in a call that another has not begun, while that
other asks for an agreement, they would wait forever: the first writes so into the store, and both raise a letter.
Collectives in flight by then cannot be called back, so every later call raises that letter, too.

One agreement has these entries in the store. Each rank takes four operations, however late another is:

    asked       what the first rank is about to do: the others compare theirs with it
    came        the roll call; a rank that is about to do something else is marked, and says what under its number
    verdict     of the last to come, or of whoever finds that not all will come; the others wait for it
    woken       for the first rank, which waits here: it is woken by the verdict, and by an error
    heir        the rank that finds out who is lost, when time is up
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from autopar.letters import Disagreement, Letter, Lost
from autopar.runtime import failure_log
from autopar.runtime.job_store import RollCall, await_key, connection, key, settle

_PATIENCE_S = 1.0  # how long a wait lasts before it looks into the store; each further one lasts twice as long
_GRACE_S = 3.0  # seconds that ranks wait for the one that says who is lost
_BEGINS, _ASKS, _RUNS, _IS_DONE = range(4)  # the point of a call at which a rank is
_ALL_AGREE = "all agree"
ADVICE = (
    "the same calls, modes, attributes, hooks and shapes on every rank; save_pretrained on all, or with state_dict="
)


@dataclass(slots=True)
class Standing:
    """How far this rank is, in agreements and calls, compared with the other ranks of its job."""

    store: Any = None  # the connection to the job's store, by which a new job is told from the last
    names: str = ""  # prefix of the names of entries
    agreements: int = 0  # number of agreements so far
    calls: int = 0  # number of calls begun since the last agreement
    where: int = _IS_DONE
    is_patient: bool = False  # whether this thread itself waits in collectives
    limit_s: float = 600.0
    broken: Letter | None = None  # ranks have parted ways for good
    written: list[str] = field(default_factory=list)  # keys of the last agreement that this rank deletes

    @property
    def place(self) -> int:
        """A number that grows along the program of a rank."""
        return 4 * self.calls + self.where

    def key(self, name: object) -> str:
        """The name of an entry of the next agreement."""
        return f"{self.names}/{self.agreements}/{name}"

    def roll_call(self) -> RollCall:
        return RollCall(self.store, self.key("came"), dist.get_world_size())


class Asked(NamedTuple):
    """What the first rank of an agreement is about to do."""

    rank: int
    place: int
    hash: str
    raised_in: int  # the last call in which it raised an error
    said: str

    def __str__(self) -> str:
        return " ".join(map(str, self))

    @staticmethod
    def of(text: str) -> Asked:
        rank, place, digest, raised_in, said = text.split(" ", 4)
        return Asked(int(rank), int(place), digest, int(raised_in), said)


class Verdict(NamedTuple):
    """How an agreement has ended; without words all ranks agree."""

    words: str
    is_final: bool = False  # ranks have parted ways for good
    is_lost: bool = False  # some do not come
    advice: str = ADVICE

    def __str__(self) -> str:
        return json.dumps(self) if self.words else _ALL_AGREE

    @staticmethod
    def of(text: str) -> Verdict:
        return Verdict("") if text == _ALL_AGREE else Verdict(*json.loads(text))


class Doing(threading.local):
    """What this rank does, in words; ranks may be threads."""

    words = ""


_HERE = Standing()
_DOING = Doing()


def _standing() -> Standing | None:
    """State of this rank; None where ranks are not processes that wait for one another."""
    if not dist.is_initialized() or dist.get_backend() not in ("gloo", "nccl") or dist.get_world_size() == 1:
        return None
    if _HERE.store is not (store := connection()):  # another world than before
        _HERE.names = key("agreement")
        _HERE.store = store
        _HERE.agreements = 0
        _HERE.calls = 0
        _HERE.where = _IS_DONE
        _HERE.broken = None
        _HERE.written = []
    return _HERE


def wait_at_most(seconds: float) -> None:
    """Set the seconds that a rank waits for others to come to an agreement."""
    _HERE.limit_s = seconds


def begin_call() -> None:
    """Note that this rank calls a parallel model; raises the letter of an agreement that failed for good."""
    here = _standing()
    _HERE.is_patient = here is not None and dist.get_backend() == "gloo"  # a GPU waits for NCCL, no thread does
    if here is not None:
        if here.broken is not None:
            raise here.broken
        here.calls += 1
        here.where = _BEGINS


def run_program() -> None:
    """Note that this rank has found the program of its call and runs it."""
    _HERE.where = _RUNS


def goes_on(said: str) -> None:
    """Note that this rank does what it did before, which needs no agreement; `said` is text that says so."""
    _DOING.words = said


def doing() -> str:
    """Text that says what this rank does."""
    return _DOING.words


def agree(what: object, said: str, is_call: bool = True) -> None:
    """Wait until all ranks are about to do `what`; raise a letter on all of them where some are not.

    `said` is text that says what this rank is about to do.
    """
    _DOING.words = said
    here = _standing()
    if here is None:
        return
    if here.broken is not None:
        raise here.broken
    here.where = _ASKS if is_call else _IS_DONE
    try:
        verdict = _verdict(here, hashlib.sha256(repr(what).encode()).hexdigest(), said)
    except RuntimeError as e:
        words = f"the job's store does not answer: {str(e).partition(chr(10))[0]:.200}"
        verdict = Verdict(words, True, True, "the log of rank 0 or of the launcher, which held it")
    here.agreements += 1
    here.calls = 0
    if verdict.words:
        raise _letter(here, verdict, said)


def _verdict(here: Standing, digest: str, said: str) -> Verdict:
    """Say what this rank is about to do, and wait until it is known what all are."""
    rank = dist.get_rank()
    mine = Asked(rank, here.place, digest, failure_log.raised_in(), said)
    asked = Asked.of(settle(here.store, here.key("asked"), str(mine)))
    if is_other := asked.hash != digest:
        here.store.set(here.key(rank), said)
    is_last, are_others = here.roll_call().come(rank, is_other)
    if is_last:
        verdict = _judge(here, Verdict(_differences(here, asked) if are_others else ""))
    else:
        verdict = _listened(here) if asked.rank == rank else _awaited(here)
    if not verdict.is_final:
        _tidy(here, is_other)
    return verdict


def tell_error() -> None:
    """Wake the first rank that waits for an agreement, unless it has raised the same error."""
    with contextlib.suppress(Exception):  # the store may be gone with rank 0
        here = _standing()
        if here is not None and here.store.check([here.key("asked")]):
            asked = Asked.of(_read(here, "asked"))
            if asked.raised_in != failure_log.raised_in():
                here.store.set(here.key("woken"), "")


def wait_for(work: Any) -> None:
    """Wait for a collective; if that takes long, check whether another rank asks for an agreement."""
    if work is None:
        return
    if not _HERE.is_patient:
        work.wait()
        return
    patience = timedelta(seconds=_PATIENCE_S)
    while True:
        try:
            work.wait(patience)
            return
        except RuntimeError:
            has_ended = work.is_completed()  # else the wait has timed out
            with contextlib.suppress(RuntimeError):  # the store may be gone with rank 0
                _look(_HERE)
            if has_ended:
                work.wait()
                return
            if _is_in_vain():
                raise RuntimeError("Connection closed: another rank has met a lost one") from None
            patience *= 2


def _is_in_vain() -> bool:
    """Whether another rank has found one lost; this one then says in time that it is there."""
    with contextlib.suppress(RuntimeError):
        return failure_log.is_lost_elsewhere()
    return False


def _look(here: Standing) -> None:
    """Raise if another rank asks for an agreement that this rank has passed, or if ranks have parted."""
    store = here.store
    if not store.check([here.key("asked")]):
        return
    asked = Asked.of(_read(here, "asked"))
    if store.check([here.key("verdict")]):
        verdict = Verdict.of(_read(here, "verdict"))
    elif here.place > asked.place:
        words = f"rank {asked.rank} {asked.said}, and rank {dist.get_rank()} runs its call as before"
        verdict = _judge(here, Verdict(words, is_final=True))
    else:
        return
    if not verdict.is_lost:  # who waits in a collective says by itself who does not come to that
        raise _letter(here, verdict, "")


def _listened(here: Standing) -> Verdict:
    """The verdict, as the first rank waits for it: a rank that raises wakes it."""
    store = here.store
    woken = here.key("woken")
    end = time.monotonic() + here.limit_s
    has_error = failure_log.errors_standing() > 0
    while True:
        if has_error:
            store.delete_key(woken)  # before anything is looked at: later news come to a new entry
            if _is_out_soon(here):
                return Verdict.of(_read(here, "verdict"))
            others = (r for r in range(dist.get_world_size()) if r != dist.get_rank())
            if words := failure_log.errors(failure_log.heard(others)):
                return _judge(here, Verdict(words, True, True, "the log of that rank"))
        if not await_key(store, woken, max(0.0, end - time.monotonic())):
            return _overdue(here)
        if news := _read(here, "woken"):
            return Verdict.of(news)
        has_error = True


def _is_out_soon(here: Standing) -> bool:
    """Whether the verdict comes within a second: a rank whose error was caught goes on."""
    pause = 0.001
    while not here.store.check([here.key("verdict")]):
        if pause > _PATIENCE_S:
            return False
        time.sleep(pause)
        pause *= 3
    return True


def _awaited(here: Standing) -> Verdict:
    """The verdict, as all but the first rank wait for it."""
    there = await_key(here.store, here.key("verdict"), here.limit_s + _GRACE_S)
    return Verdict.of(_read(here, "verdict")) if there else _overdue(here)


def _overdue(here: Standing) -> Verdict:
    """The verdict when time is up: one rank finds out who has not come, for all that have."""
    rank = str(dist.get_rank())
    if settle(here.store, here.key("heir"), rank) == rank:
        there = {r for r, _ in here.roll_call().came()}
        others = [r for r in range(dist.get_world_size()) if r not in there]
        words = (
            f"rank {', '.join(map(str, others))} did not come to an agreement: it hangs, has ended, or does something "
            "else"
        )
        return _judge(here, Verdict(words, True, True, f"{ADVICE}; timeout_s= for how long others wait"))
    if await_key(here.store, here.key("verdict"), _GRACE_S):
        return Verdict.of(_read(here, "verdict"))
    return Verdict("ranks did not come to an agreement, and one that came has ended since", True, True)


def _read(here: Standing, name: object) -> str:
    text: bytes = here.store.get(here.key(name))
    return text.decode()


def _judge(here: Standing, verdict: Verdict) -> Verdict:
    """Give a verdict and wake all who wait for it, unless a rank has given one; returns the one given."""
    mine = str(verdict)
    there = settle(here.store, here.key("verdict"), mine)
    if there == mine:
        here.store.set(here.key("woken"), mine)
    return Verdict.of(there)


def _differences(here: Standing, asked: Asked) -> str:
    """Text that says what each rank is about to do."""
    return failure_log.by_text(
        (r, _read(here, r) if is_other else asked.said) for r, is_other in here.roll_call().came()
    )


def _letter(here: Standing, verdict: Verdict, said: str) -> Letter:
    letter: Letter
    if verdict.is_lost:
        letter = Lost(verdict.words, at=f"rank {dist.get_rank()}, which {said}", advice=verdict.advice)
    else:
        letter = Disagreement(f"ranks do different things: {verdict.words}", advice=verdict.advice)
    here.broken = letter if verdict.is_final else None
    return letter


def _tidy(here: Standing, is_other: bool) -> None:
    """Delete entries of the agreement before this one, which all ranks have read; note those of this one."""
    for name in here.written:
        here.store.delete_key(name)
    here.written = [here.key(dist.get_rank())] if is_other else []
    if dist.get_rank() == 0:
        here.written += [*map(here.key, ("asked", "verdict", "woken")), *here.roll_call().keys]
