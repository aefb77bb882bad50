"""Where in the user's program a capture is: the running module, open checkpoint regions, and the line of source."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch

_NOT_THE_USERS = (
    str(Path(inspect.getfile(torch)).parent),
    str(Path(__file__).parent.parent),
    str(Path(contextlib.__file__)),
)


class Whereabouts:
    """The place that the captured program has reached."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.thread = threading.get_ident()
        self.is_running = False  # whether the model runs
        self.paths = {id(module): path for path, module in root.named_modules()}
        self.modules: list[str] = []  # paths of those that are running, innermost last
        self.regions: list[int] = []  # checkpoint regions that are open, innermost last
        self.region_count = 0

    @property
    def module(self) -> str:
        """Path of the innermost running module."""
        return self.modules[-1] if self.modules else ""

    def is_in_model(self) -> bool:
        """Whether the captured model runs here: not another thread, and not code around the model."""
        return self.is_running and threading.get_ident() == self.thread

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Track modules inside the block as they begin and end."""
        hooks = torch.nn.modules.module

        def enter(module: torch.nn.Module, _: Any) -> None:
            if threading.get_ident() == self.thread:
                self.modules.append(self.paths.get(id(module), self.module))

        def leave(module: torch.nn.Module, *_: Any) -> None:
            if threading.get_ident() == self.thread:
                self.modules.pop()

        handles = (
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        )
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def within(self, path: str) -> Iterator[None]:
        """Let ops that are recorded in the block belong to that module."""
        self.modules.append(path)
        try:
            yield
        finally:
            self.modules.pop()

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Open a checkpoint region for the block."""
        self.regions.append(self.region_count)
        self.region_count += 1
        try:
            yield
        finally:
            self.regions.pop()


def source() -> str:
    """The nearest line that is neither torch's nor autopar's: `model.py:84, in Attention.forward`."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not is_ours(frame.f_code.co_filename):
            return _said(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


def source_of(error: BaseException) -> str:
    """The line of the same kind at which an error was raised."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [_said(frame.f_code, line) for frame, line in frames if not is_ours(frame.f_code.co_filename)]
    return lines[-1] if lines else ""


def _said(code: CodeType, line: int) -> str:
    return f"{os.path.basename(code.co_filename)}:{line}, in {getattr(code, 'co_qualname', code.co_name)}"


def defined(function: Any) -> str:
    """The line at which a function of a class begins; "" for one that was not written in Python."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}, in {function.__qualname__}"


@functools.cache
def is_ours(filename: str) -> bool:
    """Whether a file is part of torch or autopar, or no real file."""
    return filename.startswith(_NOT_THE_USERS) or filename.startswith("<")
