"""The step that is priced is the step that is emitted: in order, and in what comes again before which backward."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from autopar.codegen import joint, schedule
from autopar.codegen.buffers import is_view
from autopar.codegen.joint_graph import BACK, OP, RECOMPUTED
from autopar.codegen.lower import lower
from autopar.graph.graph import info
from autopar.request import Request
from autopar.search import plan_of
from autopar.space.timeline import Timeline
from tests import language
from tests.codegen.order import check_order
from tests.models import eager_links, on_meta

PARALLEL = {"dp": "dp", "zero3": "zero3", "megatron": "megatron"}
PRESETS = ("free", *PARALLEL, "full", "selective", "in passing", "in passing too", "micro-batches")


class Two(nn.Module):
    """Two branches that nothing but their order in the script puts one behind the other."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return (torch.tanh(self.a(x)) * torch.relu(self.b(x))).sum()


def swapped(mark):
    """A pass that lets an op run before the one in front of it, which it does not read."""

    def swap(half):
        groups = {}
        for node in half.graph.nodes:
            if mark in node.meta and node.op == "call_function":
                groups.setdefault(node.meta[mark], []).append(node)
        for before, behind in itertools.pairwise(groups.values()):
            if not any(operand in before for node in behind for operand in node.all_input_nodes):
                for node in behind:
                    before[0].prepend(node)
                return

    return swap


@pytest.mark.parametrize("mark", ["op", "backward"])
def test_an_op_out_of_order_is_noticed(mark, monkeypatch):
    x = torch.zeros(4, 8)
    request = Request(mesh=(2,), cluster=eager_links(), memory_budget="inf")
    graph = request.trace(Two(), {"x": x})
    plan = plan_of(graph, request)
    joint.LOWERED.clear()
    check_order(lower(graph, plan, (0,)))
    monkeypatch.setattr(schedule, "PASSES", (*schedule.PASSES, swapped(mark)))
    joint.LOWERED.clear()
    with pytest.raises(AssertionError, match="runs where the plan has"):
        check_order(lower(graph, plan, (0,)))
    joint.LOWERED.clear()


def planned(preset):
    """A graph, its plan, and the timeline that the plan is priced by."""
    model = on_meta(lambda: language.gpt2(layers=2, vocabulary=128, dropout=0.0))
    asked = {
        "full": {"recompute": "full"},
        "selective": {"recompute": "selective"},
        "micro-batches": {"parallel": "zero2", "microbatches": 2, "recompute": "full"},
    }.get(preset, {"parallel": PARALLEL.get(preset)})
    request = Request(mesh=(2, 2), cluster=eager_links(), memory_budget="inf", assume=language.NO_PADDING, **asked)
    graph = request.trace(model, language.zeros(8, 16))
    plan = plan_of(graph, request)
    counted, point = plan.search.counted, plan.search.point
    line = Timeline.of(counted.space, point.picked, point.held, point.momentary)
    if not plan.recomputed:
        rng = np.random.default_rng(len(preset))
        names = [name for name in line.names if rng.random() < 0.7]
        ops = [run.name for run in line.runs if run.is_op]
        passing = {
            name: str(rng.choice(ops)) for name in names if preset.startswith("in passing") and rng.random() < 0.5
        }
        plan = plan.recomputing(names, passing)
    return Request.of(plan).as_planned(graph, plan), plan, line


def priced(plan, line):
    """The names of what runs again, each with the ops before whose backward it does, the last one first."""
    through = line.under(line.again(plan.recomputed), line.passing(plan.passing))
    ops = [run.name for run in line.runs if run.is_op]
    found = {}
    for i, time in zip(through.ran, through.times, strict=True):
        found.setdefault(line.runs[i].name, []).append(ops[2 * line.ops - 1 - time])
    return found


def emitted(graph, plan):
    """The same of the program of one device."""
    lowered = lower(graph, plan, (0, 0))
    check_order(lowered)
    said = {}
    for node in lowered.program.fx.nodes:
        if node.op == "call_function":
            said[node.name] = info(node).names if info(node).kind == "conversion" else (info(node).key,)
    ops = {info(n).key for n in graph.nodes if info(n).kind == "op"}
    found, waiting = {}, {}
    for node in lowered.joint.backward.nodes:
        back = said.get(node.meta.get(BACK), ("",))[0]
        if node.meta.get(RECOMPUTED) and not is_view(node):
            waiting[node.meta.get(OP)] = None
        elif back in ops:  # a conversion of a gradient goes with the op whose backward it is for
            for name in (name for op in waiting for name in said.get(op, ())):
                found.setdefault(name, []).append(back)
            waiting = {}
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_what_comes_again_is_where_it_is_priced(preset):
    joint.LOWERED.clear()
    graph, plan, line = planned(preset)
    says, runs = priced(plan, line), emitted(graph, plan)
    gathered = {line.runs[i].name for i in line.forced}  # a movement, which the schedule places
    differing = {
        name: (places, runs.get(name))
        for name, places in says.items()
        # a pass may leave a conversion out, as a gather of a slice of itself
        if name not in gathered and list(dict.fromkeys(runs.get(name, places if ":" in name else ()))) != places
    }
    print(len(says), len(runs), differing)
    assert not differing
