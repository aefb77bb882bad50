"""Seconds, from formulas written once: sympy expressions in named quantities, turned into numpy functions on first use.

    flops, bytes        work of one op on one device, and what it reads and writes
    rate, bandwidth     FLOP/s for its dtype and memory bytes/s of the device
    n, whole            devices on the axis, and bytes of the tensor as it is when not cut by the axis
    latency, wire       seconds and bytes/s of the axis's link
    launch              seconds to start a kernel
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import sympy as sp

flops, bytes_, rate, bandwidth, n, whole, latency, wire, launch = sp.symbols("flops bytes rate bandwidth n whole latency wire launch", positive=True)

FORMULAS: dict[str, sp.Expr] = {
    "compute":        launch + sp.Max(flops / rate, bytes_ / bandwidth),
    "all_gather":     latency + (n - 1) / n * whole / wire,
    "reduce_scatter": latency + (n - 1) / n * whole / wire,
    "all_reduce":     2 * latency + 2 * (n - 1) / n * whole / wire,
    "all_to_all":     latency + (n - 1) / n * whole / n / wire,    # each device holds whole / n and keeps 1 / n of it
    "slice":          launch + 2 * whole / n / bandwidth,
    "lodge":          launch + 2 * whole / bandwidth,
}

# FLOPs per point of an op's factor space (the product of its factors): a contraction multiplies and adds.
FLOPS_PER_POINT = {"linear": 2, "mm": 2, "matmul": 2, "scaled_dot_product_attention": 4}
CONTRACTIONS = frozenset(FLOPS_PER_POINT)
FREE = frozenset({"identity", "view", "transpose", "permute", "t", "split", "narrow", "select", "expand"})   # they show their operand's memory

# Per byte of parameter on a device: what the step reads and writes (parameter, gradient, states), and what it keeps (states).
OPTIMIZERS = {
    "adamw":        {"moved": 7, "kept": 2},
    "sgd":          {"moved": 3, "kept": 0},
    "sgd-momentum": {"moved": 5, "kept": 1},
}


@functools.cache
def _compiled(formula: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    names = tuple(sorted(str(s) for s in FORMULAS[formula].free_symbols))
    return sp.lambdify(names, FORMULAS[formula], "numpy"), names


def seconds(formula: str, **quantities: Any) -> Any:
    """Evaluate a formula on numbers or numpy arrays; quantities that it does not name are ignored."""
    function, names = _compiled(formula)
    return function(*(quantities[name] for name in names))
