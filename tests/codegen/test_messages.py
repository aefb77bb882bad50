"""What prices count as moving beside compute begins ahead in the emitted program, each step: on one to three axes."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.codegen import joint, lower
from autopar.request import Request
from autopar.runtime.collectives import BEGIN
from autopar.search import plan_of
from autopar.sharding.convert import REDUCTIONS
from autopar.sharding.costs import LOCAL
from autopar.space import presets
from autopar.space.windows import BLOCK
from benchmarks.emitted_steps import MESSAGES, messages_from, messages_to
from tests import language
from tests.models import MLP, eager_links, on_meta
from tests.shares import diagonal

MESHES = ((4,), (2, 2), (4, 2), (2, 2, 2))
PRESETS = (None, "zero3", "zero2", "dp", "hsdp")


def models(mesh):
    """A model of the field on two axes, where most is to be seen; a small one on the others."""
    if len(mesh) == 2:
        build = language.llama if mesh == (2, 2) else language.gpt2  # of which the latter has a tied table
        return on_meta(lambda: build(layers=3)), language.zeros(8, 64), {"assume": language.NO_PADDING}
    x = torch.empty(16, 64, device="meta")
    return on_meta(lambda: MLP(64, 4)), {"x": x, "y": x}, {}


def step_of(message):
    """A message as (kind, axis, whether it begins ahead)."""
    return MESSAGES[message.target], message.args[1], message.target in BEGIN.values()


def steps_from(graph, name):
    """The steps from the placeholder of a parameter."""
    (node,) = [n for n in graph.nodes if n.name == name]
    return [step_of(message) for message in messages_from(node, {})]


def steps_to(node):
    """The steps that lead to a gradient, the first one first."""
    return [step_of(message) for message in messages_to(node)][::-1]


def steps_of_gradients(lowered):
    """The steps that lead to the gradient of each parameter that has one."""
    halves, inputs = lowered.joint, len(lowered.program.inputs)
    results = zip(halves.gradients, halves.backward.output_node().args[0], strict=True)
    return {lowered.program.parameters[i - inputs]: steps_to(node) for i, node in results if i >= inputs and node}


def test_a_sum_over_two_axes_goes_on_to_its_end():
    model, batch, how = models((2, 2))
    request = Request(mesh=(2, 2), cluster=eager_links(), parallel="dp", precision="bf16", memory_budget="inf", **how)
    graph = request.trace(model, batch)
    found = steps_of_gradients(lower(graph, plan_of(graph, request), (0, 0)))
    assert {tuple(kind for kind, _, _ in steps) for steps in found.values()} == {
        ("reduce_scatter", "all_reduce", "all_gather")
    }
    assert all(begins for steps in found.values() for _, _, begins in steps)


@pytest.mark.parametrize("mesh, parallel", diagonal([(mesh,) for mesh in MESHES], PRESETS), ids=str)
def test_what_is_priced_beside_compute_begins_ahead(mesh, parallel, monkeypatch):
    monkeypatch.setattr(presets, "BUCKET", BLOCK)  # so that these models have several windows
    joint.LOWERED.clear()
    model, batch, how = models(mesh)
    request = Request(mesh=mesh, cluster=eager_links(), parallel=parallel, memory_budget="inf", **how)
    graph = request.trace(model, batch)
    plan = plan_of(graph, request)
    lowered = lower(graph, plan, (0,) * len(mesh))
    space, picked = plan.search.counted.space, plan.search.point.picked
    beside = {"forward": set(), "backward": set()}
    for window in space.windows:
        for k, table in window.communication:
            edge = space.edges[k]
            if table[edge.place(picked)] > 0:
                beside[window.way].add((space.sites[edge.source].name, space.sites[edge.target].name))
    program, gradients = lowered.program, steps_of_gradients(lowered)
    names = {name: f"primals_{len(program.inputs) + i + 1}" for i, name in enumerate(program.parameters)}
    moved = seen = 0
    for c in plan.conversions:
        if c.source not in names:
            continue
        ahead = [(s.kind, plan.mesh.axes[s.axis]) for s in c.forward if s.kind not in LOCAL]
        back = [(s.kind, plan.mesh.axes[s.axis]) for s in c.backward if s.kind not in LOCAL]
        back = list(itertools.dropwhile(lambda step: step[0] not in REDUCTIONS, back))  # what comes before is in line
        if (c.source, c.target) in beside["forward"] and ahead:
            emitted = steps_from(lowered.joint.forward, names[c.source])
            assert emitted == [(*step, True) for step in ahead], (c.source, emitted, ahead)
            moved += len(ahead)
        if (c.source, c.target) in beside["backward"] and back and c.source in gradients:
            emitted = gradients[c.source]
            assert emitted[-len(back) :] == [(*step, True) for step in back], (c.source, emitted, back)
            seen += len(back)
    assert seen and (moved or parallel in (None, "dp"))
