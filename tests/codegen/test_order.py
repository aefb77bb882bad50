"""The step that is priced is the step that is emitted: in order, and in what comes again before which backward.

And it is the step of the plan's file: what planning counts at every time follows from the graph and the plan.
"""

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
from autopar.solver.plan import Plan
from autopar.solver.points import Points
from autopar.space.timeline import Timeline
from autopar.tracer.precision import Precision
from tests import language
from tests.codegen.order import check_order, step_of
from tests.golden.cases import CASES, FAMILIES
from tests.models import eager_links, on_meta

PARALLEL = {name: name for name in ("dp", "zero1", "zero2", "zero3", "hsdp", "megatron", "2d")}
ASKED = {
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "micro-batches": {"parallel": "zero2", "microbatches": 2, "recompute": "full"},
    "regathered in turns": {"parallel": "zero3", "microbatches": 2, "recompute": "full"},
    "chunks": {"parallel": "dp", "chunks": 4},
}
PRESETS = ("free", *PARALLEL, *ASKED, "in passing", "in passing too")
LONG = ("zero1", "zero2", "hsdp", "2d", "regathered in turns", "dp", "full", "in passing")


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
    asked = ASKED.get(preset, {"parallel": PARALLEL.get(preset)})
    request = Request(mesh=(2, 2), cluster=eager_links(), memory_budget="inf", assume=language.NO_PADDING, **asked)
    graph = request.trace(model, language.zeros(8, 16))
    plan = plan_of(graph, request)
    space, picked = plan.search.counted.space, plan.search.point.picked
    saved = Points(space).of(picked)
    line = Timeline.of(space, picked, saved.held, saved.momentary)
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


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[pytest.mark.nightly] if name in LONG else []) for name in PRESETS]
)
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
    assert not differing
    _, loaded = step_of(graph, Plan.from_dict(plan.to_dict()), eager_links())
    np.testing.assert_allclose(held_by(loaded, plan), held_by(line, plan), atol=1)


def held_by(line, plan):
    """The bytes at every time of the plan's step."""
    return line.under(line.again(plan.recomputed), line.passing(plan.passing)).held


def wide():
    """Two layers whose activations and parameters are of one size, so that a budget asks for both to be dropped."""
    model = language.gpt2(2, 256, 512, 64, use_cache=False, bos_token_id=0, eos_token_id=0)
    return model, language.zeros(8, 64)


MIB = 2**20
# Planning counts in the space of its search: a message begins where the first of the parameters is read that may move
# in it, and what hands a tied parameter on does not know its policy. In the plan's own space both are known.
SHARED = {
    "in chunks, by rotor": {"recompute": "rotor", "memory_budget": 18 * MIB},
    "over two calls": {"mesh": (4,), "memory_budget": 22 * MIB, "accumulation": 2},
    "over two calls, tight": {"mesh": (4,), "memory_budget": 16 * MIB, "accumulation": 2},
}
BUDGETS = {
    "rotor": {"recompute": "rotor", "memory_budget": 20 * MIB},
    "rotor, tight": {"recompute": "rotor", "memory_budget": int(16.5 * MIB)},
    "auto": {"memory_budget": 18 * MIB},
    "auto, tight": {"memory_budget": int(16.5 * MIB)},
    "half": {"mesh": (4,), "parallel": "zero3", "precision": Precision("bfloat16", "float32")},
    **SHARED,
}
QUICK = ("llama-zero3-2x2", "gpt2-zero2-accumulated", "pictures-zero1-bf16")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.nightly]) for n in (*CASES, *BUDGETS)]
)
def test_a_plan_and_its_graph_are_the_whole_step(name):
    case = CASES.get(name)
    model, batch = FAMILIES[case.family]() if case else wide()
    asked = {"mesh": case.mesh, **case.asked} if case else {"mesh": (2, 2), **BUDGETS[name]}
    request = Request(**asked, cluster=eager_links())
    graph = request.trace(model, batch)
    plan = plan_of(graph, request)
    loaded = Plan.from_dict(plan.to_dict())
    saved, line = step_of(Request.of(loaded).as_planned(graph, loaded), loaded, eager_links())
    assert saved.seconds + plan.recompute_s == pytest.approx(plan.step_time_s, rel=1e-9)
    planned, held = plan.search.point.held, held_by(line, loaded)
    if name in SHARED:
        assert held.max() == pytest.approx(plan.peak_bytes, rel=1e-3)
    else:
        np.testing.assert_allclose(held, planned, atol=1)
        assert held.max() == pytest.approx(plan.peak_bytes, abs=len(plan.memory))
