"""Loops over experts and capacities on several devices that share the tokens: values and gradients of one device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import DeviceMesh
from autopar.testing import Equality, on_threads
from tests.shares import diagonal
from tests.tracer import loops_over_experts as loops
from tests.training import whole

TOKENS = 12
PUSHES = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 50.0, 0.0, 0.0], [0.0, 0.0, -50.0, 0.0]]).double()


class Capacity(nn.Module):
    """Tokens behind the third of their expert are dropped, and a loss balances the load (GShard, Switch)."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(loops.HIDDEN, loops.EXPERTS)
        self.up = nn.Parameter(torch.randn(loops.EXPERTS, loops.HIDDEN, loops.INNER))
        self.down = nn.Parameter(torch.randn(loops.EXPERTS, loops.INNER, loops.HIDDEN))

    def forward(self, x, push):
        scores = (self.router(x) + push).softmax(-1)
        ids = scores.argmax(-1)
        hot = F.one_hot(ids, loops.EXPERTS)
        place = (hot.cumsum(0) - 1) * hot
        kept = hot * (place < 3)
        slots = F.one_hot((place * kept).sum(-1), 3).to(x.dtype)[:, None] * kept[..., None]
        taken = torch.einsum("tec,th->ech", slots, x)
        y = torch.bmm(F.silu(torch.bmm(taken, self.up)), self.down)
        share = torch.histc(ids.to(x.dtype), loops.EXPERTS, 0, loops.EXPERTS)
        running = scores.cumsum(0).square().mean() / 100
        balance = (share * scores.mean(0)).sum() / 10 + running
        return torch.einsum("tec,ech->th", slots * scores[..., None], y) + balance


def losses(out, inputs):
    return (out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).square().mean()


def eager(model, x, push):
    found = copy.deepcopy(model)
    loss = losses(found(x=x, push=push), None)
    loss.backward()
    return {
        "loss": loss.detach(),
        **{n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in found.named_parameters()},
    }


MODELS = {
    "index_add": lambda: loops.Loop(loops.where_and_index_add),
    "what is hit": lambda: loops.Loop(loops.over_a_list_of_what_is_hit),
    "written at places": lambda: loops.Loop(loops.written_at_places),
    "capacity": Capacity,
}


@pytest.mark.parametrize(("ranks", "tokens", "name"), diagonal([(4, TOKENS), (3, 10)], list(MODELS)))
def test_devices_that_share_tokens_compute_what_one_does(name, ranks, tokens):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x = torch.randn(tokens, loops.HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    batch = {"x": x, "push": PUSHES[0]}
    mesh = DeviceMesh((ranks,), ("data",))
    uneven = {"constraints": {"router": "S(0)@data"}}  # which "dp" does not give
    plan = autopar.plan(
        copies[0], batch, mesh=mesh, loss=losses, **({"parallel": "dp"} if tokens % ranks == 0 else uneven)
    )

    def on_rank(rank):
        parallel = autopar.autoparallelize(copies[rank], batch, plan=plan, loss=losses)
        found = []
        for push in PUSHES:
            parallel.zero_grad()
            loss = parallel(x=x, push=push)
            loss = loss[0] if isinstance(loss, tuple) else loss
            loss.backward()
            grads = {n: whole(p.grad).clone() for n, p in parallel.named_parameters() if p.grad is not None}
            found.append({"loss": whole(loss).detach().clone(), **grads})
        return found

    for found in on_threads(ranks, on_rank):
        for push, one in zip(PUSHES, found, strict=True):
            Equality.in_float64("tokens cut", one, eager(model, x, push), 1e-10).check()
