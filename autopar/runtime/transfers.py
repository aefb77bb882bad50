"""What the ranks of a pipeline send each other: values forward, their gradients back, and what all of them have.

What goes from one stage to another has a process group of its own in each pair of ranks, and so have its gradients:
what goes one way never waits for what comes the other. Where a rank has several stages, values of several pairs of them
go the same way, and are not received in the order in which they are sent. What is sent is begun and kept until it has
arrived; nobody waits for that before the end of a step. A message is a broadcast in its pair: unlike gloo's receives, a
wait for it can look now and then whether others do something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.agreement import wait_for
from autopar.runtime.faults import waiting_in


class Way(NamedTuple):
    """What is received in the order in which it is sent: the values of a pair of stages, or their gradients."""

    sender: int  # coordinate on the axis of stages
    receiver: int
    source: int  # the stage that makes the values
    reader: int
    is_gradient: bool


@dataclass(slots=True, eq=False)
class Line:
    """The ranks that hold the same part of every stage, one for each coordinate, as one of them sees them."""

    lines: tuple[tuple[int, ...], ...]  # one for each coordinate within a stage
    ranks: tuple[int, ...]
    index: int
    group: Any  # all ranks of the line
    timeout: timedelta
    ways: dict[Way, Any] = field(default_factory=dict)  # the groups of the pairs to which this rank belongs
    sent: list[tuple[Any, Tensor]] = field(default_factory=list)

    def open(self, ways: Iterable[Way]) -> None:
        """Make the groups of ways that have none yet; all ranks do so together."""
        for way in sorted(set(ways) - self.ways.keys()):
            for line in self.lines:
                group = dist.new_group([line[way.sender], line[way.receiver]], timeout=self.timeout)
                if line == self.ranks:
                    self.ways[way] = group

    def send(self, value: Tensor, way: Way) -> None:
        """Begin to send a value to another coordinate."""
        lies = value.contiguous()
        self.sent.append((self._begin(lies, way), lies))

    def let_go(self) -> None:
        """Free what was sent and has been received."""
        self.sent = [(work, kept) for work, kept in self.sent if not work.is_completed()]

    def receive(self, into: Tensor, way: Way) -> Arrival:
        """Begin to receive a value from another coordinate into this memory."""
        return Arrival(self._begin(into, way), into, self.ranks[way.sender])

    def _begin(self, value: Tensor, way: Way) -> Any:
        return dist.broadcast(_as_bytes(value), self.ranks[way.sender], group=self.ways[way], async_op=True)

    def end(self) -> None:
        """Wait until all that was sent has been received."""
        with waiting_in("the end of a step, for others to receive what was sent"):
            for work, _ in self.sent:
                wait_for(work)
        self.sent = []

    def of_all(self, value: Tensor, source: int) -> Tensor:
        """A value of one coordinate on all of them, written to the given memory elsewhere."""
        wait_for(dist.broadcast(_as_bytes(value), self.ranks[source], group=self.group, async_op=True))
        return value


@dataclass(slots=True, eq=False)
class Arrival:
    """A value on its way here."""

    work: Any
    value: Tensor
    source: int

    def wait(self) -> Tensor:
        with waiting_in(f"a stage, for what rank {self.source} sends"):
            wait_for(self.work)
        return self.value


def added_up(value: Tensor, group: Any, what: str) -> Tensor:
    """The sum over the ranks of a group, in place."""
    with waiting_in(f"{what}, with rank {', '.join(map(str, dist.get_process_group_ranks(group)))}"):
        wait_for(dist.all_reduce(value, group=group, async_op=True))
    return value


def _as_bytes(value: Tensor) -> Tensor:
    """The memory of a contiguous tensor in a dtype that every backend takes."""
    return value.view(-1).view(torch.uint8)


def stage_meshes(device_type: str, ranks: Sequence[Sequence[int]], shape: Sequence[int], axes: Sequence[str]) -> Any:
    """The mesh of the stages of each coordinate, by the ranks there; all ranks make all of them together."""
    return tuple(mesh_of_ranks(device_type, [some], shape, axes) for some in ranks)


def mesh_of_ranks(device_type: str, ranks: Sequence[Sequence[int]], shape: Sequence[int], axes: Sequence[str]) -> Any:
    """The mesh of the stages of some coordinates, by the ranks of each; all ranks make it together."""
    return DeviceMesh(device_type, torch.tensor(list(map(list, ranks))).view(tuple(shape)), mesh_dim_names=tuple(axes))


def line_of(ranks: Sequence[Sequence[int]], timeout_s: float) -> Line:
    """This rank's line; `ranks` are those of each coordinate. All ranks make all groups together."""
    me = dist.get_rank()
    lines = tuple(zip(*ranks, strict=True))
    timeout = timedelta(seconds=timeout_s)
    groups = [dist.new_group(list(line), timeout=timeout) for line in lines]
    (mine,) = (
        Line(lines, line, line.index(me), group, timeout)
        for line, group in zip(lines, groups, strict=True)
        if me in line
    )
    return mine
