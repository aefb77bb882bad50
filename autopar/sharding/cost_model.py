"""`CostModel`: seconds of kernels, conversions and optimizer steps on one cluster.

Each quantity comes from the first of these sources that knows it:

1. a curve that `autopar calibrate` measured for it;
2. for what only reads and writes, the measured curve of a sum of two of as many bytes;
3. a formula of `costs` on what kernels of its kind were measured to reach, where the cluster's file says so;
4. a formula of `costs` on the peak rates and links of the cluster.

The same work is priced on every cluster: `space.op_seconds` says which kernels an op runs, `CostModel` how long they
take.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from autopar.sharding.certainty import MEASURED, PEAK, REACHED
from autopar.sharding.cluster import Cluster, Timed
from autopar.sharding.costs import (
    FORMULAS,
    LOCAL,
    collective_seconds,
    is_measured,
    measured_between,
    measured_seconds,
    on_devices,
    optimizer_figures,
    seconds,
)
from autopar.sharding.device import Passes, on_curve

SUM, TURNED, SUM_OVER_ROWS, COPY = "add", "copy turned", "sum over rows", "clone"  # kernels by the names of their times
PADDED = ", and of copies that pad its rows to whole 16 bytes"
UNALIGNED = " unaligned"  # suffix of a product's name: its rows are not a multiple of 16 bytes
BROADCAST = " broadcast"  # suffix of arithmetic's name: an operand is smaller than the result
_HALF = 2  # itemsize of the products that were measured
_HALVES = ("bfloat16", "float16")  # dtypes in which fused attention and unaligned rows were measured
_WORK = {"forward": 1.0, "backward": 2.5}  # attention: backward recomputes the scores and has four products
_SUMMED = {"float64": 24, "float32": 12, "bfloat16": 6, "float16": 6}  # bytes that a sum moves an element of its result


START = 4096.0  # bytes of a measured message that takes no longer than its start


class Message(NamedTuple):
    """Tensors that travel in one message: their bytes in all, and their number."""

    nbytes: float
    tensors: float


ALONE = Message(0.0, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class Matrices:
    """The sizes of batched matrix products, [batch, m, k] by [batch, k, n], as arrays by choice."""

    batch: np.ndarray
    m: np.ndarray
    n: np.ndarray
    k: np.ndarray

    def unaligned(self, itemsize: int) -> np.ndarray:
        """A mask of the choices whose rows are not a multiple of the 16 bytes that a kernel loads at once."""
        unit = 16 // itemsize
        return (self.n % unit != 0) | (self.k % unit != 0)

    def padding(self, itemsize: int) -> np.ndarray:
        """Bytes that are copied to pad both matrices to sizes of whole 16 bytes, by choice."""
        unit = 16 // itemsize
        whole_m, whole_n, whole_k = (size % unit == 0 for size in (self.m, self.n, self.k))
        left = np.where(whole_m & whole_k, 0, self.m * self.k)
        right = np.where(whole_n & whole_k, 0, self.n * self.k)
        return itemsize * self.batch * (left + right)

    @property
    def gradients(self) -> tuple[Matrices, Matrices]:
        """The products that compute the gradient of the left matrix, and that of the right one."""
        return Matrices(self.batch, self.m, self.k, self.n), Matrices(self.batch, self.n, self.k, self.m)


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """The heads of an attention: their width, and by choice the number of keys and the share of scores computed."""

    width: int
    length: np.ndarray
    share: np.ndarray
    is_causal: bool


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A kernel that an op runs on a device, and how much work it does, as arrays by choice."""

    names: tuple[str, ...]  # names under which its time may be known, the closest first
    dtype: str
    amount: np.ndarray  # FLOPs of a product, elements of the largest tensor of any other
    bytes: np.ndarray  # read and written
    back: np.ndarray  # read and written by the kernel of a gradient
    starts: tuple[bool, bool] = (True, True)  # does a kernel start with it, in forward and in backward?
    is_product: bool = False
    matrices: Matrices | None = None
    heads: Heads | None = None
    hands_on: bool = False  # backward returns the incoming gradient unchanged
    as_cut: tuple[str, np.ndarray] | None = None  # another name of its curve, and a mask of the choices on that
    size: np.ndarray | None = None  # the second size on which its time depends, where it has one
    pads: int = 0  # itemsize where compiled code may pad rows to whole 16 bytes; 0: it never does


