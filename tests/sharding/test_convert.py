"""Conversions: every pair runs on ranks and gives the parts that torch.chunk gives.

The found path is a cheapest one.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from autopar import Cluster, DeviceMesh, P, R, S
from autopar.letters import BadSharding
from autopar.runtime.collectives import STEPS, bind_axes
from autopar.runtime.world import coordinate
from autopar.sharding.convert import LocalStep, ShapeConsistencyManager, Step, localise
from autopar.sharding.layout import Layout
from autopar.sharding.placement import Sharding, part

MESH = DeviceMesh((2, 2), ("dp", "tp"))


def shardings(rank, mesh=MESH):
    placements = [R, P(), *(S(d) for d in range(rank))]
    pairs = itertools.product(
        itertools.product(placements, repeat=len(mesh.shape)), itertools.permutations(range(len(mesh.shape)))
    )
    return sorted({Sharding(p, order) for p, order in pairs}, key=repr)


def parts_of(tensor, sharding, seed):
    """Parts of every coordinate of the mesh, by chunk alone; sums are split at random."""
    held = {(): tensor}
    axes = list(sharding.order)
    by_axis = {}
    for axis in axes:
        placement, n = sharding.placements[axis], MESH.shape[axis]
        new = {}
        for key, value in held.items():
            if placement.is_shard:
                pieces = [value.narrow(placement.dim, *part(value.shape[placement.dim], n, i)) for i in range(n)]
            elif placement.is_partial:
                noise = torch.randn(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(seed))
                pieces = [noise] * (n - 1) + [value - (n - 1) * noise]
            else:
                pieces = [value] * n
            for i in range(n):
                new[(*key, i)] = pieces[i]
        held = new
        by_axis[axis] = len(by_axis)
    return {tuple(key[by_axis[a]] for a in range(len(axes))): value for key, value in held.items()}


def run_all(rank, shape, work):
    """Run every path on this rank; what each leaves."""
    axes = bind_axes(MESH.to_torch("cpu"))
    here = coordinate(MESH)
    left = []
    for source, steps, parts in work:
        value = parts[tuple(here)]
        for step in localise(steps, shape, source, MESH, here)[0]:
            (step,) = LocalStep.parse_all(repr(step))
            value = STEPS[step.kind](value, axes[step.axis], *(n for dim in step.dims for n in dim))
        left.append(value)
    return left


@pytest.mark.parametrize("shape", [(8, 4), (7, 5)], ids=str)
def test_every_pair_gives_the_right_parts_on_ranks(shape, threads):
    manager, whole = ShapeConsistencyManager(MESH, Cluster.of("generic")), torch.randn(shape, dtype=torch.float64)
    pairs = list(itertools.product(shardings(2), repeat=2))
    assert len(pairs) == 18 * 18
    work = [(s, manager.path(shape, 8, s, t).steps, parts_of(whole, s, i)) for i, (s, t) in enumerate(pairs)]
    results = threads(4, run_all, shape, work)
    for i, (source, target) in enumerate(pairs):
        left = {MESH.coordinate(rank): results[rank][i] for rank in range(4)}
        if not target.partial_axes:
            for where, expected in parts_of(whole, target, 0).items():
                torch.testing.assert_close(left[where], expected, msg=lambda m, s=source, t=target: f"{s} to {t}\n{m}")
        else:  # parts of a sum are free, their sum is not
            for where, expected in parts_of(
                whole, Sharding(tuple(R if p.is_partial else p for p in target.placements), target.order), 0
            ).items():
                partial = target.partial_axes
                group = [c for c in left if all(c[a] == where[a] for a in range(2) if a not in partial)]
                torch.testing.assert_close(
                    sum(left[c] for c in group), expected, msg=lambda m, s=source, t=target: f"{s} to {t}\n{m}"
                )


@pytest.mark.parametrize("text", ["all_gather(0)@dp", "all_to_all(0->1)@tp", "all_reduce@dp", "lodge@tp"])
def test_a_step_reads_what_it_writes(text):
    assert Step.parse(text, MESH).text(MESH.axes) == text


@pytest.mark.parametrize("text", ["exec(0)@dp", "all_gather(0)", "all_gather(x)@dp", "all_gather(0)@pp", "parse@dp"])
def test_a_step_that_cannot_be_read_is_a_letter(text):
    with pytest.raises(BadSharding):
        Step.parse(text, MESH)


def test_a_dim_too_small_to_cut_is_a_letter():
    manager = ShapeConsistencyManager(MESH, Cluster.of("generic"))
    with pytest.raises(BadSharding, match="no sequence"):
        manager.path((1, 8), 4, Sharding((R, R)), Sharding((S(0), R)))


def test_no_hop_holds_more_than_it_may():
    shape, most = (16, 8, 4), 16 * 8 * 4 * 4 // 4
    free, tight = (ShapeConsistencyManager(MESH, Cluster.of("generic"), most_bytes=b) for b in (math.inf, most))

    def widest(steps, state):
        """The most elements that a device holds between the ends."""
        held = []
        for step in steps[:-1]:
            state = step.after(state, MESH)
            held.append(math.prod(state.local_shape(MESH, (0, 0))) * 4)
        return max(held, default=0)

    dearer = 0
    states = shardings(3)
    for source, target in itertools.product(states[::3], states[::2]):
        limits = tight.table(shape, 4, [source], [target])[0, 0]
        if math.isfinite(limits):
            path = tight.path(shape, 4, source, target)
            assert widest(path.steps, Layout.of(shape, source, MESH)) <= most and path.seconds == pytest.approx(limits)
            dearer += path.seconds > free.path(shape, 4, source, target).seconds * 1.001
        else:
            with pytest.raises(BadSharding):
                tight.path(shape, 4, source, target)
    assert dearer
