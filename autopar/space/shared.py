"""`Shared`: tables that spaces of one graph and mesh share, where only the policies of parameters differ."""

from __future__ import annotations

import statistics
from collections.abc import Hashable
from dataclasses import dataclass, field

from autopar.graph.graph import Graph, info, type_of
from autopar.once import Once
from autopar.sharding.convert import ShapeConsistencyManager
from autopar.sharding.cost_model import ALONE, Message
from autopar.sharding.strategies import Choice
from autopar.space.local_bytes import LocalBytes
from autopar.space.parameter_values import casts_of_parameters
from autopar.space.schedule import schedule_of
from autopar.space.setting import Setting
from autopar.space.space import Site
from autopar.space.windows import BUCKET


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Sites, edges, bytes and conversions, each made once.

    Parameters are gathered in one message a window, and the reductions of their gradients travel in buckets: both are
    conversions of their own.
    """

    values: ShapeConsistencyManager
    gathers: ShapeConsistencyManager
    gradients: ShapeConsistencyManager
    bytes: LocalBytes
    choices: dict[Hashable, tuple[Choice, ...]] = field(default_factory=dict)  # by strategies and sizes
    sites: dict[Hashable, Site] = field(default_factory=dict)  # by what their choices and seconds depend on
    once: Once = field(default_factory=Once)  # for edges, and the ends and tables of which they are made

    @staticmethod
    def of(graph: Graph, setting: Setting) -> Shared:
        trained = [t.nbytes for t in map(type_of, graph.parameters.values()) if t.requires_grad]
        values = ShapeConsistencyManager(setting.mesh, setting.cluster)
        share = min(1.0, BUCKET / max(1, sum(trained)))
        bucket = Message(share * sum(trained), max(1.0, share * len(trained)))
        together = {"all_gather": _gathered_together(graph, setting)}, {"all_reduce": bucket, "reduce_scatter": bucket}
        gathers, gradients = (
            ShapeConsistencyManager(setting.mesh, setting.cluster, messages=messages, like=values)
            for messages in together
        )
        return Shared(values, gathers, gradients, LocalBytes(setting.mesh))


def _gathered_together(graph: Graph, setting: Setting) -> Message:
    """The median message in which a window gathers its parameters."""
    casts = {parameter: cast for cast, parameter in casts_of_parameters(graph).items()}
    schedule = schedule_of([n for n in graph.nodes if info(n).kind == "op"], setting.window_bytes)
    found: dict[int, list[int]] = {}
    for parameter, (first, _) in schedule.buckets.items():
        window = schedule.of[first]
        found.setdefault(window, []).append(type_of(casts.get(parameter, parameter)).nbytes)
    if not found:
        return ALONE
    return Message(statistics.median(map(sum, found.values())), statistics.median(map(len, found.values())))
