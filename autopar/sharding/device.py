"""What one device can do, as data: its peak rates, and the rates that kernels were measured to reach.

Peaks are those of a data sheet. Reached rates come from microbenchmarks of single kernels: each has its source in the
cluster file, and what nobody measured is not there. `costs.py` holds the formulas.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Curve = tuple[tuple[float, float], ...]  # seconds, or a rate, by an amount, ascending


@dataclass(frozen=True, slots=True)
class Products:
    """The reached rate of matrix products, whose kernels compute tiles of the result, one on each unit, in waves."""

    units: int
    tile: tuple[int, int]
    start_s: float  # seconds to start a call
    reached: tuple[tuple[str, float], ...]  # FLOP/s of full waves, by dtype
    unaligned: float = 1.0  # share of that rate where rows are not a multiple of 16 bytes; 1: not measured

    def __post_init__(self) -> None:
        if not (isinstance(self.unaligned, (int, float)) and 0 < self.unaligned <= 1):
            raise ValueError(f"unaligned: {self.unaligned!r}, where a share of a rate is from 0 to 1")


@dataclass(frozen=True, slots=True)
class Attention:
    """The reached rate of a fused attention kernel: FLOP/s by sequence length, forward and backward.

    Under a causal mask half of the score matrix is counted. Backward counts as 2.5 times the work of forward.
    """

    width: int  # width of a head
    causal: bool
    forward: Curve
    backward: Curve


@dataclass(frozen=True, slots=True)
class Passes:
    """The reached rate of an op's kernels that read and write: bytes/s by its second size, forward and backward.

    Backward holds the sums that are gradients of weights.
    """

    op: str
    dtype: str
    forward: Curve
    backward: Curve

    def __post_init__(self) -> None:
        check_curve("forward", self.forward)
        check_curve("backward", self.backward)


@dataclass(frozen=True, slots=True)
class Device:
    """A device's rates, its memory, and the seconds to start a kernel."""

    name: str
    flops_per_s: tuple[tuple[str, float], ...]  # (dtype, peak FLOP/s)
    memory_bytes: int
    memory_bytes_per_s: float
    launch_s: float
    kernels: str = "cuda"  # "cuda" or "cpu": their kernels save different values for backward
    reached_bytes_per_s: float = 0.0  # rate of kernels that only read and write; 0: not measured
    products: Products | None = None
    attention: tuple[Attention, ...] = ()
    passes: tuple[Passes, ...] = ()

    def rate(self, dtype: str) -> float:
        """Peak FLOP/s for a dtype; the slowest rate of the table for a dtype that it lacks."""
        rates = dict(self.flops_per_s)
        return rates.get(dtype, min(rates.values()))

    @property
    def bandwidth(self) -> float:
        """Memory bytes/s that kernels reach, or the peak where nobody measured that."""
        return self.reached_bytes_per_s or self.memory_bytes_per_s

    def attention_curves(self, width: int, causal: bool) -> Attention | None:
        """The attention rates of the nearest head width, in powers of two; None where nobody measured any."""
        known = [a for a in self.attention if a.causal == causal]
        return min(known, key=lambda a: (abs(math.log2(a.width / width)), a.width), default=None)

    def passes_of(self, names: Sequence[str], dtype: str) -> Passes | None:
        """The reached rates of the first of these ops that was measured in a dtype, or None."""
        known = {p.op: p for p in self.passes if p.dtype == dtype}
        return next((known[name] for name in names if name in known), None)


def on_curve(points: Curve, amount: Any) -> Any:
    """Rates for amounts on a curve, linear in the log of the amount, and constant beyond its end points."""
    x, y = np.array(points, float).T
    return np.interp(np.log(np.maximum(amount, 1e-300)), np.log(x), y)


def check_curve(name: str, points: Curve, most: float = math.inf) -> None:
    """Raise ValueError unless a curve has points, of ascending amounts and of figures above 0."""
    amounts = [amount for amount, _ in points]
    is_ascending = all(a < b for a, b in itertools.pairwise([0.0, *amounts]))
    if not points or not is_ascending or not all(0 < figure <= most for _, figure in points):
        end = f" to {most:g}" if most < math.inf else ""
        shown = str([list(point) for point in points])[:80]
        raise ValueError(f"{name}: {shown}, where amounts ascend from above 0, and figures are above 0{end}")
