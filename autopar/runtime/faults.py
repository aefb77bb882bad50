"""Errors for a lost rank: every rank that notices says in which call it was, and which ranks did not answer.

A collective that fails or times out fails on every rank that waits. Each of them writes into the job's store where it
stood; the first gives the others a moment to do so, and tells all of them who has not: those hang or are gone. A rank
whose own code raises inside the model writes that first, so that the others report its error and not their own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from autopar.letters import Letter, Lost, NotServed
from autopar.runtime import failure_log
from autopar.runtime.agreement import tell_error, wait_at_most
from autopar.runtime.job_store import RollCall, await_key, connection, settle
from autopar.runtime.private import set_timeout
from autopar.runtime.signs import tells_of_another
from autopar.runtime.world import limit_world

_GRACE_S = 3.0


@functools.cache
def tell_launcher() -> None:
    """Send an error that ends this process to the launcher, too; once a process.

    torchrun reads it from the file that it names to each rank, and knows no traceback of a rank without one.
    """
    before = sys.excepthook
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return

    def tell(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, Exception):  # An interrupt is the user's, who knows of it.
            try:
                raise error  # torchrun's handler writes the error that is being handled.
            except Exception:
                error.with_traceback(trace)
                with contextlib.suppress(OSError):
                    get_error_handler().record_exception(error)
        before(kind, error, trace)

    sys.excepthook = tell


def limit(mesh: DeviceMesh, seconds: float) -> None:
    """Set the longest wait of collectives on these axes, among all ranks, and of agreements."""
    wait_at_most(seconds)
    limit_world(seconds)
    if dist.get_backend() in ("gloo", "nccl"):
        for axis in range(mesh.ndim):
            set_timeout(mesh.get_group(axis), timedelta(seconds=seconds))


@contextlib.contextmanager
def naming_the_lost(where: str) -> Iterator[None]:
    """Turn errors of collectives in the block into letters that name the lost ranks."""
    failure_log.begin()
    try:
        yield
    except Lost:
        raise
    except Exception as e:
        if dist.get_backend() not in ("gloo", "nccl") or dist.get_world_size() == 1:
            raise
        if isinstance(e, Letter) or not isinstance(e, RuntimeError) or not tells_of_another(str(e)):
            failure_log.say(f"{failure_log.RAISED} {type(e).__name__} in {where}: {e}")
            tell_error()
            raise
        raise _lost(where, e) from e


@contextlib.contextmanager
def waiting_in(where: str) -> Iterator[None]:
    """Say in letters of the block around this one where exactly a rank waited, and for whom."""
    try:
        yield
    except RuntimeError as e:
        if not tells_of_another(str(e)):
            raise
        raise _lost(where, e) from e


@contextlib.contextmanager
def naming_the_lacking(where: str) -> Iterator[None]:
    """Turn NotImplementedError in the block into a letter.

    A dtype that `precision=` chose may lack an op, say.
    """
    try:
        yield
    except NotImplementedError as e:
        words = str(e).partition("\n")[0] or "its error says no more"
        raise NotServed(
            f"an op of {where} is not implemented on this device: {words}",
            advice="where its dtype is the cause, a cast before it, x.float(), or no precision=",
        ) from e


def _lost(where: str, error: Exception) -> Lost:
    """A letter that names the ranks that did not answer, or that raised an error."""
    first = str(error).splitlines()[0][:200] if str(error) else ""
    failure_log.say(f"waited in {where}")
    try:
        what = _told_by_one()
    except Exception:  # the store lives with rank 0, or with the launcher
        what = "rank 0 or the launcher has ended: a collective failed, and the job's store does not answer"
    return Lost(
        what,
        at=f"rank {dist.get_rank()}, in {where}",
        seen=first,
        advice="the log of that rank; timeout_s= for how long others wait",
    )


def _told_by_one() -> str:
    """Text that names the lost ranks: one of those that notice finds out, and tells the others."""
    store = connection()
    rank = dist.get_rank()
    names = failure_log.begin_loss()
    roll_call = RollCall(store, f"{names}came", dist.get_world_size())
    roll_call.come(rank)
    if settle(store, f"{names}{failure_log.FIRST}", str(rank)) == str(rank):
        store.set(f"{names}told", _who_is_lost(roll_call))
    elif not await_key(store, f"{names}told", 2 * _GRACE_S):
        return "a collective failed, and the rank that was to say who is lost has ended, too"
    told: bytes = store.get(f"{names}told")
    return told.decode()


def _who_is_lost(roll_call: RollCall) -> str:
    """Text that names the ranks that do not come to the roll call, once all others have."""
    everyone = range(dist.get_world_size())
    pause = 0.02
    end = time.monotonic() + _GRACE_S
    while True:
        there = {r for r, _ in roll_call.came()}
        has_all = len(there) + failure_log.errors_standing() >= len(everyone)
        if has_all or (left := end - time.monotonic()) <= 0:
            break
        time.sleep(min(pause, left))
        pause *= 2
    silent = [r for r in everyone if r not in there]
    if what := failure_log.errors(failure_log.heard(silent)):
        return what
    if silent:
        return f"rank {', '.join(map(str, silent))} did not come to a collective: it hangs, or has ended"
    return f"ranks wait for one another: {failure_log.by_text(sorted(failure_log.heard(everyone).items()))}"
