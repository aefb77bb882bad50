"""`LIMITS`: how long and how often calibration measures, each with its unit and how it was found.

"Chosen" is said of a number that was never measured against others. Sizes that are measured are data of the tables
(`collectives.py`, `workloads.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The reference step, whose seconds beside its ops and collectives are measured (`steps.py`). All chosen."""

    warm: int = 2  # steps before those that are timed
    width: int = 256  # width of the reference
    length: int = 64  # tokens in a row of its batch
    rows: tuple[int, int] = (2, 8)  # rows per device, in the small step and in the large one
    rounds: int = 3  # times the repetitions of a kernel: all else is multiplied by what steps take
    least: float = 0.5  # share of its ops' seconds; a step that took less shows an error of the collectives


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of what is timed. All chosen."""

    repetition_s: float = 4e-3  # least seconds of a repetition of an op
    held: int = 64 * 2**20  # bytes of results that a repetition holds at once
    ahead_s: float = 2e-3  # seconds of work that are queued on a GPU in front of what is timed
    shared_s: float = 60e-3  # least seconds of a repetition of ranks that share a core, whose turns last milliseconds
    pair_s: float = 4e-3  # the same for two ranks, as there are many pairs
    host_repetitions: int = 5  # most repetitions of copies to the host, and of AdamW there
    host_s: float = 20e-3  # least seconds of a repetition of these
    host_parameters: int = 2**22  # parameters of an AdamW there: with gradient and states 64 MiB, more than most caches
    collective_s: float = 1e-6  # least seconds of a collective: none is faster than a function that does nothing
    products: int = 3  # products of two squares between a collective and the next, about two milliseconds
    square: int = 256  # rows and columns of such a square
    steps: StepLimits = StepLimits()


LIMITS = Limits()
