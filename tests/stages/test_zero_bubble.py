"""Stages whose backward runs in two parts, the second later: gradients are those of a backward in one."""

from __future__ import annotations

import copy

import pytest
import torch

import autopar
from autopar.testing import on_processes, on_threads
from tests.stages.models import case
from tests.stages.parted import built, on_one_rank, planned


def stepped(rank, model, batch, plan):
    torch.manual_seed(1)
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
    loss = mine(**batch)
    loss.backward()
    return loss.detach(), {name: p.grad.to_local() for name, p in mine.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("twice", {}),
        ("places", {}),
        ("frozen first", {}),
        ("frozen last", {}),
        ("dropout", {}),
        ("dropout", {"recompute": "full"}),
        *(pytest.param(name, {}, marks=pytest.mark.nightly) for name in ("decoder", "encoder and decoder", "unet")),
    ],
    ids=str,
)
def test_values_are_those_of_a_backward_in_one(name, how):
    """All stages are on one rank; the second parts of all turns come at once, or after all turns."""
    model, batch = built(name)
    plan = planned(model, batch, (2, 1), 4, **how)

    def body(rank):
        return [stepped(rank, model, batch, on_one_rank(plan, kinds)) for kinds in (["B"], ["IW"], ["I", "W"])]

    (loss, gradients), *others = on_threads(1, body)[0]
    for other, found in others:
        assert torch.equal(loss, other) and gradients.keys() == found.keys()
        assert all(torch.equal(gradients[key], found[key]) for key in gradients)
    if name != "dropout":
        expected = copy.deepcopy(model)
        expected(**batch).backward()
        for key in gradients:
            torch.testing.assert_close(gradients[key], expected.get_parameter(key).grad, rtol=1e-12, atol=1e-15)


def under(rank, name, schedule, shape, preset):
    """The orders, and the largest difference of a gradient stored here from eager's, by the largest of its own."""
    model, batch = case(name)
    expected = copy.deepcopy(model)
    loss = expected(**batch)
    loss.backward()
    mesh = autopar.DeviceMesh(shape, ("pp", "tp"))
    asked = {"microbatches": 4, "memory_budget": "inf", "pipeline": {"schedule": schedule}, "parallel": preset}
    mine = autopar.autoparallelize(model, batch, mesh=mesh, timeout_s=60, **asked)
    found = mine(**batch)
    found.backward()
    torch.testing.assert_close(found.detach(), loss.detach(), rtol=1e-12, atol=0)
    worst = 0.0
    for (_, p), q in zip(expected.named_parameters(), mine.parameters(), strict=True):
        worst = max(worst, float((q.grad.full_tensor() - p.grad).abs().max() / p.grad.abs().max()))
    return mine.plan.pipeline.orders, worst


@pytest.mark.parametrize(
    ("name", "schedule", "shape", "preset"),
    [
        ("decoder", "zero-bubble", (4, 1), None),
        *(
            pytest.param(*rest, marks=pytest.mark.nightly)
            for rest in [
                ("encoder and decoder", "zero-bubble", (2, 2), "megatron"),
                ("decoder", "zero-bubble", (2, 2), "zero3"),
                ("unet", "zero-bubble", (2, 2), None),
                ("twice", "zero-bubble", (4, 1), None),
            ]
        ),
    ],
    ids=str,
)
def test_ranks_compute_what_one_device_computes(name, schedule, shape, preset):
    orders, worst = zip(*on_processes(4, under, name, schedule, shape, preset), strict=True)
    assert all("I0" in text and "W0" in text and "B" not in text for text in orders[0])
    assert max(worst) < 1e-12
