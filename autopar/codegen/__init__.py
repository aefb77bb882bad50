"""Graph + Plan -> the program of one device, as forward and backward in straight-line code."""

from autopar.codegen.lower import lower

__all__ = ["lower"]
