"""What micro-batches make of parameters alone is made once a step, before the first of them."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter

import pytest
import torch
from torch import nn

import autopar
from autopar import DeviceMesh
from autopar.runtime import collectives
from autopar.testing import Equality, on_threads
from tests.models import MLP, eager_links
from tests.oracle import ByPosition, InFloat64
from tests.shares import one_in
from tests.training import whole
from tests.turns.cases import SEED, case

RANKS = 2
ROUNDING = ("attn.c_attn.bias", "k_proj.bias")  # the gradient of a bias of keys is nothing but rounding


def steps(model, batch, calls, parameters, next_step=lambda: None):
    """Gradients of the first of three AdamW steps of several calls each, and the parameters after them."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-3)
    found = {}
    for step in range(3):
        for call in range(calls):
            waits = hasattr(model, "no_sync") and call + 1 < calls
            with model.no_sync() if waits else contextlib.nullcontext():
                next_step()
                model(**batch).loss.backward()
        if not step:
            found |= {f"gradient of {n}": whole(p.grad) for n, p in parameters(model) if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return found | {n: whole(p).detach() for n, p in parameters(model)}


def named(model):
    return [(n, p) for n, p in model.named_parameters() if not n.endswith(ROUNDING)]


@pytest.mark.parametrize(
    "name, parallel, turns, calls",
    [
        ("gpt2", "zero1", 4, 1),
        ("gpt2", "zero2", 4, 2),
        ("t5", "zero1", 4, 1),
        pytest.param("t5", "zero3", 2, 2, marks=pytest.mark.nightly),  # by day without calls, and zero2 with them
        ("llama", None, 4, 1),
    ],
)
def test_three_steps_are_those_of_the_whole_batch(name, parallel, turns, calls):
    """With dropout, a tied table, T5's bias, a frozen parameter, and calls under no_sync."""
    model, batch = case(name)
    model = copy.deepcopy(model)
    next(p for n, p in model.named_parameters() if "norm" in n or "ln_1" in n).requires_grad_(False)
    reference = copy.deepcopy(model)
    with InFloat64(), ByPosition(SEED) as numbers:
        expected = steps(reference, batch, calls, named, numbers.next_step)

    def body(rank):
        with InFloat64():
            mine = autopar.autoparallelize(
                copy.deepcopy(model),
                batch,
                mesh=RANKS,
                parallel=parallel,
                cluster=eager_links(),
                microbatches=turns,
                accumulation=calls,
            )
            mine.random_state.seed = SEED
            return steps(mine, batch, calls, named)

    for found in on_threads(RANKS, body):
        assert found.keys() == expected.keys()
        Equality.in_float64(f"{name} under {parallel}", found, expected, 1e-12).check()


class Counted:
    """Elements that all ranks receive in gathers."""

    def __init__(self, monkeypatch):
        self.elements, self.lock, gather = 0, threading.Lock(), collectives.gather_into

        def counting(arrives, sent, **how):
            with self.lock:
                self.elements += arrives.numel()
            return gather(arrives, sent, **how)

        monkeypatch.setattr(collectives, "gather_into", counting)


def gathered(counted, parallel, turns):
    """Elements that a rank receives in gathers of a step, and those of all parameters."""
    model, batch = MLP(8, 2), {"x": torch.randn(16, 8), "y": torch.randn(16, 8)}

    def body(rank):
        mine = autopar.autoparallelize(
            copy.deepcopy(model), batch, mesh=RANKS, parallel=parallel, cluster=eager_links(), microbatches=turns
        )
        for _ in range(3):  # ranks compare their programs and inputs in the first calls
            mine(**batch).backward()
        barrier.wait()
        counted.elements = 0
        barrier.wait()
        mine(**batch).backward()

    barrier = threading.Barrier(RANKS, timeout=60)
    on_threads(RANKS, body)
    return counted.elements // RANKS, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("parallel", one_in(2, ["zero1", "zero2"]))
def test_a_parameter_that_is_kept_is_gathered_once_a_step(parallel, monkeypatch):
    """However many turns there are; a plan that drops its copies gathers in each of them."""
    counted = Counted(monkeypatch)
    for turns in (1, 8):
        received, elements = gathered(counted, parallel, turns)
        assert received == elements
    received, elements = gathered(counted, "zero3", 8)
    assert 8 * elements < received <= 16 * elements


class Tied(nn.Module):
    """A table that a product reads turned, and a weight that is computed of two parameters."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))

    def forward(self, ids, labels):
        logits = self.normed(self.table(ids)) @ self.table.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_what_is_computed_of_parameters_runs_once():
    """The norm of a weight is no op of a turn, and stands in the code before it."""
    ids = torch.arange(8 * 4).view(8, 4)
    batch = {"ids": ids, "labels": ids}
    model = Tied().double()
    with InFloat64():
        expected = copy.deepcopy(model)
        expected(**batch).backward()

    def body(rank):
        with InFloat64():
            mine = autopar.autoparallelize(
                copy.deepcopy(model), batch, mesh=RANKS, parallel="zero1", cluster=eager_links(), microbatches=4
            )
            loss = mine(**batch)
            loss.backward()
        counts = {
            half: Counter(str(n.target) for n in getattr(mine.joint, half).nodes) for half in ("beginning", "forward")
        }
        assert counts["beginning"].keys() > {k for k in counts["beginning"] if "norm" in k} != set()
        assert not any("norm" in target for target in counts["forward"])
        return {n: whole(p.grad) for n, p in mine.named_parameters()}

    for found in on_threads(RANKS, body):
        theirs = {n: p.grad for n, p in expected.named_parameters()}
        Equality.in_float64("weights of a norm", found, theirs, 1e-12).check()


def test_a_plan_prices_copies_that_are_kept_once():
    """Communication of zero1 takes what it takes of one micro-batch, and that of zero3 grows with turns."""
    model, batch = MLP(256, 2), {"x": torch.zeros(4096, 256), "y": torch.zeros(4096, 256)}
    moved = {}
    for parallel in ("zero1", "zero3"):
        for turns in (1, 8):
            plan = autopar.plan(
                model, batch, mesh=DeviceMesh((4,)), parallel=parallel, cluster=eager_links(), microbatches=turns
            )
            names = set(plan.parameters)
            moved[parallel, turns] = sum(c.seconds for c in plan.conversions if c.source in names)
    assert moved["zero1", 8] == pytest.approx(moved["zero1", 1])
    assert moved["zero3", 8] > 6 * moved["zero3", 1]
