"""`KernelSites`: the groups of ops that kernels can replace, found once in a graph.

Prices count each group as its kernel. Whether the kernel can stand there follows from what a plan chooses: no
conversion is inside the group, its ops have the local forms that the kernel takes, and its results are all saved or all
recomputed.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.fx as fx

from autopar.graph.graph import Graph, call_of, info, op_name
from autopar.kernels import groups, places
from autopar.kernels.family import Family
from autopar.kernels.patterns import Match, name_of
from autopar.ops.local import OpOnDevice, on_device
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.strategies import Choice

if TYPE_CHECKING:
    from autopar.kernels import Group, Place


@dataclass(frozen=True, slots=True, eq=False)
class KernelSites:
    """The groups of ops in a graph that kernels can replace."""

    places: tuple[Place, ...]
    counted: tuple[Group, ...]  # the groups that prices count as kernels

    @staticmethod
    def of(graph: Graph, names: Collection[str], apart: Collection[str] = ()) -> KernelSites:
        """The sites of these kernels; groups whose results are in `apart` are counted as ops."""
        found = places(graph.nodes, names)
        return KernelSites(found, tuple(groups(found, lambda _, group: info(group.result).key not in apart)))

    @property
    def results(self) -> frozenset[str]:
        """The results of the groups that prices count as kernels, by name."""
        return frozenset(info(group.result).key for _, group in self.counted)

    def fused(
        self,
        mesh: DeviceMesh,
        choices: Mapping[str, Choice],
        steps: Mapping[tuple[str, int], Hashable],
        recomputed: frozenset[str],
    ) -> dict[str, str]:
        """The families of the kernels that can stand in a plan's program, by results of groups.

        `steps` are those of its conversions, by the op and the index of the operand.
        """
        allows = _Chosen(mesh, choices, steps, recomputed).allows
        return {info(group.result).key: family.name for family, group in groups(self.places, allows)}


@dataclass(frozen=True, slots=True)
class _Chosen:
    """All of a plan's choices that kernels depend on, by name."""

    mesh: DeviceMesh
    choices: Mapping[str, Choice]
    steps: Mapping[tuple[str, int], Hashable]
    recomputed: frozenset[str]

    def allows(self, family: Family, group: Match) -> bool:
        """Whether a kernel can stand for this group of ops."""
        product = [family.product(group)] if family.product is not None else []
        inside = {*group.nodes, *product}
        has_forms = all(self._function(op) == family.forms.get(op_name(op), op_name(op)) for op in inside)
        return has_forms and self._arrive_alike(group, inside) and self._are_late(group) and self._saves_alike(group)

    def _function(self, op: fx.Node) -> str:
        """The name of the op, or of the local form that computes it on a device."""
        here = OpOnDevice(self.mesh, (0,) * len(self.mesh.shape), None, self.choices[info(op).key])
        return name_of(on_device(op.target, here, call_of(op), dict(op.kwargs))[0])

    def _arrive_alike(self, group: Match, inside: Collection[fx.Node]) -> bool:
        """Whether no inner value is converted, and each value from outside alike for all readers."""
        ways = dict[fx.Node, tuple[Hashable, ...]]()
        for op in group.nodes:
            for source, way in self._arrivals(op):
                if way != ways.setdefault(source, () if source in inside else way):
                    return False
        return True

    def _arrivals(self, op: fx.Node) -> Iterator[tuple[fx.Node, tuple[Hashable, ...]]]:
        """The values that an op reads, each with the conversions on its way through fan-outs."""
        operands = [n for n in op.target.operands(op.kwargs) if isinstance(n, fx.Node)]
        for index, value in enumerate(operands):
            way = [self.steps.get((info(op).key, index))]
            while op_name(value) == "identity":
                way.append(self.steps.get((info(value).key, 0)))
                value = value.kwargs["input"]
            yield value, tuple(steps for steps in way if steps is not None)

    def _are_late(self, group: Match) -> bool:
        """Whether no result is converted before the last one, where a kernel makes all of them."""
        before = [n for result in group.results[:-1] for n in result.users if n < group.result]
        return not any(op_name(n) == "identity" and (info(n).key, 0) in self.steps for n in before)

    def _saves_alike(self, group: Match) -> bool:
        """Whether the results of a group are all saved, or all recomputed."""
        about = [info(result) for result in group.results]
        return len({self.recomputed.isdisjoint((one.key, *one.names)) for one in about}) == 1
