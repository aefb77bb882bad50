"""`Shared`: tables that spaces of one graph and mesh share, where policies of parameters or windows differ."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch.fx as fx

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
    bytes: LocalBytes
    kernels: KernelSites
    of_graph: Once  # Spaces of other meshes share what is read of the graph alone.
    choices: dict[Hashable, tuple[Choice, ...]] = field(default_factory=dict)  # strategies and sizes -> choices
    sites: dict[Hashable, Site] = field(default_factory=dict)  # sites by all that their choices and seconds depend on
    # managers of gathers and reductions, by their messages and kinds
    by_message: dict[tuple[Message, tuple[str, ...]], ShapeConsistencyManager] = field(default_factory=dict)
    # shared edges, their ends and their tables
    once: Once = field(default_factory=Once)

    @staticmethod
    def of(graph: Graph, setting: Setting, of_graph: Once | None = None) -> Shared:
        """New tables; `of_graph` has what spaces on other meshes have read of the graph."""
        of_graph = of_graph or Once()
        mesh, cluster = setting.mesh, setting.cluster
        values = of_graph(("conversions", mesh), (cluster,), lambda: ShapeConsistencyManager(mesh, cluster))
        named = "kernels", setting.kernels, setting.apart
        kernels = of_graph(named, (graph,), lambda: KernelSites.of(graph, setting.kernels, setting.apart))
        return Shared(setting, values, LocalBytes(mesh), kernels, of_graph)

    def gathers(self, schedule: Schedule, parameters: ParameterValues) -> ShapeConsistencyManager:
        """Conversions of parameters that are gathered in the windows of a schedule; one for equal messages."""
        casts = {parameter: cast for cast, parameter in parameters.casts.items()}
        sizes = {parameter: type_of(casts.get(parameter, parameter)).nbytes for parameter in schedule.buckets}
        return self._together(_of_a_window(schedule, sizes), "all_gather")

    def reductions(self, schedule: Schedule) -> ShapeConsistencyManager:
        """Conversions of gradients that are reduced in buckets of these windows; one for equal messages."""
        trained = {p: type_of(p).nbytes for p in schedule.buckets if type_of(p).requires_grad}
        whole = _of_a_window(schedule, trained)
        share = min(1.0, BUCKET / max(1.0, whole.nbytes))
        bucket = Message(share * whole.nbytes, max(1.0, share * whole.tensors))
        return self._together(bucket, "all_reduce", "reduce_scatter")

    def _together(self, message: Message, *kinds: str) -> ShapeConsistencyManager:
        """Conversions of values that share messages of these kinds."""
        key = message, kinds
        if key not in self.by_message:
            self.by_message[key] = ShapeConsistencyManager(
                self.setting.mesh, self.setting.cluster, messages=dict.fromkeys(kinds, message), like=self.values
            )
        return self.by_message[key]


def _of_a_window(schedule: Schedule, sizes: Mapping[fx.Node, int]) -> Message:
    """All parameters of a window, the median in bytes and in number."""
    found: dict[int, list[int]] = {}
    for parameter, nbytes in sizes.items():
        first, _ = schedule.buckets[parameter]
        found.setdefault(schedule.of[first], []).append(nbytes)
    if not found:
        return ALONE
    return Message(statistics.median(map(sum, found.values())), statistics.median(map(len, found.values())))
