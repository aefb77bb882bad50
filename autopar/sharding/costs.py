"""Seconds, from formulas written once: sympy expressions in named quantities, turned into numpy functions on first use.

flops, bytes        work of one op on one device, and what it reads and writes
rate, bandwidth     FLOP/s for its dtype and memory bytes/s of the device
n, whole            devices of the axis on one link level, and bytes of the tensor as it is when they do not cut it
latency, wire       seconds and bytes/s of that level's link
launch              seconds to start a kernel
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import sympy as sp

flops, bytes_, rate, bandwidth, n, whole, latency, wire, launch = sp.symbols(
    "flops bytes rate bandwidth n whole latency wire launch", positive=True
)

FORMULAS: dict[str, sp.Expr] = {
    "compute": launch + sp.Max(flops / rate, bytes_ / bandwidth),
    "all_gather": latency + (n - 1) / n * whole / wire,
    "reduce_scatter": latency + (n - 1) / n * whole / wire,
    "all_reduce": 2 * latency + 2 * (n - 1) / n * whole / wire,
    "all_to_all": latency + (n - 1) / n * whole / n / wire,  # each device holds whole / n and keeps 1 / n of it
    "copy": launch + 2 * bytes_ / bandwidth,
}

LOCAL = frozenset({"slice", "lodge"})  # steps that move nothing between devices

# Per byte of parameter on a device: what the step reads and writes (parameter, gradient, states), what it keeps
# (states), and what it makes for the while (torch's step over all parameters at once).
OPTIMIZERS: dict[str, dict[str, float]] = {
    "adamw": {"moved": 7, "kept": 2, "temporary": 1},
    "sgd": {"moved": 3, "kept": 0, "temporary": 0},
    "sgd-momentum": {"moved": 5, "kept": 1, "temporary": 0},
}


def optimizer_figures(optimizer: str | float, itemsize: int) -> dict[str, float]:
    """The line of an optimizer, by its name or by the bytes of its states for each parameter.

    The latter reads and writes them beside parameter and gradient, and makes one tensor for the while.
    """
    if isinstance(optimizer, str):
        return OPTIMIZERS[optimizer]
    kept = optimizer / itemsize
    return {"moved": 3 + 2 * kept, "kept": kept, "temporary": 1}


@functools.cache
def _compiled(formula: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    names = tuple(sorted(str(s) for s in FORMULAS[formula].free_symbols))
    return sp.lambdify(names, FORMULAS[formula], "numpy"), names


def seconds(formula: str, **quantities: Any) -> Any:
    """Evaluate a formula on numbers or numpy arrays; quantities that it does not name are ignored."""
    function, names = _compiled(formula)
    return function(*(quantities[name] for name in names))


def measured_seconds(curve: Sequence[tuple[float, float]], amount: Any) -> Any:
    """Seconds for amounts on a curve.

    Between two that were measured by powers, under the least as long as it, beyond the largest in proportion.
    """
    x, y = np.log(np.array(curve, float)).T
    at = np.log(np.maximum(amount, 1e-300))
    return np.exp(np.interp(at, x, y) + np.maximum(at - x[-1], 0.0))


def is_measured(levels: Sequence[tuple[int, Any]]) -> bool:
    """Was a collective measured on these levels? It is one then, and its times hold the packing."""
    return bool(getattr(levels[0][1], "times", ()))


def collective_seconds(kind: str, levels: Sequence[tuple[int, Any]], bytes_: float) -> float:
    """A collective on an axis whose devices are joined by these levels, innermost first.

    `bytes_` of the tensor as it is when the axis does not cut it.

    A collective that spans nodes is one within each node and one between them: a gather brings each device its share
    from the other nodes, then the shares are gathered inside.
    """
    if is_measured(levels):
        return float(measured_seconds(levels[0][1].times, bytes_))
    count = math.prod(n for n, _ in levels)
    total, inside, outside = 0.0, 1, count
    for n, link in levels:
        outside //= n
        moved = bytes_ / count * n / outside if kind == "all_to_all" else bytes_ / inside
        total += float(seconds(kind, n=n, whole=moved, latency=link.latency_s, wire=link.bytes_per_s))
        inside *= n
    return total
