"""Checkpoints: saved on one mesh, loaded on another or by a model that knows nothing of autopar, also where a dim is
cut by blocks; and weights of Hugging Face's files, in and out.
"""

from __future__ import annotations

import copy
import os

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard

import autopar
from autopar import DeviceMesh
from autopar.letters import BadWeights
from autopar.module.checkpoint import rectangles
from autopar.runtime.private import StridedShard
from autopar.testing import on_processes, on_threads
from tests import language
from tests.models import eager_links
from tests.training import whole


def gpt2(dropout=0.1):
    torch.manual_seed(0)
    return language.gpt2(1, width=32, vocabulary=61, length=16, dropout=dropout), language.drawn(4, 8, 61)


PARALLEL = {
    (2, 2): dict(constraints={"*.c_attn.weight": "S(1, blocks=(32, 32, 32))@tp, S(0)@dp; *"}),
    (4,): dict(parallel="zero3"),
    (1,): {},
    (2,): dict(parallel="megatron"),
}


def losses(rank, shape, path, first, last, save_at=None, dies_at=None):
    """Train from one step to another; save before one, lose a rank before one."""
    model, batch = gpt2()
    axes = {1: ("dp",), 2: ("dp", "tp")}[len(shape)]
    mine = autopar.autoparallelize(model, batch, mesh=DeviceMesh(shape, axes), cluster=eager_links(), **PARALLEL[shape])
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
    if first:
        of_model, of_optimizer = get_state_dict(mine, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer, "random": mine.random_state}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(mine, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    found, at_two = [], {}
    for step in range(first, last):
        if step == 2:
            at_two = {n: whole(p).detach().clone() for n, p in mine.named_parameters()}
        if step == save_at:
            of_model, of_optimizer = get_state_dict(mine, optimizer)
            dcp.save({"model": of_model, "optimizer": of_optimizer, "random": mine.random_state}, checkpoint_id=path)
        if step == dies_at and rank == 2:
            os._exit(7)
        optimizer.zero_grad()
        loss = mine(**batch).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return (
        found,
        {n: whole(p).detach().clone() for n, p in mine.named_parameters()},
        [str(p.placements) for n, p in mine.named_parameters() if "c_attn.weight" in n],
        at_two,
    )


@pytest.mark.parametrize("shapes", [[(1,)], pytest.param([(4,), (1,)], marks=pytest.mark.nightly)], ids=str)
def test_a_run_goes_on_from_where_it_was_lost(shapes, tmp_path):
    """Saved on (2, 2) with a fused weight cut by blocks, dropout on; a rank dies.

    It goes on on other meshes, and in a model that knows nothing of this.
    """
    path = str(tmp_path / "at 2")
    (expected, parameters, placements, at_two), *_ = on_processes(4, losses, (2, 2), path, 0, 5)
    assert "Strided" in placements[0]
    with pytest.raises(Exception, match=r"rank|exit|7|closed|reset"):
        on_processes(4, losses, (2, 2), path, 0, 5, 2, 3)
    for shape in shapes:
        (found, after, *_), *_ = on_processes(DeviceMesh(shape).size, losses, shape, path, 2, 5)
        assert found == pytest.approx(expected[2:], rel=1e-5)
        assert all(torch.allclose(after[n], parameters[n], atol=3e-4) for n in parameters)
    plain, _ = gpt2()
    with torch.no_grad():
        for p in plain.parameters():
            p.zero_()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=path)
    plain.load_state_dict(state["model"])
    assert all(torch.equal(p, at_two[n]) for n, p in plain.named_parameters())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rectangles_are_the_parts_that_blocks_leave(data):
    """On (2, 2): what all ranks hold, put in its places, is the whole.

    Checked against chunks of the numbers of places.
    """
    cuts = [data.draw(st.sampled_from([None, (0, 1), (1, 1), (0, 2), (1, 3), (0, 3)])) for _ in range(2)]
    if cuts[0] and cuts[1] and cuts[0][0] == cuts[1][0] and (cuts[0][1] > 1 or cuts[1][1] > 1):
        cuts[1] = None
    shape = (data.draw(st.sampled_from([12, 24, 7])) if not any(c and c[0] == 0 and c[1] > 1 for c in cuts) else 12, 12)

    def body(rank):
        mesh = DeviceMesh((2, 2), ("a", "b")).to_torch("cpu")
        placements = [
            Replicate() if c is None else Shard(c[0]) if c[1] == 1 else StridedShard(c[0], split_factor=c[1])
            for c in cuts
        ]
        table = torch.arange(shape[0] * shape[1]).view(shape)
        local = table
        for axis, cut in enumerate(cuts):
            if cut is not None:
                pieces = [block.chunk(2, cut[0]) for block in local.chunk(cut[1], cut[0])]
                at = mesh.get_coordinate()[axis]
                local = torch.cat([p[at] for p in pieces if at < len(p)], cut[0])
        tensor = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
        )
        for offsets, sizes, where in rectangles(tensor):
            assert torch.equal(local[where], table[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))])
        return sum(torch.Size(sizes).numel() for _, sizes, _ in rectangles(tensor)) == local.numel()

    assert all(on_threads(4, body))


