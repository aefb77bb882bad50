"""Experts of transformers as one op a layer, and grouped products of parts of any width."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import DeviceMesh
from autopar.graph.nodes import op_name
from autopar.letters import NotCaptured, NotServed
from autopar.ops.products import grouped_mm
from autopar.testing import Equality
from autopar.tracer import ColoTracer
from tests.random_plans import random_plan
from tests.training import whole
from tests.zoo.experts import FAMILIES, IMPLEMENTATIONS, batch_of, layers_of_experts

DAILY = [family for family in FAMILIES.values() if family.is_daily]
NIGHTLY = [family for family in FAMILIES.values() if not family.is_daily]


def step(model, batch):
    """The loss and the gradients of a step; without labels there is a loss of outputs."""
    found = model(**batch)
    loss = found["loss"] if "labels" in batch else found[0].sin().sum()
    loss.backward()
    gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": whole(loss.detach()), **gradients}


def experts_in(graph) -> int:
    return sum(op_name(node) == "experts" for node in graph.nodes)


@pytest.mark.parametrize(
    "family", [*DAILY, *(pytest.param(f, marks=pytest.mark.nightly) for f in NIGHTLY)], ids=lambda f: f.name
)
def test_a_family_is_captured_alike_and_trains_as_eager(family):
    """Whatever implementation is set, each layer of experts is one op."""
    model = family.build()
    batch = batch_of(model)
    expected = step(copy.deepcopy(model), batch)
    graphs = []
    for implementation in IMPLEMENTATIONS:
        model.config._experts_implementation = implementation
        graphs.append(ColoTracer().trace(model, batch))
    assert len({graph.digest for graph in graphs}) == 1
    assert experts_in(graphs[0]) == layers_of_experts(model) > 0
    found = step(autopar.autoparallelize(model, batch, mesh=1), batch)
    Equality.in_float64(family.name, found, expected, 1e-6 if family.rounded else 1e-9).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_runs_as_it_is_built(dtype):
    model = FAMILIES["Mixtral"].build("grouped_mm", dtype)
    batch = batch_of(model)
    expected = step(copy.deepcopy(model), batch)
    found = step(autopar.autoparallelize(model, batch, mesh=1), batch)
    for name, value in expected.items():
        bound = (1e-5 if dtype == torch.float32 else 2e-2) * max(value.abs().max().item(), 1e-2)
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=bound, msg=lambda said, name=name: f"{name}: {said}"
        )


def with_gate(model: nn.Module, gate):
    """The model, whose experts have a gate of their own, and a parameter that it may read."""
    experts = next(module for module in model.modules() if hasattr(module, "_is_expert_parallel"))
    experts.slope = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    experts.__class__ = type("Own", (type(experts),), {"_apply_gate": gate})
    return model


def learned(self, rows):
    gate, other = rows.chunk(2, -1)
    return torch.sigmoid(self.slope * gate) * other


def asking(self, rows):
    gate, other = rows.chunk(2, -1)
    return (gate if rows.numel() == 0 else torch.relu(gate)) * other


def test_a_gate_that_reads_a_parameter():
    model = with_gate(FAMILIES["Mixtral"].build("batched_mm"), learned)  # its eager experts do not call their gate
    batch = batch_of(model)
    expected = step(copy.deepcopy(model), batch)
    assert any(name.endswith("slope") for name in expected)
    assert experts_in(ColoTracer().trace(model, batch)) == 1
    Equality.in_float64("slope", step(autopar.autoparallelize(model, batch, mesh=1), batch), expected, 1e-9).check()


def test_a_gate_that_is_no_body_runs_as_transformers_writes_it():
    model = with_gate(FAMILIES["Mixtral"].build("batched_mm"), asking)
    batch = batch_of(model)
    expected = step(copy.deepcopy(model), batch)
    plan = autopar.plan(model, batch, mesh=1)
    assert "experts" not in [decision.op for decision in plan.decisions.values()]
    assert any("Own runs as transformers writes it" in line for line in plan.assumptions)
    found = step(autopar.autoparallelize(model, batch, plan=plan), batch)
    Equality.in_float64("as written", found, expected, 1e-9).check()


def test_experts_that_transformers_divides_are_a_letter():
    model = FAMILIES["Mixtral"].build()
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel"):
            module._is_expert_parallel = True
    with pytest.raises(NotServed, match="transformers divides MixtralExperts itself"):
        ColoTracer().trace(model, batch_of(model))


class Experts(nn.Module):
    """Two grouped products, with 24 and 20 columns."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(3, 24, 20, generator=generator) / 5)
        self.down = nn.Parameter(torch.randn(3, 20, 24, generator=generator) / 5)

    def forward(self, x, ends):
        h = F.silu(F.grouped_mm(x, self.up, offs=ends))
        return F.grouped_mm(h, self.down, offs=ends).square().sum()


@pytest.mark.parametrize("seed", range(4))
def test_experts_in_parts_of_any_width(seed, threads):
    """On four devices a row of a part has 6 or 5 numbers, which are no whole number of 16 bytes."""
    model = Experts()
    batch = {"x": torch.randn(8, 24).sin().requires_grad_(), "ends": torch.tensor([3, 3, 8], dtype=torch.int32)}
    reference = copy.deepcopy(model)
    reference(**batch).backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    plan = random_plan(model, batch, DeviceMesh((4,)), seed)

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        mine(**batch).backward()
        return {n: whole(p.grad) for n, p in mine.named_parameters()}

    for found in threads(4, body):
        Equality.in_float64("parts", found, expected, 1e-4).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("inner", "width"), [(8, 16), (6, 17), (7, 24), (5, 3)])
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_grouped_product_of_any_width(inner, width, is_turned, dtype):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(16, inner, generator=generator).to(dtype).requires_grad_()
    b = torch.randn(4, width, inner, generator=generator).to(dtype).mT
    b = (b if is_turned else b.contiguous()).requires_grad_()
    ends = torch.tensor([4, 8, 8, 16], dtype=torch.int32)
    exact = [x.detach().double().requires_grad_() for x in (a, b)]
    groups = torch.searchsorted(ends, torch.arange(16), right=True)
    right = torch.bmm(exact[0][:, None], exact[1][groups])[:, 0]
    found = grouped_mm(a, b, offs=ends)
    gradient = torch.randn(16, width, generator=generator).to(dtype)
    found.backward(gradient)
    right.backward(gradient.double())
    for one, other in ((found, right), (a.grad, exact[0].grad), (b.grad, exact[1].grad)):
        bound = 8 * torch.finfo(dtype).eps * other.abs().max().item()
        torch.testing.assert_close(one.double(), other, rtol=0, atol=bound)
    assert found.is_contiguous()


def test_a_grouped_product_in_float64_where_eager_fails_is_a_letter():
    model, batch = Experts().double(), {"x": torch.randn(8, 24).double(), "ends": torch.tensor([3, 3, 8]).int()}
    with pytest.raises(RuntimeError, match=r"Expected .*Float32, BFloat16 or Float16"):
        model(**batch)
    with pytest.raises(NotCaptured, match="Expected Float32, BFloat16 or Float16"):
        autopar.autoparallelize(model, batch, mesh=1)
