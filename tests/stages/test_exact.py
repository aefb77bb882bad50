"""Stages on four gloo processes compute what eager torch does on the whole batch, under every order and preset."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.testing import on_processes
from tests.stages.models import case

AXES = ("pp", "dp", "tp")
# model, mesh, order, micro-batches, preset or arguments: each of them several times, tied tables on a V among them
CASES = [
    ("twice", (2, 2), "zb-v", 4, "dp"),
    ("encoder and decoder", (2, 2), "zb-v", 4, "zero1"),  # two values go the same way in another order
    ("decoder", (4, 1), "1f1b", 8, {"memory_budget": 150_000}),  # the first two stages recompute, each for itself
    ("decoder", (2, 2), "interleaved", 4, "zero1"),
    ("decoder", (4, 1), "1f1b", 8, "zero3"),
    ("decoder", (2, 2), "zb-v", 8, "megatron"),
    ("decoder", (2, 2), "dualpipe-v", 4, None),
    ("encoder and decoder", (2, 2), "v-half", 4, "zero1"),
    ("twice", (2, 2), "v-min", 4, None),
    ("decoder", (2, 2), "gpipe", 2, "zero3"),
    ("decoder", (2, 1, 2), "greedy", 4, "megatron"),
    ("encoder and decoder", (4, 1), "1f1b", 4, None),
    ("encoder and decoder", (2, 2), "interleaved", 4, "megatron"),
    ("encoder and decoder", (4, 1), "zero-bubble", 2, None),
    ("unet", (2, 2), "gpipe", 4, "dp"),
    ("unet", (4, 1), "zero-bubble", 8, None),
    ("unet", (2, 2), "interleaved", 2, "zero3"),
    ("twice", (4, 1), "1f1b", 2, None),
    ("twice", (2, 2), "greedy", 4, "zero1"),
    ("twice", (2, 2), "dualpipe-v", 1, "dp"),
    ("again", (4, 1), "1f1b", 4, None),
    ("again", (2, 2), "zb-v", 4, "zero3"),
]


def steps(rank, cases):
    """For each case: its order, the worst of loss and gradients, and of parameters after clipped AdamW steps."""
    found = []
    for name, shape, schedule, turns, preset in cases:
        model, batch = case(name)
        expected = copy.deepcopy(model)
        how = preset if isinstance(preset, dict) else {"parallel": preset}
        how = {"memory_budget": "inf", "pipeline": {"schedule": schedule}, **how}
        mesh = autopar.DeviceMesh(shape, AXES[: len(shape)])
        mine = autopar.autoparallelize(model, batch, mesh=mesh, microbatches=turns, **how)
        assert bool(mine.plan.recomputed) == (how["memory_budget"] != "inf")
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (mine, expected)]
        first = 0.0
        for step in range(3):
            loss, right = mine(**batch), expected(**batch)
            loss.backward()
            right.backward()
            if step == 0:
                first = worst_of(mine, expected, "grad")
                first = max(first, float((loss - right).abs() / right.abs()))
            for module, optimizer in zip((mine, expected), optimizers, strict=True):
                torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        found.append((mine.plan.pipeline.schedule, first, worst_of(mine, expected, "data")))
    dist.barrier()
    return found


def worst_of(mine, expected, what):
    theirs = dict(expected.named_parameters())
    floor = 1e-6 * max(float(getattr(p, what).abs().max()) for p in theirs.values())
    worst = 0.0
    for name, p in mine.named_parameters():
        right = getattr(theirs[name], what)
        off = float((getattr(p, what).full_tensor() - right).abs().max()) / max(float(right.abs().max()), floor)
        assert off == off, name
        worst = max(worst, off)
    return worst


@pytest.mark.machines
@pytest.mark.parametrize(
    "cases", [CASES[:3], pytest.param(CASES[3:], marks=[pytest.mark.nightly, pytest.mark.timeout(900)])]
)
def test_stages_compute_what_one_device_computes(cases):
    found = on_processes(4, steps, cases)
    assert all(ran == found[0] for ran in found)
    for (name, shape, schedule, *_), (ran, first, then) in zip(cases, found[0], strict=True):
        assert ran == schedule
        assert first <= 1e-12, (name, shape, schedule, first)
        assert then <= 1e-10, (name, shape, schedule, then)
