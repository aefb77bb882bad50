"""Mixed precision: the parallel program is the single-device program on casts of its parameters, gradients are reduced
in the dtype that is said, and the plan is cheaper where bytes are.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import autopar
from autopar import DeviceMesh, Precision
from autopar.graph.graph import info, op_name
from autopar.letters import Letter
from autopar.testing.equality import Equality
from autopar.tracer import ColoTracer
from autopar.tracer.precision import reference
from tests.language import CASES
from tests.models import mlp_case, still
from tests.shares import by_day
from tests.training import whole


def case(name):
    """A model without dropout, and a random batch."""
    model, batch = CASES[name]()
    drawn = {
        k: torch.randn(v.shape) if v.is_floating_point() else torch.randint(0, 250, v.shape) for k, v in batch.items()
    }
    return still(model), drawn


@pytest.mark.parametrize(
    "reduce, parallel",
    by_day(itertools.product(["float64", "float32"], [None, "zero3", "megatron"]), ("float32", "zero3")),
)
def test_it_trains_as_the_single_device_program_on_casts(parallel, reduce, threads):
    """Computing in float64 what is stored in float32.

    No rounding is left to hide behind but that of the stored gradients.
    """
    model, batch = case("gpt2")
    precision = Precision("float64", reduce)
    plan = autopar.plan(model, batch, mesh=DeviceMesh((2, 2), ("dp", "tp")), parallel=parallel, precision=precision)
    own = copy.deepcopy(model)
    loss = reference(own, precision)(**batch).loss
    loss.backward()
    expected = {"loss": loss.detach(), **{n: p.grad for n, p in own.named_parameters()}}
    assert all(p.grad.dtype == torch.float32 for p in own.parameters())

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        loss = mine(**batch).loss
        loss.backward()
        return {"loss": loss.detach(), **{n: whole(p.grad) for n, p in mine.named_parameters()}}

    for result in threads(4, body):
        assert result["loss"].dtype == expected["loss"].dtype
        Equality.in_float64(
            f"{parallel}, reduced in {reduce}",
            {k: v.double() for k, v in result.items()},
            {k: v.double() for k, v in expected.items()},
            2e-6,
        ).check()


def test_a_step_in_bfloat16_is_the_references(threads):
    model, batch = case("mlp")
    model, batch = model.float(), {k: v.float() for k, v in batch.items()}
    precision = Precision()
    plan = autopar.plan(model, batch, mesh=2, precision=precision)
    own = copy.deepcopy(model)
    reference(own, precision)(**batch).backward()

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        mine(**batch).backward()
        return {n: whole(p.grad) for n, p in mine.named_parameters()}

    for result in threads(2, body):
        for n, p in own.named_parameters():
            assert result[n].dtype == torch.float32
            assert (result[n] - p.grad).norm() <= 0.05 * p.grad.norm() + 1e-6  # a few roundings to eight bits


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_gradients_are_reduced_in_the_dtype_that_is_said(reduce):
    with torch.device("meta"):
        model, x = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3))), torch.empty(2**17, 512)
    plan = autopar.plan(
        model,
        (x,),
        mesh=4,
        parallel="dp",
        precision=Precision("bfloat16", reduce),
        loss=lambda out, inputs: out.square().mean(),
    )
    casts = {n for n, d in plan.decisions.items() if d.op == "to" and "weight" not in n}
    ends = [
        c.target
        for c in plan.conversions
        if any(s.kind == "all_reduce" for s in c.backward) and plan.decisions[c.source].kind == "parameter"
    ]
    inside = [
        c.source for c in plan.conversions if any(s.kind == "all_reduce" for s in c.backward) and c.source in casts
    ]
    assert (len(ends), len(inside)) == ((6, 0) if reduce == "float32" else (0, 6))


def test_a_cast_stands_before_its_first_use_and_once_for_what_is_tied():
    model, batch = case("gpt2")
    graph = ColoTracer().trace(model, batch, precision=Precision())
    casts = [
        n
        for n in graph.nodes
        if info(n).kind == "op" and op_name(n) == "to" and info(n.all_input_nodes[0]).kind == "parameter"
    ]
    assert len(casts) == len(graph.parameters)
    order = {n: i for i, n in enumerate(graph.nodes)}
    assert all(
        min(order[u] for u in n.users) - order[n] <= 4 for n in casts
    )  # the casts of one call's operands stand together


def test_half_the_bytes_move_and_the_plan_says_so():
    with torch.device("meta"):
        model, x = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(4))), torch.empty(64, 4096)
    full, half = (
        autopar.plan(
            model,
            (x,),
            mesh=4,
            parallel="zero3",
            precision=p,
            cluster="h100-4x1",
            loss=lambda out, inputs: out.square().mean(),
        )
        for p in (None, Precision("bfloat16", "bfloat16"))
    )
    assert 0.4 < half.beside_s / full.beside_s < 0.6 and "computes in bfloat16, reduces in bfloat16" in half.table()
    assert (
        half.memory["optimizer states"] == full.memory["optimizer states"]
        and half.memory["gathered parameters"] < 0.6 * full.memory["gathered parameters"]
    )
    assert autopar.Plan.from_dict(half.to_dict()) == half


@pytest.mark.parametrize("wrong", ["bf16", ("bfloat16", "float32"), 3])
def test_what_is_no_precision_is_a_letter(wrong):
    model, batch = mlp_case()
    with pytest.raises(Letter):
        autopar.plan(model, batch, mesh=2, precision=wrong)


@pytest.mark.parametrize("wrong", [dict(param="int8"), dict(reduce="fp8"), dict(param=None)])
def test_a_dtype_that_does_not_float_is_a_letter(wrong):
    with pytest.raises(Letter, match="no floating dtype"):
        Precision(**wrong)


def test_a_dtype_goes_by_its_short_name_and_by_torchs():
    assert Precision("bf16", "FP32") == Precision(torch.bfloat16, torch.float) == Precision()


def test_a_gradient_that_never_has_the_dtype_of_reduction_is_a_letter():
    model, batch = mlp_case()
    with pytest.raises(Letter, match="stored in bfloat16 and computes in bfloat16"):
        autopar.plan(model.bfloat16(), batch, mesh=2, precision=Precision())
    assert autopar.plan(model.requires_grad_(False), batch, mesh=2, precision=Precision()).precision == (
        "bfloat16",
        "float32",
    )


class Factored(torch.nn.Module):
    """A factor of a matrix that is computed: torch has none in bfloat16, and its fakes have."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, x):
        h = self.layer(x)
        return torch.linalg.cholesky(h @ h.T + 6 * torch.eye(6, dtype=h.dtype)).sum()


def test_what_torch_does_not_run_in_the_dtype_is_a_letter_in_the_first_call():
    x = torch.randn(6, 6)
    model = autopar.autoparallelize(Factored(), (x,), mesh=(1,), memory_budget="inf", precision="bf16")
    with pytest.raises(Letter, match=r"(?s)cholesky.*x\.float\(\)"):
        model(x)


class Unwritten(torch.nn.Module):
    """An op of a user's that a device has no kernel for, and that says nothing."""

    def forward(self, x):
        return torch.ops.unwritten.op(x).sum()


def test_an_op_that_is_missing_without_a_word_is_a_letter_too():
    with torch.library._scoped_library("unwritten", "DEF") as library:
        library.define("op(Tensor x) -> Tensor")

        def missing(x):
            raise NotImplementedError

        library.impl("op", missing, "CPU")
        torch.library.register_fake("unwritten::op", torch.empty_like, lib=library)
        model = autopar.autoparallelize(Unwritten(), (torch.randn(6, 6),), mesh=(1,), memory_budget="inf")
        with pytest.raises(Letter, match="not implemented on this device"):
            model(torch.randn(6, 6))
