"""Every plan holds at least what `least_saved` says when backward begins."""

import numpy as np
import pytest

import autopar
from autopar.space.setting import Setting
from autopar.space.shardings import uncounted
from autopar.tracer import ColoTracer
from tests.language import CASES
from tests.models import eager_links, mlp_case
from tests.random_plans import cheapest_at_random


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_no_plan_saves_less(name):
    model, batch = mlp_case() if name == "mlp" else CASES[name]()
    graph = ColoTracer().trace(model, batch)
    rng = np.random.default_rng(0)
    space = uncounted(graph, Setting(autopar.DeviceMesh((2, 2)), eager_links()))
    least = space.least_bytes()
    assert least > 0
    assert all(cheapest_at_random(space.counted(), rng).peak_bytes >= least for _ in range(3))


def test_data_parallelism_saves_little_more():
    """What else is saved are statistics of norms and attention, and the loss head's."""
    model, batch = CASES["gpt2"]()
    mesh = autopar.DeviceMesh((2,))
    plan = autopar.plan(model, batch, mesh=mesh, parallel="dp", memory_budget="inf", recompute="none")
    least = uncounted(ColoTracer().trace(model, batch), Setting(mesh, eager_links())).least_bytes()
    assert 0.5 * plan.memory["saved activations"] < least <= plan.memory["saved activations"]
