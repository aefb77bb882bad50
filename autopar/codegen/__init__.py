"""Graph + Plan -> ParallelModule."""

from autopar.codegen.lower import lower
from autopar.codegen.module import ParallelModule, parallelise

__all__ = ["ParallelModule", "lower", "parallelise"]
