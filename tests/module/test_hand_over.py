"""`hand_over`: the tensors of a parallel model on another mesh are those of one device, cut as torch cuts them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import autopar
from autopar.letters import BadSharding, NotServed
from autopar.module import hand_over
from autopar.testing import on_processes
from tests.language import drawn, gpt2

RANKS = 4
TWO_NODES = dataclasses.replace(autopar.Cluster.of("generic"), devices_per_node=2, nodes=2)


class Mixed(nn.Module):
    """A language model with fused weights that are cut by blocks, beside tied tables, uneven dims and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt2(layers=2, width=32, vocabulary=97, length=16, dropout=0.0)
        self.norm = nn.BatchNorm1d(7)
        self.beside = nn.Linear(7, 5)

    def forward(self, input_ids, labels, x):
        return self.inner(input_ids=input_ids, labels=labels).loss + self.beside(self.norm(x)).square().mean()


def made():
    torch.manual_seed(0)
    return Mixed(), {**drawn(8, 16, 97), "x": torch.randn(8, 7)}


def part_of(whole, mesh, placements, rank: int):
    """The part of a rank, by torch.chunk along each axis; None where the rank is not on the mesh."""
    at = (mesh.mesh == rank).nonzero()
    if not len(at):
        return None
    for place, count, placement in zip(at[0].tolist(), mesh.mesh.shape, placements, strict=True):
        if not placement.is_replicate():
            blocks = whole.chunk(getattr(placement, "split_factor", 1), placement.dim)
            parts = [block.chunk(count, placement.dim) for block in blocks]
            nothing = whole.narrow(placement.dim, 0, 0)
            whole = torch.cat([of[place] if place < len(of) else nothing for of in parts], placement.dim)
    return whole


def targets():
    """Meshes of the same ranks in another grid, of some of them, and in another order, and how tensors shall lie."""
    both = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    return [
        (DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("tp",)), lambda name, t: [Shard(0)] if t.dim() else "R"),
        (DeviceMesh("cpu", [2, 3]), None),
        (both, lambda name, t: [Shard(t.dim() - 1), Shard(0)] if t.dim() else [Replicate()] * 2),
        (DeviceMesh("cpu", [[3, 1]]), {"*.weight": "S(0)@model", "*": [Replicate(), Replicate()]}),
    ]


@contextlib.contextmanager
def counted():
    """Counts the bytes that come from other ranks."""
    found = [0]
    theirs = dist.all_to_all_single

    def count(made, given, comes, sends, **how):
        assert comes[dist.get_rank()] == 0, "a rank sends to itself"
        found[0] += made.nbytes
        return theirs(made, given, comes, sends, **how)

    dist.all_to_all_single = count
    try:
        yield found
    finally:
        dist.all_to_all_single = theirs


def bring(rank: int, how, model, batch, plan):
    """What is wrong with the tensors that are handed over, and the bytes that came here beside those that were said."""
    hand_over.LIMITS = dataclasses.replace(hand_over.LIMITS, handed_bytes=20_000)  # several buckets
    whole = copy.deepcopy(model).state_dict()
    parallel = autopar.autoparallelize(model, batch, **how)
    found, came = [], []
    wanted = [*targets(), (DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("model",)), plan)]
    for (mesh, placements), dtype in itertools.product(wanted, (None, torch.float64)):
        cluster = None if dtype is None else TWO_NODES
        handing = parallel.hand_over(mesh, placements, dtype=dtype, cluster=cluster)
        with counted() as nbytes:
            found += wrong(handing, whole, rank, dtype)
        came.append((nbytes[0], handing.received_bytes))
    refused(parallel)
    return found, came


def wrong(handing, whole, rank: int, dtype):
    """Names of tensors whose part here is not that of the tensor on one device."""
    found = []
    names = []
    for name, tensor in handing:
        names.append(name)
        assert isinstance(tensor, DTensor) and tensor.shape == whole[name].shape, name
        expected = part_of(whole[name], tensor.device_mesh, tensor.placements, rank)
        if expected is None:
            assert tensor.to_local().numel() == 0
        else:
            cast = dtype or expected.dtype if expected.is_floating_point() else expected.dtype
            if not torch.equal(tensor.to_local(), expected.to(cast)):
                found.append(name)
    assert sorted(names) == sorted(whole), "a tensor is missing, or comes twice"
    assert len(handing) == len(whole)
    return found


def refused(parallel) -> None:
    """Check that what cannot be handed over is a letter, on all ranks and before anything travels."""
    one, both = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    for mesh, placements, words in (
        (one, {"inner.h.*": "R"}, "no tensor of the model is called"),
        (one, lambda name, t: [Shard(3)], "cannot lie as S"),
        (one, lambda name, t: [Replicate(), Replicate()], "whole or cut on each axis"),
        (one, lambda name, t: "P(sum)", "cannot lie as"),
        (one, lambda name, t: [Partial()], "whole or cut on each axis"),
        (both, lambda name, t: "S(0)@tp, S(0)@dp" if t.dim() else "R", "cannot lie as"),
        (both, parallel.plan, "a plan for the mesh")
        if parallel.plan.mesh.shape != (2, 2)
        else (one, {"?": "R"}, "is called"),
    ):
        with pytest.raises(BadSharding, match=words):
            parallel.hand_over(mesh, placements)
    for placements in ("megatron", 3):
        with pytest.raises(BadSharding, match="does not say how tensors shall lie"):
            parallel.hand_over(one, placements)
    for dtype in ("bfloat16", torch.int8):
        with pytest.raises(NotServed, match="not one of floating-point numbers"):
            parallel.hand_over(one, dtype=dtype)
    with pytest.raises(NotServed, match="rank 4, and the job has 4"):
        parallel.hand_over(types.SimpleNamespace(mesh=torch.tensor([0, 4]), mesh_dim_names=None, device_type="cpu"))


@pytest.mark.parametrize(
    "how",
    [
        {"mesh": (2, 2), "parallel": "zero3"},
        pytest.param({"mesh": (4,), "parallel": "megatron"}, marks=pytest.mark.nightly),
        pytest.param({"mesh": {"pp": 2, "tp": 2}, "pipeline": 2}, marks=pytest.mark.nightly),
    ],
    ids=["zero3", "megatron", "stages"],
)
def test_tensors_are_those_of_one_device(how):
    plan = autopar.plan(*made(), mesh=(4,), parallel="megatron")
    assert any(p.blocks for sharding in plan.parameters.values() for p in sharding.placements)
    wrongs, came = zip(*on_processes(RANKS, bring, how, *made(), plan), strict=True)
    assert list(wrongs) == [[]] * RANKS
    for of_ranks in zip(*came, strict=True):
        counts, said = zip(*of_ranks, strict=True)
        assert {max(counts)} == set(said)
