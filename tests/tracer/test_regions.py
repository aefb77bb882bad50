"""Regions of a forward: functions with their own backward, checkpoints, no_grad, autocast, TorchScript, transforms."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from autopar.graph.graph import info, op_name
from autopar.letters import NotCaptured
from autopar.tracer import ColoTracer
from tests.tracer.cases import Of, Scale, check, mixed, ops, traced


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * Reads.model.weight

    @staticmethod
    def backward(ctx, g):
        return g


def test_an_autograd_function_keeps_its_backward():
    graph = check(lambda m, x: sum(t.sum() for t in Scale.apply(x @ m.weight, 3.0)))
    assert ops(graph).count(f"function {Scale.__module__}.Scale") == 1 and "cos" not in ops(graph)


def test_an_autograd_function_that_reads_what_it_was_not_given_is_a_letter():
    Reads.model = model = Of(lambda m, x: Reads.apply(x @ m.weight).sum())
    with pytest.raises(NotCaptured, match="was not given"):
        ColoTracer().trace(model, (torch.randn(4, 4),))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_opened_and_tagged(reentrant):
    def twice(m, x):
        h = checkpoint(lambda y: m.linear(y).tanh(), x @ m.weight, use_reentrant=reentrant)
        return checkpoint(
            lambda y: checkpoint(m.linear, y, use_reentrant=False).sin(), h, use_reentrant=reentrant
        ).sum()

    graph = check(twice)
    tags = {op_name(n): info(n).checkpoint for n in graph.nodes if info(n).kind == "op"}
    assert (
        tags["tanh"] == (0,)
        and tags["sin"] == (1,)
        and tags["linear"] == (1, 2)
        and tags["matmul"] == ()
        and tags["sum"] == ()
    )
    assert "  checkpoint 2" in str(graph)


def test_a_reentrant_checkpoint_of_inputs_without_gradients_gives_none():
    check(lambda m, x: checkpoint(m.linear, x, use_reentrant=True).sum() + m.weight.sum())


def target_of_views(m, x):
    h = m.linear(x)
    with torch.no_grad():
        t, w = h[:, 1:], m.weight.T
        u = h.view(2, 8)
        a, b = h.split(2, 1)
    return ((m.linear(x)[:, :-1] - t) ** 2).sum() + (x @ w).sum() + (u * 2).sum() + (a * b).sum()


def test_what_is_computed_under_no_grad_is_a_constant_of_backward():
    check(target_of_views)


def test_an_output_taken_under_no_grad_carries_none():
    def target(m, x):
        h = x @ m.weight
        with torch.no_grad():
            t = h[0]
        return h.sum(), t

    assert [t.requires_grad for t in info(traced(target).output).outputs] == [True, False]


def test_the_casts_of_autocast_are_in_the_graph():
    graph = check(mixed)
    products = [n for n in graph.nodes if op_name(n) in ("matmul", "linear", "einsum", "scaled_dot_product_attention")]
    assert [info(n).outputs[0].dtype for n in products] == [
        "bfloat16",
        "bfloat16",
        "bfloat16",
        "float32",
        "bfloat16",
        "bfloat16",
    ]
    casts = [
        n
        for n in graph.nodes
        if (op_name(n) == "to" and info(n.kwargs["input"]).kind == "parameter")
        or info(n).key.startswith("linear.weight")
    ]
    assert (
        len([n for n in casts if op_name(n) == "to" and info(n.kwargs["input"]).key == "linear.weight"]) == 1
    )  # once a region


def cast_without_gradient(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            t = m.linear(x)
        return ((m.linear(x) - t) ** 2).sum() + m.linear(x).sum()


def test_a_cast_made_under_no_grad_serves_no_other_use():
    check(cast_without_gradient)


@torch.jit.script
def scripted(x):
    y = x.relu() * 2
    y.add_(1.0)
    return y + x.transpose(0, 1) * x


def test_torchscript_is_recorded_op_by_op():
    graph = check(lambda m, x: scripted(x @ m.weight).sum())
    assert {"relu", "transpose", "add"} <= set(ops(graph))


def test_a_letter_inside_torchscript_is_not_swallowed():
    @torch.jit.script
    def asks(x):
        if bool(x.sum() > 0):
            return x
        return -x

    with pytest.raises(NotCaptured, match=r"value of a tensor|depends on the values"):
        traced(lambda m, x: asks(x @ m.weight))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.vmap(lambda r: r.sin().view(2, 2).sum() * r.detach())(x @ m.weight).sum(),
        lambda m, x: torch.vmap(lambda r, s: r * s, in_dims=(0, None))(x @ m.weight, x[0]).sum(),
        lambda m, x: torch.func.grad(lambda r: (r @ m.weight).sin().sum())(x).pow(2).sum(),
        lambda m, x: torch.func.jvp(lambda r: (r @ m.weight).sin(), (x,), (x * 2,))[1].pow(2).sum(),
        lambda m, x: torch.vmap(lambda r: r + torch.tensor(1.0))(x @ m.weight),
        pytest.param(lambda m, x: torch.compile(lambda y: y * 2 + 1)(x @ m.weight).sum(), marks=pytest.mark.nightly),
    ],
    ids=["vmap", "vmap of one", "func.grad", "func.jvp", "vmap of what is made", "compile"],
)
def test_transforms_are_recorded_as_what_they_run(function):
    check(function)
