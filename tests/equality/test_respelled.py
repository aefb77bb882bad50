"""Functions that read values where a graph has shapes: the same as eager on one device, under every plan."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.letters import Letter
from autopar.testing import Equality
from autopar.tracer import ColoTracer
from tests.models import FunctionModel
from tests.random_plans import random_plan
from tests.shares import by_day
from tests.training import whole

TARGETS, READ, WANTED = (
    [[1, 2, 3], [4, 5, 0], [3, 3, 0], [1, 2, 4], [5, 5, 5], [2, 0, 0]],
    (7, 7, 6, 7, 5, 4),
    (3, 2, 2, 3, 3, 1),
)


def log_probs(m, x):
    """Seven times of six sequences and six letters."""
    return ((x @ m.weight)[None] * torch.arange(1, 8).view(-1, 1, 1)).log_softmax(-1)


def ctc(m, x):
    lengths = torch.tensor(READ), torch.tensor(WANTED)
    end_to_end = torch.tensor([t for row, n in zip(TARGETS, WANTED) for t in row[:n]])
    given = log_probs(m, x)
    impossible = nn.CTCLoss(zero_infinity=True, reduction="sum")(
        given, torch.tensor(TARGETS), (*READ[:4], 2, 4), WANTED
    )  # six letters do not go into two times
    return (
        F.ctc_loss(given, torch.tensor(TARGETS), *lengths)
        + F.ctc_loss(given, end_to_end, READ, WANTED, reduction="sum")
        + impossible
        + F.ctc_loss(given[:, 0], torch.tensor(TARGETS[0]), (7,), (3,), reduction="none").sum()
    )


def together(m, x):
    h = x @ m.weight
    return (
        torch.cov(h).pow(2).sum()
        + torch.cov(h, correction=0, aweights=x[0].abs()).sum()
        + h.cov(fweights=torch.arange(1, 7), aweights=x[1].abs()).sum()
        + torch.cov(h[0])
        + torch.corrcoef(h).pow(3).sum()
        + torch.corrcoef(h[0])
    )


def choices(m, x):
    h = (x @ m.weight)[0]
    return (
        torch.combinations(h).prod(1).sum()
        + torch.combinations(h, 3).sin().sum()
        + torch.combinations(h, with_replacement=True).prod(1).pow(2).sum()
    )


def biases(m, x):
    """Of a linear layer: for each row, for all alike, and one number."""
    rows = F.linear(x, m.weight, (x @ m.weight).sin())
    return (F.linear(rows, m.weight, m.weight[:1]) + F.linear(x, m.weight, bias=m.weight[0, 0])).pow(2).sum()


def likelihoods(m, x):
    """Of means and variances of every shape, of which some are clamped."""
    mean, var = x @ m.weight, (x @ m.weight).relu() * 1e-1
    loss = F.gaussian_nll_loss
    return (
        loss(mean, x, var.add(1e-2))
        + loss(mean, x, var, eps=0.05, reduction="sum", full=True)
        + loss(mean, x, var[:, :1], eps=0.05)
        + loss(mean, x, var[:, 0], eps=0.05, reduction="none").sum()
        + loss(mean, x, 0.5)
        + nn.GaussianNLLLoss(eps=0.02)(mean, x, var)
    )


class OneLength(nn.Module):
    """All weights of a layer share one length."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8), dim=None).double()

    def forward(self, x):
        return self.layer(x).pow(3).sum()


class Averaged(nn.Module):
    """Batch norms whose running statistics are means over all batches."""

    def __init__(self):
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(6, 6).double()), nn.BatchNorm1d(6, momentum=None).double()

    def forward(self, x):
        return self.norm(x @ self.weight).pow(3).mean()


MODELS = {
    "ctc": lambda: FunctionModel(ctc, 6, 6),
    "cov": lambda: FunctionModel(together, 6, 6),
    "biases": lambda: FunctionModel(biases, 6, 6),
    "combinations": lambda: FunctionModel(choices, 6, 6),
    "likelihoods": lambda: FunctionModel(likelihoods, 6, 6),
    "weight_norm of one length": OneLength,
    "batch norm of all batches": Averaged,
}


@pytest.mark.parametrize(
    "name", by_day(MODELS, *(name for name in MODELS if name not in ("likelihoods", "combinations", "cov")))
)
def test_it_is_eager(name, threads):
    model, batches = MODELS[name](), [{"x": torch.randn(6, 6).double()} for _ in range(3)]
    reference = copy.deepcopy(model)
    losses = [reference(**batch) for batch in batches]
    torch.stack(losses).sum().backward()
    buffers = {n: b for n, b in reference.named_buffers() if "norm." in n}
    expected = {"loss": torch.stack(losses).detach(), **buffers, **{n: p.grad for n, p in reference.named_parameters()}}

    def body(rank, plan):
        mine = autopar.autoparallelize(copy.deepcopy(model), batches[0], plan=plan)
        values = [mine(**batch) for batch in batches]
        for value in values:
            value.backward()
        held = {n: b for n, b in mine.named_buffers() if "norm." in n}
        return {"loss": torch.stack(values).detach(), **held, **{n: whole(p.grad) for n, p in mine.named_parameters()}}

    pair, square = autopar.DeviceMesh((2,)), autopar.DeviceMesh((2, 2), ("dp", "tp"))
    for plan in (
        autopar.plan(model, batches[0], mesh=pair, parallel="dp"),
        random_plan(model, batches[0], pair, 0),
        random_plan(model, batches[0], square, 1),
    ):
        for result in threads(plan.mesh.size, body, plan):
            Equality.in_float64(f"{name} on {plan.mesh}", result, expected, 1e-9).check()


