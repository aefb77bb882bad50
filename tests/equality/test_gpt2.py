"""An unmodified Hugging Face GPT-2, loss from labels, under every plan and mesh, without and with dropout."""

from __future__ import annotations

import copy

import pytest
import torch

import autopar
from autopar.testing import Equality
from tests.equality.gpt2 import check, gpt2, pins, planned, train_parallel
from tests.models import eager_links
from tests.oracle import InFloat64
from tests.training import whole

MESHES = [
    autopar.DeviceMesh((1,), ("tp",)),
    autopar.DeviceMesh((2,), ("tp",)),
    autopar.DeviceMesh((4,), ("tp",)),
    autopar.DeviceMesh((2, 2), ("dp", "tp")),
]
KINDS = ["free", "dp", "megatron", "sharded"]
RUNS = [
    (dropout, optimizer, dtype)
    for dropout in (0.0, 0.1)
    for optimizer in ("sgd", "adamw")
    for dtype in ("float64", "float32")
]
CASES = [(mesh, kind) for mesh in MESHES for kind in KINDS if mesh.size > 1 or kind == "free"]


def sample(mesh, kind):
    """A run of a case, by turns without and with dropout; over the cases every run comes up."""
    i = CASES.index((mesh, kind))
    return [RUNS[(i // 2) % 4] if i % 2 == 0 else RUNS[4 + (i // 2) % 4]]


BY_NIGHT = (1, 3, 4, 5, 6, 9, 10, 11, 12)  # by day each kind on a mesh


@pytest.mark.parametrize(
    "mesh, kind",
    [pytest.param(*c, marks=pytest.mark.nightly if i in BY_NIGHT else []) for i, c in enumerate(CASES)],
    ids=str,
)
def test_it_trains_what_one_device_trains(mesh, kind, threads):
    for dropout, optimizer, dtype in sample(mesh, kind):
        model, batch = gpt2(dropout, dtype)
        for rank, result in enumerate(
            threads(mesh.size, train_parallel, model, batch, planned(kind, mesh, dropout, dtype), optimizer, dtype)
        ):
            check(
                f"{kind} on {mesh}, rank {rank}, dropout {dropout}, {optimizer}, {dtype}",
                result,
                dropout,
                optimizer,
                dtype,
            )


def train_many(rank, work):
    return [train_parallel(rank, *one) for one in work]


@pytest.mark.nightly
@pytest.mark.parametrize("mesh, kind", CASES, ids=str)
def test_the_full_gpt2_matrix(mesh, kind, threads, processes):
    work = [
        (*gpt2(dropout, dtype), planned(kind, mesh, dropout, dtype), optimizer, dtype)
        for dropout, optimizer, dtype in RUNS
    ]
    for ranks in (threads, processes):
        for rank, results in enumerate(ranks(mesh.size, train_many, work, timeout_s=600)):
            for run, result in zip(RUNS, results):
                check(f"{kind} on {mesh}, rank {rank}, {run}", result, *run)


@pytest.mark.nightly
@pytest.mark.machines
def test_gloo_processes_train_the_same(processes):
    """Blocked storage read through torch's own full_tensor(), on real ranks."""
    mesh, kind, run = MESHES[3], "megatron", (0.1, "adamw", "float64")
    model, batch = gpt2(run[0], run[2])
    for result in processes(4, train_parallel, model, batch, planned(kind, mesh, run[0], run[2]), *run[1:]):
        check(f"{kind} on {mesh}, gloo", result, *run)


def test_megatron_cuts_attention_by_heads_and_the_head_by_vocabulary():
    plan = planned("megatron", MESHES[1], 0.0, "float64")
    text = plan.table()
    assert plan.parameters["transformer.h.0.attn.c_attn.weight"].text(("tp",)) == "S(1, blocks=(32, 32, 32))"
    assert "S(1), S(1), S(1) -> S(1)" in text and not plan.without_rule
    assert plan.parameters["transformer.wte.weight"].text(("tp",)) == "S(0)"


def test_a_mean_over_targets_counts_them_on_all_ranks(threads):
    """Row by row 15, 3, 1 and no target that counts: a mean of the ranks' means would be far off, or nan."""
    model, batch = gpt2(0.0)
    labels = batch["input_ids"].clone()
    labels[1, 4:], labels[2, 2:], labels[3] = -100, -100, -100
    batch = {**batch, "labels": labels}
    assert [(row[1:] != -100).sum().item() for row in labels] == [15, 3, 1, 0]
    with InFloat64():
        reference = copy.deepcopy(model)
        loss = reference(**batch).loss
        loss.backward()
        plan = autopar.plan(model, batch, mesh=MESHES[2], cluster=eager_links(), constraints=pins("dp", MESHES[2]))
    expected = {"loss": loss.detach(), **{n: p.grad for n, p in reference.named_parameters()}}

    def body(rank):
        with InFloat64():
            mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
            loss = mine(**batch).loss
            loss.backward()
            return {"loss": loss.detach(), **{n: whole(p.grad) for n, p in mine.named_parameters()}}

    for result in threads(4, body):
        Equality.in_float64("unequal numbers of targets", result, expected, 1e-9).check()


def test_the_seed_comes_from_torch(threads):
    model, batch = gpt2(0.1)
    plan = planned("dp", MESHES[1], 0.1, "float64")

    def losses(rank):
        with InFloat64():
            parallel = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
            return [parallel(**batch).loss.item() for _ in range(3)]

    torch.manual_seed(3)
    first = threads(2, losses)
    torch.manual_seed(3)
    assert first == threads(2, losses) and first[0] == first[1] and len(set(first[0])) == 3
    torch.manual_seed(4)
    assert first != threads(2, losses)
