"""What users' loops are made of - loss scaling, clipping, schedules, optimizers of every form, LoRA - on parameters
that are DTensors, as they are.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar
from autopar import DeviceMesh
from autopar.testing import Equality, on_processes
from tests.models import batch_of, eager_links, mlp_case
from tests.training import whole

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
@pytest.mark.parametrize("parallel, mesh", [("zero3", (2,)), ("megatron", (2,))], ids=str)
def test_optimizers_clipping_schedules_and_loss_scaling(parallel, mesh):
    model, batch = mlp_case()
    ours = on_processes(2, on_ranks, model, batch, parallel, mesh)
    for form in FORMS:
        for scaled in (False, True):
            expected = loop(copy.deepcopy(model), form, scaled)
            for rank in ours:
                Equality.in_float64(f"{form}, scaled: {scaled}", rank[form, scaled], expected, 1e-8).check()
    assert ours[0]["adamw fused", True]["scale"] < 128


class LoRA(nn.Module):
    """A frozen weight and a small correction that trains."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = (
            nn.Parameter(torch.randn(rank, base.in_features, dtype=torch.float64) * 0.1),
            nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float64)),
        )

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


def lora_case():
    model, batch = mlp_case()
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = LoRA(block.up), LoRA(block.down)
    return model, batch


def lora_steps(model, batch):
    trains = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trains, lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    assert (
        all((p.grad is not None) == p.requires_grad for p in model.parameters())
        and len(optimizer.state) == len(trains) == 8
    )
    return {n: whole(p).detach().clone() for n, p in model.named_parameters()}


def lora_on_ranks(rank, model, batch, parallel):
    mine = autopar.autoparallelize(model, batch, mesh=2, parallel=parallel, cluster=eager_links())
    assert (
        mine.plan.memory["optimizer states"]
        <= 2 * 8 * sum(p.numel() for p in mine.parameters() if p.requires_grad) + 64
    )
    return lora_steps(mine, batch)


@pytest.mark.parametrize("parallel", ["dp", "zero3"])
def test_lora_trains_what_it_trains(parallel):
    torch.manual_seed(1)
    model, batch = lora_case()
    expected = lora_steps(copy.deepcopy(model), batch)
    for parameters in on_processes(2, lora_on_ranks, model, batch, parallel):
        Equality.in_float64("LoRA", parameters, expected, 1e-8).check()
