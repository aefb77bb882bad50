"""How a parameter is stored: a DTensor on the full mesh, whose local part the emitted program reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from autopar.runtime.collectives import bind_axes, slice
from autopar.runtime.owned_meshes import own
from autopar.runtime.private import StridedShard
from autopar.sharding.placement import Placement, R, S, Sharding


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Sharding of one tensor on the mesh, with its whole shape and strides."""

    mesh: Any
    sharding: Sharding
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor, sharding: Sharding | None, mesh: Any) -> Storage:
        own(mesh)
        lies = Sharding((R,) * mesh.ndim) if sharding is None else _on_mesh(sharding, mesh)
        return Storage(mesh, lies, tuple(tensor.shape), torch.empty(tensor.shape, device="meta").stride())

    @staticmethod
    def like(tensor: DTensor) -> Storage:
        """The storage of a tensor that is a DTensor already."""
        sharding = sharding_of(tensor.placements)
        return Storage(tensor.device_mesh, sharding, tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def is_here(self) -> bool:
        """Whether this rank is on the mesh: parameters of other stages have nothing here."""
        return self.mesh.get_coordinate() is not None

    @property
    def placements(self) -> tuple[Any, ...]:
        """The sharding as torch's placements."""
        return tuple(map(_torch_placement, self.sharding.placements))

    def take(self, whole: Tensor, sync: bool) -> DTensor:
        """This rank's part of a whole tensor as a DTensor; the values are rank 0's where `sync`."""
        whole = self.spread(whole, sync)
        if not self.is_here:
            return self.wrap(whole.new_empty(0))
        axes = list(bind_axes(self.mesh).values())
        local = whole
        for dim, cut in self.sharding.cuts.items():
            for axis in cut:
                blocks = self.sharding.placements[axis].blocks
                size = local.shape[dim]
                local = slice(local, axes[axis], dim, size, tuple(b * size // sum(blocks) for b in blocks))
        return self.wrap(
            local.contiguous() if local is not whole else whole.clone(memory_format=torch.contiguous_format)
        )

    def places(self) -> list[Tensor]:
        """For each dim, the indices of the whole tensor that belong to this rank."""
        if not self.is_here:
            return [torch.arange(0) for _ in self.shape]
        axes = list(bind_axes(self.mesh).values())
        found = []
        for dim, size in enumerate(self.shape):
            here = torch.arange(size)
            for axis in self.sharding.cuts.get(dim, ()):
                blocks = self.sharding.placements[axis].blocks
                here = slice(here, axes[axis], 0, here.numel(), tuple(b * here.numel() // sum(blocks) for b in blocks))
            found.append(here)
        return found

    def spread(self, whole: Tensor, sync: bool) -> Tensor:
        """A copy of the whole tensor, broadcast from rank 0 where `sync`."""
        whole = whole.detach().clone(memory_format=torch.contiguous_format)
        if sync and dist.get_world_size() > 1:
            dist.broadcast(whole, 0)
        return whole

    def wrap(self, local: Tensor) -> DTensor:
        """The DTensor that has this local part."""
        return dtensor_of(local, self.mesh, self.sharding, self.shape, self.stride)


def sharding_of(placements: Iterable[Any]) -> Sharding:
    """The sharding that placements of torch mean."""
    return Sharding(tuple(map(_own_placement, placements)))


def dtensor_of(
    local: Tensor, mesh: Any, sharding: Sharding, shape: Sequence[int], stride: Sequence[int] | None = None
) -> DTensor:
    """The DTensor that has this local part.

    Torch's placements cut one dim by several axes in mesh order only.
    """
    sharding = _on_mesh(sharding, mesh)
    assert sharding.order == tuple(range(len(sharding.placements))), sharding
    for axes in sharding.cuts.values():
        assert len(axes) == 1 or not any(sharding.placements[a].blocks for a in axes), sharding
    placements = [_torch_placement(p) for p in sharding.placements]
    if not shape and local.dim():  # Of a rank off the mesh, torch takes the shape () for none, and that of the part.
        local = local.new_empty(())
    stride = stride or torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def _on_mesh(sharding: Sharding, mesh: Any) -> Sharding:
    """The sharding on a mesh that may be one of several stages: their axis stands in front, whole."""
    if len(sharding.placements) == mesh.ndim:
        return sharding
    return Sharding((R, *sharding.placements), (0, *(axis + 1 for axis in sharding.order)))


def _own_placement(p: Any) -> Placement:
    if isinstance(p, StridedShard):
        return S(p.dim, blocks=(1,) * p.split_factor)
    return S(p.dim) if p.is_shard() else R


def _torch_placement(p: Placement) -> Any:
    """torch's placement for one of ours; equal blocks are a strided shard."""
    if p.blocks:
        assert len(set(p.blocks)) == 1, p
        return StridedShard(p.dim, split_factor=len(p.blocks))
    return Shard(p.dim) if p.is_shard else Partial(p.reduction) if p.is_partial else Replicate()
