"""Where kernels stand is said by the plan: as its program would have them, in its file, and checked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import autopar
from autopar import DeviceMesh, Plan
from autopar.codegen import lower
from autopar.codegen.checked import check_plan
from autopar.codegen.local import Localiser, local_program
from autopar.graph.graph import info, op_name, type_of
from autopar.kernels import NAMES
from autopar.letters import BadPlan
from autopar.request import Request
from autopar.sharding.convert import Step
from autopar.sharding.placement import Sharding
from autopar.solver.decision import Conversion, Recomputed
from autopar.solver.plan_of_choices import fused_of
from autopar.space.kernel_sites import KernelSites
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.space.wiring import source_of
from autopar.tracer import ColoTracer
from tests.golden import cases
from tests.kernels.matcher import found_in
from tests.kernels.sites import ASSUMED, SITES
from tests.language import drawn
from tests.models import eager_links
from tests.random_plans import cheapest_at_random, with_random_states
from tests.shares import one_in


@pytest.mark.parametrize("name", one_in(6, SITES))
def test_kernels_stand_where_a_random_program_has_their_ops(name):
    """Nobody would choose such plans: conversions stand inside of most groups, and results are saved as it comes."""
    build, config = SITES[name]
    torch.manual_seed(0)
    model, batch, mesh = build(config).train(), drawn(16, 64, 128), DeviceMesh((2, 2))
    graph = ColoTracer().trace(model, batch, assume=ASSUMED)
    sites, space = KernelSites.of(graph, NAMES), shardings(graph, Setting(mesh, eager_links(), kernels=NAMES))
    dice, count = np.random.default_rng(0), []
    for _ in range(2):
        plan = cheapest_at_random(space, dice)
        for one in (plan, with_random_states(plan, dice, (0.5,))):
            found = found_in(local_program(graph, one, (0, 0)), one)
            assert fused_of(sites, one) == found
            count.append(len(found))
        assert plan.fused == fused_of(sites, plan)
    assert min(count) > 0 and max(count) < len(sites.results)


class Turned(torch.nn.Module):
    """Queries and keys that are rotated, the queries for two readers: these stand behind the keys."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(16))

    def forward(self, q, k, cos, sin):
        q, k = (x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin for x in (q * self.scale, k * self.scale))
        return (q * k + q).sum()


TURNED = {"q": torch.randn(2, 4, 5, 16), "k": torch.randn(2, 4, 5, 16)}
TURNED |= {"cos": torch.randn(1, 1, 5, 16), "sin": torch.randn(1, 1, 5, 16)}


@pytest.mark.parametrize("name", [*one_in(6, SITES), "turned"])
def test_kernels_stand_where_conversions_leave_them(name, monkeypatch):
    """Conversions are drawn, before any op and of any operand: a program that nobody runs, but in which they stand."""
    monkeypatch.setattr(Localiser, "_steps", lambda self, steps, whole, source: (str(steps), whole.shape))
    model, batch = (Turned(), TURNED) if name == "turned" else (SITES[name][0](SITES[name][1]), drawn(4, 16, 128))
    graph = ColoTracer().trace(model.train(), batch, assume=ASSUMED)
    plan = autopar.plan(model, batch, mesh=(1,), memory_budget="inf", kernels=NAMES, assume=ASSUMED)
    sites, count = KernelSites.of(graph, NAMES), set()
    for seed in range(12):
        dice = np.random.default_rng(seed)
        conversions = tuple(drawn_conversions(graph, plan, dice))
        one = with_random_states(replace(plan, conversions=conversions), dice, (0.0, 0.3))
        found = found_in(local_program(graph, one, (0,)), one)
        assert fused_of(sites, one) == found
        count.add(len(found))
    assert len(count) > 1


def drawn_conversions(graph, plan, dice):
    """Conversions of some operands, there and back, forward or backward or both."""
    whole, share = Sharding.parse("R", plan.mesh), dice.choice([0.01, 0.1])
    trip = (Step("slice", 0, 0), Step("all_gather", 0, 0))
    for node in graph.nodes:
        operands = node.target.operands(node.kwargs) if info(node).kind == "op" else []
        for index, value in enumerate(n for n in operands if isinstance(n, torch.fx.Node)):
            if dice.random() < (0.2 if op_name(node) == "identity" else share):
                gradient = (whole, whole) if type_of(value).requires_grad else None
                ways = [(trip, ()), (trip, trip), ((), trip)][dice.integers(3) if gradient else 0]
                ends = (info(source_of(value)[0]).key, info(node).key, index)
                yield Conversion(*ends, (whole, whole), gradient, *ways, 0.0)