@pytest.mark.parametrize(
    "kind, parallel",
    [
        pytest.param(k, p, marks=[] if (k == "whole") == (p == "megatron") else pytest.mark.nightly)
        for k in ("whole", "without its head", "in many files")
        for p in ("zero3", "megatron")
    ],
)
def test_weights_come_from_files_and_go_to_files(kind, parallel, tmp_path):
    model, batch = gpt2(dropout=0.0)
    source = model.transformer if kind == "without its head" else model
    source.save_pretrained(tmp_path / "in", **({"max_shard_size": "20KB"} if kind == "in many files" else {}))
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > (1 if kind == "in many files" else 0)
    expected = model(**batch).loss.item()

    def body(rank):
        with torch.device("meta"):
            empty = transformers.GPT2LMHeadModel(model.config).train()
        mine = autopar.autoparallelize(
            empty, batch, mesh=2, parallel=parallel, cluster=eager_links(), weights=str(tmp_path / "in")
        )
        loss = mine(**batch).loss
        loss.backward()
        torch.optim.SGD(mine.parameters(), lr=0.1).step()
        mine.save_pretrained(tmp_path / "out")
        return loss.item(), {n: whole(p).detach().clone() for n, p in mine.named_parameters()}

    results = on_threads(2, body)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert again.config.architectures == ["GPT2LMHeadModel"]
    for loss, parameters in results:
        assert loss == pytest.approx(expected, rel=1e-5) and all(
            torch.equal(p, parameters[n]) for n, p in again.named_parameters()
        )


def wrong_files(tmp_path, what):
    path = tmp_path / "w.safetensors"
    tensors = {"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}
    if what == "not there":
        return tmp_path / "nowhere"
    if what == "an empty directory":
        return tmp_path
    if what == "no safetensors":
        path.write_text("hello")
        return path
    if what == "another shape":
        tensors["weight"] = torch.zeros(4, 5)
    if what == "a tensor is missing":
        del tensors["bias"]
    safetensors.torch.save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    "what", ["not there", "an empty directory", "no safetensors", "another shape", "a tensor is missing"]
)
def test_wrong_weights_are_a_letter(what, tmp_path):
    with torch.device("meta"):
        model = torch.nn.Linear(4, 4)
    with pytest.raises(BadWeights):
        autopar.autoparallelize(
            copy.deepcopy(model),
            (torch.zeros(2, 4),),
            mesh=1,
            loss=lambda out, inputs: out.sum(),
            weights=str(wrong_files(tmp_path, what)),
        )


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_one_device_is_loaded(assign):
    model, other = (nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double() for _ in range(2))
    x = torch.arange(32, dtype=torch.float64).view(8, 4) / 10
    other[2].weight = nn.Parameter(other[2].weight.detach())

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), (x,), mesh=2, parallel="zero3", cluster=eager_links())
        mine.load_state_dict(copy.deepcopy(other).state_dict(), assign=assign)
        return whole(mine(x).detach())

    for found in on_threads(2, body):
        torch.testing.assert_close(found, other(x).detach())
