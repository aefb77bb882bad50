"""What a caller asks of a pipeline: by an axis of the mesh, by `pipeline=`, or by an entry of a preset."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.letters import NotServed, among
from autopar.runtime.world import world_size
from autopar.sharding.mesh import DeviceMesh, default_axes
from autopar.stages.orders import ORDERS
from autopar.stages.pipeline import FORWARD, Pipeline, stage_mesh

AXES = ("pp", "pipe", "pipeline")  # an axis with one of these names has stages along it
_KEYS = ("size", "schedule", "stages_each", "cuts")


@dataclass(frozen=True, slots=True)
class Asked:
    """A pipeline as it is asked for: "auto" leaves a choice to the search."""

    size: int | str
    schedule: str = "auto"
    stages_each: int = 0  # stages of each coordinate; 0: as the schedule has them
    cuts: tuple[str, ...] = ()  # blocks at which stages begin; empty: the search finds them
    mesh: DeviceMesh | None = None  # the mesh of all devices, where one was given
    axis: str = AXES[0]
    place: tuple[int, ...] = ()  # coordinate of each stage of a model that is stored already

    @staticmethod
    def again(first: Pipeline | None, has_gradients: bool) -> Asked | None:
        """The pipeline of another call of a model: its stages where they are, with or without backward."""
        if first is None:
            return None
        each = len(first.place) // first.coordinates
        schedule = first.schedule if has_gradients else FORWARD
        return Asked(first.coordinates, schedule, each, first.firsts, first.mesh, first.axis, first.place)

    def whole(self, stage: DeviceMesh) -> DeviceMesh:
        """The mesh of all devices around that of a stage; of a size that is left open, the mesh as it is."""
        if self.mesh is not None:
            return self.mesh
        if self.size == "auto":
            return stage
        return DeviceMesh((int(self.size), *stage.shape), (self.axis, *stage.axes))


def stages_asked(mesh: Any, pipeline: Any, parallel: Any) -> tuple[Any, Asked | None, Any]:
    """The mesh of one stage, the pipeline, and the preset inside a stage, of arguments as they were given.

    Without a pipeline, mesh and preset are as they were.
    """
    if isinstance(pipeline, Asked):
        return mesh, pipeline, parallel
    if isinstance(parallel, Mapping) and "pipeline" in parallel:
        if pipeline is not None:
            raise NotServed(f"pipeline={pipeline!r}, and parallel= has a pipeline, too", advice="one of them")
        pipeline = parallel["pipeline"]
        parallel = {name: part for name, part in parallel.items() if name != "pipeline"} or None
    given = mesh if mesh is None or _is_count(mesh) else DeviceMesh.of(mesh)
    axis = next((name for name in given.axes if name in AXES), None) if isinstance(given, DeviceMesh) else None
    if pipeline is None and axis is None:
        return mesh, None, parallel
    asked = _read(pipeline, axis, given)
    if asked.size == 1:
        return (stage_mesh(given, axis) if axis else mesh), None, parallel
    if isinstance(given, DeviceMesh):
        assert asked.mesh is not None
        return stage_mesh(given, asked.axis), asked, parallel
    if given is None:
        given = world_size()
    if asked.size == "auto":
        return int(given), asked, parallel
    if int(given) % int(asked.size):
        raise NotServed(
            f"pipeline={asked.size} does not divide {int(given)} devices", advice="a number of stages that divides them"
        )
    return int(given) // int(asked.size), asked, parallel


def _read(pipeline: Any, axis: str | None, mesh: Any) -> Asked:
    """The pipeline that is meant; its size is that of the axis, where there is one."""
    fields = dict(pipeline) if isinstance(pipeline, Mapping) else {} if pipeline is None else {"size": pipeline}
    if unknown := [name for name in fields if name not in _KEYS]:
        raise NotServed(f"pipeline= has {unknown[0]!r}", seen=f"known: {', '.join(_KEYS)}", advice="one of these")
    found = mesh.shape[mesh.axis(axis)] if axis else None
    size = fields.get("size", found)
    if size is None:
        raise NotServed(f"pipeline={pipeline!r} has no size", advice='pipeline=4, or an axis of the mesh called "pp"')
    if not (size == "auto" or (_is_count(size) and int(size) >= 1)):
        raise NotServed(
            f"pipeline={pipeline!r} is not a number of stages", advice='pipeline=4, "auto", or dict(size=4)'
        )
    size = size if size == "auto" else int(size)
    if isinstance(mesh, DeviceMesh):
        axis, size = _axis_of(mesh, axis, size)
    schedule = fields.get("schedule", "auto")
    if schedule not in ("auto", *ORDERS):
        raise NotServed(
            f"schedule={schedule!r} is not known", seen=among(("auto", *ORDERS), schedule), advice="one of these"
        )
    each = fields.get("stages_each", 0)
    cuts = fields.get("cuts", ())
    is_list = isinstance(cuts, (list, tuple)) and all(isinstance(name, str) for name in cuts)
    if not is_list or not _is_count(each) or int(each) < 0:
        raise NotServed(
            f"pipeline={pipeline!r} has a stages_each or cuts of another kind",
            advice='stages_each=2, cuts=["model.layers.9"]',
        )
    of_all = mesh if isinstance(mesh, DeviceMesh) else None
    return Asked(size, schedule, int(each), tuple(cuts), of_all, axis or AXES[0])


def _axis_of(mesh: DeviceMesh, axis: str | None, size: int | str) -> tuple[str, int]:
    """The axis of a mesh along which stages stand, and its size; without names, it is the first."""
    if axis is None and (size == "auto" or mesh.axes != default_axes(len(mesh.shape))):
        raise NotServed(
            f"pipeline={size!r}, and no axis of mesh {mesh} is called {', '.join(AXES)}",
            advice=f'DeviceMesh((2, ...), ("{AXES[0]}", ...)), or a count of devices as mesh=',
        )
    name = axis or mesh.axes[0]
    found = mesh.shape[mesh.axis(name)]
    if size not in ("auto", found):
        raise NotServed(
            f"pipeline={size}, and the axis {name} of mesh {mesh} has {found} devices",
            advice=f'DeviceMesh(({size}, ...), ("{AXES[0]}", ...)), or a count of devices',
        )
    return name, found


def _is_count(value: Any) -> bool:
    is_text = isinstance(value, str) and value.strip().isdecimal()
    return is_text or (isinstance(value, numbers.Integral) and not isinstance(value, bool))
