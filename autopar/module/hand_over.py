"""`HandOver`: the tensors of a parallel model on another mesh or under another sharding, one after the other.

    for name, tensor in model.hand_over(mesh, {"*": "S(0)@tp"}, dtype=torch.bfloat16):
        generator.load(name, tensor.to_local())

Tensors travel in buckets, as the messages of `autopar.sharding.handing`: each rank sends what others lack in one
message to each of them, and nothing is gathered that nobody asked for. All ranks iterate together.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.letters import BadSharding, NotServed
from autopar.module.limits import LIMITS
from autopar.module.storage import dtensor_of, sharding_of
from autopar.progress import answer
from autopar.runtime.agreement import agree, wait_for
from autopar.runtime.faults import naming_the_lost
from autopar.runtime.private import local_part
from autopar.sharding.cluster import Cluster
from autopar.sharding.handing import Cells, Holding, Messages, loads, route, seconds
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import R, Sharding
from autopar.solver.figures import size as said_bytes
from autopar.solver.figures import time as said_time
from autopar.solver.plan import Plan

# Where tensors shall lie: by name or pattern, by a function of name and tensor, or as another plan stores them.
Placements = Mapping[str, Any] | Callable[[str, Tensor], Any] | Plan | None
_WORDS = "hands over its tensors"


@dataclass(frozen=True, slots=True)
class _Piece:
    """A cell of a tensor on its way: the rank at the other end, and where it lies in what is held here."""

    other: int
    place: tuple[slice, ...]
    is_source: bool = False  # whether it lies in the source's part, else in the target's


class _Road:
    """How tensors of one size travel from one holding to another, as this rank sees it; loads are of all ranks."""

    def __init__(self, size: Sequence[int], source: Holding, target: Holding, node: int) -> None:
        world = dist.get_world_size()
        cells = Cells(size, source, target, node)
        waves = route(cells, world, node)
        self._cells = cells
        self.here = dist.get_rank()
        self.loads = loads(waves, cells.elements, world)  # elements: waves x (sent, received) x ranks
        has, wants = (cells.held(side, world) for side in (cells.source, cells.target))
        self.held = int((wants @ cells.elements).max())  # elements of the target on the fullest rank
        kept = np.flatnonzero(has[self.here] & wants[self.here])
        self.kept = list(zip(self._places(cells.source, kept), self._places(cells.target, kept), strict=True))
        self.sends = [self._sent(wave.of(wave.senders == self.here), has[self.here]) for wave in waves]
        self.comes = [self._received(wave.of(wave.receivers == self.here)) for wave in waves]
        # The shape of what lies here in the end.
        self.shape = cells.shape(cells.target[self.here]) if self.here in cells.target else [0]

    def _places(self, side: Mapping[int, Any], numbers: np.ndarray) -> list[tuple[slice, ...]]:
        return self._cells.places(side[self.here], numbers) if len(numbers) else []

    def _sent(self, messages: Messages, has: np.ndarray) -> list[_Piece]:
        """Pieces that this rank sends: of its part of the source, or of what came in the wave before."""
        of_source = has[messages.cells]
        found: dict[int, _Piece] = {}
        for is_source, side in ((True, self._cells.source), (False, self._cells.target)):
            chosen = np.flatnonzero(of_source == is_source)
            for i, place in zip(chosen, self._places(side, messages.cells[chosen]), strict=True):
                found[int(i)] = _Piece(int(messages.receivers[i]), place, is_source)
        return [found[i] for i in sorted(found)]  # The other end has them in this order.

    def _received(self, messages: Messages) -> list[_Piece]:
        places = self._places(self._cells.target, messages.cells)
        return [_Piece(int(of), at) for of, at in zip(messages.senders, places, strict=True)]


@dataclass(slots=True, eq=False)
class _Move:
    """A tensor on its way: its names, where it lies here, and where it goes."""

    names: list[str]
    tensor: Tensor
    dtype: torch.dtype
    target: Sharding
    road: _Road
    made: Tensor | None = field(default=None, init=False)  # this rank's part of the target

    @property
    def held_bytes(self) -> int:
        return self.road.held * self.dtype.itemsize


class HandOver:
    """Parameters and buffers of a parallel model as DTensors on another mesh; iterating moves them.

    Printed, it says how many bytes travel and in which time, before anything has moved. `bytes` are those of the whole
    tensors, `sent_bytes` and `received_bytes` those of the ranks that send and receive most, `seconds` are predicted.
    """

    def __init__(
        self, model: Any, mesh: Any, placements: Placements, dtype: torch.dtype | None, cluster: Cluster
    ) -> None:
        self.mesh = mesh
        self.named_mesh = DeviceMesh(tuple(mesh.mesh.shape), mesh.mesh_dim_names)
        self.device: torch.device = model._own.setup.device
        self.cluster = cluster
        world = tuple(range(dist.get_world_size()))
        _check_mesh(mesh, len(world), self.device)
        _check_dtype(dtype)
        wanted = _Wanted(placements, self.named_mesh)
        on = tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape)
        roads: dict[Any, _Road] = {}
        moves: dict[int, _Move] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                continue
            if id(tensor) in moves:
                moves[id(tensor)].names.append(name)
                continue
            source = _holding(tensor, world)
            target = wanted.of(name, tensor)
            way = tuple(tensor.shape), source, Holding(*on, target)
            if way not in roads:
                roads[way] = _Road(*way, cluster.devices_per_node)
            cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            moves[id(tensor)] = _Move([name], tensor, cast, target, roads[way])
        wanted.check_all_used()
        self._buckets = _in_buckets(list(moves.values()))
        self.bytes = sum(move.tensor.numel() * move.dtype.itemsize for move in moves.values())
        by_bucket = list(map(_bytes, self._buckets))
        total = sum(by_bucket, np.zeros((2, 2, len(world))))
        self.sent_bytes, self.received_bytes = (int(way.max()) for way in total.sum(0))
        self.seconds = sum(seconds(nbytes, cluster) for nbytes in by_bucket)

    def __len__(self) -> int:
        return sum(len(move.names) for bucket in self._buckets for move in bucket)

    def __str__(self) -> str:
        return (
            f"{len(self)} tensors of {said_bytes(self.bytes)} onto {self.named_mesh}: a rank sends at most "
            f"{said_bytes(self.sent_bytes)} and receives at most {said_bytes(self.received_bytes)}, "
            f"in {said_time(self.seconds)} on {self.cluster.name}"
        )

    def __iter__(self) -> Iterator[tuple[str, DTensor]]:
        took = 0.0
        for bucket in self._buckets:
            agree((str(self), [move.names for move in bucket]), _WORDS, is_call=False)
            began = time.monotonic()
            with torch.no_grad(), naming_the_lost("a hand-over of its tensors"):
                for dtype in dict.fromkeys(move.dtype for move in bucket):
                    _bring([move for move in bucket if move.dtype == dtype], self.device)
            took += time.monotonic() - began
            for move in bucket:
                assert move.made is not None
                made = dtensor_of(move.made, self.mesh, move.target, move.tensor.shape)
                move.made = None
                yield from ((name, made) for name in move.names)
        answer("handed over %s; it took %s", self, said_time(took))


def _check_mesh(mesh: Any, world: int, device: torch.device) -> None:
    """Raise a letter unless the mesh has ranks of this job, and devices of the model's kind."""
    last = int(mesh.mesh.max())
    if last >= world:
        raise NotServed(
            f"the mesh has the rank {last}, and the job has {world}",
            advice="a mesh of ranks of the job; for another job: model.save_pretrained, or autopar.save",
        )
    if mesh.device_type != device.type:
        raise NotServed(f"the mesh is of {mesh.device_type}, and the model is on {device.type}")


