"""What an op without a rule seems to allow is a suggestion to its owner; a plan computes it whole."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar import Cluster, DeviceMesh
from autopar.letters import NoRule
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.tracer import ColoTracer
from tests.tracer.cases import Of


@torch.library.custom_op("autopar_tests::clipped", mutates_args=())
def clipped(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-100, 100)


clipped.register_fake(torch.empty_like)
clipped.register_autograd(
    lambda ctx, g: g * (ctx.saved_tensors[0].abs() < 100),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("autopar_tests::every_second", mutates_args=())
def every_second(x: torch.Tensor) -> torch.Tensor:
    return x[::2].clone()


@torch.library.custom_op("autopar_tests::the_rest", mutates_args=())
def the_rest(x: torch.Tensor) -> torch.Tensor:
    return x[:, 9:].clone()


@torch.library.custom_op("autopar_tests::mean_of_nines", mutates_args=())
def mean_of_nines(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return (x * (token == 9)[:, None]).sum(0) / (token == 9).sum().clamp(min=1)


every_second.register_fake(lambda x: x.new_empty((x.shape[0] + 1) // 2, *x.shape[1:]))
the_rest.register_fake(lambda x: x.new_empty(x.shape[0], max(x.shape[1] - 9, 0)))
mean_of_nines.register_fake(lambda x, token: x.new_empty(x.shape[1]))


def site_of(function, op, **how):
    model, x = Of(function), torch.randn(32, 16)
    model.weight = torch.nn.Parameter(torch.randn(16, 16))
    space = shardings(ColoTracer().trace(model, (x,)), Setting(DeviceMesh((2,)), Cluster.of("generic"), **how))
    return next(s for s in space.sites if s.op == op)


NINES = "ops.autopar_tests.mean_of_nines.default"
CALLS = {
    "ops.autopar_tests.clipped.default": lambda m, x: clipped(x @ m.weight),
    "ops.autopar_tests.every_second.default": lambda m, x: every_second(x @ m.weight),
    "ops.autopar_tests.the_rest.default": lambda m, x: the_rest(x @ m.weight),
    NINES: lambda m, x: mean_of_nines((x @ m.weight).detach(), x[:, 0].long()) + m.weight,
}
SUSPECTED = {
    "ops.autopar_tests.clipped.default": "a b -> a b",
    # what depends on places is not as small on small parts: nothing is said
    "ops.autopar_tests.every_second.default": "",
    "ops.autopar_tests.the_rest.default": "",
    NINES: "w0_0! a, w1_0! -> a",
}


@pytest.mark.parametrize("op", CALLS)
def test_an_opaque_op_is_computed_whole_whatever_it_seems(op):
    site = site_of(CALLS[op], op)
    assert not site.has_rule
    assert all(f.value.is_replicated for c in site.choices for s in c.strategies for f in (*s.operands, *s.outputs))


@pytest.mark.parametrize("op", CALLS)
def test_what_it_seems_is_a_line_for_its_owner(op):
    """Sizes with parts odd and even, clips, and a token that stands in the op's own code are among what is drawn.

    Sums are never suggested from looking.
    """
    assert site_of(CALLS[op], op).suspected == SUSPECTED[op]


def test_the_plan_offers_the_line():
    model = Of(CALLS[NINES])
    model.weight = torch.nn.Parameter(torch.randn(16, 16))
    plan = autopar.plan(model, (torch.randn(32, 16),), mesh=2, loss=lambda out, inputs: out.sum())
    assert "autopar.rule('autopar_tests::mean_of_nines', 'w0_0! a, w1_0! -> a')" in plan.table()
    assert autopar.Plan.from_dict(plan.to_dict()).suspected == plan.suspected == ((NINES, SUSPECTED[NINES]),)


def test_what_is_complex_runs_replicated():
    assert not site_of(lambda m, x: torch.linalg.eigvals(x.T @ x).abs(), "linalg.eigvals").has_rule


def test_looking_moves_no_generator():
    model, x = Of(lambda m, x: clipped(x @ m.weight)), torch.randn(8, 16)
    model.weight = torch.nn.Parameter(torch.randn(16, 16))
    graph, state = ColoTracer().trace(model, (x,)), torch.get_rng_state()
    shardings(graph, Setting(DeviceMesh((2,)), Cluster.of("generic")))
    assert torch.equal(torch.get_rng_state(), state)


def test_strict_means_a_rule():
    with pytest.raises(NoRule, match="clipped"):
        site_of(CALLS["ops.autopar_tests.clipped.default"], "ops.autopar_tests.clipped.default", strict=True)
