"""A model that was built on meta.

Its values are those of its own recipes on one device, under every plan, and no rank ever holds it in full.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import DeviceMesh
from autopar.letters import Disagreement, NotServed
from autopar.testing import on_processes, on_threads
from tests import language
from tests.models import eager_links, on_meta
from tests.training import whole

TEXT = {
    "gpt2": lambda: language.gpt2(width=32, vocabulary=61, length=32),
    "bert": lambda: language.bert(1, 32, 64, 61, 32),
    "llama": lambda: language.llama(2, 32, 64, 61, 32, pad_token_id=3),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(8 * 16, 16)

    def forward(self, x):
        h = self.head(self.features(x)).unsqueeze(1)
        return self.attention(h, h, h, need_weights=False)[0].square().mean()


def batch_for(kind):
    if kind == "net":
        return (torch.randn(4, 3, 4, 4),)
    return language.drawn(4, 8, 61)


def by_hand(model):
    """The recipes on one device: everything made at once, children first."""
    model.to_empty(device="cpu")
    if hasattr(model, "tie_weights"):
        model.tie_weights()

    def walk(module, above):
        above = getattr(module, "_init_weights", None) or above
        for child in module.children():
            walk(child, above)
        for step in (
            getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None),
            above and (lambda: above(module)),
        ):
            if step:
                step()

    walk(model, None)
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize(
    "kind, parallel",
    [
        pytest.param(
            k,
            p,
            marks=[] if (k, p) in (("llama", "zero3"), ("bert", "megatron"), ("net", "zero3")) else pytest.mark.nightly,
        )
        for k in ("gpt2", "llama", "bert", "net")
        for p in ("zero3", "megatron", None)
    ],
)
def test_values_are_those_of_the_recipes_on_one_device(kind, parallel):
    if kind == "net" and parallel == "megatron":
        parallel = "dp"
    model = on_meta(Net if kind == "net" else TEXT[kind])
    torch.manual_seed(7)
    expected = by_hand(copy.deepcopy(model))
    torch.manual_seed(7)
    batch = batch_for(kind)
    torch.manual_seed(7)

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, parallel=parallel, cluster=eager_links())
        loss = mine(*batch) if kind == "net" else mine(**batch).loss
        loss.backward()
        return {n: whole(t).detach().clone() for n, t in (*mine.named_parameters(), *mine.named_buffers())}, loss.item()

    for found, loss in on_threads(2, body):
        assert loss == loss and set(found) == set(expected)
        assert all(
            torch.equal(found[n], expected[n])
            for n in expected
            if not n.endswith(("running_mean", "running_var", "num_batches_tracked"))
        )


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_draws_by_position_are_the_same_under_every_plan(kind):
    model, batch = on_meta(TEXT[kind]), batch_for(kind)

    def body(rank, size, parallel):
        mine = autopar.autoparallelize(
            copy.deepcopy(model),
            batch,
            mesh=DeviceMesh(size),
            parallel=parallel,
            cluster=eager_links(),
            init="counter",
        )
        return {n: whole(t).detach().clone() for n, t in mine.named_parameters()}, sum(
            p.to_local().numel() for p in mine.parameters()
        )

    runs = []
    for size, parallel in (((1,), "dp"), ((2,), "zero3"), ((2,), "megatron"), ((2, 2), "zero3")):
        torch.manual_seed(5)
        runs += on_threads(DeviceMesh(size).size, body, size, parallel)
    whole_size = runs[0][1]
    for found, local in runs[1:]:
        assert all(torch.equal(found[n], runs[0][0][n]) for n in found) and local < 0.7 * whole_size
    for name, values in runs[0][0].items():
        if values.dim() == 2 and values.numel() > 1000:
            assert abs(values.mean()) < 0.003 and 0.005 < values.std() < 0.03, name
    if kind == "llama":
        assert runs[0][0]["model.embed_tokens.weight"][3].abs().max() == 0


def peak_of(rank):
    """The largest tensor that a rank ever makes on its way from meta to shards."""

    class Sizes(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.now, self.most = 0, 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.empty.memory_format and not result.is_meta and result.dtype == torch.float32:
                self.most = max(self.most, result.numel())
            return result

    model = on_meta(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(10))))
    with Sizes() as sizes:
        mine = autopar.autoparallelize(
            model, (torch.zeros(4, 64),), mesh=2, parallel="zero3", loss=lambda out, inputs: out.sum()
        )
    return sizes.most, sum(p.to_local().numel() for p in mine.parameters())


def test_one_module_is_there_in_full_at_a_time():
    for most, held in on_processes(2, peak_of):
        assert most == 64 * 64 and held == 10 * (64 * 64 + 64) // 2


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))

    def forward(self, x):
        return (x @ self.weight).sum()


class Partly(Bare):
    def reset_parameters(self):
        with torch.no_grad():
            self.weight[:2].zero_()


class Held(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.table = torch.zeros(4)

    def forward(self, x):
        return (super().forward(x) + self.table).sum()


@pytest.mark.parametrize(
    "make, how, match",
    [
        (Bare, {}, "neither reset_parameters"),
        (Partly, {}, "in part only"),
        (Held, {}, "neither parameter nor buffer"),
        (Bare, dict(init="counter"), "neither reset_parameters"),
        (Bare, dict(init="zeros"), "init="),
    ],
)
def test_what_nothing_gives_values_is_a_letter(make, how, match):
    model = on_meta(make)
    with pytest.raises(NotServed, match=match):
        autopar.autoparallelize(model, (torch.zeros(4, 4),), mesh=1, **how)


class Elsewhere(nn.Linear):
    def reset_parameters(self):
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(np.random.default_rng().standard_normal((4, 4))))
            self.bias.zero_()


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=False)

    def reset_parameters(self):
        nn.init.orthogonal_(self.lin.weight)

    def forward(self, x):
        return self.lin(x)


class Scaled(nn.Linear):
    def reset_parameters(self):
        with torch.no_grad():
            self.weight.normal_()
            self.weight.div_(self.weight.norm())
            self.bias.zero_()


def diverges(rank):
    try:
        autopar.autoparallelize(on_meta(lambda: Elsewhere(4, 4)), (torch.zeros(4, 4),), mesh=2, parallel="dp")
    except Disagreement as e:
        return str(e)
    return "nothing"


def test_recipes_that_draw_elsewhere_or_in_wholes():
    assert all("draws from elsewhere" in said for said in on_processes(2, diverges))

    def orthogonal(rank):
        mine = autopar.autoparallelize(on_meta(Parent), (torch.zeros(4, 4),), mesh=2, parallel="zero3")
        w = whole(mine.lin.weight.detach())
        return (w @ w.t() - torch.eye(4)).abs().max().item()

    assert max(on_threads(2, orthogonal)) < 1e-5
    for make in (Parent, lambda: Scaled(4, 4), lambda: Elsewhere(4, 4)):
        with pytest.raises(NotServed, match="counter"):
            on_threads(
                2,
                lambda rank, make=make: autopar.autoparallelize(
                    on_meta(make), (torch.zeros(4, 4),), mesh=2, init="counter"
                ),
            )