def _check_dtype(dtype: Any) -> None:
    """Raise a letter unless floating-point tensors can be handed over in this dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise NotServed(
            f"dtype={dtype!r} is not one of floating-point numbers, in which such tensors are handed over",
            advice="dtype=torch.bfloat16, or none",
        )


def _holding(tensor: Tensor, world: tuple[int, ...]) -> Holding:
    """The holding of a tensor of a parallel model; plain ones are whole on every rank."""
    if not isinstance(tensor, DTensor):
        return Holding(world, (len(world),), Sharding((R,)))
    mesh = tensor.device_mesh.mesh
    return Holding(tuple(mesh.flatten().tolist()), tuple(mesh.shape), sharding_of(tensor.placements))


def _in_buckets(moves: Sequence[_Move]) -> list[list[_Move]]:
    """Tensors in their order, in buckets of which a rank holds no more than the limit, or one tensor."""
    buckets: list[list[_Move]] = []
    room = 0
    for move in moves:
        room -= move.held_bytes
        if not buckets or room < 0:
            buckets.append([])
            room = LIMITS.handed_bytes - move.held_bytes
        buckets[-1].append(move)
    return buckets


def _bytes(moves: Sequence[_Move]) -> np.ndarray:
    """Bytes that ranks send and receive for some tensors: waves x 2 x ranks."""
    return np.sum([move.road.loads * move.dtype.itemsize for move in moves], axis=0)


class _Wanted:
    """The shardings in which the tensors of a hand-over shall lie."""

    def __init__(self, placements: Placements, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._known: list[str] = []
        if placements is not None and not isinstance(placements, (Mapping, Plan)) and not callable(placements):
            raise BadSharding(
                f"placements={placements!r} does not say how tensors shall lie",
                advice='by name or pattern, {"*": "S(0)@tp"}; a function of name and tensor; or a plan',
            )
        self._given = placements.parameters if isinstance(placements, Plan) else placements
        self._is_plan = isinstance(placements, Plan)
        self._unused = dict.fromkeys(self._given) if isinstance(self._given, Mapping) else {}
        if isinstance(placements, Plan) and placements.mesh.shape != self.mesh.shape:
            raise BadSharding(f"a plan for the mesh {placements.mesh} says how tensors lie", seen=f"mesh {self.mesh}")

    def of(self, name: str, tensor: Tensor) -> Sharding:
        """The sharding in which a tensor shall lie; whole where nothing is said."""
        self._known.append(name)
        sharding = self._parsed(self._said(name, tensor), name)
        if not _can_be_written(sharding, tensor.dim()):
            raise BadSharding(
                f"{name} cannot lie as {sharding.text(self.mesh.axes)} in a DTensor",
                seen=f"its shape is {tuple(tensor.shape)}",
                advice="R, or cuts of its dims, the axes of one dim in the order of the mesh",
            )
        return sharding

    def _said(self, name: str, tensor: Tensor) -> Any:
        if self._given is None:
            return "R"
        if not isinstance(self._given, Mapping):
            return self._given(name, tensor)
        pattern = name if name in self._given else next((p for p in self._given if fnmatchcase(name, p)), None)
        if pattern is None:
            return "R"
        self._unused.pop(pattern, None)
        return self._given[pattern]

    def _parsed(self, said: Any, name: str) -> Sharding:
        """The sharding that a caller's text, one of ours or torch's placements say."""
        if isinstance(said, Sharding):
            return said
        if isinstance(said, str):
            return Sharding.parse(said, self.mesh)
        placements = tuple(said) if isinstance(said, (tuple, list)) else ()
        if len(placements) != len(self.mesh.shape) or any(p.is_partial() for p in placements):
            raise BadSharding(
                f"{said!r} does not say how {name} shall lie on the mesh {self.mesh}",
                advice='whole or cut on each axis, such as (Shard(0), Replicate()), or text such as "S(0)@dp"',
            )
        return sharding_of(placements)

    def check_all_used(self) -> None:
        """Raise a letter where a name or a pattern of the caller's has met no tensor."""
        if self._unused and not self._is_plan:
            pattern = next(iter(self._unused))
            near = difflib.get_close_matches(pattern, self._known, n=1)
            raise BadSharding(
                f"no tensor of the model is called {pattern!r}",
                seen=f"the model has {', '.join(self._known[:4])}{', ...' if len(self._known) > 4 else ''}",
                advice=repr(near[0]) if near else "names of model.state_dict(), or patterns of them",
            )


