"""Graph -> Space: every legal choice, priced."""

from autopar.space.shardings import shardings
from autopar.space.space import Space

__all__ = ["Space", "shardings"]
