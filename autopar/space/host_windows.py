"""Windows of copies on the link of the host, and of steps of its CPUs: what moves or is stepped there beside compute.

A parameter's seconds on the host are those of its site; a window says which of them compute may hide. They stand on the
edge from the parameter to its first reader, whose flows tell its choices apart.

    up      beside the window before the one in which the part is read, or its gather begins
    down    beside the window after the one in which the gradient is reduced
    steps   beside the window after that; where the gradient stays on the device, beside the same
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch.fx as fx

from autopar.graph.graph import TensorType, type_of
from autopar.sharding.placement import local_elements
from autopar.sharding.strategies import values
from autopar.space.overlap import OpsBeside, WindowTables
from autopar.space.parameter_values import ParameterValues
from autopar.space.schedule import Schedule
from autopar.space.setting import Setting
from autopar.space.space import Edge, Site
from autopar.space.windows import CPUS, DOWN, UP, Window
from autopar.space.wiring import Wiring


@dataclass(frozen=True, slots=True)
class _Moved:
    """Seconds of a parameter on the host that a window may hide, by [given, taken] of an edge."""

    lane: str
    beside: OpsBeside
    table: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class HostWindows:
    """The windows of a space's parameters on the host."""

    wiring: Wiring
    schedule: Schedule
    parameters: ParameterValues
    setting: Setting

    def windows(self, ops: Sequence[fx.Node]) -> tuple[Window, ...]:
        """The windows of a step with these ops, in order."""
        tables = WindowTables(self.setting.cluster.hidden)
        if not tables.hidden or not self.setting.host_bytes or self.setting.cluster.host is None:
            return ()
        moved: dict[tuple[str, OpsBeside], list[tuple[int, np.ndarray]]] = {}
        for k, parameter in self._first_edges(ops):
            for one in self._of(self.wiring.edges[k], parameter, self.wiring.takers[k], tables):
                if one.table.any():
                    moved.setdefault((one.lane, one.beside), []).append((k, tables.share(one.table)))
        places = [self.wiring.index[op] for op in ops]
        found = []
        for (lane, beside), communication in sorted(moved.items(), key=lambda item: item[0]):
            first, last = self.schedule.spans[beside.window]
            name = (
                f"{beside.way} of {self.wiring.sites[places[first]].name} until {self.wiring.sites[places[last]].name}"
            )
            way = ("forward", "backward").index(beside.way)
            compute = tables.compute(self.wiring.sites, places[first : last + 1], way)
            span = places[first], places[last]
            found.append(Window(beside.way, span, name, self._times(beside), tuple(communication), compute, lane))
        return tuple(found)

    def _times(self, beside: OpsBeside) -> int:
        return self.setting.passes if beside.every else 1

    def _first_edges(self, ops: Sequence[fx.Node]) -> Iterator[tuple[int, fx.Node]]:
        """The first edge of each parameter that may have something on the host, to an op."""
        seen = set[int]()
        known = set(ops)
        for k, (edge, value, taker) in enumerate(
            zip(self.wiring.edges, self.wiring.values, self.wiring.takers, strict=True)
        ):
            site = self.wiring.sites[edge.source]
            if site.kind == "parameter" and taker in known and edge.source not in seen:
                seen.add(edge.source)
                if any(policy.on_host for policy in site.policies):
                    yield k, value

    def _of(self, edge: Edge, parameter: fx.Node, taker: fx.Node, tables: WindowTables) -> Iterator[_Moved]:
        reading = self.schedule.reading(parameter)
        if reading is None:
            return
        first, last = (self.schedule.of[op] for op in reading)
        work = _Work.of(self.wiring.sites[edge.source], type_of(parameter), self.setting, tables)
        is_cast = taker in self.parameters.casts
        gathered = tables.once(("gathered", is_cast), (edge.forward,), lambda: (edge.forward > 0) | is_cast)
        for ahead in (False, True):
            up = tables.on_edge(edge, work.up, gathered if ahead else ~gathered)
            if (before := first - 1 - ahead) >= 0:
                yield _Moved(UP, OpsBeside(before, "forward", True), up)
            if (behind := last + 1 + ahead) < len(self.schedule.spans):
                yield _Moved(UP, OpsBeside(behind, "backward", True), up)
        everywhere = np.ones(edge.seconds.shape, bool)
        for lane, seconds, later in ((DOWN, work.down, 2), (CPUS, work.step, 2), (CPUS, work.step_of_part, 3)):
            if first >= later:
                beside = OpsBeside(first - later, "backward", False)
                yield _Moved(lane, beside, tables.on_edge(edge, seconds, everywhere))


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """Seconds of a parameter on the host by choice: copies, each once, and steps while backward goes on."""

    up: np.ndarray
    down: np.ndarray
    step: np.ndarray  # The gradient stays on the device.
    step_of_part: np.ndarray  # It has gone down, as the parameter lies on the host.

    @staticmethod
    def of(site: Site, type_: TensorType, setting: Setting, tables: WindowTables) -> _Work:
        return tables.once(("work", type_), (site.choices, site.policies), lambda: _Work._made(site, type_, setting))

    @staticmethod
    def _made(site: Site, type_: TensorType, setting: Setting) -> _Work:
        host = setting.cluster.host
        assert host is not None
        held: np.ndarray = (
            local_elements(type_.shape, [values(c.output()) for c in site.choices], setting.mesh) * type_.itemsize
        )
        parts = np.array([policy.with_part for policy in site.policies])
        states = np.array([policy.on_host > 0 for policy in site.policies]) & ~parts
        is_alone = setting.passes == 1 and type_.requires_grad
        up = np.where(parts, host.up_s(held), 0.0)
        down = np.where(parts & is_alone, host.down_s(held), 0.0)
        is_stepped = is_alone and setting.steps_in_backward
        copies = 2 * up + np.where(parts, host.down_s(held), 0.0)
        step = np.where(states & is_stepped, site.seconds, 0.0)
        of_part = np.where(parts & is_stepped, np.maximum(site.seconds - copies, 0.0), 0.0)
        return _Work(up, down, step, of_part)
