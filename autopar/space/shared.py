"""`Shared`: tables that spaces of one graph and mesh share, where policies of parameters or windows differ."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from autopar.graph.graph import Graph, type_of
from autopar.once import Once
from autopar.sharding.convert import ShapeConsistencyManager
from autopar.sharding.cost_model import ALONE, Message
from autopar.sharding.strategies import Choice
from autopar.space.kernel_sites import KernelSites
from autopar.space.local_bytes import LocalBytes
from autopar.space.parameter_values import ParameterValues
from autopar.space.schedule import Schedule
from autopar.space.setting import Setting
from autopar.space.space import Site
from autopar.space.windows import BUCKET


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Sites, edges, bytes, conversions and groups of ops that kernels replace, each made once.

    Parameters are gathered in one message a window, and the reductions of their gradients travel in buckets: both are
    conversions of their own.
    """

    setting: Setting
    values: ShapeConsistencyManager
    gradients: ShapeConsistencyManager
    bytes: LocalBytes
    kernels: KernelSites
    choices: dict[Hashable, tuple[Choice, ...]] = field(default_factory=dict)  # strategies and sizes -> choices
    sites: dict[Hashable, Site] = field(default_factory=dict)  # sites by all that their choices and seconds depend on
    by_message: dict[Message, ShapeConsistencyManager] = field(default_factory=dict)  # the managers of gathers
    once: Once = field(default_factory=Once)  # shared edges, their ends and their tables

    @staticmethod
    def of(graph: Graph, setting: Setting) -> Shared:
        trained = [t.nbytes for t in map(type_of, graph.parameters.values()) if t.requires_grad]
        values = ShapeConsistencyManager(setting.mesh, setting.cluster)
        share = min(1.0, BUCKET / max(1, sum(trained)))
        bucket = Message(share * sum(trained), max(1.0, share * len(trained)))
        gradients = _in_messages(setting, values, {"all_reduce": bucket, "reduce_scatter": bucket})
        kernels = KernelSites.of(graph, setting.kernels, setting.apart)
        return Shared(setting, values, gradients, LocalBytes(setting.mesh), kernels)

    def gathers(self, schedule: Schedule, parameters: ParameterValues) -> ShapeConsistencyManager:
        """Conversions of parameters that are gathered in the windows of a schedule; one for equal messages."""
        message = _gathered_together(schedule, parameters)
        if message not in self.by_message:
            self.by_message[message] = _in_messages(self.setting, self.values, {"all_gather": message})
        return self.by_message[message]


def _in_messages(
    setting: Setting, values: ShapeConsistencyManager, messages: Mapping[str, Message]
) -> ShapeConsistencyManager:
    """Conversions of values that share messages of these kinds."""
    return ShapeConsistencyManager(setting.mesh, setting.cluster, messages=messages, like=values)


def _gathered_together(schedule: Schedule, parameters: ParameterValues) -> Message:
    """The median message in which a window gathers its parameters."""
    casts = {parameter: cast for cast, parameter in parameters.casts.items()}
    found: dict[int, list[int]] = {}
    for parameter, (first, _) in schedule.buckets.items():
        window = schedule.of[first]
        found.setdefault(window, []).append(type_of(casts.get(parameter, parameter)).nbytes)
    if not found:
        return ALONE
    return Message(statistics.median(map(sum, found.values())), statistics.median(map(len, found.values())))
