"""The logical mesh: devices in a row-major grid with named axes, the last axis innermost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.letters import BadSharding, Disagreement

if TYPE_CHECKING:
    import torch.distributed.device_mesh


@dataclass(frozen=True, slots=True, init=False)
class DeviceMesh:
    """`DeviceMesh((2, 4), ("dp", "tp"))`: 8 devices, rank 5 at dp=1, tp=1. Needs no process group until `to_torch`."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]

    def __init__(self, shape: tuple[int, ...] | int, axes: tuple[str, ...] | None = None) -> None:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        axes = tuple(str(a) for a in range(len(shape))) if axes is None else tuple(axes)
        if not shape or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in shape):
            raise BadSharding(f"{shape} is not a mesh shape", advice="positive sizes, for example (2, 4)")
        if len(axes) != len(shape) or len(set(axes)) != len(axes):
            raise BadSharding(f"axes {axes} do not name the {len(shape)} axes of shape {shape} once each")
        if bad := [a for a in axes if not a or any(c in a for c in "@,;/ ")]:
            raise BadSharding(f"{bad[0]!r} is not an axis name", advice="a word without spaces or any of @ , ; /")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "axes", axes)

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
        """Where a rank stands, one index per axis."""
        result = []
        for n in reversed(self.shape):
            rank, index = divmod(rank, n)
            result.append(index)
        return tuple(reversed(result))

    def to_torch(self, device_type: str) -> torch.distributed.device_mesh.DeviceMesh:
        """torch's own mesh over the same ranks; needs a process group of exactly this size."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if dist.get_world_size() != self.size:
            raise Disagreement(
                f"mesh {self} has {self.size} devices, the world has {dist.get_world_size()} ranks",
                advice=f"torchrun --nproc-per-node {self.size}, or another mesh",
            )
        return init_device_mesh(device_type, self.shape, mesh_dim_names=self.axes)

    @staticmethod
    def of(given: Any) -> DeviceMesh:
        """A mesh from what a caller may pass: a DeviceMesh, a shape, or a count."""
        if isinstance(given, DeviceMesh):
            return given
        if isinstance(given, (int, tuple, list)):
            return DeviceMesh(given if isinstance(given, int) else tuple(given))
        raise BadSharding(f"{given!r} is not a mesh", advice='DeviceMesh((2, 4), ("dp", "tp")), or a shape such as (2, 4)')
