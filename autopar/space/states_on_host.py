"""Optimizer states on the host: a policy of a parameter, whose step then runs on the CPUs of its node.

The gradient of such a parameter goes down when the optimizer steps, and the updated parameter comes back; its states
stay on the host. In a space a parameter has each of its choices a second time, with no bytes of states on the device
and the seconds of that step.
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
    """Which parameters may have their states on the host, and what these take there."""

    setting: Setting
    host: Host
    # Bytes of a parameter's states, and of those of all behind it in the graph, before they are divided among devices.
    through: Mapping[str, float]
    once: Once = field(default_factory=Once)  # sites that are alike share their tables

    @staticmethod
    def of(graph: Graph, setting: Setting) -> StatesOnHost | None:
        """The states of a graph; None where none may lie on the host."""
        host = setting.cluster.host
        if not setting.host_bytes or host is None:
            return None
        through: dict[str, float] = {}
        total = 0.0
        trained = [node for node in graph.parameters.values() if type_of(node).requires_grad]
        for node in reversed(trained):
            type_ = type_of(node)
            total += type_.nbytes * optimizer_figures(setting.optimizer, type_.itemsize)["kept"]
            through[info(node).key] = total
        return StatesOnHost(setting, host, through)

    def with_policy(self, site: Site, type_: TensorType) -> Site:
        """A parameter with its choices repeated, where its states have room on the host.

        The states of the last parameters have room first. A choice has room if these have, all divided as it divides
        its own.
        """
        if site.name not in self.through:
            return site
        objects = site.choices, site.seconds
        held = self.once(("held", type_), objects, lambda: self._held(site, type_))
        fits = self.through[site.name] * held / type_.nbytes <= self.setting.host_bytes
        what = "repeated", type_, fits.tobytes()
        return site.sharing(self.once(what, objects, lambda: self._repeated(site, type_, held, fits)))

    def _held(self, site: Site, type_: TensorType) -> np.ndarray:
        """Bytes of a parameter on the fullest device, by choice."""
        shardings = [values(choice.output()) for choice in site.choices]
        held: np.ndarray = local_elements(type_.shape, shardings, self.setting.mesh) * type_.itemsize
        return held

    def _repeated(self, site: Site, type_: TensorType, held: np.ndarray, fits: np.ndarray) -> Site:
        more = np.flatnonzero(fits).tolist()
        kept = optimizer_figures(self.setting.optimizer, type_.itemsize)["kept"]
        policies = site.policies or (StoragePolicy(),) * len(site.choices)
        moved = tuple(policies[i]._replace(on_host=float(held[i] * kept)) for i in more)
        # No host is faster than the device: where nothing is gained, states stay.
        seconds = np.maximum(site.seconds + 2 * self.host.latency_s, self.host.adamw_s(type_.itemsize, held))
        found = site.at([*range(len(site.choices)), *more], policies=(*policies, *moved))
        found.seconds[len(site.choices) :] = seconds[more]
        return found
