"""Capture a module as a Graph of what it computes, one node per canonical op."""

from autopar.graph.graph import Assume, Graph
from autopar.tracer.capture import ColoTracer

__all__ = ["Assume", "ColoTracer", "Graph"]
