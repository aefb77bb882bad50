"""The algebra of shardings, without torch: placements, layouts, notation, strategies, meshes, conversions, costs."""

from autopar.sharding.cluster import Cluster
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import P, R, S, Sharding

__all__ = ["Cluster", "DeviceMesh", "P", "R", "S", "Sharding"]