class CostModel:
    """Seconds on a cluster, for a job on a number of devices that wait for each other.

    What was measured on the machine includes that wait. A formula is of one device, and is multiplied by `slowest`, the
    expected time of the slowest device relative to one.
    """

    def __init__(self, cluster: Cluster, devices: int = 1) -> None:
        self.cluster = cluster
        self.devices = devices
        self.slowest = cluster.slowest_of(devices)

    def forward(self, kernel: Kernel) -> np.ndarray:
        """Seconds of a kernel, by choice."""
        if kernel.pads:
            return self._where_padded(kernel, self.forward)
        if timed := self._timed(kernel):
            return self._on_curve(kernel, timed, "forward")
        return self._unmeasured(kernel, "forward")

    def backward(self, kernel: Kernel) -> np.ndarray:
        """Seconds of the kernel that computes a gradient of this one, by choice."""
        if kernel.pads:
            return self._where_padded(kernel, self.backward)
        if timed := self._timed(kernel):
            return self._on_curve(kernel, timed, "backward")
        if kernel.hands_on:
            return np.zeros(len(kernel.bytes))
        return self._unmeasured(kernel, "backward")

    def _where_padded(self, kernel: Kernel, seconds: Callable[[Kernel], np.ndarray]) -> np.ndarray:
        """Seconds of a product, by choice, with unaligned rows padded to whole 16 bytes where that is faster."""
        whole = seconds(replace(kernel, as_cut=None, pads=0))
        if kernel.matrices is None or kernel.as_cut is None or not kernel.as_cut[1].any():
            return whole
        copied = [self.copy(float(nbytes)) for nbytes in kernel.matrices.padding(kernel.pads)]
        as_they_are = seconds(replace(kernel, pads=0))
        return np.where(kernel.as_cut[1], np.minimum(as_they_are, whole + copied), whole)

    @functools.cached_property
    def knows_unaligned(self) -> bool:
        """Whether products with rows that are not a multiple of 16 bytes were measured, here or for the class."""
        products = self.cluster.device.products
        is_in_file = products is not None and products.unaligned < 1
        return is_in_file or any(timed.op.endswith(UNALIGNED) for timed in self.cluster.timed)

    def is_measured(self, kernel: Kernel) -> bool:
        return self._timed(kernel) is not None

    def is_known(self, kernel: Kernel) -> bool:
        """Whether the kernel was timed, on this machine or on its device class by the rate of its passes."""
        return self.is_measured(kernel) or self._passes(kernel) is not None

    def _passes(self, kernel: Kernel) -> Passes | None:
        """The reached rates of a kernel's class, if any; without a second size only such as do not need it."""
        found = self.cluster.device.passes_of(kernel.names, kernel.dtype)
        if found is None or kernel.size is not None:
            return found
        return found if len(found.forward) == len(found.backward) == 1 else None

    def source(self, kernel: Kernel) -> str:
        """The source of a kernel's seconds: a name of `certainty`."""
        device = self.cluster.device
        if self._timed(kernel) is not None or self._as_a_sum(kernel) is not None:
            return MEASURED
        if kernel.heads is not None:
            return PEAK if self._attention(kernel, kernel.heads, "forward") is None else REACHED
        if kernel.is_product:
            is_known = device.products is not None and kernel.dtype in dict(device.products.reached)
            return REACHED if is_known and kernel.matrices is not None else PEAK
        return REACHED if device.reached_bytes_per_s else PEAK

    def source_of_optimizer(self, optimizer: str | float, dtype: str) -> str:
        """The source of the seconds of an optimizer's step: a name of `certainty`."""
        if self.cluster.times_of(f"optimizer {on_devices(optimizer)}", dtype):
            return MEASURED
        return REACHED if self.cluster.device.reached_bytes_per_s else PEAK

    def _timed(self, kernel: Kernel) -> Timed | None:
        dtype = _timed_dtype(kernel)
        found = (self.cluster.times_of(name, dtype) for name in kernel.names)
        return next((timed for timed in found if timed), None)

    def _on_curve(self, kernel: Kernel, timed: Timed, way: str) -> np.ndarray:
        found = self._at_size(kernel, timed.op, timed.dtype, way)
        if kernel.as_cut is None or not self.cluster.times_of(kernel.as_cut[0], timed.dtype):
            return found
        return np.where(kernel.as_cut[1], self._at_size(kernel, kernel.as_cut[0], timed.dtype, way), found)

    def _at_size(self, kernel: Kernel, op: str, dtype: str, way: str) -> np.ndarray:
        """Seconds on an op's curves, by choice, interpolated where there are several by a second size."""
        curves = self.cluster.curves_of(op, dtype)
        return measured_between([getattr(t, way) for t in curves], [t.at for t in curves], kernel.amount, kernel.size)

    def _unmeasured(self, kernel: Kernel, way: str) -> np.ndarray:
        """Seconds of a kernel that nobody measured: as of a sum of as many bytes, or by a formula."""
        if (summed := self._as_a_sum(kernel)) is not None:
            found = measured_seconds(summed.forward, _moved(kernel, way) / _SUMMED[summed.dtype])
            # An op that runs in the kernel of another one moves its bytes, and starts no kernel.
            return found if _starts(kernel, way) else np.maximum(found - summed.forward[0][1], 0.0)
        formula, quantities = self._formula(kernel, way)
        return seconds(formula, **quantities) * self.slowest

    def _as_a_sum(self, kernel: Kernel) -> Timed | None:
        """An elementwise sum's measured curve, for a kernel that only reads and writes, or None."""
        return None if kernel.is_product else self.cluster.times_of(SUM, _timed_dtype(kernel))

    def _formula(self, kernel: Kernel, way: str) -> tuple[str, dict[str, Any]]:
        """The name of the formula of an unmeasured kernel, and its quantities."""
        device = self.cluster.device
        known: dict[str, Any] = {"bytes": _moved(kernel, way), "bandwidth": device.bandwidth}
        known["launch"] = device.launch_s * _starts(kernel, way)
        work = kernel.amount
        if (passes := self._passes(kernel)) is not None:
            rate = on_curve(getattr(passes, way), 1.0 if kernel.size is None else kernel.size)
            known["bandwidth"] = np.minimum(rate, device.bandwidth)
        if kernel.heads is not None:
            work = work * kernel.heads.share * _WORK[way]
            if (found := self._attention(kernel, kernel.heads, way)) is not None:
                return "attention", {"flops": work, "reached": found, **known}
        products = device.products
        if kernel.matrices is not None and products is not None and kernel.dtype in dict(products.reached):
            sizes = {name: getattr(kernel.matrices, name) for name in ("batch", "m", "n", "k")}
            tile_m, tile_n = products.tile
            about = {"units": products.units, "start": products.start_s, "tile_m": tile_m, "tile_n": tile_n}
            reached: Any = dict(products.reached)[kernel.dtype]
            is_half = kernel.dtype in _HALVES  # Unaligned rows make these kernels load few bytes at once.
            if is_half and kernel.as_cut is not None and kernel.as_cut[0].endswith(UNALIGNED):
                reached = reached * np.where(kernel.as_cut[1], products.unaligned, 1.0)
            about |= {"itemsize": _HALF, "reached": reached}
            return "product", {**sizes, **about, **known}
        return "compute", {"flops": work, "rate": device.rate(kernel.dtype), **known}

    def told(self, kernel: Kernel, way: str) -> str:
        """Text about the source of a kernel's seconds: a curve, or a formula with the first choice's numbers."""
        if kernel.pads:
            seconds_of = getattr(self, way)
            as_it_is = replace(kernel, pads=0)
            is_padded = seconds_of(kernel)[0] < seconds_of(as_it_is)[0]
            return self.told(replace(as_it_is, as_cut=None), way) + PADDED if is_padded else self.told(as_it_is, way)
        curve = self._timed(kernel) or self._as_a_sum(kernel)
        if curve is not None and kernel.as_cut is not None and kernel.as_cut[1][0]:
            curve = self.cluster.times_of(kernel.as_cut[0], curve.dtype) or curve
        if curve is not None:
            return f"on the curve that was measured of {curve.op} in {curve.dtype}"
        if way == "backward" and kernel.hands_on:
            return "nothing: it hands on the gradient that it is given"
        formula, quantities = self._formula(kernel, way)
        names = (str(symbol) for symbol in FORMULAS[formula].free_symbols)
        numbers = {name: float(np.ravel(quantities[name])[0]) for name in sorted(names)}
        told = f"{FORMULAS[formula]} with {', '.join(f'{name} = {value:.4g}' for name, value in numbers.items())}"
        return told if self.slowest == 1 else f"{told}, times {self.slowest:.3f} of the slowest of {self.devices}"

    def _attention(self, kernel: Kernel, heads: Heads, way: str) -> np.ndarray | None:
        """FLOP/s that a fused attention kernel reaches, by choice; None where nobody measured it."""
        curves = self.cluster.device.attention_curves(heads.width, heads.is_causal)
        if curves is None or kernel.dtype not in _HALVES:
            return None
        return on_curve(getattr(curves, way), heads.length)

    def copy(self, nbytes: float, name: str = COPY) -> float:
        """Seconds to copy `nbytes` bytes on a device, on the measured curve `name` where there is one."""
        if timed := self.cluster.times_of(name, "float32"):
            return float(measured_seconds(timed.forward, nbytes / 4))
        device = self.cluster.device
        took = seconds("copy", bytes=nbytes, launch=device.launch_s, bandwidth=device.bandwidth)
        return float(took) * self.slowest

    def moving(self, nbytes: np.ndarray) -> np.ndarray:
        """Seconds to read and write `nbytes` bytes in all, without the start of a kernel."""
        return nbytes / self.cluster.device.bandwidth * self.slowest

    def step(
        self, kind: str, dim: int, levels: Sequence[tuple[int, Any]], nbytes: float, message: Message = ALONE
    ) -> float:
        """Seconds of one step of a conversion.

        `nbytes` is the size of the tensor where the axis does not cut it. A collective that travels with others in one
        `message` pays for its share of the bytes and, on measured links, for an equal share of the start.
        """
        n = math.prod(size for size, _ in levels)
        if kind in LOCAL:
            return self.copy(nbytes / (n if kind == "slice" else 1))
        moved = collective_seconds(kind, levels, max(message.nbytes, nbytes))
        if nbytes < message.nbytes:
            is_known = is_measured(levels)  # otherwise a start is a few microseconds by a data sheet: shared like bytes
            start = collective_seconds(kind, levels, min(START, message.nbytes)) if is_known else 0.0
            moved = start / message.tensors + max(0.0, moved - start) * nbytes / message.nbytes
        if kind == "all_to_all" and not is_measured(levels):  # packed for those who receive, put together from all
            return moved + 2 * self.copy(nbytes / n)
        # a collective packs by the first dim: what is gathered or scattered along another is turned on the way
        turned = kind in ("all_gather", "reduce_scatter") and dim > 0
        return moved + (self.copy(nbytes * (1 + 1 / n), TURNED) if turned else 0.0)

    def optimizer(self, optimizer: str | float, dtype: str, itemsize: int, nbytes: np.ndarray) -> np.ndarray:
        """Seconds of an optimizer's step on `nbytes` bytes of a parameter."""
        if timed := self.cluster.times_of(f"optimizer {on_devices(optimizer)}", dtype):
            return measured_seconds(timed.forward, nbytes / itemsize)
        return self.moving(nbytes * optimizer_figures(optimizer, itemsize)["moved"])


def _starts(kernel: Kernel, way: str) -> bool:
    return kernel.starts[0] if way == "forward" else kernel.starts[1]


def _moved(kernel: Kernel, way: str) -> np.ndarray:
    return kernel.bytes if way == "forward" else kernel.back


def _timed_dtype(kernel: Kernel) -> str:
    """The dtype of a kernel's curve: the kernel's own, or float32 for numbers that are not floating-point."""
    return kernel.dtype if "float" in kernel.dtype else "float32"
