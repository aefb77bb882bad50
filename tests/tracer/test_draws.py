"""Draws are ops of the graph, in order, with their probabilities; what torch does not draw is an error."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.graph.graph import info
from autopar.letters import NotCaptured
from tests.tracer.cases import check, traced


def test_every_draw_is_explicit_with_its_probability():
    def draws(m, x):
        h = x @ m.weight
        noise = (
            torch.rand_like(h)
            + torch.rand(4, 4)
            + torch.randn(4)
            + torch.empty(4).uniform_(-1, 1)
            + torch.empty(4, 4).bernoulli_(0.3)
            + torch.bernoulli(torch.full((4, 4), 0.5))
        )
        return (
            (h * noise).view(1, 4, 2, 2)
            + F.dropout2d(h.view(1, 4, 2, 2), 0.4)
            + F.alpha_dropout(h, 0.3, True).view(1, 4, 2, 2)
            + F.gumbel_softmax(h).view(1, 4, 2, 2)
        ).sum()

    graph = check(draws)
    drawn = [n for n in graph.nodes if info(n).random >= 0]
    assert [info(n).random for n in drawn] == list(range(len(drawn))) and len(drawn) == 9
    assert [n.kwargs["p"] for n in drawn if "p" in n.kwargs] == [0.3, 0.4, 0.3]


def test_numbers_of_numpy_are_numbers():
    """Torch takes them wherever it takes Python's; a graph has the latter, bounds of draws too."""

    def counts_with_numpy(m, x):
        two, third = np.int64(2), np.float32(1 / 3)
        h = (x @ m.weight).view(two, -1, np.int64(2)).sum(np.int64(1), keepdim=True) * third
        h = h.transpose(np.int64(0), two)[np.int64(1)].clamp(max=np.float64(0.5))
        return h.sum() + torch.randint(0, np.int64(5), (np.int64(4),)) + torch.randint(np.int64(7), (4,))

    graph = check(counts_with_numpy)
    bounds = [(n.kwargs["low"], n.kwargs["high"]) for n in graph.nodes if "high" in n.kwargs]
    assert bounds == [(0, 5), (0, 7)] and "np." not in str(graph)


def test_only_what_draws_is_random():
    def draws_from_a_view_of_written_memory(m, x):
        z = torch.zeros(4, 4)
        v = z[1]
        z.add_(x @ m.weight)
        return F.dropout(v, 0.5)

    def draws_under_autocast(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention((x @ m.weight)[None], x[None], x[None], dropout_p=0.2)

    for function in (draws_from_a_view_of_written_memory, draws_under_autocast):
        drawn = [n.target.name for n in traced(function).nodes if info(n).random >= 0]
        assert drawn in (["dropout"], ["scaled_dot_product_attention"])


def all_dropped(m, x):
    return F.dropout(x @ m.weight, 1.0) + F.dropout(x @ m.weight, 1.0, inplace=True)


def second_numbers(m, x):
    return (
        x @ m.weight
        + torch.empty(4).normal_(std=2.0)
        + torch.empty(4).log_normal_(std=0.3)
        + torch.empty(4).uniform_(to=3.0)
        + torch.empty(4).random_(5)
    )


@pytest.mark.parametrize("function", [all_dropped, second_numbers], ids=lambda f: f.__name__)
def test_numbers_are_drawn_as_in_eager(function):
    check(function)


def test_modules_made_in_forward_draw_their_weights():
    check(lambda m, x: (x @ m.weight).sum() + nn.Linear(4, 4)(x).detach().sum())


@pytest.mark.parametrize(
    "function, name",
    [
        (lambda m, x: (x @ m.weight) * np.random.rand(), "numpy.random.rand"),
        (lambda m, x: (x @ m.weight) * random.random(), "random.random"),
        (lambda m, x: (x @ m.weight) * by_name(), "numpy's or Python's"),
        (lambda m, x: x @ m.weight + torch.rand(4, 4, generator=torch.Generator()), "generator of the model"),
    ],
)
def test_draws_that_torch_does_not_make_are_letters(function, name, monkeypatch):
    monkeypatch.setattr(
        threading, "enumerate", lambda: [threading.current_thread()]
    )  # threads of other tests may be about
    with pytest.raises(NotCaptured, match=name):
        traced(function)


def test_with_other_threads_about_the_graph_says_that_something_drew(monkeypatch):
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread(), threading.Thread()])
    assert any(
        "another thread or by the model" in a for a in traced(lambda m, x: (x @ m.weight) * by_name()).assumptions
    )


by_name = random.random  # imported by name, it is found by the generator's state
