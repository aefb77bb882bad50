"""The value Graph: what a model computes, one node per canonical op."""

from autopar.graph.graph import Assume, Graph

__all__ = ["Assume", "Graph"]
