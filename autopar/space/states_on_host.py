"""Optimizer states on the host, or all of a parameter: policies by which the CPUs of its node step it.

    states    the gradient goes down when the optimizer steps, and the updated parameter comes back
    wholly    the stored part lies on the host as well: it comes up before it is read, in forward and in backward, and
              its gradient goes down in backward

In a space a parameter has each of its choices a second time, with no bytes of states on the device and the seconds of
that step; and a third time, with no bytes of it on the device but while it is read, where the setting lets parameters
lie on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autopar.graph.graph import Graph, TensorType, info, type_of
from autopar.once import Once
from autopar.sharding.costs import optimizer_figures
from autopar.sharding.host import Host
from autopar.sharding.placement import local_elements
from autopar.sharding.strategies import values
from autopar.space.setting import Setting
from autopar.space.space import Site, StoragePolicy


@dataclass(frozen=True, slots=True, eq=False)
class StatesOnHost:
    """Which parameters may have their states on the host, or lie there, and what these take there."""

    setting: Setting
    host: Host
    # Bytes of states, and of all that may lie on the host: of a parameter and of those behind it in the graph, before
    # they are divided among devices.
    through: Mapping[str, tuple[float, float]]
    once: Once = field(default_factory=Once)  # sites that are alike share their tables

    @staticmethod
    def of(graph: Graph, setting: Setting) -> StatesOnHost | None:
        """The states of a graph; None where none may lie on the host."""
        host = setting.cluster.host
        if not setting.host_bytes or host is None:
            return None
        through: dict[str, tuple[float, float]] = {}
        states = 0.0
        whole = 0.0
        for node in reversed(graph.parameters.values()):
            type_ = type_of(node)
            kept, beside = _tensors_of(type_, setting)
            states += (kept + _on_the_way(setting)) * type_.nbytes
            whole += (kept + beside) * type_.nbytes
            if kept or setting.parts_on_host:
                through[info(node).key] = states, whole
        return StatesOnHost(setting, host, through)

    def with_policy(self, site: Site, type_: TensorType) -> Site:
        """A parameter with its choices repeated, where its states have room on the host.

        The last parameters have room first: whole where they may leave, then the states of those before. A choice has
        room if these have, all divided as it divides its own.
        """
        if site.name not in self.through:
            return site
        objects = site.choices, site.seconds
        held = self.once(("held", type_), objects, lambda: self._held(site, type_))
        states, whole = self._fits(site, held / type_.nbytes)
        what = "repeated", type_, states.tobytes(), whole.tobytes()
        return site.sharing(self.once(what, objects, lambda: self._repeated(site, type_, held, states, whole)))

    def _held(self, site: Site, type_: TensorType) -> np.ndarray:
        """Bytes of a parameter on the fullest device, by choice."""
        shardings = [values(choice.output()) for choice in site.choices]
        held: np.ndarray = local_elements(type_.shape, shardings, self.setting.mesh) * type_.itemsize
        return held

    def _fits(self, site: Site, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Masks of choices: where states have room on the host, and where all of a parameter does.

        `share` is the part of a parameter on the fullest device, by choice.
        """
        room = self.setting.host_bytes / np.maximum(share, 1e-300)
        states, whole = self.through[site.name]
        if not self.setting.parts_on_host:
            return states <= room, np.zeros(len(share), bool)
        # Behind the last parameter that has room whole, what these take, and their states among that.
        pairs = np.array([(0.0, 0.0), *self.through.values()])
        last = np.searchsorted(pairs[:, 1], room, side="right") - 1
        beside = states - pairs[last, 0] + pairs[last, 1] <= room
        return (whole <= room) | beside, (whole <= room) & self._may_leave(site)

    def _may_leave(self, site: Site) -> np.ndarray:
        """A mask of the choices under which a parameter itself may lie on the host.

        A copy of it that is gathered and kept for backward would take more of a device than the part does.
        """
        return ~np.array(site.is_cut()) | np.array(site.regathered or (True,) * len(site.choices))

    def _repeated(self, site: Site, type_: TensorType, held: np.ndarray, states: np.ndarray, whole: np.ndarray) -> Site:
        kept, beside = _tensors_of(type_, self.setting)
        with_states = np.flatnonzero(states).tolist() if kept else []
        with_all = np.flatnonzero(whole).tolist()
        policies = site.policies or (StoragePolicy(),) * len(site.choices)
        there = held * (kept + _on_the_way(self.setting))
        moved = [policies[i]._replace(on_host=float(there[i])) for i in with_states]
        of_all = held * (kept + beside)
        moved += [policies[i]._replace(on_host=float(of_all[i]), with_part=True) for i in with_all]
        # No host is faster than the device: where nothing is gained, states stay.
        steps = np.maximum(site.seconds + 2 * self.host.latency_s, self.host.adamw_s(type_.itemsize, held))
        found = site.at([*range(len(site.choices)), *with_states, *with_all], policies=(*policies, *moved))
        in_place = self._in_place(site, type_, held)
        found.seconds[len(site.choices) :] = [*steps[with_states], *in_place[with_all]]
        return found

    def _in_place(self, site: Site, type_: TensorType, held: np.ndarray) -> np.ndarray:
        """Seconds of a parameter on the host: its step, and its copies as if nothing ran beside them."""
        copies: np.ndarray = 2 * self.setting.passes * self.host.up_s(held)
        if not type_.requires_grad:
            return copies
        stepped = np.maximum(site.seconds, held / type_.itemsize / self.host.adamw_params_per_s)
        return stepped + copies + self.host.down_s(held)


def _on_the_way(setting: Setting) -> int:
    """Tensors of a parameter's size that wait beside its states where backward is faster than the CPUs."""
    return 2 if setting.steps_in_backward else 0


def _tensors_of(type_: TensorType, setting: Setting) -> tuple[float, float]:
    """Tensors of a parameter's size that may lie on the host: its states, and it and its gradient."""
    if not type_.requires_grad:
        return 0.0, 1.0
    return optimizer_figures(setting.optimizer, type_.itemsize)["kept"], 2.0
