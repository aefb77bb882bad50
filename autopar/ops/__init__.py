"""The canonical ops, one entry each, by families: what an op is called, how it may be cut, and what it costs."""

from autopar.ops import (
    attention,
    draws,
    factories,
    losses,
    matrices,
    norms,
    pictures,
    pointwise,
    products,
    recurrent,
    reductions,
    tables,
    turns,
    views,
)

__all__ = [
    "attention",
    "draws",
    "factories",
    "losses",
    "matrices",
    "norms",
    "pictures",
    "pointwise",
    "products",
    "recurrent",
    "reductions",
    "tables",
    "turns",
    "views",
]