@pytest.mark.parametrize("name", one_in(6, cases.CASES))
def test_kernels_stand_where_a_fast_program_has_their_ops(name):
    """Plans for GPUs, which cut the groups that they count as kernels by no conversion."""
    case = cases.CASES[name]
    model, batch = cases.FAMILIES[case.family]()
    plan = autopar.plan(model, batch, mesh=case.mesh, cluster="h100-1x8", kernels=NAMES, **case.asked)
    graph = ColoTracer().trace(model, batch, precision=case.asked.get("precision"))
    graph = Request.of(plan).as_planned(graph, plan)
    last = tuple(n - 1 for n in plan.mesh.shape)
    assert plan.fused and found_in(local_program(graph, plan, last), plan) == plan.fused
    assert plan.search.counted_as_kernels <= plan.fused.keys()


@pytest.fixture(scope="module")
def planned():
    """A plan with kernels, and its graph."""
    build, config = SITES["llama"]
    torch.manual_seed(0)
    model, batch = build(config).train(), drawn(4, 16, 128)
    plan = autopar.plan(model, batch, mesh=(2,), memory_budget="inf", kernels=NAMES, assume=ASSUMED)
    return plan, ColoTracer().trace(model, batch, assume=ASSUMED)


def test_a_plan_names_its_kernels(planned, tmp_path):
    plan, _ = planned
    assert plan.fused["model.layers.0.mlp/mul"] == "gated"
    assert "model.layers.*.mlp/mul (x2)" in plan.table()
    assert "the last op of a kernel of gated" in plan.explain("model.layers.0.mlp/mul")
    less = replace(plan, fused={name: family for name, family in plan.fused.items() if family != "gated"})
    assert "in a kernel of gated" in plan.diff(less)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_plan_of_an_older_release_has_the_kernels_that_can_stand(planned):
    plan, graph = planned
    data = plan.to_dict()
    assert data.pop("fused")
    older = Plan.from_dict(data)
    check_plan(graph, older)
    assert older.fused is None and older.to_dict() == data
    assert lower(graph, older, (0,)).code == lower(graph, plan, (0,)).code


def test_a_program_has_the_kernels_of_its_plan_and_no_others(planned, as_ops):
    plan, graph = planned
    less = replace(plan, fused={name: family for name, family in plan.fused.items() if family != "gated"})
    check_plan(graph, less)
    code, all_of_them = (lower(graph, one, (0,)).code for one in (less, plan))
    assert "gated(" not in code and code.count("# one kernel") == len(less.fused)
    assert all_of_them.count("# one kernel") == len(plan.fused)


def test_other_states_have_the_kernels_that_can_stand(planned, as_ops):
    """A kernel makes both of its results at once: where one is recomputed and one saved, its ops are written out."""
    plan, graph = planned
    norm = next(name for name, family in plan.fused.items() if family == "add_rms_norm")
    other = plan.recomputing([norm])
    may = fused_of(KernelSites.of(graph, NAMES), other)
    assert plan.fused[norm] != may.get(norm) and other.states == {norm: Recomputed()}
    code = lower(graph, other, (0,)).code
    assert code.count("# one kernel") == len(may) and Plan.from_dict(other.to_dict()) == other
    with pytest.raises(BadPlan, match=f"a kernel of add_rms_norm in the place of {norm}, recomputes some of its"):
        lower(graph, replace(other, fused=plan.fused), (0,))


def test_a_kernel_that_cannot_stand_is_a_letter(planned):
    plan, graph = planned
    result = next(name for name, family in plan.fused.items() if family == "add_rms_norm")
    assert result in {info(node).key for node in graph.nodes}
    for wrong, words in (
        ({result: "gated"}, f"a kernel of gated in the place of {result}, where none can stand"),
        ({"lm_head/linear": "gated"}, "where none can stand"),
    ):
        with pytest.raises(BadPlan, match=words):
            check_plan(graph, replace(plan, fused={**plan.fused, **wrong}))
    with pytest.raises(BadPlan, match="and its program other ops"):
        lower(graph, replace(plan, fused={"lm_head/linear": "rms_norm"}), (0,))
    for wrong, words in (
        ({"lm_head.weight": "gated"}, "which is not one of its ops"),
        ({"elsewhere": "gated"}, "which is not one of its ops"),
        ({result: "gate"}, "names no kernels"),
    ):
        with pytest.raises(BadPlan, match=words):
            Plan.from_dict({**plan.to_dict(), "fused": wrong})
    with pytest.raises(BadPlan, match="uses no such kernels"):
        Plan.from_dict({**plan.to_dict(), "kernels": ["rms_norm"]})
