"""`Pipeline`: how a plan divides a model among the devices along one axis, and in which order they run its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.sharding.mesh import DeviceMesh

FORWARD = "forward"  # the schedule of calls without gradients, which run the F of their order alone


@dataclass(frozen=True, slots=True)
class StageFigures:
    """What is predicted of one stage and micro-batch."""

    blocks: tuple[str, ...]
    forward_s: float = 0.0
    inward_s: float = 0.0  # backward, to the gradients of what came in
    weights_s: float = 0.0  # the rest of backward
    transfer_s: float = 0.0  # seconds of sending on what leaves it
    sent_bytes: int = 0  # sent by one device; none where the next stage is on the same coordinate
    standing_bytes: int = 0  # parameters, gradients, states of the optimizer
    saved_bytes: int = 0  # saved for the backward of one micro-batch
    waiting_bytes: int = 0  # held from the inward half of backward to the rest of it
    in_flight: int = 1  # most micro-batches of which it holds something
    peak_bytes: int = 0
    host_bytes: int = 0  # saved for the backward of one micro-batch on the host


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a plan: where they run, where each begins, and the order of the actions on each coordinate."""

    mesh: DeviceMesh  # all devices; the plan's own mesh is that of one stage
    axis: str  # the axis of `mesh` along which stages stand
    schedule: str  # name of the order
    place: tuple[int, ...]  # stage -> its coordinate on the axis
    firsts: tuple[str, ...]  # the block at which each stage but the first begins
    orders: tuple[str, ...]  # the actions of each coordinate, in order: `0F0 0F1 0B0 0B1`
    idle: float = 0.0  # share of the step in which devices wait for each other
    stages: tuple[StageFigures, ...] = field(default=(), repr=False)

    @property
    def coordinates(self) -> int:
        return self.mesh.shape[self.mesh.axis(self.axis)]

    def at(self, coordinate: int) -> tuple[int, ...]:
        """The stages of a coordinate, in order."""
        return tuple(stage for stage, place in enumerate(self.place) if place == coordinate)

    def is_parted(self, stage: int) -> bool:
        """Whether the backward of a stage runs in two parts."""
        return any(action.startswith(f"{stage}I") for order in self.orders for action in order.split())

    def split(self, rank: int) -> tuple[int, tuple[int, ...]]:
        """A rank's coordinate on the axis, and its coordinate on the mesh of its stage."""
        whole = self.mesh.coordinate(rank)
        a = self.mesh.axis(self.axis)
        return whole[a], (*whole[:a], *whole[a + 1 :])

    def ranks(self, coordinate: int) -> tuple[int, ...]:
        """The ranks at a coordinate of the axis, in the order of the mesh of a stage."""
        places = self.mesh.ranks or range(self.mesh.size)
        return tuple(rank for rank in places if self.split(rank)[0] == coordinate)


def stage_mesh(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """The mesh of one stage: all axes but one."""
    others = tuple(name for name in mesh.axes if name != axis)
    return mesh[others] if others else DeviceMesh((1,), ("stage",))


def coordinates_of(stages: Sequence[int], place: Sequence[int]) -> tuple[int, ...]:
    """The coordinates of stages, each once."""
    return tuple(sorted({place[stage] for stage in stages}))


def forward_orders(place: Sequence[int]) -> tuple[str, ...]:
    """The order of one turn on each coordinate, for stages placed anyhow: all F, and B back."""
    found = []
    for coordinate in range(max(place) + 1):
        mine = [stage for stage, at in enumerate(place) if at == coordinate]
        found.append(" ".join([f"{stage}F0" for stage in mine] + [f"{stage}B0" for stage in reversed(mine)]))
    return tuple(found)
