"""A composite function of torch is what torch makes of it, and stays whole where that cannot be told."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autopar.graph.graph import info, op_name
from autopar.tracer import ColoTracer, composites
from tests.tracer.cases import Of

X = torch.randn(6, 4, dtype=torch.float64)


def traced(function, x=X):
    model = Of(function)
    model.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    return model, ColoTracer().trace(model, (x,))


def ops(function):
    return [op_name(n) for n in traced(function)[1].nodes if info(n).kind == "op" and op_name(n) != "identity"]


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda m, x: torch.kron(x @ m.weight, x), ["matmul", "view", "view", "mul", "view"]),
        (
            lambda m, x: torch.trapezoid(x @ m.weight, dim=0),
            ["matmul", "select", "select", "add", "mul", "sum", "sub", "mul"],
        ),
        (
            lambda m, x: F.margin_ranking_loss(x @ m.weight, x, x),
            ["matmul", "sub", "neg", "mul", "clamp", "sum", "div"],
        ),  # a write into a temporary
        (lambda m, x: (x @ m.weight).movedim(0, 1), ["matmul", "permute"]),
        (lambda m, x: torch.hsplit(x @ m.weight, 2)[1], ["matmul", "narrow"]),
    ],
    ids=["kron", "trapezoid", "margin ranking", "movedim", "hsplit"],
)
def test_it_is_opened(function, expected):
    assert ops(function) == expected


@pytest.mark.parametrize(
    "function, op",
    [
        (
            lambda m, x: F.cosine_similarity(x @ m.weight, x),
            "cosine_similarity",
        ),  # writes under no_grad: its gradient is not that of the chain
        (
            lambda m, x: torch.linalg.matrix_rank(x @ m.weight),
            "linalg.matrix_rank",
        ),  # a chain with ops that the vocabulary lacks
        (lambda m, x: F.gumbel_softmax(x @ m.weight), None),  # draws: recorded from above, one op each
    ],
)
def test_it_stays_whole(function, op):
    found = ops(function)
    assert (op in found) if op is not None else not any("clamp_min" in o for o in found)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.special.logsumexp(x @ m.weight, 1),
        lambda m, x: torch.nanmean(torch.where(x > 0, x @ m.weight, torch.nan)),
        lambda m, x: F.pairwise_distance(x @ m.weight, x @ m.weight),
        lambda m, x: F.triplet_margin_loss(x @ m.weight, x, x),
        lambda m, x: torch.fft.fftshift(x @ m.weight),
        lambda m, x: (x @ m.weight).norm(dim=1) * 0 + (x * 0 @ m.weight).norm(dim=1),
    ],
    ids=["logsumexp", "nanmean", "distance of the same", "triplet", "fftshift", "norm at zero"],
)
def test_values_and_gradients_are_eagers(function):
    """At zeros and ties too: an op with a derivative of its own is never opened further."""
    model, graph = traced(function)
    expected, found = model(X), graph.module(model)(X)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    want, got = (torch.autograd.grad(out.nansum(), model.weight)[0] for out in (expected, found))
    torch.testing.assert_close(got, want, rtol=1e-15, atol=1e-15, equal_nan=True)


def test_the_same_call_is_opened_once():
    composites._chain.cache_clear()
    traced(lambda m, x: sum(torch.kron(x @ m.weight, x).sum() for _ in range(5)))
    assert composites._chain.cache_info().currsize == 1
