"""`compile=`: what stands between collectives is torch.compile's, and computes the same."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.codegen import compiled
from autopar.letters import NotServed
from autopar.testing import Equality, on_processes, on_threads
from tests.models import batch_of, eager_links, mlp_case
from tests.shares import by_day
from tests.training import results, whole


def run(rank, model, batch, backend, parallel):
    mine = autopar.autoparallelize(
        copy.deepcopy(model), batch, mesh=2, parallel=parallel, cluster=eager_links(), compile=backend
    )
    found = [results(mine, mine(**b)) for b in (batch, batch_of(3))]
    with mine.no_sync():
        mine(**batch).backward()
    mine(**batch).backward()
    forward, backward = (
        mine._autopar.programs[0].runner.halves.modules["forward", (), False],
        mine._autopar.programs[0].runner.halves.modules["backward", (), False],
    )
    compiled = [sum(n.op == "call_module" for n in m.graph.nodes) for m in (forward, backward)]
    assert all(compiled)
    return [*found, {n: whole(p.grad) for n, p in mine.named_parameters()}]


@pytest.mark.parametrize("parallel", by_day(["zero3", "megatron"], "zero3"))
def test_compiled_halves_compute_the_same(parallel):
    model, batch = mlp_case()
    expected = [results(own := copy.deepcopy(model), own(**b)) for b in (batch, batch_of(3))]
    (2 * own(**batch)).backward()
    expected.append({n: p.grad for n, p in own.named_parameters()})
    for rank in on_processes(2, run, model, batch, "aot_eager", parallel):
        for ours, theirs in zip(rank, expected, strict=True):
            Equality.in_float64(parallel, ours, theirs, 1e-9).check()


def test_a_compiler_around_the_model_runs_it_as_it_is():
    """Trainers compile what they are given, and read what its forward takes."""
    model, batch = mlp_case()
    expected = results(own := copy.deepcopy(model), own(**batch))
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=1)
    Equality.in_float64(
        "compiled around", results(mine, torch.compile(mine, backend="eager")(**batch)), expected, 1e-9
    ).check()
    assert inspect.signature(mine.forward) == inspect.signature(model.forward)


class Alive(TorchDispatchMode):
    """Counts at each op how many of some storages are left."""

    def __init__(self, tensors):
        super().__init__()
        self.held, self.left = [StorageWeakRef(t.untyped_storage()) for t in tensors], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.left.append(sum(not ref.expired() for ref in self.held))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", [False, "aot_eager"])
def test_a_compiled_backward_frees_what_it_has_read(backend):
    model = autopar.autoparallelize(Deep(), {"x": torch.randn(8, 16)}, mesh=1, compile=backend)
    model(torch.randn(8, 16)).backward()
    loss = model(torch.randn(8, 16))
    shapes = {(8, 16)}  # activations: parameters stay anyway
    with Alive([t for t in loss.grad_fn.saved_tensors if tuple(t.shape) in shapes]) as seen:
        loss.backward()
    assert set(seen.left) == set(range(len(seen.held) + 1))  # one after the other


def test_a_compiled_backward_under_autocast_is_eagers_and_the_next_is_not():
    """What a user's autocast casts in one backward is not compiled into the next."""
    model, x = Deep(), torch.randn(8, 16)
    mine = autopar.autoparallelize(copy.deepcopy(model), {"x": x}, mesh=1, compile="aot_eager")
    for within in (True, False, True):
        for each in (model, mine):
            each.zero_grad()
            loss = each(x)
            with torch.autocast("cpu", torch.bfloat16, enabled=within):
                loss.backward()
        for p, q in zip(model.parameters(), mine.parameters(), strict=True):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-6, atol=1e-6)


def test_a_compilation_that_was_broken_off_is_begun_anew(monkeypatch):
    x = torch.randn(8, 16)
    mine = autopar.autoparallelize(Deep(), {"x": x}, mesh=1, compile="aot_eager")
    begun = []

    def broken_off(graph, backend, given):
        begun.append(backend)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "compiled_freeing", broken_off)
        with pytest.raises(KeyboardInterrupt):
            mine(x)
    mine(x).backward()
    assert begun == ["aot_eager"] and all(p.grad is not None for p in mine.parameters())


class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


@pytest.mark.nightly
def test_inductor_too():
    model, batch = mlp_case()
    expected = results(own := copy.deepcopy(model), own(**batch))
    for rank in on_processes(2, run, model, batch, True, "zero3", timeout_s=600.0):
        Equality.in_float64("inductor", rank[0], expected, 1e-9).check()


@pytest.mark.parametrize("wrong", ["fastest", 3, None])
def test_what_is_no_backend_is_a_letter(wrong):
    model, batch = mlp_case()
    with pytest.raises(NotServed, match="not a backend"):
        on_threads(1, lambda rank: autopar.autoparallelize(copy.deepcopy(model), batch, mesh=1, compile=wrong))
