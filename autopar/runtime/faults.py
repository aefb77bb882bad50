"""When a rank is lost: whoever notices says in which call it was, and who did not answer.

A collective that fails or runs out of time fails on every rank that waits. Each of them writes down in the job's store
where it stood, gives the others a moment to do so, and raises a letter that names those who have not: they hang or are
gone. A rank whose own code raises inside the model writes that down first, so that the others tell its error and not
theirs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.letters import Letter, Lost, NotServed
from autopar.runtime.agreement import wait_at_most
from autopar.runtime.private import job_store, set_timeout

_GRACE_S, _GOES_ON = 3.0, "goes on"
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


_has_said = False  # does something stand in the store of this rank?


def limit(mesh: DeviceMesh, seconds: float) -> None:
    """No collective on these axes, and no agreement, waits longer."""
    wait_at_most(seconds)
    if dist.get_backend() in ("gloo", "nccl"):
        for axis in range(mesh.ndim):
            set_timeout(mesh.get_group(axis), timedelta(seconds=seconds))


@contextlib.contextmanager
def naming_the_lost(where: str) -> Iterator[None]:
    """Around what runs collectives."""
    global _has_said
    if _has_said:  # it has raised before, was caught, and goes on
        _write(_GOES_ON)
        _has_said = False
    try:
        yield
    except Lost:
        raise
    except Exception as e:
        if dist.get_backend() not in ("gloo", "nccl") or dist.get_world_size() == 1:
            raise
        if isinstance(e, Letter) or not isinstance(e, RuntimeError) or not any(sign in str(e) for sign in _SIGNS):
            _write(f"raised {type(e).__name__} in {where}: {e}")
            raise
        raise _lost(where, e) from e


@contextlib.contextmanager
def naming_the_lacking(where: str) -> Iterator[None]:
    """Around what runs ops, of which some turn out there to be missing: in a dtype that `precision=` chose, say."""
    try:
        yield
    except NotImplementedError as e:
        words = str(e).partition("\n")[0] or "its error says no more"
        raise NotServed(
            f"an op of {where} is not implemented on this device: {words}",
            advice="where its dtype is the cause, a cast before it, x.float(), or no precision=",
        ) from e


def _key(rank: int) -> str:
    return f"autopar/ended/{rank}"


def _write(text: str) -> None:
    global _has_said
    _has_said = True
    with contextlib.suppress(Exception):  # the store may be gone with rank 0
        job_store().set(_key(dist.get_rank()), text[:500])


def _lost(where: str, error: Exception) -> Lost:
    """A letter that names who did not answer."""
    me, first = dist.get_rank(), str(error).splitlines()[0][:200] if str(error) else ""
    _write(f"waited in {where}")
    said: dict[int, str] = {}
    end = time.monotonic() + _GRACE_S
    with contextlib.suppress(Exception):  # the store lives with rank 0, which may be the one
        store = job_store()
        while time.monotonic() < end and len(said) < dist.get_world_size():
            read = {
                r: store.get(_key(r)).decode()
                for r in range(dist.get_world_size())
                if r not in said and store.check([_key(r)])
            }
            said |= {r: text for r, text in read.items() if text != _GOES_ON}
            time.sleep(0.05)
    raised = {r: text for r, text in said.items() if text.startswith("raised")}
    silent = [r for r in range(dist.get_world_size()) if r not in said and r != me]
    if raised:
        what = "; ".join(f"rank {r} {text}" for r, text in sorted(raised.items()))
    elif silent:
        what = f"rank {', '.join(map(str, silent))} did not come to a collective: it hangs, or has ended"
    else:
        places: dict[str, list[int]] = {}
        for r, text in sorted(said.items()):
            places.setdefault(text, []).append(r)
        what = "ranks wait for one another: " + "; ".join(
            f"rank {', '.join(map(str, ranks))} {text}" for text, ranks in places.items()
        )
    return Lost(
        what,
        at=f"rank {me}, in {where}",
        seen=first,
        advice="the log of that rank; timeout_s= for how long others wait",
    )
