"""Hugging Face models whose sequence is cut: windows, sinks, padding and documents train as eager torch does.

Parts are uneven, and labels are ignored unequally often in them. Norms and softmaxes that the models compute in
single precision are computed in double here, in eager torch and in the program alike, so that 1e-9 is a fair bound.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import DeviceMesh
from autopar.sharding.attention_ways import ATTENTIONS, way_of
from autopar.testing import Equality
from tests.random_plans import random_plan_with
from tests.training import whole
from tests.zoo.masks import LENGTH, build, positions

ROWS, RANKS, STEPS = 2, 4, 3
EAGER_ALONE = ("gpt-oss",)
NAMES = ("LLaMA", "Mistral", "Gemma 3", "gpt-oss", "ModernBERT", "Qwen 3")
KINDS = ("plain", "padded", "restarted")
FLAT, SQUARE = DeviceMesh((RANKS,), ("cp",)), DeviceMesh((2, 2), ("dp", "cp"))
WAYS = {  # a mesh, a preset, and the way of attention along the last axis
    "ring": (FLAT, dict(context=dict(size=4, how="ring")), "ring"),
    "gather": (DeviceMesh((2, 2), ("outer", "cp")), dict(context=dict(size=4, how="gather")), "gather"),
    "ulysses": (SQUARE, dict(data=2, context=dict(size=2, how="ulysses")), "ulysses"),
    "ring, zero3": (SQUARE, dict(data=dict(size=2, zero=3), context=dict(size=2, how="ring")), "ring"),
    "free": (DeviceMesh((2, 2)), None, ""),
}
DAILY = {("LLaMA", "restarted", "ring")}
# Each model meets each other way and each kind of batch, and each kind each way.
CASES = [(name, KINDS[(2 + i + k) % len(KINDS)], way) for i, name in enumerate(NAMES) for k, way in enumerate(WAYS)]
MARKED = [
    pytest.param(*case, marks=() if case in DAILY else pytest.mark.nightly, id=" | ".join(case)) for case in CASES
]


class Trained(nn.Module):
    """A model with the mean loss of the labels that are not ignored, in the precision of its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, labels: Tensor, **given: Tensor) -> Tensor:
        logits = self.model(**given).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def trained(name: str) -> Trained:
    model = build(name, "eager" if name in EAGER_ALONE else "sdpa")
    model.config.use_cache = False
    return Trained(model)


def batch(kind: str) -> dict[str, Tensor]:
    """Two rows of tokens; most labels of the first positions are ignored, and few of the last."""
    ids = torch.randint(3, 32, (ROWS, LENGTH))
    is_ignored = torch.rand(ROWS, LENGTH) > torch.linspace(0.1, 1, LENGTH)
    given = {"input_ids": ids, "labels": torch.where(is_ignored, -100, ids.flip(1))}
    if kind == "padded":
        given["attention_mask"] = (torch.arange(LENGTH) >= torch.tensor([[9], [20]])).long()
    if kind == "restarted":
        given["position_ids"] = positions((10, 20, 1, 6), (30, 7))
    return given


def training(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Losses and parameters of three steps of AdamW, and the gradients of the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}
    for step in range(STEPS):
        loss = model(**given)
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        if step == 0:
            found |= {f"gradient {n}": whole(p.grad).clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return found | {n: whole(p).detach().clone() for n, p in model.named_parameters()}


@pytest.fixture
def in_double(monkeypatch):
    """Values of double precision stay in it where a model asks for single precision."""

    def kept(method, asks):
        @functools.wraps(method)
        def called(x, *args, **kwargs):
            is_asked = x.dtype == torch.float64 and asks(*args, **kwargs)
            return x if is_asked else method(x, *args, **kwargs)

        return called

    def softmax(x, dim=None, _stacklevel=3, dtype=None):
        return plain(x, dim, _stacklevel, None if x.dtype == torch.float64 else dtype)

    def to_single(*args, **kwargs):
        return (*args, kwargs.get("dtype"))[0] == torch.float32

    plain = F.softmax
    monkeypatch.setattr(F, "softmax", softmax)
    monkeypatch.setattr(Tensor, "float", kept(Tensor.float, lambda: True))
    monkeypatch.setattr(Tensor, "to", kept(Tensor.to, to_single))


def planned(model: nn.Module, given: dict[str, Tensor], way: str) -> autopar.Plan:
    mesh, parallel, expected = WAYS[way]
    if parallel is None:
        (op,) = {d.op for d in autopar.plan(model, given, mesh=1).decisions.values() if d.op in ATTENTIONS}
        return random_plan_with((op, 0, "S(2)"), model, given, mesh, 0)
    plan = autopar.plan(model, given, mesh=mesh, parallel=parallel, memory_budget="inf")
    ways = [way_of(d.choice.strategies[-1], 4) for d in plan.decisions.values() if d.op in ATTENTIONS]
    assert ways == [expected] * 2
    return plan


def check(model, given, plan, threads, **how) -> None:
    """Raises Unequal where a rank's steps are not those of eager torch."""
    expected = training(copy.deepcopy(model), given)

    def body(rank):
        return training(autopar.autoparallelize(copy.deepcopy(model), given, plan=plan, **how), given)

    for found in threads(plan.mesh.size, body, timeout_s=170):
        Equality.in_float64("long sequence", found, expected, 1e-9).check()


@pytest.mark.parametrize(("name", "kind", "way"), MARKED)
def test_a_cut_sequence_trains_as_eager_torch_does(name, kind, way, threads, in_double):
    model, given = trained(name), batch(kind)
    check(model, given, planned(model, given, way), threads)
