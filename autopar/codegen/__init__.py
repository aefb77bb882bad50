"""Lower a graph and a plan to the program of one device: its forward and its backward, as straight-line code."""

from autopar.codegen.lower import lower

__all__ = ["lower"]
