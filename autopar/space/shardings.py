"""Graph -> Space: all legal choices of every node and all conversions of every edge, each with its seconds.

    bindings      the rule of every op, fitted to its call            bindings.py
    sites         the choices of every node, and their seconds        sites.py, with dim_blocks.py and op_seconds.py
    pins          less what constraints forbid                        pinning.py, constraints.py
    edges         conversions between sites, and their seconds        edges.py
    memory        the pieces that a step holds                        pieces.py
    windows       communication beside compute                        schedule.py, overlap.py

`shardings` builds all of it for planning, `uncounted` all but the memory, which is half of the work, and
`sites_and_uses` only what a plan is checked against.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.graph.graph import Graph, TensorType, info
from autopar.once import Once
from autopar.sharding.cluster import Cluster
from autopar.sharding.mesh import DeviceMesh
from autopar.space.bindings import Bindings
from autopar.space.constraints import Constraints, Preset
from autopar.space.cost_explanation import CostLines
from autopar.space.edges import EdgeBuilder
from autopar.space.host_windows import HostWindows
from autopar.space.memory import Memory
from autopar.space.overlap import windows_of
from autopar.space.parameter_values import ParameterValues
from autopar.space.pieces import least_bytes, memory_of
from autopar.space.pinning import Narrowing, Pinning, supported
from autopar.space.schedule import Schedule, schedule_of
from autopar.space.setting import Setting
from autopar.space.shared import Shared
from autopar.space.sites import SiteBuilder
from autopar.space.space import Rival, Site, Space
from autopar.space.wiring import source_of


class Uncounted:
    """A space whose bytes are counted when they are asked for."""

    def __init__(self, space: Space, memory: Callable[[], Memory], least: Callable[[], float]) -> None:
        self.space = space
        self.least_bytes = least  # bytes that a device holds at least, where nothing is recomputed
        self._memory = memory
        self._counted: Space | None = None

    def counted(self) -> Space:
        """The space with its bytes."""
        if self._counted is None:
            self._counted = replace(self.space, memory=self._memory())
        return self._counted


def shardings(
    graph: Graph,
    setting: Setting,
    constraints: Mapping[str, Any] | None = None,
    preset: Preset | None = None,
    rival: Rival | None = None,
    shared: Shared | None = None,
) -> Space:
    """The space of all legal, priced ways to run `graph` in a setting, under constraints and a preset.

    Raises `Outdone` where no plan takes less than the `rival`. `shared` has the tables of another space of this graph
    and mesh, whose policies of parameters alone may differ.
    """
    return uncounted(graph, setting, constraints, preset, rival, shared).counted()


def uncounted(
    graph: Graph,
    setting: Setting,
    constraints: Mapping[str, Any] | None = None,
    preset: Preset | None = None,
    rival: Rival | None = None,
    shared: Shared | None = None,
) -> Uncounted:
    """The same space before its bytes are counted."""
    pins = Constraints(constraints, setting.mesh, preset)
    setting = replace(setting, regather=setting.regather or pins.speak_of_gathering)
    shared = shared or Shared.of(graph, setting)
    rival = rival or Rival()
    bindings, parameters, schedule = _read(graph, setting, shared.of_graph)
    drafts, narrowing = SiteBuilder(graph, setting, bindings, parameters, shared).drafts(), Narrowing()
    if pins.pins:
        Pinning(graph, setting.mesh, bindings, pins).pin(drafts)
    for draft in drafts.values():
        narrowing.narrow(draft, draft.keep)
    rival.check_sites([draft.site for draft in drafts.values()])
    ops = list(bindings.rules)
    edges = EdgeBuilder(setting, parameters, schedule, pins.habits, shared)
    wiring = edges.wiring(drafts)
    if pins.habits:  # they leave many choices that go with none
        for draft, keep in zip(drafts.values(), supported(wiring.sites, wiring.edges), strict=True):
            narrowing.narrow(draft, None if keep.all() else keep)
        wiring = edges.wiring(drafts)
    windows = windows_of(
        schedule,
        [wiring.index[n] for n in ops],
        edges.movements(wiring, ops),
        wiring.sites,
        wiring.edges,
        setting,
    )
    windows += HostWindows(wiring, schedule, parameters, setting).windows(ops)
    told = CostLines(graph, setting, bindings, shared.kernels, shared.of_graph)
    space = Space(
        setting,
        wiring.sites,
        wiring.edges,
        edges.conversions,
        shared.of_graph("digest", (graph,), lambda: graph.digest),
        None,
        windows,
        told,
        told.unaligned,
        told.beside,
        tuple(bindings.warnings()),
        shared.kernels,
        frozenset(info(n).key for n in parameters.runs_once(setting)),
    )
    rival.check(space)
    memory = functools.partial(memory_of, graph, setting, wiring, schedule, parameters, shared)
    return Uncounted(space, memory, functools.partial(least_bytes, graph, setting, parameters, shared))


def _read(graph: Graph, setting: Setting, once: Once) -> tuple[Bindings, ParameterValues, Schedule]:
    """Rules, values of parameters and windows of a graph, read `once` for the spaces of all meshes."""
    strict = setting.strict
    reduce = setting.reduce
    least = setting.window_bytes
    bindings = once(("bindings", strict), (graph,), lambda: Bindings.of(graph, strict))
    parameters = once(("parameters", reduce), (graph,), lambda: ParameterValues.of(graph, reduce))
    return bindings, parameters, once(("schedule", least), (graph,), lambda: schedule_of(list(bindings.rules), least))


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """A value that one site gives and another takes: an edge without the seconds of its conversions."""

    source: str  # name of the site that gives
    port: int  # index of its output
    target: str
    operand: int  # index of the operand there
    type: TensorType
    may_reduce: bool  # whether its gradient may be reduced here: a parameter's is in one dtype only


def sites_and_uses(
    graph: Graph, mesh: DeviceMesh, accumulation: int = 1, reduce: str = ""
) -> tuple[tuple[Site, ...], tuple[Use, ...]]:
    """The unpriced sites of `graph` on `mesh` with legal choices, and the uses of values between them.

    A plan is checked against them.
    """
    setting = Setting(mesh, Cluster.of(None), 0.0, accumulation, reduce, regather=True)
    parameters = ParameterValues.of(graph, reduce)
    bindings = Bindings.of(graph, strict=False)
    drafts = SiteBuilder(graph, setting, bindings, parameters, Shared.of(graph, setting)).drafts()
    uses = []
    for draft in drafts.values():
        for i, (value, type_) in enumerate(zip(draft.sources, draft.operands, strict=True)):
            source, port = source_of(value)
            in_its_dtype = value in parameters.reduced_in or reduce in ("", type_.dtype)
            may_reduce = value not in parameters.owners or in_its_dtype
            uses.append(Use(drafts[source].site.name, port, draft.site.name, i, type_, may_reduce))
    return tuple(d.site for d in drafts.values()), tuple(uses)
