"""Pipelines: a model cut into stages, the order in which coordinates run them, its proof and its seconds."""

from autopar.stages.orders import ORDERS, Action, Order, Prices, StagePrices, order_of
from autopar.stages.proof import Proof, prove
from autopar.stages.search import Atoms, Block, Choice, best_cuts, bound
from autopar.stages.simulate import Run, simulated

__all__ = [
    "ORDERS",
    "Action",
    "Atoms",
    "Block",
    "Choice",
    "Order",
    "Prices",
    "Proof",
    "Run",
    "StagePrices",
    "best_cuts",
    "bound",
    "order_of",
    "prove",
    "simulated",
]
