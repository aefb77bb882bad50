"""What a critical reader has broken once.

Copies, constants, second derivatives, gradients at other outputs, whole state dicts, recipes that draw elsewhere.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.letters import BadPlan, BadWeights, Consumed, Disagreement, NotCaptured, NotServed
from autopar.testing import on_processes, on_threads
from tests.models import eager_links
from tests.training import whole

X = torch.arange(32, dtype=torch.float64).view(8, 4) / 10


def two(body):
    return on_threads(2, body)


def parallel(model, batch, **how):
    return autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, cluster=eager_links(), **how)


class WithLogits(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 16).double(), nn.Linear(16, 4).double()

    def forward(self, x, y):
        out = self.b(self.a(x))
        return {"loss": F.mse_loss(out, y), "logits": out}


@pytest.mark.parametrize("preset", ["dp", "zero3"])
def test_a_gradient_at_another_output_than_the_loss_is_a_letter(preset):
    model = WithLogits()

    def body(rank):
        out = parallel(model, {"x": X, "y": X}, parallel=preset)(X, X)
        with pytest.raises(NotServed, match="backward was lowered for the loss"):
            (out["loss"] + out["logits"].full_tensor().square().mean()).backward()

    two(body)


def test_gradients_of_gradients_are_a_letter():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def body(rank):
        x = X.clone().requires_grad_()
        mine = parallel(model, (x,))
        with pytest.raises(NotServed, match="gradient of gradients"):
            torch.autograd.grad(mine(x).sum(), x, create_graph=True)

    two(body)


def test_a_call_under_inference_mode_first():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double().eval()
    own = copy.deepcopy(model)
    own(X).sum().backward()

    def body(rank):
        mine = parallel(model.train(), (X,)).eval()
        with torch.inference_mode():
            mine(X)
        mine(X).sum().backward()
        return [whole(p.grad) for p in mine.parameters()]

    for found in two(body):
        for gradient, p in zip(found, own.parameters(), strict=True):
            torch.testing.assert_close(gradient, p.grad)


class Switched(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4).double()

    def forward(self, x, k):
        h = self.l(x).square().mean()
        if isinstance(k, set):
            return h * (2 if "a" in k else 3)
        return h if k is True else h * 5 if isinstance(k, float) else h * 3


def test_constants_are_what_they_are_now():
    model = Switched()

    def body(rank):
        mine = parallel(model, {"x": X, "k": True})
        found = [mine(X, k).item() for k in (True, 1, 1.0)]
        held = {"z"}
        found.append(mine(X, held).item())
        held.add("a")
        found.append(mine(X, held).item())
        for _ in range(3):
            mine(X, float("nan"))
        return found, len(mine._autopar.programs)

    base = model(X, True).item()
    for found, programs in two(body):
        assert found == pytest.approx([base, 3 * base, 5 * base, 3 * base, 2 * base]) and programs == 6


def test_a_copy_has_modes_and_gradients_of_its_own():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    own = copy.deepcopy(model)
    own(X)
    expected = copy.deepcopy(own).eval()(X)

    def body(rank):
        mine = parallel(model, (X,))
        mine(X)
        with mine.no_sync():
            mine(X).sum().backward()
        statistics = mine[1].running_mean.clone()
        other = copy.deepcopy(mine).eval()
        other[1].running_mean.copy_(own[1].running_mean)
        other[1].running_var.copy_(own[1].running_var)
        found = other(X)
        other.zero_grad()
        assert (
            torch.equal(mine[1].running_mean, statistics)
            and mine._autopar.waiting.of
            and not other._autopar.waiting.of
            and mine.training
        )
        return whole(found.detach())

    for found in two(body):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_one_device_is_loaded(assign):
    model, other = (nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double() for _ in range(2))
    other[2].weight = nn.Parameter(other[2].weight.detach())

    def body(rank):
        mine = parallel(model, (X,), parallel="zero3")
        mine.load_state_dict(copy.deepcopy(other).state_dict(), assign=assign)
        return whole(mine(X).detach())

    for found in two(body):
        torch.testing.assert_close(found, other(X).detach())


def test_names_that_the_parallel_model_has_too_are_a_letter():
    model = nn.Linear(4, 4).double()
    model.plan = nn.Linear(4, 4).double()
    with pytest.raises(NotServed, match="attribute 'plan'"):
        two(lambda rank: parallel(model, (X,)))


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


def on_meta(make):
    with torch.device("meta"):
        return make()


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

    assert max(two(orthogonal)) < 1e-5
    for make in (Parent, lambda: Scaled(4, 4), lambda: Elsewhere(4, 4)):
        with pytest.raises(NotServed, match="counter"):
            two(
                lambda rank, make=make: autopar.autoparallelize(
                    on_meta(make), (torch.zeros(4, 4),), mesh=2, init="counter"
                )
            )


def test_wrong_uses_are_letters():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()

    def body(rank):
        mine = parallel(model, (X,))
        for use, letter, match in (
            (lambda: mine(X[:, :3]), NotCaptured, r"raises RuntimeError.*\n *at .*in forward"),
            (lambda: mine("text"), NotCaptured, "raises TypeError"),
            (lambda: autopar.autoparallelize(mine, (X,), mesh=2), Consumed, "parallel already"),
            (lambda: autopar.plan(mine, (X,), mesh=2), Consumed, "parallel already"),
            (lambda: parallel(model, (X,), plan="plan.json"), BadPlan, "is no Plan"),
            (lambda: parallel(model, (X,), weights=3), BadWeights, "is no path"),
        ):
            with pytest.raises(letter, match=match):
                use()

    two(body)
