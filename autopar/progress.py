"""What autopar says while it works: lines at INFO of the logger `autopar`, on rank 0 alone.

Who has configured logging finds them there, under the rules of that configuration. Where nobody has, the first rank of
a job writes them to stderr, as the jobs of a shell do: a search may take a while, and silence looks like a hang.
`logging.getLogger("autopar").setLevel(logging.WARNING)` silences them either way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist

log = logging.getLogger("autopar")
_SHOWN: ContextVar[bool] = ContextVar("autopar_progress_is_shown", default=False)


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Show progress inside even where nobody has configured logging."""
    token = _SHOWN.set(True)
    try:
        yield
    finally:
        _SHOWN.reset(token)


def detail(message: str, *args: Any) -> None:
    """Say, on rank 0 alone, a line that only those see who have asked for INFO."""
    if not (dist.is_initialized() and dist.get_rank()):
        log.info(message, *args)


def tell(message: str, *args: Any) -> None:
    """Say a line of progress, on rank 0 alone."""
    _say(message, args, _SHOWN.get() and _is_in_a_job())


def answer(message: str, *args: Any) -> None:
    """Say a line that the user has asked for, on rank 0 alone: also where nobody has configured logging."""
    _say(message, args, True)


def caution(message: str, *args: Any) -> None:
    """Say a warning, on rank 0 alone: where nobody has configured logging, beginning as other lines do."""
    if dist.is_initialized() and dist.get_rank():
        return
    if log.hasHandlers():
        log.warning(message, *args)
    elif log.isEnabledFor(logging.WARNING):
        print(f"autopar: {message % args}", file=sys.stderr, flush=True)


def _say(message: str, args: tuple[Any, ...], is_printed: bool) -> None:
    """Give a line to the logger, or print it where logging is not configured."""
    if dist.is_initialized() and dist.get_rank():
        return
    if log.hasHandlers():
        log.info(message, *args)
    elif log.isEnabledFor(logging.INFO) or (is_printed and not _is_silenced()):
        print(f"autopar: {message % args}", file=sys.stderr, flush=True)


def _is_in_a_job() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ or (dist.is_initialized() and dist.get_world_size() > 1)


def _is_silenced() -> bool:
    """Whether a level keeps INFO out, other than the default of the root."""
    root = logging.getLogger()
    return (
        log.level > logging.INFO or log.disabled or root.level > logging.WARNING or root.manager.disable >= logging.INFO
    )
