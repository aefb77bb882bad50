"""Temporary memory of a conversion: elements that it holds while it runs, beside its input and its result.

A collective sends and receives contiguous memory. What lies otherwise is copied: parts along a later dim, parts of
blocks, parts of uneven lengths. The copies are counted step by step, in the order in which `runtime/collectives.py`
makes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.sharding.convert import LocalStep, Step, localise
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Sharding

_Shape = tuple[int, ...]


def temporaries(
    path: Sequence[Step],
    shape: Sequence[int],
    source: Sharding,
    mesh: DeviceMesh,
    is_turned: bool = False,
    is_last_use: bool = False,
) -> int:
    """The most elements that the steps hold at a time on the fullest device.

    The tensor itself and the result are not counted. A tensor that `is_turned` is not contiguous. With `is_last_use` it
    is freed after the first step.
    """
    first = (0,) * len(mesh.shape)
    steps, _ = localise(path, shape, source, mesh, first)
    _, local = localise((), shape, source, mesh, first)
    most = between = 0
    gone = math.prod(local) if is_last_use else 0
    for place, step in enumerate(steps):
        after, held = _STEPS[step.kind](step, local, mesh.shape[mesh.axis(step.axis)], is_turned)
        most = max(most, between + held - (gone if place else 0))
        local = after
        between = math.prod(after)
        is_turned = False
    return max(0, most - between)


def between(path: Sequence[Step], shape: Sequence[int], source: Sharding, mesh: DeviceMesh) -> int:
    """Elements on the fullest device before the last of several steps; 0 where there is only one."""
    if len(path) < 2:
        return 0
    _, local = localise(path[:-1], shape, source, mesh, (0,) * len(mesh.shape))
    return math.prod(local)


def _all_reduce(step: LocalStep, local: _Shape, parts: int, is_turned: bool) -> tuple[_Shape, int]:
    """Count a copy, which becomes the sum."""
    return local, math.prod(local)


def _lodge(step: LocalStep, local: _Shape, parts: int, is_turned: bool) -> tuple[_Shape, int]:
    """Count the value or zeros, and the contiguous copy of a tensor that is turned."""
    return local, (1 + is_turned) * math.prod(local)


def _all_gather(step: LocalStep, local: _Shape, parts: int, is_turned: bool) -> tuple[_Shape, int]:
    """Count a contiguous copy to send, if needed; then what arrives, and the copies that put it in order."""
    ((dim, size, blocks),) = step.dims
    length = -(-size // parts)
    after, padded = _with(local, dim, size), _with(local, dim, length)
    sent = math.prod(padded) if is_turned or padded != local else 0
    arrives = math.prod(padded) * parts
    return after, arrives + max(sent, _put_in_order(after, dim, arrives, length * parts, blocks))


def _put_in_order(after: _Shape, dim: int, arrives: int, padded: int, blocks: Sequence[int]) -> int:
    """Elements of the copies that make one tensor out of parts that have arrived one behind the other."""
    is_first = _is_first(after, dim)
    copied = 0 if is_first else arrives
    if blocks or (padded != after[dim] and not is_first):
        copied += math.prod(after)
    return copied


def _reduce_scatter(step: LocalStep, local: _Shape, parts: int, is_turned: bool) -> tuple[_Shape, int]:
    """Count the parts in their receivers' order, a copy to send where it is another one, and what arrives."""
    ((dim, size, blocks),) = step.dims
    length = -(-size // parts)
    after = _with(local, dim, length)
    padded = _with(local, dim, length * parts)
    ordered = math.prod(local) if blocks else 0
    if padded != local:
        ordered = math.prod(padded)
    sent = math.prod(padded) if not _is_first(local, dim) or (is_turned and not ordered) else 0
    return after, max(ordered + sent, (sent or ordered) + math.prod(after))


def _all_to_all(step: LocalStep, local: _Shape, parts: int, is_turned: bool) -> tuple[_Shape, int]:
    """Count a copy to send, what arrives, and the copies that put it in order."""
    (dim, size, blocks), (to_dim, to_size, to_blocks) = step.dims
    length, to_length = -(-size // parts), -(-to_size // parts)
    after = _with(_with(local, dim, size), to_dim, to_length)
    sent = math.prod(_with(_with(local, dim, length), to_dim, to_length * parts))
    ordered = sent if to_blocks or length != local[dim] or to_length * parts != local[to_dim] else 0
    return after, sent + max(ordered, sent, _put_in_order(after, dim, sent, length * parts, blocks))


def _slice(step: LocalStep, local: _Shape, parts: int, is_turned: bool) -> tuple[_Shape, int]:
    """Count the parts in order, where they are of blocks, and the part of this device."""
    ((dim, size, blocks),) = step.dims
    after = _with(local, dim, -(-size // parts))
    return after, (math.prod(local) if blocks else 0) + math.prod(after)


_STEPS = {  # each gives the local shape after the step, and the elements that it holds meanwhile
    "all_reduce": _all_reduce,
    "lodge": _lodge,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
}


def _with(shape: _Shape, dim: int, size: int) -> _Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _is_first(shape: _Shape, dim: int) -> bool:
    """Whether the parts of a dim lie one behind the other in memory."""
    return math.prod(shape[:dim]) == 1
