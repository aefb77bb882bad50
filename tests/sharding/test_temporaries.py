"""Temporaries of a conversion are what its program holds on one rank, counted storage by storage while it runs."""

from __future__ import annotations

import itertools
import random
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar import Cluster, DeviceMesh, P, R, S
from autopar.letters import BadSharding
from autopar.runtime.collectives import STEPS, bind_axes
from autopar.sharding.convert import ShapeConsistencyManager, localise
from autopar.sharding.layout import Layout
from autopar.sharding.placement import Sharding
from autopar.sharding.temporaries import temporaries

_SCALARS = 16  # bytes that no count knows: the rank's place


class Live(TorchDispatchMode):
    """Bytes of the storages that ops have made and somebody holds."""

    def __init__(self):
        super().__init__()
        self.most, self.sizes = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {storage._cdata for storage in storages(args)}
        out = func(*args, **(kwargs or {}))
        for storage in storages(out):
            if storage._cdata not in given:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata)
        self.most = max(self.most, sum(self.sizes.values()))
        return out


def storages(values):
    """The storages of the tensors among these values."""
    return [x.untyped_storage() for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def pairs_of(shape, mesh, blocks):
    """Pairs of shardings, at random."""
    placements = [R, P(), *(S(d) for d in range(len(shape))), *(S(d, b) for d, b in blocks)]
    all_ = itertools.product(
        itertools.product(placements, repeat=len(mesh.shape)), itertools.permutations(range(len(mesh.shape)))
    )
    found = [s for s in (Sharding(*one) for one in all_) if Layout.of(shape, s, mesh)]
    dice = random.Random(0)
    return [(dice.choice(found), dice.choice(found)) for _ in range(250)]


def local(shape, is_turned):
    """A tensor in memory order, or in the opposite one."""
    return torch.zeros(shape[::-1]).permute(*reversed(range(len(shape)))) if is_turned else torch.zeros(shape)


@pytest.mark.parametrize(
    "mesh, shape, blocks",
    [
        ((2, 2), (8, 4, 16), ()),
        ((4,), (3, 7, 10), ()),  # uneven
        ((4,), (8, 48), ((1, (16, 16, 16)),)),
        ((2, 4), (1, 16, 16), ()),  # parts of its second dim lie one behind the other
    ],
)
def test_temporaries_are_what_the_program_holds(mesh, shape, blocks, fake_world):
    mesh = DeviceMesh(mesh, "ab"[: len(mesh)])
    manager, first, kinds = ShapeConsistencyManager(mesh, Cluster.of("h100-2x8")), (0,) * len(mesh.shape), set()
    with fake_world(mesh.size):
        axes = bind_axes(mesh.to_torch("cpu"))
        for (source, target), is_turned, is_last_use in itertools.product(
            pairs_of(shape, mesh, blocks), (False, True), (False, True)
        ):
            try:
                path = manager.path(shape, 4, source, target).steps
            except BadSharding:
                continue
            steps = localise(path, shape, source, mesh, first)[0]
            with Live() as live:
                y = x = local(Layout.of(shape, source, mesh).local_shape(mesh, first), is_turned)
                given, is_turned = x.numel() * 4, not x.is_contiguous()
                if is_last_use:
                    del x
                for step in steps:
                    y = STEPS[step.kind](y, axes[step.axis], *(n for dim in step.dims for n in dim))
                    kinds.add(step.kind)
            said = temporaries(path, shape, source, mesh, is_turned, is_last_use) * 4
            made = y.numel() * 4 if path else 0
            assert said <= max(0, live.most - given - made) <= said + _SCALARS, (source, target, is_turned)
    assert len(kinds) >= 5
