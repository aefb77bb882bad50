"""Read what lies on the mesh of another stage: each rank then has what eager has, and not its own empty part.

    p.full_tensor()             made whole where it lies, then broadcast from there; its gradient goes back there
    stack([p.norm(), q.norm()]) of tensors on several stages' meshes: of the whole ones, and plain
    found_inf of GradScaler     one of any stage counts

DTensor leaves an empty part, or a zero, on ranks that are not on a mesh; all reads end in one of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from autopar.letters import NotServed
from autopar.runtime.faults import naming_the_lost
from autopar.runtime.owned_meshes import Far, far_of
from autopar.runtime.private import local_part

_READ = "a read of a tensor of another stage, which all ranks make"


def from_where_it_lies(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """DTensor's `full_tensor` with the same result on all ranks, on the mesh or not."""

    def full_tensor(self: DTensor, **how: Any) -> Tensor:
        far = far_of(self)
        if far is None:
            return theirs(self, **how)
        copies = self.redistribute(placements=[Replicate()] * self.device_mesh.ndim)
        found: Tensor = _Read.apply(copies, far)
        return found

    return full_tensor


class _Read(torch.autograd.Function):
    """A tensor that is whole on the ranks of its mesh, on all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, far: Far) -> Tensor:
        ctx.like = tensor.device_mesh, tensor.shape, tensor.stride()
        if far.line.index == far.source:
            value = local_part(tensor).clone(memory_format=torch.contiguous_format)
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device_mesh.device_type)
        with naming_the_lost(_READ):
            return far.line.of_all(value, far.source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[DTensor, None]:
        mesh, shape, stride = ctx.like
        placements = [Replicate()] * mesh.ndim
        return DTensor.from_local(gradient, mesh, placements, run_check=False, shape=shape, stride=stride), None


def are_apart(one: DTensor, other: Any) -> bool:
    """Whether operands meet of which not all ranks have parts: of two stages, or of one and a number."""
    if isinstance(other, DTensor):
        return one.device_mesh != other.device_mesh and (far_of(one) or far_of(other)) is not None
    return isinstance(other, Tensor) and not other.dim() and far_of(one) is not None


def read_whole(value: Any) -> Any:
    """A DTensor in full, with gradients; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def is_view_of(one: DTensor, other: DTensor) -> bool:
    """Whether one is a view of the other's memory.

    Ranks that hold no part of it cannot see that, so there the cut says it: what the same axes cut was not gathered.
    """
    if far_of(one) is not None:
        return [p.is_shard() for p in one.placements] == [p.is_shard() for p in other.placements]
    return local_part(one).untyped_storage()._cdata == local_part(other).untyped_storage()._cdata


def across_meshes(op: Any, args: Any, kwargs: Any) -> Any:
    """The result of an op whose operands lie on several meshes of stages; NotImplemented for others.

    Lists of which an op takes one tensor after the other are taken mesh by mesh; what else writes in place is left to
    torch, which refuses it.
    """
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    first, *others = leaves
    if all(leaf.device_mesh == first.device_mesh for leaf in others) or all(far_of(leaf) is None for leaf in leaves):
        return NotImplemented
    name = op._schema.name
    if name.startswith(("aten::_foreach", "aten::_fused")):
        return _mesh_by_mesh(op, args, kwargs)
    if name.endswith("_"):
        return NotImplemented
    if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
        raise NotServed(
            f"{name.partition('::')[2]} of tensors that lie on several stages, with gradients",
            seen=", ".join(f"{tuple(leaf.shape)} on {leaf.device_mesh.mesh.tolist()}" for leaf in leaves[:3]),
            advice="x.full_tensor() of each, through which gradients go back; detach() or no_grad() without gradients",
        )
    with torch.no_grad():
        args, kwargs = pytree.tree_map_only(DTensor, lambda x: x.full_tensor(), (args, kwargs))
        return op(*args, **kwargs)


def _mesh_by_mesh(op: Any, args: Any, kwargs: Any) -> Any:
    """The results of an op over lists, which runs on the tensors of one mesh after the other."""
    count = len(args[0])
    places: dict[Any, list[int]] = {}
    for place, tensor in enumerate(args[0]):
        places.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(place)
    found: list[Any] = [None] * count
    for mesh, at in places.items():

        def of_these(value: Any, mesh: Any = mesh, at: list[int] = at) -> Any:
            if isinstance(value, (list, tuple)) and len(value) == count:
                return [value[i] for i in at]
            is_elsewhere = isinstance(value, DTensor) and value.device_mesh != mesh
            return value.full_tensor() if is_elsewhere else value

        made = op(*map(of_these, args), **{name: of_these(value) for name, value in kwargs.items()})
        for place, result in zip(at, made or (), strict=False):
            found[place] = result
    return found if op._schema.returns else None
