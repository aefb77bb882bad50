"""The contract on an MLP: loss, gradients, and parameters after ten steps, under every plan, mesh and kind of rank."""

from __future__ import annotations

import itertools

import pytest
import torch

import autopar
from tests.models import eager_links, mean_square, mlp_case, mlp_pins
from tests.shares import by_day
from tests.training import Reference, train_parallel

MESHES = [
    autopar.DeviceMesh((2,), ("tp",)),
    autopar.DeviceMesh((4,), ("tp",)),
    autopar.DeviceMesh((2, 2), ("dp", "tp")),
]
UNEVEN = [
    autopar.DeviceMesh((3,)),
    autopar.DeviceMesh((2, 2), ("dp", "tp")),
    autopar.DeviceMesh((1, 4), ("none", "tp")),
]
KINDS = ["free", "dp", "megatron", "sharded"]
RUNS = list(itertools.product(["sgd", "adamw"], ["inside", "callable", "outside"], ["float64", "float32"]))
RUNS = RUNS[::5] + RUNS[1::5] + RUNS[2::5] + RUNS[3::5] + RUNS[4::5]  # neighbours differ in everything


def plans(model, batch, mesh, kind, runs):
    """A plan for every loss and dtype that the runs need."""
    made = {}
    for _, loss, dtype in runs:
        given = {
            k: torch.empty_like(v, dtype=getattr(torch, dtype), device="meta")
            for k, v in batch.items()
            if loss == "inside" or k == "x"
        }
        pins = {k: v for k, v in mlp_pins(kind, mesh).items() if k != "y" or loss == "inside"}
        how = {"loss": mean_square} if loss == "callable" else {}
        made[loss, dtype] = autopar.plan(
            model.to(getattr(torch, dtype)), given, mesh=mesh, cluster=eager_links(), constraints=pins, **how
        )
    model.double()
    return made


def sample(mesh, kind, count):
    """Some of the runs, others in each case: over the cases each comes up as often as any other."""
    first = count * (MESHES.index(mesh) * len(KINDS) + KINDS.index(kind))
    return [RUNS[(first + i) % len(RUNS)] for i in range(count)]


def references(model, batch, runs):
    """What one device leaves of each run."""
    return {run: Reference.of(model, batch, *run) for run in runs}


def on_threads_it_trains_the_same(threads, mesh, kind, runs):
    model, batch = mlp_case()
    planned = plans(model, batch, mesh, kind, runs)  # which rounds the model to float32
    expected = references(model, batch, runs)
    for rank, results in enumerate(threads(mesh.size, train_parallel, model, batch, planned, runs)):
        for run, result in zip(runs, results):
            expected[run].check(f"{kind} on {mesh}, rank {rank}, {run}", result)


def on_local_tensors_it_trains_the_same(local_tensor, mesh, kind, runs):
    for run in runs:
        model, batch = mlp_case()
        planned = plans(model, batch, mesh, kind, [run])
        dtype = getattr(torch, run[2])
        (result,) = local_tensor(
            mesh.size, train_parallel, model.to(dtype), {k: v.to(dtype) for k, v in batch.items()}, planned, [run]
        )
        Reference.of(model.double(), batch, *run).check(f"{kind} on {mesh}, {run}", result)


def on_processes_it_trains_the_same(processes, mesh, cases):
    model, batch = mlp_case()
    work = [(plans(model, batch, mesh, kind, runs), runs) for kind, runs in cases]
    expected = references(model, batch, [run for _, runs in cases for run in runs])
    for rank, answers in enumerate(processes(mesh.size, train_many, model, batch, work, timeout_s=600)):
        for (kind, runs), results in zip(cases, answers):
            for run, result in zip(runs, results):
                expected[run].check(f"{kind} on {mesh}, rank {rank}, {run}", result)


def train_many(rank, model, batch, work):
    return [train_parallel(rank, model, batch, planned, runs) for planned, runs in work]


@pytest.mark.parametrize(
    "mesh, kind",
    by_day(
        itertools.product(MESHES, KINDS),
        (MESHES[1], "sharded"),
        *((MESHES[2], k) for k in KINDS[::2]),
    ),
    ids=str,
)
def test_threads_train_what_one_device_trains(mesh, kind, threads):
    on_threads_it_trains_the_same(threads, mesh, kind, sample(mesh, kind, 1))


@pytest.mark.parametrize(
    "mesh, kind",
    [
        pytest.param(m, k, marks=[] if len(m.shape) == 2 and k == "megatron" else pytest.mark.nightly)
        for m in MESHES
        for k in KINDS
    ],
    ids=str,
)
def test_one_process_playing_all_ranks_trains_the_same(mesh, kind, local_tensor):
    on_local_tensors_it_trains_the_same(local_tensor, mesh, kind, sample(mesh, kind, 1))


@pytest.mark.machines
@pytest.mark.parametrize(
    "mesh", [pytest.param(m, marks=[] if len(m.shape) == 2 else pytest.mark.nightly) for m in MESHES], ids=str
)
def test_gloo_processes_train_the_same(mesh, processes):
    on_processes_it_trains_the_same(processes, mesh, [(kind, sample(mesh, kind, 1)) for kind in KINDS])


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_full_matrix(mesh, threads, local_tensor, processes):
    """Every optimizer, place of the loss and dtype, under every plan, on every kind of rank."""
    for kind in KINDS:
        on_threads_it_trains_the_same(threads, mesh, kind, RUNS)
        on_local_tensors_it_trains_the_same(local_tensor, mesh, kind, RUNS)
    on_processes_it_trains_the_same(processes, mesh, [(kind, RUNS) for kind in KINDS])


@pytest.mark.parametrize(
    "mesh, kind",
    by_day(itertools.product(UNEVEN, KINDS), (UNEVEN[0], "sharded")),
    ids=str,
)
def test_uneven_parts_change_nothing(mesh, kind, threads):
    model, batch = mlp_case(width=11, batch=7)
    runs = [("adamw", "inside", "float64")]
    expected = references(model, batch, runs)
    for (result,) in threads(mesh.size, train_parallel, model, batch, plans(model, batch, mesh, kind, runs), runs):
        expected[runs[0]].check(f"{kind} on {mesh}", result)


def test_one_device_is_a_mesh_too(threads):
    model, batch = mlp_case()
    runs = [("adamw", "inside", "float64")]
    (result,) = threads(
        1, train_parallel, model, batch, plans(model, batch, autopar.DeviceMesh((1,)), "free", runs), runs
    )[0]
    Reference.of(model, batch, *runs[0]).check("one device", result)
