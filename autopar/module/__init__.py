"""The parallel model in the user's hands: an nn.Module whose forward and backward are the emitted programs."""

from autopar.module.parallel import ParallelModule
from autopar.module.parallelise import parallelise
from autopar.module.runner import How
from autopar.module.values import Source

__all__ = ["How", "ParallelModule", "Source", "parallelise"]
