"""Budgets that parameters, gradients and states of the optimizer alone exceed are refused before anything is searched.

Of spaces of many sites: here, of all.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.letters import Infeasible
from autopar.solver import standing_bytes
from autopar.solver.limits import LIMITS
from autopar.solver.standing_bytes import standing
from tests.models import eager_links

WIDTH, DEVICES = 64, 4
WEIGHTS = 3 * 4 * WIDTH * WIDTH  # bytes


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return {"loss": x.square().mean()}


@pytest.fixture(autouse=True)
def every_space_has_many_sites(monkeypatch):
    monkeypatch.setattr(standing_bytes, "LIMITS", replace(LIMITS, searches=replace(LIMITS.searches, long=0)))


def planned(budget="inf", **asked):
    x = torch.randn(8, WIDTH)
    return autopar.plan(Deep(), {"x": x}, mesh=(DEVICES,), cluster=eager_links(), memory_budget=budget, **asked)


@pytest.mark.parametrize(("asked", "parts"), [({}, DEVICES), ({"parallel": "zero3"}, DEVICES), ({"parallel": "dp"}, 1)])
def test_what_stands_is_counted_in_the_most_parts(asked, parts):
    kinds = standing(planned(**asked).search.counted.space)
    found = [kinds[kind] for kind in ("parameters", "gradients", "optimizer states")]
    assert found == [WEIGHTS / parts, WEIGHTS / parts, 2 * WEIGHTS / parts]


@pytest.mark.parametrize("asked", [{}, {"parallel": "dp"}, {"optimizer": "sgd"}, {"constraints": {"layers.0.*": "R"}}])
def test_no_plan_is_smaller_and_a_smaller_budget_is_refused_at_once(asked):
    counted = planned(**asked).search.counted
    least = sum(standing(counted.space).values())
    assert least <= counted.smallest()[0].peak
    with pytest.raises(Infeasible, match=r"(?s)no plan fits in .* needed by any plan") as letter:
        planned(int(0.98 * least), **asked)
    assert letter.value.is_of_states and letter.value.needs == pytest.approx(least, rel=0.01)
    try:
        plan = planned(int(1.02 * least), **asked)
    except Infeasible as other:
        assert not other.is_of_states
    else:
        assert plan.peak_bytes <= 1.02 * least


def test_the_letter_says_what_keeps_them_whole():
    with pytest.raises(Infeasible, match="another preset than 'dp'") as letter:
        planned("150KiB", parallel="dp")
    assert f"{4 * WEIGHTS / DEVICES / 1024:.2f} KiB" in str(letter.value)
