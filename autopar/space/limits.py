"""`LIMITS`: the tuned numbers of the space, each with its unit and how it was found.

"Chosen" is said of a number that was never measured against others. Bytes of windows and of buckets are part of what a
plan says, and are where that is made (`windows.py`, `schedule.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of what is tried to find or to prove a rule, and of what counts as small."""

    # A recurrent module has twenty operands: 4,000 were tried before.
    assignments: int = 400  # assignments of placements up to which an op of a graph is tried. Chosen.
    elements: int = 1 << 17  # elements of the largest call that is tried. Chosen.
    elements_in_all_draws: int = 1 << 14  # elements up to which a call is tried in all draws, not in two. Chosen.
    large_or_tiny: float = (
        1e-3  # relative tolerance for numbers of the size of 1e4 and 1e-3. Chosen: functions amplify.
    )
    coarse: float = 0.25  # relative tolerance of floats with a mantissa of two or three bits. Chosen.
    carried_dims: int = 2  # first dims by which values are cut that calls carry on: rows, and heads or channels
    # Granite of two layers on (2,) at .4 of its peak took 3.39 ms without it, and takes 1.37 ms (design 041).
    small: float = 2**-10  # share of the peak; larger values may be recomputed even below `timeline.SMALL`


LIMITS = Limits()
