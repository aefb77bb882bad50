"""Answer calls of attention that describe their masks, while a module is captured."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopar.runtime.brief_patches import answered
from autopar.tracer.described import Described
from autopar.tracer.flex_calls import FlexCalls
from autopar.tracer.varlen_calls import VarlenCalls

if TYPE_CHECKING:
    from autopar.tracer.recorder import Recorder


@contextlib.contextmanager
def attention_calls_read(recorder: Recorder) -> Iterator[None]:
    """Let flex_attention and varlen attention become the op of attention, inside the block."""
    described = Described(recorder)
    with contextlib.ExitStack() as stack:
        for calls in (FlexCalls(described), VarlenCalls(described)):
            for function, answer in calls.answers():
                stack.enter_context(answered(function, functools.partial(described.read, answer)))
        yield
        described.close()
