"""Ops that look for values which draws seldom have.

Once cut because they looked right in a trial, with wrong numbers and no word.
"""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import DeviceMesh
from autopar.testing import Equality, on_threads
from autopar.tracer import ColoTracer
from tests.models import eager_links
from tests.random_plans import random_plan_of
from tests.training import whole

GENERATOR = torch.Generator().manual_seed(11)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR)


class OfLinear(nn.Module):
    """A linear, some buffers, and a function of both and the inputs that gives a loss."""

    def __init__(self, function, width, **buffers):
        super().__init__()
        self.f, self.function = nn.Linear(16, width), function
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, **batch):
        return self.function(self, **batch)


def lengths(m, x, lengths):
    mask = torch.arange(x.shape[1])[None] < lengths[:, None]
    weight = lengths.double() / lengths.max()
    return ((m.f(x).tanh() * mask[..., None]).sum(1) * weight[:, None]).pow(2).mean()


def special(m, x, ids):
    keep = ~torch.isin(ids, m.special)
    return (m.f(x).pow(2).mean(-1) * keep).sum() / keep.sum()


def peaks(m, x):
    scores = torch.sigmoid(m.f(x))
    return torch.where(scores == F.max_pool2d(scores, 3, 1, 1), scores, 0.0).pow(2).sum()


@torch.library.custom_op("autopar_tests::sum_of_nines", mutates_args=())
def sum_of_nines(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (x * (t == 9)[:, None]).sum(0) / (t == 9).sum().clamp(min=1)


def _nines_backward(ctx, g):
    here = ctx.saved_tensors[0] == 9
    return g[None] * here[:, None] / here.sum().clamp(min=1), None


sum_of_nines.register_fake(lambda x, t: x.new_empty(x.shape[1]))
sum_of_nines.register_autograd(
    _nines_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1])
)

SIGNS = torch.where(torch.arange(16) % 3 == 0, 1.0, -1.0).double()
CASES = {
    "cosine_embedding_loss": (
        OfLinear(lambda m, x, y: F.cosine_embedding_loss(m.f(x), m.f(x.flip(0)), y, margin=0.1), 8),
        dict(x=normal(16, 16), y=SIGNS),
    ),
    "the largest of whole numbers": (
        OfLinear(lengths, 8),
        dict(x=normal(8, 12, 16), lengths=torch.tensor([1, 2, 3, 12, 5, 6, 7, 8])),
    ),
    "a product of whole numbers": (
        OfLinear(lambda m, x, counts: (m.f(x).pow(2).mean(1) * counts.prod(1).double()).sum(), 8),
        dict(x=normal(8, 16), counts=torch.randint(1, 4, (8, 12), generator=GENERATOR)),
    ),
    "isin": (
        OfLinear(special, 8, special=torch.arange(50, 62)),
        dict(x=normal(8, 6, 16), ids=torch.randint(0, 64, (8, 6), generator=GENERATOR)),
    ),
    "index_fill": (
        OfLinear(
            lambda m, x: m.f(x).index_fill(1, m.off, 0.0).pow(2).mean(), 32, off=torch.tensor([3, 9, 1, 30, 7, 25])
        ),
        dict(x=normal(8, 16)),
    ),
    "index_put": (
        OfLinear(
            lambda m, x: m.f(x).index_put((m.at,), m.row).sin().sum(), 8, at=torch.tensor([3, 1, 6]), row=normal(8)
        ),
        dict(x=normal(8, 16)),
    ),
    "a pool without a batch": (OfLinear(peaks, 16), dict(x=normal(2, 16, 16))),
    "a mean of neighbours without a batch": (
        OfLinear(lambda m, x: F.avg_pool2d(m.f(x), 3, 1, 1).pow(2).sum(), 8),
        dict(x=normal(4, 8, 16)),
    ),
    "a user's own op that looks for a token": (
        OfLinear(lambda m, x, t: sum_of_nines(m.f(x).tanh(), t).pow(2).mean(), 8),
        dict(x=normal(16, 16), t=torch.where(torch.arange(16) % 4 == 0, 9, 1)),
    ),
    "count_nonzero": (
        OfLinear(lambda m, x: (m.f(x) * torch.count_nonzero(m.f(x).relu().detach())).sin().sum(), 8),
        dict(x=normal(8, 16)),
    ),
    "isclose": (
        OfLinear(lambda m, x: torch.where(torch.isclose(m.f(x).relu(), m.f(x)), m.f(x) * 2, m.f(x)).sin().sum(), 8),
        dict(x=normal(8, 16)),
    ),
    "nansum": (
        OfLinear(lambda m, x: torch.nansum(torch.where(m.f(x) > 0, m.f(x), torch.nan)).sin(), 8),
        dict(x=normal(8, 16)),
    ),
    "a bag of embeddings": (
        OfLinear(lambda m, x, ids: (m.f(x) * F.embedding_bag(ids, m.table, mode="max")).sum(), 8, table=normal(20, 8)),
        dict(x=normal(8, 16), ids=torch.randint(0, 20, (8, 5), generator=GENERATOR)),
    ),
}
PLANS = {
    "dp": dict(parallel="dp"),
    "zero3": dict(parallel="zero3"),
    "free": dict(cluster=eager_links()),
    "drawn": 0,
}


@functools.cache
def eager(case):
    model, batch = copy.deepcopy(CASES[case][0]).double(), CASES[case][1]
    loss = model(**batch)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}


def drawn_plan(model, batch, seed):
    return random_plan_of(ColoTracer().trace(model, batch), DeviceMesh((2,)), np.random.default_rng(seed))


# of the one loss that takes seconds to plan, a drawn plan by day
SLOW = "cosine_embedding_loss"


@pytest.mark.parametrize(
    "kind, case",
    [
        pytest.param(kind, case, marks=[] if (i + k) % 2 == 0 and case != SLOW else pytest.mark.nightly)
        for i, kind in enumerate(PLANS)
        for k, case in enumerate(CASES)
    ],
)
def test_it_is_what_eager_computes(case, kind):
    model, batch = copy.deepcopy(CASES[case][0]).double(), CASES[case][1]
    how = PLANS[kind]
    plan = drawn_plan(model, batch, how) if isinstance(how, int) else autopar.plan(model, batch, mesh=2, **how)
    made = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        mine = autopar.autoparallelize(made[rank], batch, plan=plan)
        loss = mine(**batch)
        loss.backward()
        return {"loss": loss.detach(), **{n: whole(p.grad) for n, p in mine.named_parameters()}}

    for rank, found in enumerate(on_threads(2, body)):
        Equality.in_float64(f"{case}, {kind}, rank {rank}", found, eager(case), 1e-9).check()
