"""Steps of conversions on tensors that are no floating numbers.

What is taken apart and put together again is what it was.
"""

from __future__ import annotations

import pytest
import torch

from autopar.runtime import collectives as c
from autopar.runtime.collectives import bind_axes
from autopar.sharding.mesh import DeviceMesh
from autopar.testing import on_processes, on_threads

VALUES = {
    "bool": torch.arange(24).view(4, 6) % 3 == 0,
    "int64": torch.arange(24).view(4, 6) * 2**40,
    "uint8": torch.arange(24, dtype=torch.uint8).view(4, 6),
    "float64": torch.randn(4, 6, dtype=torch.float64),
}


def there_and_back(rank, values):
    axis = bind_axes(DeviceMesh((2,), ("a",)).to_torch("cpu"))["a"]
    for x in values.values():
        lodged = c.lodge(x, axis)
        part = c.slice(x, axis, 1, 6)
        ways = {
            "all_reduce": c.all_reduce(lodged, axis),
            "reduce_scatter": c.all_gather(c.reduce_scatter(lodged, axis, 1, 6), axis, 1, 6),
            "slice": c.all_gather(part, axis, 1, 6),
            "all_to_all": c.all_gather(c.all_to_all(part, axis, 1, 6, (), 0, 4, ()), axis, 0, 4),
            "buckets": c.all_reduce_bucket([lodged, lodged[:1].contiguous()], axis)[0],
        }
        for way, found in ways.items():
            assert found.dtype == x.dtype and torch.equal(found, x), (way, x.dtype, found.dtype)
    return True


@pytest.mark.parametrize("ranks", [on_threads, on_processes])
def test_what_is_lodged_or_cut_comes_back(ranks):
    assert all(ranks(2, there_and_back, VALUES))


def pictures_there_and_back(rank, x):
    """A picture whose channels lie last in memory: torch stacks, cuts and joins such so again."""
    axis = bind_axes(DeviceMesh((2,), ("a",)).to_torch("cpu"))["a"]
    for dim in range(4):
        size = x.shape[dim]
        part = x.narrow(dim, rank * size // 2, size // 2)
        assert torch.equal(c.all_gather(part, axis, dim, size), x)
        lodged = x if rank == 0 else torch.zeros_like(x)
        assert torch.equal(c.all_gather(c.reduce_scatter(lodged, axis, dim, size), axis, dim, size), x)
        assert torch.equal(c.all_reduce(lodged, axis), x)
        for to_dim in set(range(4)) - {dim}:
            to_size = x.shape[to_dim]
            moved = c.all_to_all(part, axis, dim, size, (), to_dim, to_size, ())
            assert torch.equal(c.all_gather(moved, axis, to_dim, to_size), x), (dim, to_dim)
    return True


@pytest.mark.parametrize("ranks", [on_threads, on_processes])
def test_pictures_whose_channels_lie_last_are_exchanged(ranks):
    x = torch.randn(8, 16, 8, 8).contiguous(memory_format=torch.channels_last)
    assert all(ranks(2, pictures_there_and_back, x))


def in_one_message(rank, whole):
    """Tensors of unlike shapes, some of them with parts of unlike sizes, go in one message as each goes alone."""
    axis = bind_axes(DeviceMesh((3,), ("a",)).to_torch("cpu"))["a"]
    ways = [(0, 1), (1, 0), (2, 0), (1, 2)]
    parts = [c.slice(x, axis, dim, x.shape[dim]) for x, (dim, _) in zip(whole, ways)]
    numbers = [(d, x.shape[d], (), t, x.shape[t], ()) for x, (d, t) in zip(whole, ways)]
    together = c.all_to_all_bucket(parts, axis, *map(list, zip(*numbers)))
    for x, made, part, number in zip(whole, together, parts, numbers):
        assert torch.equal(made, c.slice(x, axis, number[3], number[4]))
        assert torch.equal(made, c.all_to_all(part, axis, *number))
    return True


@pytest.mark.parametrize("ranks", [on_threads, on_processes])
def test_all_to_alls_travel_in_one_message(ranks):
    shapes = [(6, 9), (7, 4), (5, 2, 8), (3, 10, 4)]
    assert all(ranks(3, in_one_message, [torch.randn(shape) for shape in shapes]))
