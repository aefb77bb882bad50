"""There is one count of memory: the peak that a plan names is the greatest of its timeline."""

from __future__ import annotations

import numpy as np
import pytest

import autopar
from autopar.solver.points import Points
from autopar.space.timeline import Timeline
from tests.golden.cases import CASES, FAMILIES
from tests.models import eager_links

QUICK = ("gpt2-free", "t5-2d")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_the_peak_of_a_plan_is_that_of_its_timeline(name):
    case = CASES[name]
    model, batch = FAMILIES[case.family]()
    plan = autopar.plan(model, batch, mesh=case.mesh, cluster=eager_links(), **case.asked)
    space, point = plan.search.counted.space, plan.search.point
    saved = Points(space).of(point.picked)
    line = Timeline.of(space, point.picked, saved.held, saved.momentary)
    held = line.under(line.again(point.recomputed), line.passing(point.passing)).held
    assert plan.peak_bytes == pytest.approx(held.max(), abs=len(plan.memory))  # each kind is rounded
    np.testing.assert_allclose(point.held, held, atol=1)
    np.testing.assert_allclose(line.under(line.forced).held, saved.held, atol=1)
