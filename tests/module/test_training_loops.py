"""What users' loops are made of - loss scaling, clipping, schedules, optimizers of every form, LoRA - on parameters
that are DTensors, as they are.
"""

from __future__ import annotations

import copy

import pytest
import torch

import autopar
from autopar import DeviceMesh
from autopar.testing import Equality, on_processes
from tests.models import batch_of, eager_links, lora_case, mlp_case
from tests.shares import by_day
from tests.training import lora_on_ranks, lora_steps, whole

FORMS = {
    "adamw in a loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw at once": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam with amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def loop(model, form, scaled):
    """Four steps; with loss scaling the third meets an inf and must not happen, on any rank."""
    optimizer = FORMS[form](model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=8, cycle_momentum=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=scaled)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(**batch_of(8, seed=step))
        scaler.scale(loss).backward()
        if scaled and step == 2:  # an overflow in one element, which only one rank holds
            with torch.no_grad():
                spoiled = torch.zeros(64, 16, dtype=torch.float64)
                spoiled[-1, -1] = float("inf")
                gradient = model.blocks[0].up.weight.grad
                gradient += (
                    spoiled
                    if not hasattr(gradient, "to_local")
                    else torch.distributed.tensor.distribute_tensor(spoiled, gradient.device_mesh, gradient.placements)
                )
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    return {
        "norm": whole(norm.detach()) if step != 2 else torch.zeros(()),
        "scale": torch.tensor(scaler.get_scale()),
        **{n: whole(p).detach().clone() for n, p in model.named_parameters()},
    }


def on_ranks(rank, model, batch, parallel, mesh):
    found = {}
    for form in FORMS:
        for scaled in (False, True):
            mine = autopar.autoparallelize(
                copy.deepcopy(model), batch, mesh=DeviceMesh(mesh), parallel=parallel, cluster=eager_links()
            )
            found[form, scaled] = loop(mine, form, scaled)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parallel, mesh", by_day([("zero3", (2,)), ("megatron", (2,))], ("zero3", (2,))), ids=str)
def test_optimizers_clipping_schedules_and_loss_scaling(parallel, mesh):
    model, batch = mlp_case()
    ours = on_processes(2, on_ranks, model, batch, parallel, mesh)
    for form in FORMS:
        for scaled in (False, True):
            expected = loop(copy.deepcopy(model), form, scaled)
            for rank in ours:
                Equality.in_float64(f"{form}, scaled: {scaled}", rank[form, scaled], expected, 1e-8).check()
    assert ours[0]["adamw fused", True]["scale"] < 128


@pytest.mark.parametrize("parallel", by_day(["dp", "zero3"], "zero3"))
def test_lora_trains_what_it_trains(parallel):
    torch.manual_seed(1)
    model, batch = lora_case()
    expected = lora_steps(copy.deepcopy(model), batch)
    for parameters in on_processes(2, lora_on_ranks, model, batch, parallel):
        Equality.in_float64("LoRA", parameters, expected, 1e-8).check()
