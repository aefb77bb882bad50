"""`LIMITS`: the tuned numbers of the search for cuts and orders, each with its unit and how it was found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of `bounds.py`, `search.py` and `chains.py`."""

    # Cuts of least bound that are simulated in one order, before blocks of the best are moved. Chosen.
    cuts: int = 50
    # Moves from a cut that takes so much longer than a known plan, as a share, do not lead below it: they gained
    # 20 % at most in the orders of 60 random chains and of GPT-3's blocks on 8 to 32 coordinates.
    moves: float = 0.25
    chains: int = 64  # Chains of the last runs of an order that bound its seconds at other prices. Chosen.
    rounding: float = 1e-9  # Share by which sums of equal seconds may differ. Sums of doubles differ by 1e-13.


LIMITS = Limits()
