"""Module -> Graph: what the model computes, one node per canonical op."""

from autopar.graph.graph import Assume, Graph
from autopar.tracer.capture import ColoTracer

__all__ = ["Assume", "ColoTracer", "Graph"]
