"""`StartTime`: the seconds of a start by stage, on rank 0 and on others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from autopar.progress import tell
from autopar.runtime.world import exchanged, plays_several_ranks, rank_here, ranks_can_talk

_STAGES = ("join", "tracing", "plan", "lower", "read", "wait", "values")


class StartTime:
    """The stages of a start that runs, each with its seconds."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.since = self.began
        self.seconds = dict.fromkeys(_STAGES, 0.0)

    def lap(self, stage: str) -> None:
        """Count the seconds since the last lap to a stage."""
        now = time.monotonic()
        self.seconds[stage] += now - self.since
        self.since = now

    def of_all(self, stage: str) -> None:
        """Count the seconds since the last lap to a stage of rank 0, for which other ranks have waited."""
        self.lap(stage if not ranks_can_talk() or plays_several_ranks() or rank_here() == 0 else "wait")

    def tell(self, device: torch.device) -> None:
        """Say the seconds of rank 0, and of the slowest other rank by stage; all ranks do so together."""
        whole = time.monotonic() - self.began
        mine = [round(1e3 * self.seconds[stage]) for stage in _STAGES]
        everyone = exchanged(mine, device)
        said = f"started in {whole:.1f} s: {_in_words(everyone[0])}"
        if everyone[1:]:
            slowest = [max(column) for column in zip(*everyone[1:], strict=True)]
            said = f"{said}; other ranks, at most: {_in_words(slowest)}"
        tell("%s", said)


def _in_words(milliseconds: Sequence[int]) -> str:
    shown: Mapping[str, int] = dict(zip(_STAGES, milliseconds, strict=True))
    return ", ".join(f"{stage} {ms / 1e3:.1f} s" for stage, ms in shown.items() if ms)
