"""Module -> Graph: what the model computes, one node per canonical op."""

from autopar.tracer.capture import ColoTracer
from autopar.tracer.graph import Assume, Graph

__all__ = ["Assume", "ColoTracer", "Graph"]
