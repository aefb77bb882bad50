"""After a capture the model and the process are what they were before, and nothing of the capture is kept."""

from __future__ import annotations

import functools
import gc
import weakref

import torch
from torch import nn

from autopar.tracer import ColoTracer
from tests.tracer.cases import Of, traced


def test_what_forward_sets_is_put_back_and_said():
    def sets(m, x):
        m.last = x @ m.weight
        m.calls = getattr(m, "calls", 0) + 1
        return m.last.sum()

    model = Of(sets)
    before = dict(vars(model))
    graph = ColoTracer().trace(model, (torch.randn(4, 4),))
    assert vars(model) == before
    assert graph.assumptions == (
        "the attribute last that forward sets on the model is not kept",
        "the attribute calls that forward sets on the model is not kept",
    )


def test_hooks_that_forward_installs_do_not_stay():
    def hooks(m, x):
        m.linear.register_forward_hook(lambda *_: None)
        return m.linear(x @ m.weight).sum()

    model = Of(hooks)
    ColoTracer().trace(model, (torch.randn(4, 4),))
    assert not model.linear._forward_hooks


def test_a_scripted_submodule_is_itself_afterwards():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    x = torch.randn(2, 4)
    before = model(x)
    ColoTracer().trace(model, (x,))
    torch.testing.assert_close(model(x), before)


def test_defaults_are_put_back():
    def changes(m, x):
        torch.set_default_dtype(torch.float64)
        return x @ m.weight

    traced(changes)
    assert torch.get_default_dtype() == torch.float32


@functools.lru_cache
def positions(n):
    return torch.arange(n).float()


def test_a_cache_keeps_no_tensor_of_the_capture():
    model, x = Of(lambda m, x: x @ m.weight + positions(4)), torch.randn(4, 4)
    graph = ColoTracer().trace(model, (x,))
    torch.testing.assert_close(graph.module(model)(x), model(x))
    positions.cache_clear()


def test_what_keeps_tensors_of_the_capture_is_looked_for_once(monkeypatch):
    looks, look = [], gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *objects: (looks.append(len(objects)), look(*objects))[1])
    caches = [functools.lru_cache(lambda n: torch.arange(n).float()) for _ in range(4)]
    model, x = Of(lambda m, x: x @ m.weight + sum(cache(4) for cache in caches)), torch.randn(4, 4)
    graph = ColoTracer().trace(model, (x,))
    assert len(looks) <= 2  # each look goes through all objects of the process
    torch.testing.assert_close(graph.module(model)(x), model(x))


def test_nothing_of_a_model_is_kept_alive():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    graph = ColoTracer().trace(model, (torch.randn(2, 4),))
    gone = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert gone() is None and len(list(graph.nodes)) == 7
