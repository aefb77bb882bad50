"""Ops that draw: the same draws however they are cut, those of eager with the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    Dirichlet,
    Exponential,
    Gamma,
    Independent,
    Normal,
    Uniform,
    kl_divergence,
)

import autopar
from autopar.testing import Equality
from tests.models import FunctionModel
from tests.oracle import ByPosition
from tests.random_plans import random_plan
from tests.shares import one_in
from tests.training import whole


def of_channels(dropout, *shape):
    return lambda m, x: (dropout((x @ m.weight).view(*shape), 0.4, True) * x.view(*shape)).sum(0)


FUNCTIONS = {
    "dropout of channels, 1d": of_channels(F.dropout1d, 3, 4, 3),
    "without batches, 1d": of_channels(F.dropout1d, 6, 6),
    "2d": of_channels(F.dropout2d, 3, 2, 2, 3),
    "3d": of_channels(F.dropout3d, 3, 2, 2, 3),
    "alpha dropout": of_channels(F.alpha_dropout, 6, 6),
    "of channels": of_channels(F.feature_alpha_dropout, 3, 4, 3),
    "rand": lambda m, x: torch.rand(6, 6, dtype=torch.float64) * (x @ m.weight),
    "randn": lambda m, x: torch.randn(6, 6, dtype=torch.float64) + (x @ m.weight),
    "drop path": lambda m, x: (x @ m.weight) / 0.8 * (0.8 + torch.rand((x.shape[0], 1), dtype=x.dtype)).floor_(),
    "mixed with noise": lambda m, x: (x @ m.weight) + torch.rand_like(x) * torch.randn_like(x),
    "bernoulli": lambda m, x: torch.bernoulli((x @ m.weight).sigmoid()) * (x @ m.weight),
    "bernoulli of a number": lambda m, x: (x @ m.weight) * torch.empty_like(x).bernoulli_(0.3),
    "drawn in place": lambda m, x: (
        (x @ m.weight) * torch.empty(6, 6).double().exponential_(2.0)
        + torch.empty_like(x).uniform_(-1, 1) * torch.empty_like(x).normal_(1, 2)
    ),
    "and more": lambda m, x: (
        (x @ m.weight) * torch.empty_like(x).log_normal_()
        + torch.empty_like(x).cauchy_() * torch.empty_like(x).geometric_(0.3)
        + torch.empty_like(x).random_(3, 9)
    ),
    "categories": lambda m, x: (
        (x @ m.weight) * torch.multinomial(x.detach().abs(), 6).double()
        + torch.multinomial(x.detach().abs(), 6, replacement=True)
    ),
    "a count": lambda m, x: (x @ m.weight) * torch.arange(6) + torch.arange(1, 2.5, 0.25)[:, None],
    "a shuffle of pixels": lambda m, x: F.pixel_shuffle((x @ m.weight).view(1, 12, 1, 3), 2).pow(3),
    "places written": lambda m, x: (
        torch.index_put(x * 1, (torch.tensor([0, 4]),), (x @ m.weight)[:2])
        + torch.diagonal_scatter(x, (x @ m.weight)[0])
    ),
}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", one_in(2, FUNCTIONS))
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_draws_are_the_same_on_any_mesh(name, seed, threads):
    model, batch = FunctionModel(FUNCTIONS[name], 6, 6), {"x": torch.randn(6, 6).double()}

    def body(rank, plan):
        torch.manual_seed(3)
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        out = mine(**batch)
        out.pow(2).sum().backward()
        return {"out": out.detach(), "weight": whole(mine.weight.grad)}

    (expected,) = threads(1, body, random_plan(model, batch, autopar.DeviceMesh((1,)), 0))
    if not any(word in name for word in ("count", "pixels", "places")):
        assert not torch.equal(
            expected["out"],
            threads(
                1,
                lambda rank, plan: autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)(**batch).detach(),
                random_plan(model, batch, autopar.DeviceMesh((1,)), 0),
            )[0],
        )
    else:
        reference = copy.deepcopy(model)
        reference(**batch).pow(2).sum().backward()
        Equality.in_float64(
            name, expected, {"out": reference(**batch).detach(), "weight": reference.weight.grad}, 1e-12
        ).check()
    for mesh in (autopar.DeviceMesh((2,)), autopar.DeviceMesh((3,)), autopar.DeviceMesh((2, 2), ("dp", "tp"))):
        for result in threads(mesh.size, body, random_plan(model, batch, mesh, seed)):
            Equality.in_float64(f"{name} on {mesh}, plan {seed}", result, expected, 1e-9).check()


def vae(m, x):
    latent = Normal(x @ m.weight, (x @ m.weight).exp())
    prior = Normal(torch.zeros_like(x), torch.ones_like(x))
    return (
        -Normal(latent.rsample(), 1.0).log_prob(x).mean()
        + kl_divergence(latent, prior).mean()
        + latent.rsample((2,)).cos().mean()
        + (Normal(0.0, 1.0).sample(x.shape) * latent.mean).mean()
    )


def policy(m, x):
    h = x @ m.weight
    action, press, move = Categorical(logits=h), Bernoulli(logits=h), Independent(Normal(h, h.exp()), 1)
    return (
        (action.log_prob(action.sample()) * x.sum(1)).mean()
        + action.entropy().mean()
        + (press.log_prob(press.sample()) * x).mean()
        + move.log_prob(move.sample()).mean()
    )


def others(m, x):
    h = x @ m.weight
    drawn = (
        Beta(h.exp(), h.exp() + 1).rsample()
        + Gamma(h.exp(), h.cos() + 2).rsample()
        + Uniform(h, h + 1).rsample()
        + Dirichlet(h.exp()).rsample()
        + Exponential(h.exp()).rsample()
    )
    return (
        drawn.pow(2).mean()
        + Beta(h.exp(), h.exp() + 1).log_prob(x.sigmoid()).mean()
        + Gamma(h.exp(), 2.0).log_prob(x.exp()).mean()
        + Gamma(h.exp() / 50, 1.0).rsample().mean()
    )


def draws(m, x):
    h = x @ m.weight
    with torch.no_grad():
        noise = (
            torch.normal(h, h.exp())
            + torch.normal(h, 2.0)
            + torch.normal(1.0, h.exp())
            + torch.normal(h)
            + torch.normal(0.5, 2.0, (6, 6), dtype=x.dtype)
        )
        noise = (
            noise
            + torch.normal(h[:1], h[:, :1].exp())
            + torch.randint(2, 9, (6, 6))
            + torch.randint(3, (6, 1))
            + torch.randint_like(x, 4)
            + torch.randint_like(x, -2, 3)
        )
        noise = noise + torch.poisson(h.sigmoid() * 20)
    return (noise * h).mean() + F.rrelu(h, 0.1, 0.4, True).pow(2).mean() + (h[torch.randperm(6)] * x).sum()


class Recurrent(nn.Module):
    """Layers with dropout between them."""

    def __init__(self, kind, **how):
        super().__init__()
        self.layers, self.weight = (
            kind(6, 5, num_layers=2, dropout=0.4, **how).double(),
            nn.Parameter(torch.randn(6, 6).double()),
        )

    def forward(self, x):
        out, states = self.layers(
            (x @ self.weight)
            .unsqueeze(int(self.layers.batch_first))
            .expand(*((-1, 3, -1) if self.layers.batch_first else (3, -1, -1)))
        )
        return out.pow(2).sum() + sum(s.sin().sum() for s in (states if isinstance(states, tuple) else (states,)))


DRAWN = {
    "vae": lambda: FunctionModel(vae, 6, 6),
    "policy": lambda: FunctionModel(policy, 6, 6),
    "other distributions": lambda: FunctionModel(others, 6, 6),
    "draws": lambda: FunctionModel(draws, 6, 6),
    "lstm": lambda: Recurrent(nn.LSTM, bidirectional=True, batch_first=True),
    "gru": lambda: Recurrent(nn.GRU),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in ("gru", "lstm", "other distributions") else [])
        for name in DRAWN
    ],
)
def test_what_draws_is_eager_with_the_same_bits(name, threads):
    model, batch = DRAWN[name](), {"x": torch.randn(6, 6).double()}
    reference, bits = copy.deepcopy(model), ByPosition(seed=11)
    with bits:
        bits.next_step()
        reference(**batch).backward()
        bits.next_step()
        second = reference(**batch).detach()
    expected = {"second": second, **{n: p.grad for n, p in reference.named_parameters()}}

    def body(rank, plan):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        mine.random_state.load_state_dict({"seed": 11, "step": 0})
        mine(**batch).backward()
        return {
            "second": mine(**batch).detach(),
            **{n: whole(p.grad) for n, p in mine.named_parameters()},
        }  # whole() compares copies bit by bit

    free = autopar.DeviceMesh((2,)) if isinstance(model, Recurrent) else autopar.DeviceMesh((2, 2), ("dp", "tp"))
    for plan in (autopar.plan(model, batch, mesh=2, parallel="dp"), random_plan(model, batch, free, 1)):
        for result in threads(plan.mesh.size, body, plan):
            Equality.in_float64(f"{name} on {plan.mesh}", result, expected, 1e-9).check()
