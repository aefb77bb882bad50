"""Graph + Plan -> ParallelModule."""

from autopar.codegen.lower import lower
from autopar.codegen.module import How, ParallelModule, parallelise

__all__ = ["How", "ParallelModule", "lower", "parallelise"]
