"""Formulas of seconds, each written once: sympy expressions that become numpy functions on first use.

    flops, bytes        work of one op on one device, and what it reads and writes
    rate, bandwidth     FLOP/s for its dtype and memory bytes/s of the device
    batch, m, n, k      products of matrices, the rows and columns of their results, and what they sum over
    tile_m, tile_n      of a result, what one of the `units` of a device computes at a time
    itemsize            bytes of a number of a product's result
    reached             FLOP/s that kernels of this kind were measured to reach
    n, whole            devices of the axis on one link level, and bytes of the tensor where they do not cut it
    latency, wire       seconds and bytes/s of that level's link
    launch, start       seconds to start a kernel, and a product

`seconds` evaluates a formula; `measured_seconds` reads a measured curve, which comes before any formula.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import sympy as sp

_SINGLE = 4  # bytes of a number in single precision
_NARROW = 64  # rows or columns of the narrowest tile that libraries have

flops, bytes_, rate, bandwidth, n, whole, latency, wire, launch = sp.symbols(
    "flops bytes rate bandwidth n whole latency wire launch", positive=True
)
batch, m, k, tile_m, tile_n, units, reached, start, itemsize = sp.symbols(
    "batch m k tile_m tile_n units reached start itemsize", positive=True
)
_area = tile_m * tile_n
# a narrow matrix has narrow tiles, of as many numbers
_tiles = batch * sp.Min(
    *(sp.ceiling(m * down / _area) * sp.ceiling(n / down) for down in (tile_m, tile_n, _NARROW)),
    sp.ceiling(m / _NARROW) * sp.ceiling(n * _NARROW / _area),
)
_parts = sp.Max(1, sp.floor(units / _tiles))  # Sums are split where units would have no tile.
# a wave computes its tiles, then writes them
_whole = sp.ceiling(_tiles / units) * _area * units * (2 * k / reached + itemsize / bandwidth)
# parts are written in single precision, and added up by a kernel of its own
_split = sp.ceiling(_tiles * _parts / units) * _area * units * (2 * k / _parts / reached + _SINGLE / bandwidth)
_added = start + batch * m * n * (_parts * _SINGLE + itemsize) / bandwidth

FORMULAS: dict[str, sp.Expr] = {
    "compute": launch + sp.Max(flops / rate, bytes_ / bandwidth),
    "product": start + sp.Max(sp.Min(_whole, _split + _added), bytes_ / bandwidth),
    "attention": launch + sp.Max(flops / reached, bytes_ / bandwidth),
    "all_gather": latency + (n - 1) / n * whole / wire,
    "reduce_scatter": latency + (n - 1) / n * whole / wire,
    "all_reduce": latency + 2 * (n - 1) / n * whole / wire,
    "all_to_all": latency + (n - 1) / n * whole / n / wire,  # each device holds whole / n and keeps 1 / n of it
    "uneven_all_to_all": latency + (n - 1) / n * whole / n / wire,  # parts of a device differ in length
    "send": latency + whole / wire,  # `whole` is what one device sends to the next
    "copy": launch + 2 * bytes_ / bandwidth,
}

LOCAL = frozenset({"slice", "lodge"})  # steps that move nothing between devices

# Per byte of parameter on a device: what the step reads and writes, what it keeps (states), and what it makes for the
# while. Counted from torch's own steps over lists of tensors, op by op: AdamW decays (2), moves the average (3), scales
# the squares and adds to them (2, 3), takes the root (2), divides it and adds to it (2, 2), and updates (4).
OPTIMIZERS: dict[str, dict[str, float]] = {
    "adamw": {"moved": 20, "kept": 2, "temporary": 1},
    "sgd": {"moved": 3, "kept": 0, "temporary": 0},
    "sgd-momentum": {"moved": 8, "kept": 1, "temporary": 0},
    # autopar.optim.AdamW on single precision, each once: parameter, gradient and states are read, all but the gradient
    # are written
    "autopar-adamw": {"moved": 7, "kept": 2, "temporary": 0},
}

# The optimizers whose step may run on the host, where their states then lie: behind backward, and while it goes on.
STEPS_ON_HOST = ("autopar-adamw", "autopar-adamw-during-backward")
DURING_BACKWARD = STEPS_ON_HOST[-1]


def on_devices(optimizer: str | float) -> str | float:
    """The optimizer whose step devices make, where the host steps the other parameters."""
    return STEPS_ON_HOST[0] if optimizer == DURING_BACKWARD else optimizer


def optimizer_figures(optimizer: str | float, itemsize: int) -> dict[str, float]:
    """Bytes moved, kept and temporarily made by an optimizer's step, per byte of parameter on a device.

    `optimizer` is a name of OPTIMIZERS, or the bytes of its states for each parameter: such a one reads and writes its
    states as AdamW does two of them, and makes one temporary tensor.
    """
    optimizer = on_devices(optimizer)
    if optimizer == "autopar-adamw" and itemsize < _SINGLE:
        kept = 3 * _SINGLE / itemsize
        return {"moved": 2 * kept + 2, "kept": kept, "temporary": 0}
    if isinstance(optimizer, str):
        return OPTIMIZERS[optimizer]
    kept = optimizer / itemsize
    sgd, adamw = OPTIMIZERS["sgd"], OPTIMIZERS["adamw"]
    each = (adamw["moved"] - sgd["moved"]) / adamw["kept"]
    return {"moved": sgd["moved"] + each * kept, "kept": kept, "temporary": 1}


@functools.cache
def _compiled(formula: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    names = tuple(sorted(str(s) for s in FORMULAS[formula].free_symbols))
    return sp.lambdify(names, FORMULAS[formula], "numpy"), names


def seconds(formula: str, **quantities: Any) -> Any:
    """Evaluate a formula on numbers or numpy arrays; quantities that it does not name are ignored."""
    function, names = _compiled(formula)
    return function(*(quantities[name] for name in names))


def measured_seconds(curve: Sequence[tuple[float, float]], amount: Any) -> Any:
    """Seconds for amounts on a measured curve, interpolated on log-log scales.

    They are constant below the smallest measured amount, and proportional to the amount beyond the largest.
    """
    x, y = np.log(np.array(curve, float)).T
    at = np.log(np.maximum(amount, 1e-300))
    return np.exp(np.interp(at, x, y) + np.maximum(at - x[-1], 0.0))


def measured_between(
    curves: Sequence[Sequence[tuple[float, float]]], sizes: Sequence[float], amount: Any, size: Any
) -> Any:
    """Seconds for amounts, interpolated on log scales between curves of ascending second sizes.

    Outside of the measured sizes the nearest curve holds.
    """
    if len(curves) == 1 or size is None:
        return measured_seconds(curves[0], amount)
    found = np.log([measured_seconds(points, amount) for points in curves])
    at = np.log(np.maximum(size, 1e-300))
    x = np.log(np.array(sizes, float))
    place = np.clip(np.searchsorted(x, at), 1, len(x) - 1)
    share = np.clip((at - x[place - 1]) / (x[place] - x[place - 1]), 0.0, 1.0)
    choice = np.arange(found.shape[1])
    return np.exp((1 - share) * found[place - 1, choice] + share * found[place, choice])


def is_measured(levels: Sequence[tuple[int, Any]]) -> bool:
    """Whether a collective was measured on these levels.

    There is only one level then, and its times include packing.
    """
    return bool(getattr(levels[0][1], "times", ()))


def collective_seconds(kind: str, levels: Sequence[tuple[int, Any]], bytes_: float) -> float:
    """Seconds of a collective on an axis whose devices are joined by these link levels, innermost first.

    `bytes_` is the size of the tensor where the axis does not cut it, or of what one device sends to the next one. A
    collective that spans nodes is one ring of all devices, as NCCL's: as many bytes pass each device's link in a node,
    and those of a node's devices together pass its links to the next. Both move at once, piece by piece, and the slower
    one says how long the pieces take. A sum over two nodes goes up and down a tree, of which each holds half. A
    collective starts once, and its first piece makes every hop. A sum takes at least as long as one of fewer bytes,
    although doublings of more bytes may be cheaper.
    """
    if is_measured(levels):
        return float(measured_seconds(levels[0][1].times, bytes_))
    sizes = [bytes_]
    if kind == "all_reduce":
        sizes += [smaller for smaller in _before_cheaper(levels) if smaller < bytes_]
    return max(_ring_seconds(kind, levels, size) for size in sizes)


def _before_cheaper(levels: Sequence[tuple[int, Any]]) -> list[float]:
    """Sizes of a sum beyond which doublings of a level become cheaper; between others its seconds ascend."""
    found = []
    inside = 1
    for n, link in levels:
        falls = [a[0] for a, b in itertools.pairwise(link.doubling) if b[1] < a[1]]
        found += [inside * size for size in falls]
        inside *= n
    return found


def _ring_seconds(kind: str, levels: Sequence[tuple[int, Any]], bytes_: float) -> float:
    """Seconds of a collective of this size alone."""
    count = math.prod(n for n, _ in levels)
    started = 0.0
    hops = 0.0
    moved = 0.0
    inside = 1
    outside = count
    for n, link in levels:
        outside //= n
        whole = bytes_ / count * n / outside if kind == "all_to_all" else bytes_ / inside
        whole = bytes_ if kind == "send" else whole  # the slowest link has one device's, too
        started = max(started, float(seconds(kind, n=n, whole=0.0, latency=link.latency_s, wire=1.0)))
        hops += link.sum_s(n, whole) if kind == "all_reduce" else link.hop_s * _hops(kind, n, outside)
        around = n if kind in ("all_to_all", "send") or (kind == "all_reduce" and n == 2) else count
        moved = max(moved, float(seconds(kind, n=around, whole=whole, latency=0.0, wire=link.wire(kind, n))))
        inside *= n
    return started + hops + moved


def _hops(kind: str, n: int, outside: int) -> int:
    """Hops in a row over one level: those of a ring, 1 for all_to_all and send."""
    return 1 if kind in ("all_to_all", "send") else (n - 1) * outside
