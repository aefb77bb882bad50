"""An unmodified Hugging Face GPT-2, loss from labels, under every plan and mesh, without and with dropout."""

from __future__ import annotations

import contextlib
import copy
import functools

import numpy as np
import pytest
import torch

import autopar
from autopar.runtime.random import bits, mix
from autopar.testing import Equality
from tests.models import eager_links
from tests.oracle import ByPosition, InFloat64, PermutedSums, kept, murmur_finalizer
from tests.training import OPTIMIZERS, whole

transformers = pytest.importorskip("transformers")

MESHES = [
    autopar.DeviceMesh((1,), ("tp",)),
    autopar.DeviceMesh((2,), ("tp",)),
    autopar.DeviceMesh((4,), ("tp",)),
    autopar.DeviceMesh((2, 2), ("dp", "tp")),
]
KINDS = ["free", "dp", "megatron", "sharded"]
STEPS = 3


def gpt2(dropout: float, dtype: str = "float64", layers: int = 2):
    """A tiny GPT-2; 101 tokens are cut unevenly, as 50257 are. Targets are ignored in unequal numbers in every row."""
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=32,
        n_head=4,
        vocab_size=101,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        for p in model.parameters():
            p.data += 0.05 * torch.randn_like(p)
        ids = torch.randint(0, 101, (4, 16))
    labels = ids.clone()
    labels[0, :11], labels[1, 3:5], labels[3, 1:] = -100, -100, -100
    return model.to(getattr(torch, dtype)), {"input_ids": ids, "labels": labels}


def pins(kind, mesh):
    inner, outer = mesh.axes[-1], mesh.axes[:-1]
    everywhere = ", ".join(f"S(0)@{a}" for a in mesh.axes)
    rows = ", ".join(f"S(0)@{a}" for a in outer) or "R"
    heads = "blocks=(32, 32, 32)"
    return {
        "free": {},
        "dp": {"input_ids": everywhere, "labels": everywhere, "*.weight": "R", "*.bias": "R"},
        "megatron": {
            "input_ids": rows,
            "labels": rows,
            "*wte.weight": f"S(0)@{inner}",
            "*wpe.weight": "R",
            "*.ln_*": "R",
            "*.c_attn.weight": f"S(1, {heads})@{inner}",
            "*.c_attn.bias": f"S(0, {heads})@{inner}",
            "*.attn.c_proj.weight": f"S(0)@{inner}",
            "*.c_fc.weight": f"S(1)@{inner}",
            "*.c_fc.bias": f"S(0)@{inner}",
            "*.mlp.c_proj.weight": f"S(0)@{inner}",
            "*.c_proj.bias": f"R; P(sum)@{inner}",
        },
        "sharded": {"input_ids": everywhere, "labels": everywhere, "*": f"{everywhere}; R; regathered"},
    }[kind]


def modes(dtype):
    return InFloat64() if dtype == "float64" else contextlib.nullcontext()


_PLANS = {}


def planned(kind, mesh, dropout, dtype):
    key = kind, mesh, dropout, dtype
    if key not in _PLANS:
        model, batch = gpt2(dropout, dtype)
        with modes(dtype):
            _PLANS[key] = autopar.plan(
                model, batch, mesh=mesh, cluster=eager_links(), constraints=pins(kind, mesh) if mesh.size > 1 else None
            )
    return _PLANS[key]


def train(model, batch, optimizer, next_step=lambda: None):
    parameters = dict(model.named_parameters())
    stepper = OPTIMIZERS[optimizer](parameters.values())
    losses, gradients = {}, {}
    for step in range(STEPS):
        stepper.zero_grad()
        next_step()
        loss = model(**batch).loss
        loss.backward()
        losses[f"loss.{step}"] = loss.detach()
        if step == 0:
            gradients = {n: whole(p.grad).detach().clone() for n, p in parameters.items()}
        stepper.step()
    return losses, gradients, {n: whole(p).detach().clone() for n, p in parameters.items()}


def train_parallel(rank, model, batch, plan, optimizer, dtype):
    with modes(dtype):
        parallel = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        parallel.random_state.seed = 1234567
        return train(parallel, batch, optimizer)


def eager(dropout, optimizer, dtype, permuted=None):
    model, batch = gpt2(dropout, dtype)
    with (
        modes(dtype),
        contextlib.nullcontext() if permuted is None else PermutedSums(permuted),
        ByPosition(1234567) as random,
    ):
        return train(model, batch, optimizer, random.next_step)


@functools.cache
def _cached(dropout, optimizer, dtype, permuted, steps):
    return eager(dropout, optimizer, dtype, permuted)


