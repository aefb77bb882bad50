"""Sharding and states together: the bound and the plan against every sharding with every set of runs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar import DeviceMesh
from autopar.solver import joint, solve
from autopar.solver.budget import Budgeted
from autopar.solver.states import StateSearch
from autopar.space import timeline
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.space.timeline import Timeline
from autopar.tracer import ColoTracer
from tests.models import eager_links


class Chain(nn.Module):
    """Three ops between a parameter and a loss, whose values are much larger than it."""

    def __init__(self, second) -> None:
        super().__init__()
        self.weight, self.second = nn.Parameter(torch.randn(16, 16)), second

    def forward(self, x):
        return self.second(F.gelu(F.linear(x, self.weight))).square().mean()


SECOND = {"sigmoid": torch.sigmoid, "softmax": lambda x: x.softmax(-1), "norm": lambda x: F.layer_norm(x, (16,))}


def every(space, counted, slowest):
    """All shardings that take no longer than the slowest, each with its seconds and all of its states."""
    finite = [[i for i, s in enumerate(site.seconds) if math.isfinite(s)] for site in space.sites]
    for picked in itertools.product(*finite):
        point = counted.point(picked)
        if not point.seconds <= slowest:
            continue
        of = Timeline.of(space, picked, point.held, point.momentary)
        search, runs = StateSearch(of), [i for i, run in enumerate(of.runs) if run.name in of.names]
        for n in range(len(runs) + 1):
            for again in itertools.combinations(runs, n):
                states = search.of(frozenset(again))
                yield point.seconds + states.seconds, states.peak


@pytest.mark.parametrize("name", SECOND)
def test_the_bound_is_under_the_best_and_the_plan_is_the_best(name, monkeypatch):
    for module in (timeline, joint):
        monkeypatch.setattr(module, "SMALL", 0)
    model, batch = Chain(SECOND[name]), (torch.randn(64, 16),)
    graph = ColoTracer().trace(model, batch)
    constraints = {"weight": "R; R"}
    space = shardings(graph, Setting(DeviceMesh((2,)), eager_links(), 0.0, regather=True), constraints=constraints)
    count = math.prod(len(site.choices) for site in space.sites)
    assert count < 20_000, count
    free = solve(space)
    plans = np.array(list(every(space, Budgeted(space), 1.3 * free.step_time_s)))
    lowest = plans[:, 1].min()
    assert lowest < 0.95 * free.peak_bytes
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        budget = lowest + share * (free.peak_bytes - lowest)
        truth = plans[plans[:, 1] <= budget, 0].min()
        plan = solve(space, budget=budget, recompute="auto")
        assert plan.lower_bound_s <= truth * (1 + 1e-9) and plan.peak_bytes <= budget
        assert truth * (1 - 1e-9) <= plan.step_time_s <= truth * 1.02, (share, plan.step_time_s, truth)
