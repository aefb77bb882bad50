"""Random conversions run on ranks.

Every device ends with the part that numpy cuts, of the value forward and of the gradient backward.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from autopar import Cluster, DeviceMesh
from autopar.runtime.collectives import STEPS, bind_axes
from autopar.sharding.convert import LocalStep, ShapeConsistencyManager, localise
from tests.sharding.world import World, kept

#         ranks, mesh, shape, blocks of dim 0, pairs
WORLDS = [
    pytest.param(4, (4,), (8, 12), (), 60, marks=pytest.mark.nightly),
    pytest.param(4, (2, 2), (7, 5), (), 60, marks=pytest.mark.nightly),
    pytest.param(4, (2, 2), (16, 4), (8, 8), 90, marks=pytest.mark.nightly),
    (4, (2, 2), (16, 6), (8, 4, 4), 60),
    pytest.param(8, (2, 4), (8, 9), (), 80, marks=pytest.mark.nightly),
    (8, (2, 2, 2), (9, 8, 3), (), 90),
    (8, (4, 2), (32, 4), (8, 8, 8, 8), 80),
    pytest.param(8, (2, 2, 2), (16, 2, 2), (8, 8), 80, marks=pytest.mark.nightly),
]


def parts(tensor, sharding, mesh, seed):
    """Parts of every device: rows as numpy picks them, and sums split at random."""
    held = {}
    for where in itertools.product(*map(range, mesh.shape)):
        mine = tensor.numpy()
        for dim, size in enumerate(tensor.shape):
            cuts = [
                (a, mesh.shape[a], sharding.placements[a].blocks)
                for a in sharding.order
                if sharding.placements[a].is_shard and sharding.placements[a].dim == dim
            ]
            mine = np.take(mine, kept(size, cuts, where), axis=dim)
        held[where] = torch.from_numpy(np.ascontiguousarray(mine))
    for axis in sharding.partial_axes:

        def noise(where, axis=axis):
            place = hash(tuple(w for a, w in enumerate(where) if a != axis)) % 1000
            return torch.randn(
                held[where].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * seed + place)
            )

        n = mesh.shape[axis]
        held = {
            where: (value - (n - 1) * noise(where) if where[axis] == 0 else noise(where))
            for where, value in held.items()
        }
    return held


def summed(held, axes, mesh):
    """Values with the parts of sums added up."""
    for axis in axes:
        held = {
            where: sum(held[(*where[:axis], i, *where[axis + 1 :])] for i in range(mesh.shape[axis])) for where in held
        }
    return held


class Converted(torch.autograd.Function):
    """The steps of the value forward, those of the gradient backward."""

    @staticmethod
    def forward(ctx, x, forward, backward, axes):
        ctx.steps = backward, axes
        return run(x, forward, axes)

    @staticmethod
    def backward(ctx, gradient):
        return run(gradient, *ctx.steps), None, None, None


def run(x, steps, axes):
    for step in LocalStep.parse_all("; ".join(map(repr, steps))):
        x = STEPS[step.kind](x, axes[step.axis], *(n for dim in step.dims for n in dim))
    return x


def body(rank, mesh, shape, work):
    axes = bind_axes(mesh.to_torch("cpu"))
    where, left = mesh.coordinate(rank), []
    for value, gradient, forward, backward, given, pulled in work:
        there = localise(forward, shape, value, mesh, where)[0]
        back = localise(backward, shape, gradient, mesh, where)[0]
        x = given[where].clone().requires_grad_()
        y = Converted.apply(x, there, back, axes)
        left.append((y.detach(), torch.autograd.grad(y, x, pulled[where])[0]))
    return left


def works(mesh, shape, blocks, count):
    world = World(mesh, shape, [(0, blocks)] if blocks else [])
    manager, states = ShapeConsistencyManager(mesh, Cluster.of("generic")), list(world.states.values())
    choose = random.Random(str((mesh.shape, shape)))
    like = {
        s: tuple(tuple(p.shape) for p in parts(torch.zeros(shape, dtype=torch.float64), s, mesh, 0).values())
        for s in states
    }
    value, gradient = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    work = []
    for i in range(count):
        source, target = choose.choice(states), choose.choice(states)
        # the gradient lies in another way wherever the local shapes let it: R/P(sum), P(sum)/R
        back_from, back_to = (choose.choice([s for s in states if like[s] == like[end]]) for end in (target, source))
        work.append(
            (
                source,
                target,
                back_from,
                back_to,
                manager.path(shape, 8, source, target).steps,
                manager.path(shape, 8, back_from, back_to).steps,
                parts(value, source, mesh, i),
                parts(gradient, back_from, mesh, i),
            )
        )
    return value, gradient, work


def check(ranks, mesh, shape, blocks, count, launch):
    mesh = DeviceMesh(mesh)
    value, gradient, work = works(mesh, shape, blocks, count)
    results = launch(
        ranks,
        body,
        mesh,
        shape,
        [(s, b, forward, backward, given, pulled) for s, _, b, _, forward, backward, given, pulled in work],
    )
    for i, (source, target, back_from, back_to, *_) in enumerate(work):
        for whole, end, leaves in ((value, target, 0), (gradient, back_to, 1)):
            left = summed(
                {mesh.coordinate(rank): results[rank][i][leaves] for rank in range(ranks)}, end.partial_axes, mesh
            )
            expected = summed(parts(whole, end, mesh, 0), end.partial_axes, mesh)
            for where in left:
                torch.testing.assert_close(
                    left[where],
                    expected[where],
                    msg=lambda m, s=source, t=target, f=back_from, b=back_to: f"{s} to {t}, back {f} to {b}\n{m}",
                )


@pytest.mark.parametrize("ranks, mesh, shape, blocks, count", WORLDS, ids=str)
def test_random_pairs_on_processes(ranks, mesh, shape, blocks, count, processes):
    check(ranks, mesh, shape, blocks, count, processes)


def test_there_are_enough():
    """By day and by night together."""
    assert sum(getattr(world, "values", world)[-1] for world in WORLDS) >= 500
