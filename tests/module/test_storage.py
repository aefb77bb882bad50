"""Stored parameters are DTensors that torch reads back whole, clips and steps, however they are cut."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed
from torch import nn

from autopar import DeviceMesh, R, S
from autopar.module.storage import Storage
from autopar.sharding.layout import Layout
from autopar.sharding.placement import Sharding
from autopar.space.sites import torch_can_state
from tests.training import whole

MESH = DeviceMesh((2, 2), ("dp", "tp"))
BLOCKS = S(1, (8, 8, 8))


def read_back(rank, weight, shardings):
    mesh = MESH.to_torch("cpu")
    left = []
    for sharding in shardings:
        storage = Storage.of(weight, sharding, mesh)
        parameter = nn.Parameter(storage.take(weight, True))
        parameter.grad = storage.wrap(parameter.to_local().detach().clone())
        norm = nn.utils.clip_grad_norm_([parameter], 1e9)
        torch.optim.SGD([parameter], lr=1.0).step()
        try:
            read = storage.take(weight, True).full_tensor()
        except ValueError:  # torch before 2.13 cannot read blocks back, and says so
            read = None
        left.append((read, norm.full_tensor(), whole(parameter.detach())))
    return left


@pytest.mark.machines
def test_torch_reads_clips_and_steps_what_is_stored(processes):
    weight = torch.arange(6 * 24).reshape(6, 24).double()
    shardings = [Sharding(p) for p in itertools.product([R, S(0), S(1), BLOCKS], repeat=2)]
    shardings = [s for s in shardings if Layout.of(weight.shape, s, MESH) and torch_can_state(s)]
    assert len(shardings) == 13
    for sharding, (read, norm, stepped) in zip(shardings, processes(4, read_back, weight, shardings)[0]):
        if read is None:
            assert BLOCKS in sharding.placements and not hasattr(torch.distributed, "all_gather_single")
        else:
            assert torch.equal(read, weight)
        assert not stepped.any()
        torch.testing.assert_close(norm, weight.norm())
