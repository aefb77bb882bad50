"""The garbage collector rests while the compiler works."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def without_collections(working: Callable[P, T]) -> Callable[P, T]:
    """A function that runs without garbage collections.

    Tracing, planning and lowering make many small objects that all stay and hold no cycles. The collector would look
    through them, and all of torch, again and again.
    """

    @functools.wraps(working)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return working(*args, **kwargs)
        finally:
            if was_on:
                gc.enable()

    return run
