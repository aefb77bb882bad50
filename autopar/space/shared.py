"""`Shared`: tables of one space that another of the same graph and mesh takes, if only parameters' policies differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autopar.graph.graph import Graph, type_of
from autopar.sharding.convert import ShapeConsistencyManager
from autopar.space.local_bytes import LocalBytes
from autopar.space.setting import Setting
from autopar.space.windows import BUCKET

Made = dict[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Sites, edges, bytes and conversions that were found once.

    The reductions of parameters' gradients travel in buckets: they are conversions of their own. Keys hold identities;
    what they are of is held beside them.
    """

    values: ShapeConsistencyManager
    gradients: ShapeConsistencyManager
    bytes: LocalBytes
    choices: Made = field(default_factory=dict)
    sites: Made = field(default_factory=dict)
    ends: Made = field(default_factory=dict)
    tables: Made = field(default_factory=dict)
    edges: Made = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, setting: Setting) -> Shared:
        trained = sum(t.nbytes for t in map(type_of, graph.parameters.values()) if t.requires_grad)
        values = ShapeConsistencyManager(setting.mesh, setting.cluster)
        in_buckets = ShapeConsistencyManager(setting.mesh, setting.cluster, bucket=min(BUCKET, trained), like=values)
        return Shared(values, in_buckets, LocalBytes(setting.mesh))
