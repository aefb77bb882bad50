"""Run ranks and compare results in tests of parallel programs."""

from autopar.testing.equality import Equality, Unequal
from autopar.testing.ranks import fake_world, on_local_tensor, on_processes, on_threads

__all__ = ["Equality", "Unequal", "fake_world", "on_local_tensor", "on_processes", "on_threads"]
