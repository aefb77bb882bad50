"""What the ranks of a pipeline send each other: values forward, their gradients back, and what all of them have.

Every ordered pair of ranks has a process group of its own, so that what goes one way never waits for what comes the
other. A send is begun and kept until it has ended; nobody waits for one before the end of a step. Receives are waited
for in the order in which the peer sends.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.agreement import wait_for

Pair = tuple[int, int]  # coordinates on the axis of stages: who sends, who receives


@dataclass(slots=True, eq=False)
class Line:
    """The ranks that hold the same part of every stage, one for each coordinate, as one of them sees them."""

    ranks: tuple[int, ...]
    index: int
    group: Any  # the process group of all of them
    ways: dict[Pair, Any]  # the groups of the pairs to which this rank belongs
    shared: dict[tuple[int, ...], Any]  # groups of coordinates that store the same parameters
    sent: list[tuple[Any, Tensor]] = field(default_factory=list)

    def send(self, value: Tensor, to: int) -> None:
        """Begin to send a value to another coordinate."""
        lies = value.contiguous()
        work = dist.isend(lies, self.ranks[to], group=self.ways[self.index, to])
        self.sent = [(before, kept) for before, kept in self.sent if not before.is_completed()]
        self.sent.append((work, lies))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int) -> Arrival:
        """Begin to receive a value from another coordinate."""
        value = torch.empty(tuple(shape), dtype=dtype, device=device)
        return Arrival(dist.irecv(value, self.ranks[source], group=self.ways[source, self.index]), value)

    def end(self) -> None:
        """Wait until all that was sent has been received."""
        for work, _ in self.sent:
            work.wait()
        self.sent = []

    def of_all(self, value: Tensor, source: int) -> Tensor:
        """A value of one coordinate on all of them, written to the given memory elsewhere."""
        wait_for(dist.broadcast(value, self.ranks[source], group=self.group, async_op=True))
        return value

    def summed(self, value: Tensor, coordinates: tuple[int, ...]) -> Tensor:
        """The sum over the coordinates that share a parameter, in place."""
        wait_for(dist.all_reduce(value, group=self.shared[coordinates], async_op=True))
        return value


@dataclass(slots=True, eq=False)
class Arrival:
    """A value on its way here."""

    work: Any
    value: Tensor

    def wait(self) -> Tensor:
        self.work.wait()  # not in short waits: gloo closes the pair where one runs out
        return self.value


def stage_meshes(device_type: str, ranks: Sequence[Sequence[int]], shape: Sequence[int], axes: Sequence[str]) -> Any:
    """The mesh of the stages of each coordinate, by the ranks there; all ranks make all of them together."""
    return tuple(
        DeviceMesh(device_type, torch.tensor(list(some)).view(tuple(shape)), mesh_dim_names=tuple(axes))
        for some in ranks
    )


def line_of(ranks: Sequence[Sequence[int]], pairs: Iterable[Pair], shared: Iterable[tuple[int, ...]]) -> Line:
    """This rank's line; `ranks` are those of each coordinate. All ranks make all groups together."""
    me = dist.get_rank()
    pairs = sorted(set(pairs))
    shared = sorted(set(shared))
    mine = None
    for line in zip(*ranks, strict=True):
        group = dist.new_group(list(line))
        ways = {(a, b): dist.new_group([line[a], line[b]]) for a, b in pairs}
        sharing = {some: dist.new_group(list(operator.itemgetter(*some)(line))) for some in shared}
        if me in line:
            mine = Line(tuple(line), line.index(me), group, ways, sharing)
    assert mine is not None
    return mine
