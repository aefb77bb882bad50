"""The meshes of a pipeline's stages, and where each parameter is stored: on the mesh of the stages that read it.

On other ranks a parameter is there, too, by its name, as a DTensor of that mesh without a part of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.codegen.lower import Lowered
from autopar.module.stage_runner import coordinates_of
from autopar.runtime.transfers import Line, line_of, stage_meshes
from autopar.runtime.world import coordinate, rank_here
from autopar.solver.plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class StagesOfJob:
    """What the stages of a job share: the mesh of each coordinate, and how this rank reaches the others."""

    meshes: tuple[Any, ...]
    line: Line
    stored: dict[str, tuple[int, ...]]  # parameter -> the coordinates that store it

    @staticmethod
    def of(lowered: Lowered, meshes: tuple[Any, ...]) -> StagesOfJob:
        """Make the groups that the stages of a lowered program need, on all ranks together."""
        pipeline = lowered.plan.pipeline
        staged = lowered.staged
        assert pipeline is not None and staged is not None
        place = pipeline.place
        pairs = {
            pair
            for crossing in staged.crossings
            for reader in crossing.readers
            for pair in ((place[crossing.source], place[reader]), (place[reader], place[crossing.source]))
            if pair[0] != pair[1]
        }
        stored = {name: coordinates_of(read, place) for name, read in staged.readers.items()}
        shared = {at for at in stored.values() if len(at) > 1}
        ranks = [pipeline.ranks(coordinate) for coordinate in range(pipeline.coordinates)]
        return StagesOfJob(meshes, line_of(ranks, pairs, shared), stored)

    def mesh_of(self, name: str) -> Any:
        """The mesh on which this rank stores a parameter; that of buffers for ""."""
        at = self.stored.get(name, ())
        return self.meshes[self.line.index if self.line.index in at or not at else at[0]]


@dataclass(frozen=True, slots=True, eq=False)
class Ground:
    """Where this rank stands: its mesh and coordinate there, and its coordinate on the axis of stages."""

    mesh: Any
    coordinate: Sequence[int]
    place: int = 0
    meshes: tuple[Any, ...] = ()  # the mesh of each coordinate on the axis of stages

    @staticmethod
    def of(plan: Plan, device_type: str) -> Ground:
        """The ground of a plan; all ranks make its groups together."""
        pipeline = plan.pipeline
        if pipeline is None:
            return Ground(plan.mesh.to_torch(device_type), coordinate(plan.mesh))
        place, here = pipeline.split(rank_here())
        ranks = [pipeline.ranks(at) for at in range(pipeline.coordinates)]
        meshes = stage_meshes(device_type, ranks, plan.mesh.shape, plan.mesh.axes)
        return Ground(meshes[place], here, place, meshes)
