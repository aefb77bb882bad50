"""What a step takes by block of a model, of which stages are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Units:
    """The blocks of a model, and the sites that belong to each."""

    names: tuple[str, ...]
    of: Mapping[str, int]  # site -> its block
    weights: Mapping[str, float]  # op -> the share of its backward that makes gradients of parameters
    crossing: tuple[tuple[str, int, int], ...]  # values that a later block reads: node's name, its block, the last one
    frozen: int  # blocks at first that have no parameter that is trained
    shared: Mapping[str, tuple[int, ...]]  # parameter that several blocks read -> these blocks
    anywhere: frozenset[str]  # ops that every stage which reads their results runs for itself


@dataclass(frozen=True, slots=True, eq=False)
class ByBlock:
    """Seconds and bytes of one device, an entry a block."""

    names: tuple[str, ...]
    forward: np.ndarray  # seconds of one micro-batch
    inward: np.ndarray  # seconds of its backward, to the gradients of what comes in
    weights: np.ndarray  # seconds of the rest of backward
    once: np.ndarray  # seconds that come once a step: the optimizer's
    standing: Mapping[str, np.ndarray]  # bytes that are there all the time, by kind
    gathered: np.ndarray  # bytes of gathered parameters that are kept from forward to backward
    after: np.ndarray  # bytes by block and by time from the reduction of gradients on
    saved: np.ndarray  # bytes of a micro-batch that backward needs
    waiting: np.ndarray  # bytes of a micro-batch that wait for the gradients of parameters alone
    busy: np.ndarray  # most bytes while a block runs, beside what stands and what blocks before it have saved

    def stands(self, first: int, end: int) -> dict[str, float]:
        """Bytes of some blocks that are there all the time, by kind."""
        return {kind: float(of_kind[first:end].sum()) for kind, of_kind in self.standing.items()}

    def runs(self, first: int, end: int) -> float:
        """The most bytes while one of these blocks runs, beside what stands and what is saved in the end."""
        own = self.saved[first:end]
        return float((self.busy[first:end] + np.cumsum(own) - own).max() - own.sum())