def _eager(dropout, optimizer, dtype, permuted=None):
    return _cached(dropout, optimizer, dtype, permuted, STEPS)


def check(what, actual, dropout, optimizer, dtype):
    expected = _eager(dropout, optimizer, "float64")
    if dtype == "float64":
        for part, tolerance, a, e in zip(("losses", "gradients", "parameters"), (1e-9, 1e-9, 1e-8), actual, expected):
            if (
                part == "parameters" and optimizer == "adamw"
            ):  # key biases have no gradient but rounding noise, of which AdamW makes steps
                a, e = ({n: _without_key_bias(n, t) for n, t in side.items()} for side in (a, e))
            Equality.in_float64(f"{what}: {part}", a, e, tolerance).check()
        return
    own = _eager(dropout, optimizer, "float32")
    permuted = [_eager(dropout, optimizer, "float32", seed)[2] for seed in range(5)] if optimizer == "adamw" else []
    for i, part in enumerate(("losses", "gradients", "parameters")):
        Equality.in_float32(
            f"{what}: {part}", actual[i], own[i], expected[i], permuted if part == "parameters" else ()
        ).check()


def _without_key_bias(name, tensor):
    if not name.endswith("c_attn.bias"):
        return tensor
    q, _, v = tensor.chunk(3)
    return torch.cat([q, v])


RUNS = [
    (dropout, optimizer, dtype)
    for dropout in (0.0, 0.1)
    for optimizer in ("sgd", "adamw")
    for dtype in ("float64", "float32")
]
CASES = [(mesh, kind) for mesh in MESHES for kind in KINDS if mesh.size > 1 or kind == "free"]


def sample(mesh, kind):
    """Two runs of a case: one without, one with dropout; over the cases every run comes up."""
    i = CASES.index((mesh, kind))
    return [RUNS[i % 4], RUNS[4 + (i + 1) % 4]]


@pytest.mark.parametrize("mesh, kind", CASES, ids=str)
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


@pytest.mark.machines
def test_gloo_processes_train_the_same(processes):
    """Blocked storage read through torch's own full_tensor(), on real ranks."""
    mesh, kind, run = MESHES[3], "megatron", (0.1, "adamw", "float64")
    model, batch = gpt2(run[0], run[2])
    for result in processes(4, train_parallel, model, batch, planned(kind, mesh, run[0], run[2]), *run[1:]):
        check(f"{kind} on {mesh}, gloo", result, *run)


def test_megatron_cuts_attention_by_heads_and_the_head_by_vocabulary():
    plan = planned("megatron", MESHES[1], 0.0, "float64")
    text = str(plan)
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


def test_the_bits_are_murmurs():
    """Published: MurmurHash3_x86_32 of nothing with seed 1 is 0x514E28B7, with seed 0xFFFFFFFF 0x81F16F39."""
    assert mix(torch.tensor([1, -1], dtype=torch.int32)).tolist() == [0x514E28B7, 0x81F16F39 - 2**32]
    assert [hex(int(murmur_finalizer(s))) for s in (1, 0xFFFFFFFF)] == ["0x514e28b7", "0x81f16f39"]


@pytest.mark.parametrize("shape", [(3, 5, 7), (11,), (), (1, 64)])
@pytest.mark.parametrize("seed, step, op", [(0, 0, 0), (2**63 - 1, 3, 41), (1234567, 2**40, 7)])
def test_bits_equal_numpys(shape, seed, step, op):
    from autopar.runtime.random import key_of

    found = bits(torch.tensor(key_of(seed, step)), op, shape, [()] * len(shape), shape)
    for p in (0.0, 0.1, 0.5, 0.9):
        assert np.array_equal((found >= int(p * 2**32) - 2**31).numpy(), kept(seed, step, op, p, shape))


def test_the_bits_look_random():
    found = bits(torch.tensor(12345), 0, (1000, 1000), [(), ()], (1000, 1000))
    ones = torch.stack([(found >> i) & 1 for i in range(32)]).double()
    assert ((ones.mean((1, 2)) - 0.5).abs() < 5 * 0.5 / 1000).all()
    for axis in (1, 2):  # no correlation with the neighbour
        a, b = ones.narrow(axis, 0, 999) - 0.5, ones.narrow(axis, 1, 999) - 0.5
        assert ((a * b).mean((1, 2)).abs() < 5 * 0.25 / 1000).all()
    others = bits(torch.tensor(12345), 1, (1000, 1000), [(), ()], (1000, 1000))
    assert (found == others).double().mean() < 1e-5


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
