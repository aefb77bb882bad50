"""Tight budgets: small models recompute, bytes that no schedule changes are priced, and letters say what is proven."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.letters import Infeasible
from autopar.solver import joint
from autopar.solver.budget import Budgeted
from autopar.solver.figures import size
from autopar.solver.joint import JointPrices
from autopar.solver.joint_search import JointSearch
from autopar.solver.polish import spliced
from autopar.solver.recompute import recompute
from autopar.solver.searches import Findings, Task
from autopar.solver.standing_bytes import least_standing
from autopar.space import timeline
from tests.solver.drawn_schedules import language_space, schedules


class Narrow(nn.Module):
    """Residual blocks whose values are all under 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(4)
        )

    def forward(self, x):
        for block in self.h:
            x = x + block(x)
        return x.square().mean()


ROWS = {"x": torch.zeros(256, 16)}


def narrow(share=math.inf, **how):
    """The plan at a share of the free peak."""
    how = {"mesh": (2,), "loss": lambda out, inputs: out} | how
    free = autopar.plan(Narrow(), ROWS, memory_budget="inf", **how)
    return free, autopar.plan(Narrow(), ROWS, memory_budget=int(share * free.peak_bytes), **how)


def test_a_small_model_recomputes_before_its_batch_is_cut():
    free, plan = narrow(0.5)
    assert free.peak_bytes < 2**20 and plan.peak_bytes <= 0.5 * free.peak_bytes
    assert plan.microbatches == 1 and plan.recomputed and plan.step_time_s < 1.5 * free.step_time_s


@pytest.mark.parametrize("turns", [1, 2])
def test_what_is_said_to_be_needed_is_in_every_schedule(turns, monkeypatch):
    monkeypatch.setattr(timeline, "SMALL", 0)
    space = language_space(turns)
    counted, step = Budgeted(space), 2 * len(space.memory.ops)
    tables = [joint.JointTables(counted, time, step) for time in (step // 2, 3 * step // 4)]
    needed, always = max(t.least_bytes() for t in tables), least_standing(space)
    assert 0 < always <= needed
    for lined, rows, held in schedules(space, counted):
        assert held.max() >= needed * (1 - 1e-9) and held.min() >= always * (1 - 1e-9)
        assert (held[step:] >= rows[step:] * (1 - 1e-9)).all() and held[step:].max() == lined.at_step


def test_a_plan_of_exactly_the_budget_is_spliced_with_faster_ones():
    counted = Budgeted(language_space(1))
    fast = min(counted.fastest(math.inf, 0.0, until=math.inf).points, key=lambda point: point.seconds)
    small = counted.smallest()[0]
    assert small.peak < fast.peak and fast.seconds < small.seconds
    found = spliced(counted, [fast, small], small.peak)
    assert found and all(point.peak <= small.peak for point in found)


def test_a_policys_plan_of_exactly_the_budget_is_the_one():
    task = Task(Budgeted(language_space(1)), math.inf, "cbc", None, 0.0, math.inf, recomputes=True)
    fastest = recompute(task, "full", Findings).best
    again = recompute(replace(task, budget=fastest.peak), "full", Findings).best
    assert (again.picked, again.peak) == (fastest.picked, fastest.peak)


def test_prices_at_the_step_give_bounds(monkeypatch):
    """No plan takes less than the bound under a budget that it just fits in, and where it fits at the step alone."""
    monkeypatch.setattr(timeline, "SMALL", 0)
    space = language_space(1)
    counted, step = Budgeted(space), 2 * len(space.memory.ops)
    search = JointSearch.of(Task(counted, math.inf, "cbc", None, 0.0, math.inf, recomputes=True))
    apart = search.free.bound / search.first.at_step
    for price in (0.1, 0.3, 1.0, 3.0):
        search.look(JointPrices(0.0, search.free.prices.exposed, price * apart), search.first)
    raised = 0
    for lined, _, held in schedules(space, counted):
        bound = search.bound(held[step:].max())
        raised += bound > 1.01 * search.free.bound
        assert bound <= lined.point.seconds * (1 + 1e-9)
    assert raised


def test_a_letter_needs_no_more_than_its_smallest_plan_holds():
    with pytest.raises(Infeasible) as letter:
        narrow(0.05, microbatches=1)
    found = letter.value
    assert 0 < found.stands <= found.needs <= found.smallest
    assert f"{size(found.needs)} are needed by any plan; " in found.seen
