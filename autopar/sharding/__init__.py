"""Graph -> Space: every legal choice, priced. The values here import no torch."""

from autopar.sharding import families as families
from autopar.sharding.cluster import Cluster
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import P, R, S, Sharding
from autopar.sharding.rules import rule
from autopar.sharding.shardings import shardings

__all__ = ["Cluster", "DeviceMesh", "P", "R", "S", "Sharding", "rule", "shardings"]
