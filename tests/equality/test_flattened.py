"""A sequence that is cut inside a flattened (batch, sequence), beside an axis that cuts the batches."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.testing import Equality
from tests.random_plans import random_plan
from tests.training import whole


class Flattened(nn.Module):
    """What GPT-2's Conv1D does, and a loss over flattened tokens."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 10)

    def forward(self, x, labels):
        b, s, d = x.shape
        h = self.up(x.tanh().view(b * s, d))
        y = self.down(F.gelu(h)).view(b, s, 10)
        return F.cross_entropy(y.tanh().view(-1, 10), labels.view(-1))


BLOCKS = "blocks=(8, 8, 8, 8)"
PINS = {
    "sequence": ((2,), {"up": f"S(0, {BLOCKS})", "down": f"S(0, {BLOCKS})"}),
    "both": ((2, 2), {"up": f"S(0)@0, S(0, {BLOCKS})@1", "down": f"S(0)@0, S(0, {BLOCKS})@1"}),
    "both, the other way": ((2, 2), {"up": f"S(0, {BLOCKS})@0, S(0)@1", "down": f"S(0, {BLOCKS})@0, S(0)@1"}),
    "in turn": ((2, 2), {"up": f"S(0)@0, S(0, {BLOCKS})@1", "down": "S(0)@0, S(0)@1"}),
    **{f"random {i}": ((2, 2, 2), i) for i in range(2)},
}


@pytest.mark.parametrize("name", PINS)
def test_the_sequence_is_cut_inside_each_batch(name, threads):
    mesh, pins = PINS[name]
    model, batch = Flattened().double(), {"x": torch.randn(4, 8, 6).double(), "labels": torch.randint(0, 10, (4, 8))}
    reference = copy.deepcopy(model)
    loss = reference(**batch)
    loss.backward()
    expected = {"loss": loss.detach(), **{n: p.grad for n, p in reference.named_parameters()}}
    mesh = autopar.DeviceMesh(mesh)
    plan = (
        random_plan(model, batch, mesh, pins)
        if isinstance(pins, int)
        else autopar.plan(model, batch, mesh=mesh, constraints=pins)
    )

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        loss = mine(**batch)
        loss.backward()
        return {"loss": loss.detach(), **{n: whole(p.grad) for n, p in mine.named_parameters()}}

    for result in threads(mesh.size, body):
        Equality.in_float64(name, result, expected, 1e-9).check()
