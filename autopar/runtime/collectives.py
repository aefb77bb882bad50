"""Collectives and local steps that emitted programs call, over torch.distributed (NCCL on GPUs, gloo on CPUs).

Each takes what a device holds and the mesh axis, and returns a new tensor: no step writes to its operand. A `dim` comes
with the size that the dim has when the axis does not cut it, because the last parts may be smaller: parts are padded to
one size inside the collective, and the padding never leaves it.

`convert` is what the local program holds before it is differentiated: the steps forward, and those of the gradient
backward. The two are adjoint only together with the strategies at both ends, which is why no step has a backward of its
own. Tracing the joint graph turns it into two `convert`s; `codegen/joint_passes.py` then writes out their steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime import rehearsal
from autopar.runtime.agreement import wait_for
from autopar.sharding.placement import part

gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis as one rank sees it."""

    name: str
    size: int
    index: Any  # this rank's place on the axis
    group: Any  # the process group of its ranks


TIME = "time"  # name of the axis of turns


@dataclass(slots=True, eq=False)
class Turns:
    """The axis of time: its number of turns on one device, and the turn that runs."""

    size: int
    index: int = 0
    name: str = TIME


def bind_axes(mesh: Any) -> dict[str, Axis]:
    """The axes of a torch DeviceMesh, by name."""
    return {
        name: Axis(name, mesh.size(i), mesh.get_local_rank(i), mesh.get_group(i))
        for i, name in enumerate(mesh.mesh_dim_names)
    }


Blocks = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Packed:
    """Several tensors packed as one, and a function that unpacks what arrives; the tensors may be freed meanwhile."""

    flat: Tensor
    unpack: Callable[[Tensor], list[Tensor]]


@dataclass(slots=True, eq=False)
class Pending:
    """A collective under way: it keeps the memory that the collective reads and writes until `finish`."""

    work: Any
    sent: Tensor | None
    arrives: Tensor
    unpack: Callable[[Tensor], list[Tensor]]


def finish(pending: Pending) -> list[Tensor]:
    """Wait for a collective and unpack its results; on a GPU only later kernels wait, not the host."""
    if pending.work is not None:
        wait_for(pending.work)
    pending.work = pending.sent = None
    return pending.unpack(pending.arrives)


def pack_all_reduce(xs: list[Tensor], axis: Axis) -> Packed:
    flat = (
        torch.cat([x.flatten() for x in xs])
        if len(xs) > 1
        else xs[0].clone(memory_format=torch.contiguous_format).view(-1)
    )
    shapes = [x.shape for x in xs]
    sizes = [shape.numel() for shape in shapes]
    dtype = xs[0].dtype
    return Packed(
        _summed(flat),
        lambda y: [part.view(shape) for part, shape in zip(y.to(dtype).split(sizes), shapes, strict=True)],
    )


def _summed(flat: Tensor) -> Tensor:
    """The same memory in a dtype that can be summed: bool as uint8."""
    return flat.view(torch.uint8) if flat.dtype == torch.bool else flat


def begin_all_reduce(message: Packed, axis: Axis) -> Pending:
    """P(sum) -> R of several tensors in one message."""
    return Pending(dist.all_reduce(message.flat, group=axis.group, async_op=True), None, message.flat, message.unpack)


