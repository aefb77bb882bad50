"""Programs -> ParallelModule: the model in the user's hands."""

from autopar.module.module import How, ParallelModule, parallelise

__all__ = ["How", "ParallelModule", "parallelise"]
