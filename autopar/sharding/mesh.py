"""The logical mesh: devices in a row-major grid with named axes, the last axis innermost."""

from __future__ import annotations

import html
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from autopar.letters import BadSharding, Disagreement, NotServed

if TYPE_CHECKING:
    import torch.distributed.device_mesh


# torch's meshes that exist, by the job's process group: the same on every rank, for all ranks make one together
_made: WeakKeyDictionary[Any, dict[tuple[DeviceMesh, str], torch.distributed.device_mesh.DeviceMesh]] = (
    WeakKeyDictionary()
)


@dataclass(frozen=True, slots=True, init=False)
class DeviceMesh:
    """A grid of devices with named axes: `DeviceMesh((2, 4), ("dp", "tp"))` has rank 5 at dp=1, tp=1.

    `mesh["tp"]` and `mesh["dp", "tp"]` are the meshes of some of its axes. An axis of size 1 has no effect. `ranks`
    lists the ranks row-major, on a machine whose fast links ask for another order than 0, 1, 2. Axes without given
    names have those of `default_axes`. No process group is needed until `to_torch`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    ranks: tuple[int, ...]  # empty: in their order

    def __init__(
        self, shape: tuple[int, ...] | int, axes: tuple[str, ...] | None = None, ranks: Sequence[int] = ()
    ) -> None:
        try:
            sizes = (shape,) if hasattr(shape, "__index__") else shape
            shape = tuple(n if isinstance(n, (bool, float)) else operator.index(n) for n in sizes)
            axes = default_axes(len(shape)) if axes is None else tuple(axes)
            ranks = [operator.index(r) for r in ranks]
        except TypeError:
            raise BadSharding(
                f"{shape!r} is not a mesh shape, or {axes!r} no names of axes, or {ranks!r} no ranks",
                advice='DeviceMesh((2, 4), ("dp", "tp"))',
            ) from None
        _check_shape(shape)
        _check_axes(axes, shape)
        _check_ranks(ranks, shape)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "ranks", () if ranks == sorted(ranks) else tuple(ranks))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        return "(" + ", ".join(f"{a}={n}" for a, n in zip(self.axes, self.shape, strict=True)) + ")"

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    def axis(self, name: str | int) -> int:
        """The index of an axis given by name or index."""
        if name in self.axes:
            return self.axes.index(str(name))
        if str(name).isdigit() and int(name) < len(self.shape):
            return int(name)
        raise BadSharding(f"the mesh has no axis {name!r}", seen=f"mesh {self}")

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The coordinate of a rank: its index on each axis."""
        rank = self.ranks.index(rank) if self.ranks else rank
        result = []
        for n in reversed(self.shape):
            rank, index = divmod(rank, n)
            result.append(index)
        return tuple(reversed(result))

    def rank(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate."""
        places = zip(coordinate, self.shape, strict=False)
        if len(coordinate) != len(self.shape) or not all(0 <= c < n for c, n in places):
            raise BadSharding(f"{tuple(coordinate)} is not a coordinate of mesh {self}")
        rank = 0
        for c, n in zip(coordinate, self.shape, strict=True):
            rank = rank * n + c
        return self.ranks[rank] if self.ranks else rank

    def groups(self, axis: str | int) -> list[tuple[int, ...]]:
        """The groups of ranks that differ along one axis only."""
        a = self.axis(axis)
        stride = math.prod(self.shape[a + 1 :])
        n = self.shape[a]
        places = self.ranks or range(self.size)
        firsts = [first for first in range(self.size) if first // stride % n == 0]
        return [tuple(places[first : first + n * stride : stride]) for first in firsts]

    def __getitem__(self, names: str | int | tuple[str | int, ...]) -> DeviceMesh:
        chosen = [self.axis(name) for name in (names if isinstance(names, tuple) else (names,))]
        if sorted(set(chosen)) != chosen:
            raise BadSharding(f"{names!r} are not axes of the mesh in its order", seen=f"mesh {self}")
        shape = tuple(self.shape[a] for a in chosen)
        axes = tuple(self.axes[a] for a in chosen)
        return DeviceMesh(shape, axes, self.ranks if len(chosen) == len(self.shape) else ())

    def check_world(self, ranks: int) -> None:
        """Raise a letter where a job has another number of ranks than the mesh has devices."""
        if ranks != self.size:
            raise Disagreement(
                f"mesh {self} has {self.size} devices, the world has {ranks} ranks",
                advice=f"torchrun --nproc-per-node {self.size}, or another mesh",
            )

    def to_torch(self, device_type: str) -> torch.distributed.device_mesh.DeviceMesh:
        """The DeviceMesh of torch over the same ranks; it needs a process group of exactly this size.

        Equal meshes of one job share one object: process groups cost threads and device memory.
        """
        import torch.distributed  # here, for start-up time: meshes are planned for without torch

        self.check_world(torch.distributed.get_world_size())
        if any(list(group) != sorted(group) for axis in self.axes for group in self.groups(axis)):
            raise NotServed(
                f"mesh {self} has ranks that do not ascend along an axis: torch's groups do",
                seen=f"ranks {list(self.ranks)}",
                advice="start the job with its ranks in the mesh's order",
            )
        made = _made.setdefault(torch.distributed.group.WORLD, {})
        if (self, device_type) not in made:
            made[self, device_type] = self._new(device_type)
        return made[self, device_type]

    def _new(self, device_type: str) -> torch.distributed.device_mesh.DeviceMesh:
        import torch.distributed.device_mesh

        if self.ranks:
            places = torch.tensor(self.ranks).view(self.shape)
            return torch.distributed.device_mesh.DeviceMesh(device_type, places, mesh_dim_names=self.axes)
        return torch.distributed.device_mesh.init_device_mesh(device_type, self.shape, mesh_dim_names=self.axes)

    @staticmethod
    def of(given: Any) -> DeviceMesh:
        """The mesh that a caller means: ours, torch's own, a shape, sizes by name, a count, or "2x4"."""
        if isinstance(given, DeviceMesh):
            return given
        if isinstance(given, Mapping):
            return DeviceMesh(tuple(given.values()), tuple(given))
        if isinstance(given, str) and re.fullmatch(r"\s*\d+(\s*[x,]\s*\d+)*\s*", given):
            return DeviceMesh(tuple(int(n) for n in re.split("[x,]", given)))
        if type(given).__module__.startswith("torch.") and hasattr(given, "mesh_dim_names"):
            return DeviceMesh(tuple(given.mesh.shape), given.mesh_dim_names, given.mesh.flatten().tolist())
        if isinstance(given, (tuple, list)) or hasattr(given, "__index__"):
            return DeviceMesh(tuple(given) if isinstance(given, (tuple, list)) else (given,))
        raise BadSharding(
            f"{given!r} is not a mesh", advice='DeviceMesh((2, 4), ("dp", "tp")), or a shape such as (2, 4) or "2x4"'
        )


def default_axes(count: int) -> tuple[str, ...]:
    """Default names of axes: "data" and "model", with replicas outside of them; "devices" for one alone."""
    if count < 2:
        return ("devices",)[:count]
    outer = [f"replica{k}" for k in range(count - 3, 0, -1)]
    return (*outer, *("replica", "data", "model")[-count:])


def _check_shape(shape: Sequence[Any]) -> None:
    """Raise a letter unless all sizes are positive whole numbers."""
    if not shape or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in shape):
        raise BadSharding(f"{shape} is not a mesh shape", advice="positive sizes, for example (2, 4)")


def _check_axes(axes: Sequence[str], shape: Sequence[int]) -> None:
    """Raise a letter unless each axis has a name of its own that can stand in a sharding."""
    if len(axes) != len(shape) or len(set(axes)) != len(axes):
        raise BadSharding(f"axes {axes} do not name the {len(shape)} axes of shape {shape} once each")
    if bad := [a for a in axes if not a or not set(a).isdisjoint("@,;/ ")]:
        raise BadSharding(f"{bad[0]!r} is not an axis name", advice="a word without spaces or any of @ , ; /")


def _check_ranks(ranks: Sequence[int], shape: Sequence[int]) -> None:
    """Raise a letter unless `ranks` is empty or has every rank of the mesh once."""
    # their number first: a shape of a file may be of more devices than a list can hold
    if ranks and (len(ranks) != math.prod(shape) or sorted(ranks) != list(range(len(ranks)))):
        raise BadSharding(
            f"ranks {list(ranks)} do not stand on a mesh of shape {shape}",
            advice=f"each of 0 to {math.prod(shape) - 1} once",
        )
