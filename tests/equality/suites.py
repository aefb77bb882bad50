"""Small suites that broken compilers must not pass.

An MLP under five plans, a layer of GPT-2 under one, and a model of a mutant's own.
"""

from __future__ import annotations

import copy

import torch

import autopar
from autopar.testing import Equality
from tests.equality import gpt2
from tests.gauntlet.models import Tables
from tests.models import FunctionModel, eager_links, mlp_case, mlp_pins
from tests.training import train, whole

MESH = autopar.DeviceMesh((2, 2), ("dp", "tp"))
PINS = {
    **{kind: mlp_pins(kind, MESH) for kind in ("dp", "megatron", "sharded")},
    "contracted": {"x": "S(1)@dp", "*.up": "R", "blocks.*.down": "S(1)@tp", "*.up.weight": "S(1)@tp"},
    "through gelu": {"*.up.weight": "S(1)@tp", "blocks.*.up": "P(sum)@tp"},
}


TABLES = "two tables"


def one_step(rank, model, batch, plan):
    return train(autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan), batch, "sgd", steps=1)


def two_backwards(rank, model, batch, plan):
    parallel = model if plan is None else autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
    found = {}
    for k in range(2):
        loss = parallel(**batch)
        loss.backward()
        found[f"loss.{k}"] = loss.detach()
    return found | {n: whole(p.grad) for n, p in parallel.named_parameters()}


def suite(threads, first=None):
    """Raises Unequal as soon as something differs from one device.

    `first` is a kind of plan, or TABLES, that is tried before the others.
    """
    if first == TABLES:
        two_tables(threads)
    model, batch = mlp_case()
    expected = train(copy.deepcopy(model), batch, "sgd", steps=1)
    for kind, pins in sorted(PINS.items(), key=lambda item: item[0] != first):
        try:
            plan = autopar.plan(model, batch, mesh=MESH, cluster=eager_links(), constraints=pins)
        except autopar.letters.BadConstraint:
            assert kind in (
                "through gelu",
                "megatron",
            )  # gelu of a P(sum) is no point of a sound space; a broken one may have it, and lack another
            continue
        for result in threads(4, one_step, model, batch, plan):
            Equality.in_float64(f"{kind}: losses", result[0], expected[0], 1e-9).check()
            Equality.in_float64(f"{kind}: gradients", result[1], expected[1], 1e-9).check()
    if first != TABLES:
        two_tables(threads)


def two_tables(threads):
    """Gradients of two backward calls add up."""
    tables, batch = Tables().double(), {"x": torch.randn(8, 4).double()}
    plan = autopar.plan(tables, batch, mesh=MESH, cluster=eager_links(), constraints={"*": "R"})
    for result in threads(4, two_backwards, tables, batch, plan):
        Equality.in_float64("two backwards", result, two_backwards(0, copy.deepcopy(tables), batch, None), 1e-9).check()


def gpt2_plan():
    """A layer of a Megatron GPT-2 with dropout: vocabulary, heads and batch are cut."""
    return gpt2.planned("megatron", MESH, 0.1, "float64", layers=1)


def gpt2_suite(threads, plan):
    """One step under `gpt2_plan()`; raises Unequal where it differs from one device."""
    model, batch = gpt2.gpt2(0.1, layers=1)
    for result in threads(4, gpt2.train_parallel, model, batch, plan, "sgd", "float64", 1):
        gpt2.check("gpt2", result, 0.1, "sgd", "float64", steps=1, layers=1)


def own_suite(threads, function):
    """One step of a model of this function with its rows cut; raises Unequal where it differs from one device."""
    torch.manual_seed(0)
    model, batch = FunctionModel(function, 6, 12), {"x": torch.randn(6, 6).double()}
    expected = two_backwards(0, copy.deepcopy(model), batch, None)
    plan = autopar.plan(model, batch, mesh=2, constraints={"x": "S(0)@devices"})
    for result in threads(2, two_backwards, model, batch, plan):
        Equality.in_float64("a model of its own", result, expected, 1e-9).check()
