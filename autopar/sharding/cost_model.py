"""`CostModel`: seconds of what a device runs and of what devices exchange, on one cluster.

Every quantity has its sources in one order, and the first that knows it answers:

1. a curve that `autopar calibrate` measured for it;
2. for what only reads and writes, the measured curve of a sum of two of as many bytes;
3. the formula of `costs`, on the rates and links of the cluster.

What is priced is the same on every cluster. `space.op_seconds` says which kernels an op runs, `CostModel` how long they
take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.sharding.cluster import Cluster, Timed
from autopar.sharding.costs import LOCAL, collective_seconds, is_measured, measured_seconds, optimizer_figures, seconds

SUM, TURNED, SUM_OVER_ROWS, COPY = "add", "copy turned", "sum over rows", "clone"  # kernels by the names of their times
_SUMMED = 12  # bytes that a sum of two moves for each element of its result


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A kernel that an op runs on a device: how much it does, by choice."""

    names: tuple[str, ...]  # by which its time may be known, the closest first
    dtype: str
    amount: np.ndarray  # FLOPs of a product, elements of the largest tensor of any other
    bytes: np.ndarray  # read and written
    is_product: bool = False
    gradients: int = 1  # of how many operands its backward gives the gradients at once
    hands_on: bool = False  # the gradient that its backward gives is the one that it is given
    as_cut: tuple[str, np.ndarray] | None = None  # another name of its time, and the choices that have that


class CostModel:
    """Seconds on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def forward(self, kernel: Kernel) -> np.ndarray:
        """Seconds of a kernel."""
        if timed := self._timed(kernel):
            return self._on_curve(kernel, timed, "forward")
        return self._unmeasured(kernel, 1)

    def backward(self, kernel: Kernel) -> np.ndarray:
        """Seconds of the kernel that gives a gradient of this one."""
        if timed := self._timed(kernel):
            return self._on_curve(kernel, timed, "backward")
        return np.zeros(len(kernel.bytes)) if kernel.hands_on else self._unmeasured(kernel, kernel.gradients)

    def is_measured(self, kernel: Kernel) -> bool:
        return self._timed(kernel) is not None

    def _timed(self, kernel: Kernel) -> Timed | None:
        dtype = _timed_dtype(kernel)
        found = (self.cluster.times_of(name, dtype) for name in kernel.names)
        return next((timed for timed in found if timed), None)

    def _on_curve(self, kernel: Kernel, timed: Timed, way: str) -> np.ndarray:
        found = measured_seconds(getattr(timed, way), kernel.amount)
        if kernel.as_cut is None or not (cut := self.cluster.times_of(kernel.as_cut[0], timed.dtype)):
            return found
        return np.where(kernel.as_cut[1], measured_seconds(getattr(cut, way), kernel.amount), found)

    def _unmeasured(self, kernel: Kernel, times: int) -> np.ndarray:
        moved: np.ndarray = times * kernel.bytes
        dtype = _timed_dtype(kernel)
        if not kernel.is_product and (summed := self.cluster.times_of(SUM, dtype)):
            return measured_seconds(summed.forward, moved / _SUMMED)
        device = self.cluster.device
        return seconds(
            "compute",
            flops=times * kernel.amount,
            bytes=moved,
            rate=device.rate(kernel.dtype),
            bandwidth=device.memory_bytes_per_s,
            launch=device.launch_s,
        )

    def copy(self, nbytes: float, name: str = COPY) -> float:
        """Seconds to copy so many bytes."""
        if timed := self.cluster.times_of(name, "float32"):
            return float(measured_seconds(timed.forward, nbytes / 4))
        device = self.cluster.device
        return float(seconds("copy", bytes=nbytes, launch=device.launch_s, bandwidth=device.memory_bytes_per_s))

    def step(self, kind: str, dim: int, levels: Sequence[tuple[int, Any]], nbytes: float, bucket: float = 0.0) -> float:
        """Seconds of a step of a conversion.

        `nbytes` are those of the tensor as it is when the axis does not cut it. A reduction that travels in a `bucket`
        of so many bytes pays a share of it.
        """
        n = math.prod(size for size, _ in levels)
        if kind in LOCAL:
            return self.copy(nbytes / (n if kind == "slice" else 1))
        if bucket and kind in ("all_reduce", "reduce_scatter"):
            moved = collective_seconds(kind, levels, bucket) * nbytes / bucket
        else:
            moved = collective_seconds(kind, levels, nbytes)
        if kind == "all_to_all" and not is_measured(levels):  # packed for those who receive, put together from all
            return moved + 2 * self.copy(nbytes / n)
        # a collective packs by the first dim: what is gathered or scattered along another is turned on the way
        turned = kind in ("all_gather", "reduce_scatter") and dim > 0
        return moved + (self.copy(nbytes * (1 + 1 / n), TURNED) if turned else 0.0)

    def optimizer(self, optimizer: str | float, dtype: str, itemsize: int, nbytes: np.ndarray) -> np.ndarray:
        """Seconds of an optimizer's step on so many bytes of a parameter."""
        if timed := self.cluster.times_of(f"optimizer {optimizer}", dtype):
            return measured_seconds(timed.forward, nbytes / itemsize)
        moved = optimizer_figures(optimizer, itemsize)["moved"]
        return nbytes * moved / self.cluster.device.memory_bytes_per_s


def _timed_dtype(kernel: Kernel) -> str:
    """The dtype in which its time is known: what is no floating-point number is moved like float32."""
    return kernel.dtype if "float" in kernel.dtype else "float32"
