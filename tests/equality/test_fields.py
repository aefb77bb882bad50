"""Models of fields that no other test names, under free, preset and random plans: some here, all nightly."""

from __future__ import annotations

import random

import pytest

from tests.equality.fields import PLANS, worst
from tests.zoo.fields import FIELDS

LONG = ("physics: neural differential equation", "physics: Hamiltonian by leapfrog", "control: Kalman filter")
CASES = [(name, kind) for name in FIELDS if name not in LONG for kind in PLANS]


@pytest.mark.parametrize("name, kind", random.Random(5).sample(CASES, 6))
def test_some_models_and_plans_compute_the_same(name, kind):
    worst(name, kind)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FIELDS)
def test_every_plan_computes_the_same(name):
    for kind in PLANS:
        worst(name, kind)