def _can_be_written(sharding: Sharding, dims: int) -> bool:
    """Whether a tensor of so many dims can lie so in a DTensor of torch, whole or cut."""
    if sharding.partial_axes:
        return False
    for dim, axes in sharding.cuts.items():
        blocks = {size for axis in axes for size in sharding.placements[axis].blocks}
        if dim >= dims or list(axes) != sorted(axes) or len(blocks) > 1 or (blocks and len(axes) > 1):
            return False
    return True


def _bring(moves: Sequence[_Move], device: torch.device) -> None:
    """Let every move have its part on this rank: what it holds already, and what comes in two waves."""
    held = [_part_of(move, device) for move in moves]
    for move, part in zip(moves, held, strict=True):
        move.made = part.new_empty(move.road.shape)
        for there, here in move.road.kept:
            move.made[here] = part[there]
    for wave in range(2):
        if not any(move.road.loads[wave].any() for move in moves):
            continue  # On all ranks, as loads are of all.
        sends: list[list[Tensor]] = [[] for _ in range(dist.get_world_size())]
        comes: list[list[Tensor]] = [[] for _ in sends]
        for move, part in zip(moves, held, strict=True):
            assert move.made is not None
            for piece in move.road.sends[wave]:
                sends[piece.other].append((part if piece.is_source else move.made)[piece.place])
            for piece in move.road.comes[wave]:
                comes[piece.other].append(move.made[piece.place])
        _exchange(sends, comes, held[0].new_empty(0))


def _part_of(move: _Move, device: torch.device) -> Tensor:
    """This rank's part of a tensor, in the dtype in which it is handed over."""
    part = local_part(move.tensor) if isinstance(move.tensor, DTensor) else move.tensor.detach()
    return part.to(device=device, dtype=move.dtype)


def _exchange(sends: Sequence[Sequence[Tensor]], comes: Sequence[Sequence[Tensor]], like: Tensor) -> None:
    """Send pieces to each rank in one message, and receive those of each into their places."""
    flat = torch.cat([like, *(piece.reshape(-1) for pieces in sends for piece in pieces)])
    places = [piece for pieces in comes for piece in pieces]
    made = flat.new_empty(sum(map(Tensor.numel, places)))
    splits = list(map(_nbytes, comes)), list(map(_nbytes, sends))
    # Every backend sends bytes.
    wait_for(dist.all_to_all_single(made.view(torch.uint8), flat.view(torch.uint8), *splits, async_op=True))
    for piece, came in zip(places, made.split([piece.numel() for piece in places]), strict=True):
        piece.copy_(came.view(piece.shape))


def _nbytes(pieces: Sequence[Tensor]) -> int:
    return sum(piece.nbytes for piece in pieces)
