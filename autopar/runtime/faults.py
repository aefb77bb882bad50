"""Errors for a lost rank: every rank that notices says in which call it was, and which ranks did not answer.

A collective that fails or times out fails on every rank that waits. Each of them writes into the job's store where it
stood, gives the others a moment to do so, and raises a letter that names those who have not: they hang or are gone. A
rank whose own code raises inside the model writes that first, so that the others report its error and not their own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.letters import Letter, Lost, NotServed
from autopar.runtime import failure_log
from autopar.runtime.agreement import wait_at_most
from autopar.runtime.private import set_timeout

_GRACE_S = 3.0
_SIGNS = (
    "gloo",
    "NCCL",
    "Connection closed",
    "Connection reset",
    "Timed out",
    "timed out",
    "Broken pipe",
    "Socket",
    "wait timeout",
)


def limit(mesh: DeviceMesh, seconds: float) -> None:
    """Set the longest wait of collectives on these axes, and of agreements, in seconds."""
    wait_at_most(seconds)
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
        if isinstance(e, Letter) or not isinstance(e, RuntimeError) or not any(sign in str(e) for sign in _SIGNS):
            failure_log.say(f"{failure_log.RAISED} {type(e).__name__} in {where}: {e}")
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
    me, first = dist.get_rank(), str(error).splitlines()[0][:200] if str(error) else ""
    failure_log.say(f"waited in {where}")
    heard: dict[int, str] = {}
    end = time.monotonic() + _GRACE_S
    with contextlib.suppress(Exception):  # the store lives with rank 0, which may be the one
        while time.monotonic() < end and len(heard) < dist.get_world_size():
            heard |= failure_log.heard(r for r in range(dist.get_world_size()) if r not in heard)
            time.sleep(0.05)
    what = failure_log.errors(heard)
    silent = [r for r in range(dist.get_world_size()) if r not in heard and r != me]
    if not what and silent:
        what = f"rank {', '.join(map(str, silent))} did not come to a collective: it hangs, or has ended"
    elif not what:
        what = f"ranks wait for one another: {failure_log.by_text(sorted(heard.items()))}"
    return Lost(
        what,
        at=f"rank {me}, in {where}",
        seen=first,
        advice="the log of that rank; timeout_s= for how long others wait",
    )
