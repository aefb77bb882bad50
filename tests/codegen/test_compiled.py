"""`compile=`: what stands between collectives is torch.compile's, and computes the same."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

import autopar
from autopar.letters import NotServed
from autopar.testing import Equality, on_processes, on_threads
from tests.models import batch_of, eager_links, mlp_case
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


@pytest.mark.parametrize("parallel", ["zero3", "megatron"])
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


@pytest.mark.nightly
def test_inductor_too():
    model, batch = mlp_case()
    expected = results(own := copy.deepcopy(model), own(**batch))
    for rank in on_processes(2, run, model, batch, True, "zero3", timeout_s=600.0):
        Equality.in_float64("inductor", rank[0], expected, 1e-9).check()


@pytest.mark.parametrize("wrong", ["fastest", 3, None])
def test_what_is_no_backend_is_a_letter(wrong):
    model, batch = mlp_case()
    with pytest.raises(NotServed, match="no backend"):
        on_threads(1, lambda rank: autopar.autoparallelize(copy.deepcopy(model), batch, mesh=1, compile=wrong))
