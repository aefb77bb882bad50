"""What an op without a rule allows is found by running it; what cannot be run runs replicated."""

from __future__ import annotations

import pytest
import torch

from autopar import Cluster, DeviceMesh
from autopar.letters import NoRule
from autopar.sharding import shardings
from autopar.sharding.strategies import Strategy
from autopar.tracer import ColoTracer
from tests.tracer.cases import Of


def site_of(function, op, **how):
    model, x = Of(function), torch.randn(32, 16)
    model.weight = torch.nn.Parameter(torch.randn(16, 16))
    space = shardings(ColoTracer().trace(model, (x,)), DeviceMesh((2,)), Cluster.of("generic"), **how)
    return next(s for s in space.sites if s.op == op)


def written(text):
    return {Strategy.parse(s) for s in text.split("|")}


@pytest.mark.parametrize("function, op, expected", [
    (lambda m, x: torch.sinc(x @ m.weight), "sinc", "R -> R | R/P -> R/P | S(0) -> S(0) | S(1) -> S(1)"),
    (lambda m, x: torch.cummax(x @ m.weight, 1)[0], "cummax", "R -> R, R | R/P -> R/P, R | S(0) -> S(0), S(0)"),
    (lambda m, x: (x @ m.weight).unfold(1, 3, 1), "Tensor.unfold", "R -> R | R/P -> R/P | P -> P | S(0) -> S(0)"),
    (lambda m, x: (x @ m.weight).std(1), "Tensor.std", "R -> R | R/P -> R/P | S(0) -> S(0)"),
    (lambda m, x: torch.kron(x @ m.weight, x), "kron", "R, R -> R | R/P, R -> R/P | P, R -> P | R/P, P -> P | S(0), R -> S(0) | S(1), R -> S(1)"),
])
def test_it_is_found(function, op, expected):
    site = site_of(function, op)
    assert site.has_rule and {c.strategies[0] for c in site.choices} <= written(expected) | {Strategy.parse("S(1), R -> S(1)")}
    assert {repr(c) for c in site.choices} == {repr(s) for s in written(expected) if not (op == "kron" and repr(s) == "S(1), R -> S(1)")} | ({"S(1), R -> S(1)"} if op == "kron" else set())


def test_what_is_complex_or_random_runs_replicated():
    assert len(site_of(lambda m, x: torch.fft.rfft(x @ m.weight).abs(), "fft.rfft").choices) == 2
    assert not site_of(lambda m, x: torch.nn.functional.rrelu(x @ m.weight, training=True), "rrelu").has_rule


def test_an_op_of_many_operands_is_not_tried():
    lstm = torch.nn.LSTM(16, 16, num_layers=2)
    model = torch.nn.Sequential(lstm)
    graph = ColoTracer().trace(model, (torch.randn(4, 2, 16),))
    space = shardings(graph, DeviceMesh((2,)), Cluster.of("generic"))
    assert not next(s for s in space.sites if s.op == "lstm").has_rule


@torch.library.custom_op("autopar_tests::clipped", mutates_args=())
def clipped(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-100, 100)


clipped.register_fake(torch.empty_like)
clipped.register_autograd(lambda ctx, g: g * (ctx.saved_tensors[0].abs() < 100), setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))


@torch.library.custom_op("autopar_tests::every_second", mutates_args=())
def every_second(x: torch.Tensor) -> torch.Tensor:
    return x[::2].clone()


@torch.library.custom_op("autopar_tests::the_rest", mutates_args=())
def the_rest(x: torch.Tensor) -> torch.Tensor:
    return x[:, 9:].clone()


every_second.register_fake(lambda x: x.new_empty((x.shape[0] + 1) // 2, *x.shape[1:]))
the_rest.register_fake(lambda x: x.new_empty(x.shape[0], max(x.shape[1] - 9, 0)))


def test_what_depends_on_places_is_not_right_by_chance():
    """Parts of even size would do for one, and parts of which nothing is left for the other."""
    for op, name, wrong, right in ((every_second, "every_second", "S(0)", "S(1)"), (the_rest, "the_rest", "S(1)", "S(0)")):
        site = site_of(lambda m, x, op=op: op(x) @ m.weight[: op(x).shape[1]], f"ops.autopar_tests.{name}.default")
        said = {repr(c) for c in site.choices}
        assert not any(wrong in c for c in said) and (not site.has_rule or any(right in c for c in said))
    stepped = {repr(c) for c in site_of(lambda m, x: (x @ m.weight)[9::2], "index").choices}
    assert "S(1) -> S(1)" in stepped and not any("S(0)" in c for c in stepped)         # it has a rule


def test_what_is_linear_below_a_hundred_is_not_linear():
    site = site_of(lambda m, x: clipped(x @ m.weight), "ops.autopar_tests.clipped.default")
    assert {repr(c) for c in site.choices} == {"R -> R", "R/P(sum) -> R/P(sum)", "S(0) -> S(0)", "S(1) -> S(1)"}


def test_looking_moves_no_generator():
    model, x = Of(lambda m, x: torch.sinc(x @ m.weight) * torch.special.i0(x)), torch.randn(4, 4)
    graph, state = ColoTracer().trace(model, (x,)), torch.get_rng_state()
    shardings(graph, DeviceMesh((2,)), Cluster.of("generic"))
    assert torch.equal(torch.get_rng_state(), state)


def test_strict_means_a_rule():
    with pytest.raises(NoRule, match="sinc"):
        site_of(lambda m, x: torch.sinc(x @ m.weight), "sinc", strict=True)
