"""Ops that draw: the same draws however they are cut, of the distribution that torch's have."""

from __future__ import annotations

import copy

import numpy as np
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
from autopar.runtime import forms
from autopar.runtime.random import key_of, uniform
from autopar.testing import Equality
from tests.equality.test_functions import Of, random_plan
from tests.oracle import ByPosition
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


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_draws_are_the_same_on_any_mesh(name, threads):
    model, batch = Of(FUNCTIONS[name], 6, 6), {"x": torch.randn(6, 6).double()}

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
        for seed in range(2):
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
    "vae": lambda: Of(vae, 6, 6),
    "policy": lambda: Of(policy, 6, 6),
    "other distributions": lambda: Of(others, 6, 6),
    "draws": lambda: Of(draws, 6, 6),
    "lstm": lambda: Recurrent(nn.LSTM, bidirectional=True, batch_first=True),
    "gru": lambda: Recurrent(nn.GRU),
}


@pytest.mark.parametrize("name", DRAWN)
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


KEY, N = torch.tensor(key_of(11, 2)), 60000


def drawn(kind, a=None, b=None, dtype=torch.float64):
    return forms.drawn_by_position(kind, KEY, 3, (N,), ((),), (N,), dtype, a, b)


@pytest.mark.parametrize(
    "kind, a, b",
    [
        ("uniform", None, None),
        ("uniform", -2.0, 5.0),
        ("normal", None, None),
        ("normal", 3.0, 0.5),
        ("exponential", 2.0, None),
        ("log_normal", 0.5, 0.3),
        ("cauchy", 1.0, 2.0),
        ("geometric", 0.3, None),
        ("random", 3, 17),
    ],
)
def test_their_distribution_is_that_of_torch(kind, a, b):
    eager = getattr(torch.empty(N, dtype=torch.float64), f"{kind}_")(*(v for v in (a, b) if v is not None))
    for dtype in (torch.float64, torch.float32):
        ours = drawn(kind, a, b, dtype)
        assert ours.dtype == dtype and ours.isfinite().all()
        edges = torch.linspace(0.02, 0.98, 25).double()
        share = [
            (x.double()[:, None] <= eager.quantile(edges)).double().mean(0) for x in (ours, eager)
        ]  # the empirical distributions, at the same points
        assert (share[0] - share[1]).abs().max() < 0.012
    if kind != "geometric":
        assert drawn(kind, a, b).unique().numel() > (13 if kind == "random" else N // 2)


def test_whole_numbers_reach_both_ends_and_no_further():
    ours = drawn("random", -2, 3, torch.int64)
    assert ours.unique().tolist() == [-2, -1, 0, 1, 2]


def test_uniform_numbers_are_the_published_finalizer_of_places():
    def mix(h):
        with np.errstate(over="ignore"):
            h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
            h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
            return h ^ (h >> np.uint32(16))

    key, op, shape = int(KEY) % 2**64, 5, (4, 7)
    with np.errstate(over="ignore"):
        seed = mix(mix(np.uint32(key % 2**32) ^ np.uint32(op * 0x85EBCA77 % 2**32)) ^ np.uint32(key >> 32))
        rows = mix(mix(np.uint32(0) ^ seed) ^ np.arange(4, dtype=np.uint32))
        bits = mix(rows[:, None] + np.arange(7, dtype=np.uint32) * np.uint32(0x9E3779B9))
    assert np.array_equal(uniform(KEY, op, shape, ((), ()), shape, torch.float64).numpy(), bits / 2.0**32)
    assert np.array_equal(
        uniform(KEY, op, shape, ((), ()), shape).numpy(), (bits >> 8).astype(np.float32) / np.float32(2**24)
    )


@pytest.mark.parametrize("replacement", [False, True])
def test_categories_come_by_their_weights(replacement):
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0]).expand(20000, 4)
    ours = forms.multinomial_by_position(weights, KEY, 1, (20000, 4), ((), ()), 2, replacement)
    eager = torch.multinomial(weights, 2, replacement)
    for i in range(2):
        shares = [torch.bincount(x[:, i], minlength=4) / 20000 for x in (ours, eager)]
        assert (shares[0] - shares[1]).abs().max() < 0.015
    assert replacement or (ours[:, 0] != ours[:, 1]).all()


def test_alpha_dropout_keeps_mean_and_variance():
    x = torch.randn(400, 300).double()
    ours = forms.alpha_dropout_by_position(x, KEY, 1, (400, 300), ((), ()), 0.3)
    assert abs(ours.mean().item()) < 0.02 and abs(ours.var().item() - 1) < 0.02
    torch.manual_seed(0)
    eager = F.alpha_dropout(x, 0.3, True)
    low = torch.stack([y.min() for y in (ours, eager)])
    torch.testing.assert_close(ours[ours <= low[0] + 1e-9].mean(), eager[eager <= low[1] + 1e-9].mean())
