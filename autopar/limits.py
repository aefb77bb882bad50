"""`LIMITS`: the tuned numbers of the search over graphs and meshes, each with its unit and how it was found.

Those of the search for one plan are in `solver/limits.py`. "Chosen" is said of a number that was never measured against
others.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of planning (`planning.py`, `search.py`) and of the estimate of what a step needs (`needs.py`)."""

    # Products of few rows take more: two chunks and a whole head are searched too (design 043). Chosen.
    free: float = 0.02  # share of a step that chunks of the loss head may take without that
    kernel_searches: int = 5  # searches for a plan that can run its kernels, before one without kernels. Chosen.
    constraints: int = 4  # constraints that are left out one at a time to see which a budget breaks on. Chosen.
    gap_again: float = 0.01  # gap at which a plan for another batch is good enough: a training loop waits. Chosen.
    turns: int = 3  # numbers of micro-batches before what the last two lack tells whether more may fit. Chosen.
    fit_gap: float = 0.05  # gap at which a plan is good enough to say what so many devices do. Chosen.
    waits: float = (
        0.1  # share of a step that waits for communication above which fewer micro-batches are tried. Chosen.
    )
    batch_gain: float = 0.01  # gain in rows a second for which a batch is made larger. Chosen.
    # Shares of what a plan saves for backward that are tried for stages under a budget. Chosen.
    tighter: tuple[float, ...] = (1.0, 0.5, 0.25, 0.12, 0.0)
    # Micro-batches for each coordinate of stages that are tried where no number is asked for; meshes are searched with
    # the first of them. Chosen.
    fills: tuple[int, ...] = (2, 4)
    devices: int = 4096  # devices up to which an estimate looks for a number that holds a step. Chosen.


LIMITS = Limits()
