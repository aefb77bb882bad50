"""GPT-2 trained alone and in parallel, and what the two must agree in."""

from __future__ import annotations

import contextlib
import copy
import functools

import torch

import autopar
from autopar.testing import Equality
from tests import language
from tests.models import eager_links
from tests.oracle import ByPosition, InFloat64, PermutedSums
from tests.training import OPTIMIZERS, whole

SEED, STEPS = 1234567, 3


def gpt2(dropout: float, dtype: str = "float64", layers: int = 2):
    """A tiny GPT-2 of 101 tokens, which are cut unevenly, as 50257 are.

    Targets are ignored in unequal numbers in every row.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = language.gpt2(
            layers, width=32, vocabulary=101, length=32, dropout=dropout, bos_token_id=0, eos_token_id=0
        )
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


@functools.cache
def planned(kind, mesh, dropout, dtype, layers=2):
    model, batch = gpt2(dropout, dtype, layers)
    constraints = pins(kind, mesh) if mesh.size > 1 else None
    with modes(dtype):
        return autopar.plan(model, batch, mesh=mesh, cluster=eager_links(), constraints=constraints)


def train(model, batch, optimizer, next_step=lambda: None, steps=STEPS):
    """Losses of every step, gradients of the first, parameters after the last."""
    parameters = dict(model.named_parameters())
    stepper = OPTIMIZERS[optimizer](parameters.values())
    losses, gradients = {}, {}
    for step in range(steps):
        stepper.zero_grad()
        next_step()
        loss = model(**batch).loss
        loss.backward()
        losses[f"loss.{step}"] = loss.detach()
        if step == 0:
            gradients = {n: whole(p.grad).detach().clone() for n, p in parameters.items()}
        stepper.step()
    return losses, gradients, {n: whole(p).detach().clone() for n, p in parameters.items()}


def train_parallel(rank, model, batch, plan, optimizer, dtype, steps=STEPS):
    with modes(dtype):
        parallel = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        parallel.random_state.seed = SEED
        return train(parallel, batch, optimizer, steps=steps)


@functools.cache
def eager(dropout, optimizer, dtype, steps=STEPS, permuted=None, layers=2):
    """The same on one device; its products may add their terms in another order."""
    model, batch = gpt2(dropout, dtype, layers)
    sums = contextlib.nullcontext() if permuted is None else PermutedSums(permuted)
    with modes(dtype), sums, ByPosition(SEED) as random:
        return train(model, batch, optimizer, random.next_step, steps)


def check(what, actual, dropout, optimizer, dtype, steps=STEPS, layers=2):
    """Equality as the contract defines it, for losses, gradients and parameters."""
    expected = eager(dropout, optimizer, "float64", steps, layers=layers)
    if dtype == "float64":
        for part, tolerance, a, e in zip(("losses", "gradients", "parameters"), (1e-9, 1e-9, 1e-8), actual, expected):
            if part == "parameters" and optimizer == "adamw":
                # key biases have no gradient but rounding noise, of which AdamW makes steps
                a, e = ({n: _without_key_bias(n, t) for n, t in side.items()} for side in (a, e))
            Equality.in_float64(f"{what}: {part}", a, e, tolerance).check()
        return
    own = eager(dropout, optimizer, "float32", steps, layers=layers)
    permuted = []
    if optimizer == "adamw":
        permuted = [eager(dropout, optimizer, "float32", steps, seed, layers)[2] for seed in range(5)]
    for i, part in enumerate(("losses", "gradients", "parameters")):
        others = permuted if part == "parameters" else ()
        Equality.in_float32(f"{what}: {part}", actual[i], own[i], expected[i], others).check()


def _without_key_bias(name, tensor):
    if not name.endswith("c_attn.bias"):
        return tensor
    q, _, v = tensor.chunk(3)
    return torch.cat([q, v])