class Speech(nn.Module):
    """Targets with lengths of their own, or the labels of each row that count, put end to end."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6).double())

    def forward(self, x, targets, read, wanted=None):
        if wanted is None:
            counts = targets >= 0
            targets, wanted = targets.masked_select(counts), counts.sum(-1)
        if (read > x.shape[1]).any():
            raise ValueError("lengths beyond what was read")
        return F.ctc_loss((x @ self.weight).log_softmax(-1).transpose(0, 1), targets, read, wanted, zero_infinity=True)


def _left_out(targets):
    """The targets, with labels that do not count among them."""
    targets = targets.clone()
    targets[0, 1] = targets[2, :2] = targets[3] = -100
    return targets


@pytest.mark.parametrize("has_lengths", [True, False])
def test_a_loss_of_sequences_is_cut_by_sequences(has_lengths, threads):
    """CTC under data parallelism: lengths that are inputs are cut with their rows, and so are labels that count."""
    model = Speech()
    batch = {"x": torch.randn(6, 7, 6).double(), "targets": torch.tensor(TARGETS), "read": torch.tensor(READ)}
    if has_lengths:
        batch["wanted"] = torch.tensor(WANTED)
    else:
        batch["targets"] = _left_out(batch["targets"])
    plan = autopar.plan(model, batch, mesh=2, parallel="dp")
    (cut,) = (str(d.choice) for key, d in plan.decisions.items() if key.endswith("/ctc_loss"))
    assert "S(1)" in cut
    reference = copy.deepcopy(model)
    expected = reference(**batch)
    expected.backward()

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        loss = mine(**batch)
        loss.backward()
        return {"loss": whole(loss.detach()), "weight": whole(mine.weight.grad)}

    for result in threads(2, body):
        right = {"loss": expected.detach(), "weight": reference.weight.grad}
        Equality.in_float64("ctc", result, right, 1e-9).check()


def test_labels_that_count_come_with_their_numbers():
    class Wrong(Speech):
        def forward(self, x, targets, read):
            return super().forward(x, targets.masked_select(targets >= 0), read, (targets > 0).sum(-1))

    batch = {"x": torch.randn(6, 7, 6).double(), "targets": torch.tensor(TARGETS), "read": torch.tensor(READ)}
    with pytest.raises(autopar.NotCaptured, match="other lengths than their numbers"):
        autopar.plan(Wrong(), batch, mesh=2)


def draws_in_layers(m, x):
    h = x @ m.weight
    out, _ = torch.gru(
        h[None], h.new_zeros(4, 6, 3), [p for k in range(4) for p in _weights(h)], True, 2, 0.5, True, True, False
    )
    return out.sum()


def _weights(h):
    return [h.new_ones(9, 6) / 7, h.new_ones(9, 3) / 5, h.new_ones(9) / 3, h.new_ones(9) / 2]


@pytest.mark.parametrize(
    "function",
    [
        draws_in_layers,
        lambda m, x: torch.normal(x @ m.weight, 2.0).sum() + torch.normal(1.0, 2.0, (3,)).sum() + (x @ m.weight).sum(),
        lambda m, x: (
            (x @ m.weight)
            * torch.randint(3, (6, 6))
            * torch.randint(low=1, high=4, size=(6, 1))
            * torch.randint_like(x, 2, 9)
        )[torch.randperm(6)].sum(),
        lambda m, x: (torch.poisson(x.abs()) * F.rrelu(x @ m.weight, training=True)).sum(),
        lambda m, x: torch.distributions.Beta(x.exp(), (x @ m.weight).exp()).rsample().sum(),
    ],
    ids=["layers", "normal", "whole numbers", "counts and slopes", "beta"],
)
def test_a_graph_draws_as_the_model_does(function):
    """Replayed, it takes the same numbers from torch's generator in the same order."""
    model, x = FunctionModel(function, 6, 6), torch.randn(6, 6).double()
    replay = ColoTracer().trace(model, {"x": x}).module(model)
    torch.manual_seed(5)
    expected = model(x)
    torch.manual_seed(5)
    torch.testing.assert_close(replay(x=x), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "draw", [lambda h: torch.normal(h, h.exp()), torch.bernoulli, torch.poisson], ids=["normal", "bernoulli", "poisson"]
)
def test_what_a_draw_depends_on_has_a_gradient_of_zeros(draw):
    """As in eager, where AdamW then decays it; None would leave it as it is."""
    model, batch = (
        FunctionModel(lambda m, x: (draw((x @ m.weight).sigmoid()) * x).sum(), 6, 6),
        {"x": torch.randn(6, 6).double()},
    )
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=1)
    for one in (model, mine):
        one(**batch).backward()
        assert not whole(one.weight.grad).any()


@pytest.mark.parametrize(
    "function, advice",
    [
        (lambda m, x: torch.binomial(torch.full_like(x, 5), x.sigmoid()) * (x @ m.weight), "torch.bernoulli"),
        (lambda m, x: torch.feature_dropout((x @ m.weight)[:, :, None], 0.3, True), "dropout2d"),
    ],
)
def test_what_has_no_form_is_a_letter_that_says_what_has_one(function, advice):
    with pytest.raises(Letter, match=advice):
        autopar.autoparallelize(FunctionModel(function, 6, 6), {"x": torch.randn(6, 6).double()}, mesh=1)
