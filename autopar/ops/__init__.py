"""The canonical ops by families, one entry each: how an op is called, how it may be cut, and what it costs."""

from autopar.ops import (
    attention,
    draws,
    experts,
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
    transforms,
    turns,
    views,
)
from autopar.ops.entry import FACTS, PROVEN

PROVEN.update(FACTS)

__all__ = [
    "attention",
    "draws",
    "experts",
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
    "transforms",
    "turns",
    "views",
]