def pack_all_gather(xs: list[Tensor], axis: Axis, dims: list[int], sizes: list[int], blocks: list[Blocks]) -> Packed:
    parts = [_padded(x, dim, -(-size // axis.size)).contiguous() for x, dim, size in zip(xs, dims, sizes, strict=True)]
    flat = torch.cat([p.view(-1) for p in parts]) if len(parts) > 1 else parts[0].view(-1)
    shapes = [p.shape for p in parts]

    def unpack(y: Tensor) -> list[Tensor]:
        pieces = y.view(axis.size, -1).split([shape.numel() for shape in shapes], 1)
        wholes = (
            piece.view(axis.size, *shape).movedim(0, dim).flatten(dim, dim + 1)
            for piece, shape, dim in zip(pieces, shapes, dims, strict=True)
        )
        return [
            _by_blocks(whole.narrow(dim, 0, size), dim, axis.size, block).contiguous()
            for whole, dim, size, block in zip(wholes, dims, sizes, blocks, strict=True)
        ]

    return Packed(flat, unpack)


def begin_all_gather(message: Packed, axis: Axis) -> Pending:
    """S(dim) -> R of several tensors in one message."""
    y = message.flat.new_empty(axis.size * message.flat.numel())
    return Pending(gather_into(y, message.flat, group=axis.group, async_op=True), message.flat, y, message.unpack)


def pack_reduce_scatter(
    xs: list[Tensor], axis: Axis, dims: list[int], sizes: list[int], blocks: list[Blocks]
) -> Packed:
    steps = [-(-size // axis.size) for size in sizes]
    parts = [
        _padded(_by_parts(x, dim, axis.size, block), dim, axis.size * step)
        .unflatten(dim, (axis.size, step))
        .movedim(dim, 0)
        for x, dim, block, step in zip(xs, dims, blocks, steps, strict=True)
    ]
    shapes = [(*x.shape[:dim], step, *x.shape[dim + 1 :]) for x, dim, step in zip(xs, dims, steps, strict=True)]
    counts = [math.prod(shape) for shape in shapes]
    dtype = xs[0].dtype
    if len(parts) > 1:
        flat = xs[0].new_empty(axis.size, sum(counts))
        for place, part in zip(flat.split(counts, 1), parts, strict=True):
            place.view(part.shape).copy_(part)
    else:
        flat = parts[0].contiguous()

    def unpack(y: Tensor) -> list[Tensor]:
        return [
            piece.view(shape).narrow(dim, 0, _length(size, axis)).contiguous()
            for piece, shape, dim, size in zip(y.to(dtype).split(counts), shapes, dims, sizes, strict=True)
        ]

    return Packed(_summed(flat.view(-1)), unpack)


def begin_reduce_scatter(message: Packed, axis: Axis) -> Pending:
    """P(sum) -> S(dim) of several tensors in one message."""
    y = message.flat.new_empty(message.flat.numel() // axis.size)
    return Pending(_reduce_scatter(y, message.flat, group=axis.group, async_op=True), message.flat, y, message.unpack)


def pack_all_to_all(
    xs: list[Tensor],
    axis: Axis,
    dims: list[int],
    sizes: list[int],
    blocks: list[Blocks],
    to_dims: list[int],
    to_sizes: list[int],
    to_blocks: list[Blocks],
) -> Packed:
    cuts = list(zip(dims, sizes, blocks, to_dims, to_sizes, to_blocks, strict=True))
    parts = []
    for x, (dim, size, _, to_dim, to_size, cut_by) in zip(xs, cuts, strict=True):
        step, to_step = -(-size // axis.size), -(-to_size // axis.size)
        padded = _padded(_padded(_by_parts(x, to_dim, axis.size, cut_by), dim, step), to_dim, to_step * axis.size)
        # [receiver, ..., step, ..., to_step, ...]; a stack of pictures whose channels lie last would lie so too
        parts.append(torch.stack(padded.split(to_step, to_dim)).contiguous())
    shapes = [part.shape[1:] for part in parts]
    flat = torch.cat([part.view(axis.size, -1) for part in parts], 1) if len(parts) > 1 else parts[0]

    def unpack(y: Tensor) -> list[Tensor]:
        pieces = y.view(axis.size, -1).split([shape.numel() for shape in shapes], 1)
        wholes = (  # the senders' parts in their order
            piece.view(axis.size, *shape).movedim(0, dim).flatten(dim, dim + 1)
            for piece, shape, (dim, *_) in zip(pieces, shapes, cuts, strict=True)
        )
        return [
            _by_blocks(whole.narrow(dim, 0, size), dim, axis.size, gathered)
            .narrow(to_dim, 0, _length(to_size, axis))
            .contiguous()
            for whole, (dim, size, gathered, to_dim, to_size, _) in zip(wholes, cuts, strict=True)
        ]

    return Packed(flat.view(-1), unpack)


def begin_all_to_all(message: Packed, axis: Axis) -> Pending:
    """S(dim) -> S(to_dim) of several tensors in one message."""
    y = torch.empty_like(message.flat)
    work = dist.all_to_all_single(y, message.flat, group=axis.group, async_op=True)
    return Pending(work, message.flat, y, message.unpack)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """P(sum) -> R, by an all-reduce."""
    return all_reduce_bucket([x], axis)[0]


def all_reduce_bucket(xs: list[Tensor], axis: Axis) -> list[Tensor]:
    """P(sum) -> R of several tensors in one message."""
    return finish(begin_all_reduce(pack_all_reduce(xs, axis), axis))


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """P(max) -> R, by an all-reduce."""
    y = x.clone(memory_format=torch.contiguous_format)
    wait_for(dist.all_reduce(y, dist.ReduceOp.MAX, group=axis.group, async_op=True))
    return y


def all_gather(x: Tensor, axis: Axis, dim: int, size: int, blocks: Blocks = ()) -> Tensor:
    """S(dim) -> R, by an all-gather."""
    return all_gather_bucket([x], axis, [dim], [size], [blocks])[0]


def all_gather_bucket(
    xs: list[Tensor], axis: Axis, dims: list[int], sizes: list[int], blocks: list[Blocks]
) -> list[Tensor]:
    """S(dim) -> R of several tensors in one message."""
    return finish(begin_all_gather(pack_all_gather(xs, axis, dims, sizes, blocks), axis))


def reduce_scatter(x: Tensor, axis: Axis, dim: int, size: int, blocks: Blocks = ()) -> Tensor:
    """P(sum) -> S(dim), by a reduce-scatter."""
    return reduce_scatter_bucket([x], axis, [dim], [size], [blocks])[0]


def reduce_scatter_bucket(
    xs: list[Tensor], axis: Axis, dims: list[int], sizes: list[int], blocks: list[Blocks]
) -> list[Tensor]:
    """P(sum) -> S(dim) of several tensors in one message."""
    return finish(begin_reduce_scatter(pack_reduce_scatter(xs, axis, dims, sizes, blocks), axis))


def all_to_all(
    x: Tensor, axis: Axis, dim: int, size: int, blocks: Blocks, to_dim: int, to_size: int, to_blocks: Blocks
) -> Tensor:
    """S(dim) -> S(to_dim), by an all-to-all."""
    return all_to_all_bucket([x], axis, [dim], [size], [blocks], [to_dim], [to_size], [to_blocks])[0]


def all_to_all_bucket(xs: list[Tensor], axis: Axis, *numbers: list[Any]) -> list[Tensor]:
    """S(dim) -> S(to_dim) of several tensors in one message; `numbers` are those of `pack_all_to_all`."""
    return finish(begin_all_to_all(pack_all_to_all(xs, axis, *numbers), axis))


def slice(x: Tensor, axis: Axis, dim: int, size: int, blocks: Blocks = ()) -> Tensor:
    """R -> S(dim), without communication."""
    return (
        _by_parts(x, dim, axis.size, blocks)
        .narrow(dim, part_start(x, axis, size, on_host=True), _length(size, axis))
        .clone(memory_format=torch.contiguous_format)
    )


def lodge(x: Tensor, axis: Axis) -> Tensor:
    """R -> P(sum), without communication: the first rank keeps the value, the others hold zeros."""
    return torch.where(
        torch.full((), axis.index, device=x.device) == 0, x, x.new_zeros(())
    ).contiguous()  # not a product: 0 times inf is nan


def part_start(like: Tensor, axis: Axis, size: int, on_host: bool = False) -> Any:
    """Start of this rank's part of a dim: a tensor on the device of `like`, or a number if `on_host`."""
    step = -(-size // axis.size)
    start = step * axis.index if size % axis.size == 0 else part(size, axis.size, axis.index)[0]
    return start if on_host else torch.full((), start, dtype=torch.int64, device=like.device)


def _by_parts(x: Tensor, dim: int, parts: int, blocks: Blocks) -> Tensor:
    """Reorder a dim cut by blocks so that each rank's part is contiguous.

    The order is the first part of every block, the second part of every block, and so on.
    """
    if not blocks:
        return x
    pieces = [block.chunk(parts, dim) for block in x.split(blocks, dim)]
    return torch.cat([piece[i] for i in range(parts) for piece in pieces], dim)


def _by_blocks(x: Tensor, dim: int, parts: int, blocks: Blocks) -> Tensor:
    """Undo `_by_parts`."""
    if not blocks:
        return x
    sizes = [b // parts for b in blocks]
    pieces = [p.split(sizes, dim) for p in x.chunk(parts, dim)]
    return torch.cat([pieces[i][b] for b in range(len(blocks)) for i in range(parts)], dim)


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    missing = size - x.shape[dim]
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x


def _length(size: int, axis: Axis) -> Any:
    return size // axis.size if size % axis.size == 0 else part(size, axis.size, axis.index)[1]


STEPS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (
        all_reduce,
        all_reduce_bucket,
        all_gather_bucket,
        reduce_scatter_bucket,
        all_to_all_bucket,
        all_reduce_max,
        all_gather,
        reduce_scatter,
        all_to_all,
        slice,
        lodge,
    )
}
PACK: dict[str, Callable[..., Packed]] = {
    "all_reduce": pack_all_reduce,
    "all_gather": pack_all_gather,
    "reduce_scatter": pack_reduce_scatter,
    "all_to_all": pack_all_to_all,
}
BEGIN: dict[str, Callable[..., Pending]] = {
    "all_reduce": begin_all_reduce,
    "all_gather": begin_all_gather,
    "reduce_scatter": begin_reduce_scatter,
    "all_to_all": begin_all_to_all,
}


@torch.library.custom_op(
    "autopar::convert", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)  # so tagged, it is never computed while tracing, though its operand is a constant
def convert(x: Tensor, forward: str, backward: str, shape: list[int], dtype: str = "") -> Tensor:
    """Change the sharding by `forward` steps, and the gradient's by `backward`; `shape` is the result's.

    With a `dtype` it is also a cast, before the steps in forward and in backward.
    """
    return rehearsal.converted(x.to(getattr(torch, dtype)) if dtype else x, forward)


@convert.register_fake
def _(x: Tensor, forward: str, backward: str, shape: list[int], dtype: str = "") -> Tensor:
    return x.new_empty(shape, dtype=getattr(torch, dtype) if dtype else x.dtype)


def _remember(ctx: Any, inputs: tuple[Tensor, str, str, list[int], str], output: Tensor) -> None:
    x, ctx.forward_steps, ctx.backward_steps, _, dtype = inputs
    ctx.shape = list(x.shape)
    ctx.dtype = str(x.dtype).removeprefix("torch.") if dtype else ""
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
    if gradient is None:  # nothing that depends on the value has a gradient, such as a norm of order 0
        return None, None, None, None, None
    return convert(gradient, ctx.backward_steps, ctx.forward_steps, ctx.shape, ctx.dtype), None, None, None, None


convert.register_autograd(_backward, setup_context=_remember)


@torch.library.custom_op("autopar::start", mutates_args=())
def start(like: Tensor, axis: str, size: int) -> Tensor:
    """`part_start` for an axis that is not bound yet."""
    return torch.full((), rehearsal.start_in(size), dtype=torch.int64, device=like.device)


@start.register_fake
def _(like: Tensor, axis: str, size: int) -> Tensor:
    return like.new_empty((), dtype=torch.int64)
