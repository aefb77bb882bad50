"""Ranks pass rows of their own to stages, wherever their axis is in the mesh; stages of one part pass the same."""

from __future__ import annotations

import copy

import pytest
import torch.distributed as dist

import autopar
from autopar.testing import on_processes
from tests.stages.models import case


def trained(rank, axes):
    model, batch = case("decoder")
    mesh = autopar.DeviceMesh((2, 2), axes)
    how = {"parallel": "dp", "inputs": "local", "pipeline": {"schedule": "1f1b"}}
    mine = autopar.autoparallelize(model, batch, mesh=mesh, microbatches=2, memory_budget="inf", **how)
    rows = list(mine.sampler(range(8), shuffle=False))
    loss = mine(**{name: whole[rows] for name, whole in batch.items()})
    loss.backward()
    gradients = {name: p.grad.full_tensor() for name, p in mine.named_parameters()}
    everyone = [None] * 4
    dist.all_gather_object(everyone, rows)
    return everyone, loss.item(), gradients


@pytest.mark.machines
@pytest.mark.parametrize("axes", [pytest.param(("pp", "dp"), marks=pytest.mark.nightly), ("dp", "pp")])
def test_stages_of_one_part_pass_the_same_rows(axes):
    found = on_processes(4, trained, axes)
    place = axes.index("dp")
    model, batch = case("decoder")
    rows, *_ = found[0]
    parts = [rows[rank] for rank in (0, (2, 1)[place])]
    assert all(rows[rank] == parts[(rank // 2, rank % 2)[place]] for rank in range(4))
    assert sorted(parts[0] + parts[1]) == list(range(8))
    expected = copy.deepcopy(model)
    loss = expected(**{name: whole[parts[0] + parts[1]] for name, whole in batch.items()})
    loss.backward()
    for _, mine, gradients in found:
        assert abs(mine - loss.item()) <= 1e-12 * loss.item()
        for name, p in expected.named_parameters():
            assert float((gradients[name] - p.grad).abs().max()) <= 1e-13, name
