"""The meshes of a pipeline's stages, and where each parameter is stored: on the mesh of the stages that read it.

On other ranks a parameter is there, too, by its name, as a DTensor of that mesh without a part of its own; all ranks
read it from there. One that stages at several coordinates read lies on the mesh of these together, whole along them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.codegen.lower import Lowered
from autopar.codegen.stage_programs import StagedProgram
from autopar.letters import NotServed
from autopar.runtime.faults import limit
from autopar.runtime.owned_meshes import Far, own
from autopar.runtime.transfers import Line, line_of, mesh_of_ranks, stage_meshes
from autopar.runtime.world import coordinate, plays_several_ranks, rank_here, world_size
from autopar.solver.plan import Plan
from autopar.stages.pipeline import coordinates_of


@dataclass(frozen=True, slots=True, eq=False)
class StagesOfJob:
    """What the stages of a job share: the meshes of parameters, and how this rank reaches the other stages."""

    meshes: Mapping[tuple[int, ...], Any]  # coordinates -> the mesh of what is stored there
    line: Line
    stored: Mapping[str, tuple[int, ...]]  # parameter -> the coordinates that store it

    @staticmethod
    def of(lowered: Lowered, meshes: tuple[Any, ...], device_type: str, timeout_s: float) -> StagesOfJob:
        """Make what the stages share, from the meshes of single coordinates; all ranks do so together."""
        pipeline = lowered.plan.pipeline
        staged = lowered.staged
        assert pipeline is not None and staged is not None
        everywhere = tuple(range(pipeline.coordinates))
        stored = {name: coordinates_of(read, pipeline.place) or everywhere for name, read in staged.readers.items()}
        ranks = [pipeline.ranks(coordinate) for coordinate in everywhere]
        line = line_of(ranks, timeout_s)
        by_coordinates: dict[tuple[int, ...], Any] = {(coordinate,): mesh for coordinate, mesh in enumerate(meshes)}
        for at in sorted({everywhere, *stored.values()}):
            if len(at) > 1:
                shape = (len(at), *lowered.plan.mesh.shape)
                axes = (pipeline.axis, *lowered.plan.mesh.axes)
                by_coordinates[at] = mesh_of_ranks(device_type, [ranks[c] for c in at], shape, axes)
        for at, mesh in by_coordinates.items():
            if line.index in at:
                limit(mesh, timeout_s)
            if at != everywhere:
                own(mesh, Far(line, at[0]))
        return StagesOfJob(by_coordinates, line, stored)

    def mesh_of(self, name: str) -> Any:
        """The mesh on which a parameter is stored; that of this rank's stages for ""."""
        if not name:
            return self.meshes[self.line.index,]
        return self.meshes[self.stored[name]] if name in self.stored else self.whole_mesh

    @property
    def whole_mesh(self) -> Any:
        """The mesh of all stages, on which outputs leave the model: every rank has them."""
        return self.meshes[tuple(range(len(self.line.ranks)))]

    def stored_as(self, staged: StagedProgram, place: Sequence[int]) -> Mapping[str, tuple[int, ...]]:
        """The coordinates that store each parameter; a letter where a program reads one elsewhere."""
        for name, stages in staged.readers.items():
            reads = coordinates_of(stages, place)
            has = self.stored[name]
            if not set(reads) <= set(has):
                raise NotServed(
                    f"this call reads the parameter {name} in other stages than those that store it",
                    seen=f"read at {reads} of the axis, stored at {has}",
                    advice="the batch and the arguments for which the model was made parallel",
                )
        return self.stored


@dataclass(frozen=True, slots=True, eq=False)
class Ground:
    """Where this rank stands: its mesh and coordinate there, and its coordinate on the axis of stages."""

    mesh: Any
    coordinate: Sequence[int]
    place: int = 0
    meshes: tuple[Any, ...] = ()  # the mesh of each coordinate on the axis of stages
    stages: StagesOfJob | None = None

    def with_stages(self, lowered: Lowered, device_type: str, timeout_s: float) -> Ground:
        """The ground with what a lowered program's stages share, where it has any; all ranks make it together."""
        if not self.meshes:
            return self
        return replace(self, stages=StagesOfJob.of(lowered, self.meshes, device_type, timeout_s))

    @staticmethod
    def of(plan: Plan, device_type: str) -> Ground:
        """The ground of a plan; all ranks make its groups together."""
        pipeline = plan.pipeline
        if pipeline is None:
            return Ground(plan.mesh.to_torch(device_type), coordinate(plan.mesh))
        pipeline.mesh.check_world(world_size())
        if plays_several_ranks():
            raise NotServed(
                "stages send each other values while they compute, and ranks of one process wait for one another",
                advice="a process for each rank: torchrun, or autopar.testing.on_processes",
            )
        place, here = pipeline.split(rank_here())
        ranks = [pipeline.ranks(at) for at in range(pipeline.coordinates)]
        meshes = stage_meshes(device_type, ranks, plan.mesh.shape, plan.mesh.axes)
        return Ground(meshes[place], here, place, meshes)
