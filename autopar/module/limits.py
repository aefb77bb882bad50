"""`LIMITS`: the tuned numbers of a parallel model, each with its unit and how it was found.

"Chosen" is said of a number that was never measured against others.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """Looks at a model that trains, and at a gradient beside that of a single device (`watch.py`, design 048)."""

    rows: int = 4  # rows of the batch on which a gradient is compared. Chosen.
    every: int = 10  # looks of which one compares a gradient. Chosen.
    named: int = 3  # tensors that one letter names. Chosen.
    # A program adds in other orders. Of eleven models in two dtypes under three plans none is named.
    rounding: float = 8.0  # tolerance, in multiples of the rounding of the plain model
    share: float = 4.0  # least norm of a part, in multiples of its share: rounding may gather in one part. Chosen.
    most: float = 0.5  # relative tolerance above which a gradient is mostly rounding and is not compared. Chosen.


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of what a model remembers of its calls, and of what it compares. All chosen."""

    programs: int = 16  # programs that a model keeps; the one that was not called for longest is dropped first
    checked_calls: int = 2  # first calls of a program, in which ranks compare what they pass
    states: int = 16  # states of attributes that are remembered; one that comes back later counts as new
    noise: float = 1e-2  # share of all gradients under which one is rounding, such as that of a key's bias
    named: int = 4  # modules or parameters that a text names
    objects: int = 100_000  # objects behind an attribute or a function, above which it has no text that is compared
    cache_error: float = 0.05  # most that logits differ with a cache and without, as a share of the largest
    handed_bytes: int = 1 << 29  # bytes of tensors that a rank holds beside the model while it hands them over
    watch: WatchLimits = WatchLimits()


LIMITS = Limits()
