"""Recurrent layers in single precision, whose kernels on a CPU are others than in double."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar
from tests.shares import diagonal
from tests.training import whole

KINDS = {
    "lstm": lambda: nn.LSTM(8, 6, batch_first=True),
    "lstm of two directions and two layers": lambda: nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True),
    "gru": lambda: nn.GRU(8, 6, batch_first=True),
}
HOWS = {
    "whole": {"mesh": (1,)},
    "compiled": {"mesh": (1,), "compile": "aot_eager"},
    "two": {"mesh": 2, "parallel": "dp"},
}


class Read(nn.Module):
    """A recurrent layer behind a product, and a loss of all that it gives."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(8, 8), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, states = self.layer(self.first(x))
        states = states if isinstance(states, tuple) else (states,)
        return out.square().mean() + sum(s.sin().mean() for s in states)


@pytest.mark.parametrize("kind, how", diagonal(list(KINDS), list(HOWS), 3))
def test_a_recurrent_layer_in_single_precision_is_eagers(kind, how, threads):
    torch.manual_seed(0)
    model, x = Read(KINDS[kind]()), torch.randn(4, 5, 8)
    eager = copy.deepcopy(model)
    loss = eager(x)
    loss.backward()
    plan = autopar.plan(model, (x,), memory_budget="inf", **HOWS[how])

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), (x,), plan=plan)
        found = mine(x)
        found.backward()
        return {"loss": found.detach(), **{n: whole(p.grad) for n, p in mine.named_parameters()}}

    right = {"loss": loss.detach(), **{n: p.grad for n, p in eager.named_parameters()}}
    for result in threads(plan.mesh.size, body):
        for name, value in right.items():
            torch.testing.assert_close(result[name], value, rtol=1e-5, atol=1e-6)
