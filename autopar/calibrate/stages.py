"""Stages of a calibration: each reports its progress, and its figures are kept in a file until the end.

A calibration that was stopped continues after its last finished stage when it is asked for the same again.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

Figures = list[float]
Tick = Callable[[], None]
_WIDTH = 30  # characters of a bar


class Stages:
    """Runs stages on all ranks; rank 0 keeps their figures in a file, if there is one, and reports progress."""

    def __init__(self, path: str | Path | None = None, about: str = "", out: IO[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.about = about  # the request; figures that a file holds for another are not taken
        self.out = out if out is not None else sys.stderr
        self.is_first = dist.get_rank() == 0
        box = [self._read() if self.is_first else {}]
        dist.broadcast_object_list(box, 0)
        self.known: dict[str, Figures] = box[0]

    def run(self, name: str, count: int, measure: Callable[[Tick], Figures]) -> Figures:
        """The figures of a stage of `count` steps, measured or known."""
        if name in self.known:
            self._say(f"{name}: measured before\n")
            return self.known[name]
        with self._bar(name, count) as tick:
            self.known[name] = measure(tick)
        if self.is_first and self.path is not None:
            text = json.dumps({"about": self.about, "stages": self.known})
            self.path.write_text(text, encoding="utf-8")
        return self.known[name]

    def end(self) -> None:
        """Remove the file, after all figures are written elsewhere."""
        if self.is_first and self.path is not None:
            self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _bar(self, name: str, count: int) -> Iterator[Tick]:
        """Yield a function to call after every step; on a terminal it redraws a progress bar."""
        done = 0
        is_seen = self.out.isatty()

        def tick() -> None:
            nonlocal done
            done = min(done + 1, count)
            if is_seen:
                full = _WIDTH * done // max(count, 1)
                self._say(f"\r{name}: [{'#' * full}{'.' * (_WIDTH - full)}] {done} of {count}")

        yield tick
        self._say("\n" if is_seen and count else f"{name}: {count} measured\n")

    def _say(self, text: str) -> None:
        if self.is_first:
            self.out.write(text)
            self.out.flush()

    def _read(self) -> dict[str, Figures]:
        """The stages in the file, if they belong to what is asked for."""
        if self.path is None or not self.path.exists():
            return {}
        try:
            kept: Any = json.loads(self.path.read_text(encoding="utf-8"))
            if kept["about"] != self.about:
                return {}
            return {name: list(map(float, figures)) for name, figures in kept["stages"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
