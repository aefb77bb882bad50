"""Masks that depend on no input: what they choose has a known shape, and trains as on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar
from autopar.letters import NotCaptured, NotServed
from autopar.testing import Equality, on_threads
from tests.models import eager_links
from tests.shares import one_in
from tests.training import whole

ROWS = 6


def apart(rows):
    """A mask of pairs of different rows, as in a contrastive loss."""
    return ~torch.eye(len(rows), dtype=torch.bool)


def upper(rows):
    return torch.ones_like(rows).triu(1) > 0


def by_index(x, s):
    return s[apart(x)].view(len(x), -1).logsumexp(1)


def by_select(x, s):
    return s.masked_select(apart(x)).view(len(x), -1).logsumexp(1)


def by_a_broadcast_select(x, s):
    return torch.masked_select(s, torch.arange(len(x))[:, None] % 2 == 0).sin()


def by_nonzero(x, s):
    at = apart(x).nonzero()
    return s[at[:, 0], at[:, 1]].sin() * torch.argwhere(apart(x)).shape[0]


def by_where(x, s):
    rows, columns = torch.where(upper(s))
    return s[rows, columns].sin() + s[upper(s).nonzero(as_tuple=True)].cos()


def beside_other_items(x, s):
    kept = torch.tensor([True, False] * (ROWS // 2))
    return x[kept, 1:, None].sin().sum() + x[..., torch.arange(x.shape[1]) > 1].cos().sum() + s[kept, 0].sum()


def written(x, s):
    kept = torch.arange(ROWS) % 2 == 0
    y = x * 2
    y[kept] = x[~kept].sin()
    y[:, torch.arange(x.shape[1]) < 2] = 0.5
    return y.cos()


WAYS = by_index, by_select, by_a_broadcast_select, by_nonzero, by_where, beside_other_items, written


class Pairs(nn.Module):
    """What a function makes of rows, and of their products with each other."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        rows = x @ self.weight
        return self.function(rows, rows @ rows.T).mean()


@pytest.mark.parametrize("function", one_in(2, WAYS), ids=lambda f: f.__name__)
def test_what_they_choose_trains_as_on_one_device(function):
    batches = [torch.randn(ROWS, 4, dtype=torch.float64) for _ in range(3)]

    def train(model):
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.05), []
        for x in batches:
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return {"losses": torch.stack(losses), "weight": whole(model.weight).detach()}

    model = Pairs(function)
    expected = train(copy.deepcopy(model))
    for how in (dict(mesh=2, parallel="dp"), dict(mesh=(2, 2), constraints={"x": (autopar.S(0), autopar.S(1))})):

        def body(rank, how=how):
            mine = autopar.autoparallelize(copy.deepcopy(model), (batches[0],), cluster=eager_links(), **how)
            return train(mine)

        for rank in on_threads(4 if how["mesh"] == (2, 2) else 2, body):
            Equality.in_float64(function.__name__, rank, expected, 1e-9).check()


def test_the_graph_says_how_many_there_are():
    graph = autopar.tracer.ColoTracer().trace(Pairs(by_index), (torch.randn(ROWS, 4, dtype=torch.float64),))
    assert any(f"a mask has {ROWS * (ROWS - 1)} true elements" in line for line in graph.assumptions)


def test_masks_of_inputs_and_buffers_are_refused():
    x = torch.randn(ROWS, 4, dtype=torch.float64)
    with pytest.raises(NotCaptured, match="shape of __getitem__"):
        autopar.plan(Pairs(lambda x, s: s[s > 0]), (x,), mesh=2)
    model = Pairs(lambda x, s: x[:, model.kept])
    model.register_buffer("kept", torch.tensor([True, False, True, True]))
    with pytest.raises(NotCaptured, match="shape of __getitem__"):
        autopar.plan(model, (x,), mesh=2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, s: s.sum().masked_select(torch.zeros((), dtype=torch.bool)),
        lambda x, s: torch.masked_select(s, apart(x), out=torch.empty(0, dtype=s.dtype)),
    ],
    ids=["without dims", "into a tensor"],
)
def test_other_calls_are_refused(function):
    with pytest.raises(NotCaptured):
        autopar.plan(Pairs(function), (torch.randn(ROWS, 4, dtype=torch.float64),), mesh=2)


def test_micro_batches_of_rows_that_a_mask_counts_are_refused():
    with pytest.raises(NotServed, match="all rows of a batch"):
        autopar.plan(
            Pairs(lambda x, s: x[torch.arange(len(x)) % 2 == 0]),
            (torch.randn(8, 4, dtype=torch.float64),),
            mesh=2,
            microbatches=2,
        )
