"""`plan.curve()`: budgets against step time, beside a plan for each budget."""

from __future__ import annotations

import itertools
import math

import pytest

import autopar
from autopar.letters import BadBudget, BadPlan, Infeasible
from tests.language import CASES
from tests.models import mlp_case
from tests.shares import by_day

MODELS = {"gpt2": CASES["gpt2"], "mlp": mlp_case, "bert": CASES["bert"], "llama": lambda: CASES["llama"](2)}
WORSE = 0.05  # a plan for one budget is looked at more closely than a point of a curve: so much slower it may be


def planned(name, **how):
    model, batch = MODELS[name]()
    return autopar.plan(model, batch, mesh=(2, 2), microbatches=1, chunks=1, **how)


@pytest.mark.parametrize("name", by_day(MODELS, "mlp"))
def test_a_curve_is_what_plans_are(name):
    free = planned(name, memory_budget=math.inf)
    curve = free.curve(12)
    assert len(curve) == 12 and curve[0].budget == pytest.approx(free.peak_bytes, rel=0.02)  # others are as fast
    assert curve[0].step_time_s == pytest.approx(free.step_time_s, rel=WORSE)
    assert all(
        b.step_time_s >= a.step_time_s and b.lower_bound_s >= a.lower_bound_s for a, b in itertools.pairwise(curve)
    )
    assert all(p.lower_bound_s <= p.step_time_s and p.peak_bytes <= p.budget for p in curve)
    assert sum(p.recomputed > 0 for p in curve) >= (0 if name == "mlp" else 4)  # of the MLP little could be dropped
    for point, near in ((curve[5], 1.01), (curve[11], 1.03)):  # gaps are widest at the lowest peak
        plan = planned(name, memory_budget=point.budget)
        assert point.lower_bound_s <= plan.step_time_s * (1 + 1e-9) and plan.step_time_s <= point.step_time_s * near
        assert point.step_time_s <= plan.step_time_s * (1 + WORSE)
    assert str(curve).count("\n") == 12


def test_a_budget_that_nothing_fits_is_said():
    points = planned("mlp", memory_budget=math.inf).curve([2**30, 1])
    assert math.isfinite(points[0].step_time_s) and math.isinf(points[1].step_time_s)
    assert "none found" in str(points)
    with pytest.raises(Infeasible):
        planned("mlp", memory_budget=1)


@pytest.mark.nightly
def test_a_curve_keeps_to_the_plans_policy():
    free = planned("mlp", memory_budget=math.inf, recompute="none")
    curve = free.curve(4)
    assert all(p.recomputed == 0 for p in curve)
    least = planned("mlp", memory_budget=curve[-1].budget, recompute="none")
    assert least.step_time_s == pytest.approx(curve[-1].step_time_s) and least.step_time_s > free.step_time_s


@pytest.mark.parametrize("budgets", [0, -1, [], [0], ["16GiB"], "16GiB", True, 2.5, None, 16 * 2**30])
def test_what_is_no_budget_is_a_letter(budgets):
    plan = planned("mlp")
    with pytest.raises(BadBudget, match="not valid budgets for a curve"):
        plan.curve(budgets)


def test_a_plan_from_a_file_has_no_curve(tmp_path):
    planned("mlp").save(tmp_path / "plan.json")
    with pytest.raises(BadPlan, match="is gone"):
        autopar.Plan.load(tmp_path / "plan.json").curve()
