"""`LIMITS`: the tuned numbers of ops, each with its unit and how it was found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Numbers that local forms are built with."""

    # Rows of a round, and pairs of a chunk, over those of a router that loads all experts alike. A router that is a
    # quarter off still needs one round. Chosen.
    spare: float = 1.25
    # Tensors of an integer for each pair of a row and an expert, which say where pairs stand. Counted.
    integers: int = 7
    # Pairs of the device that has most, over the mean, from which on queries of a window are dealt by work. Chosen.
    uneven: float = 1.1


LIMITS = Limits()
