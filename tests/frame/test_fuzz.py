"""Random modules under random legal plans: two hundred here, two thousand nightly; and the two hundred notice each broken compiler."""

from __future__ import annotations

import pytest

from tests.frame.fuzz import fuzz, kills
from tests.mutants import GPT2_MUTANTS, MUTANTS

COUNT, AT_ONCE = 200, 10


@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
def test_random_modules_compute_the_same(first):
    for seed in range(first, first + AT_ONCE):
        fuzz(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(COUNT, 2000, 50))
def test_two_thousand_compute_the_same(first):
    for seed in range(first, first + 50):
        fuzz(seed)


KILLED_BY = {}


@pytest.mark.parametrize("name", MUTANTS | GPT2_MUTANTS)
def test_each_broken_compiler_is_noticed_by_one_of_them(name):
    """The first of the two hundred that notices it; nightly looks for it anew."""
    assert 0 <= KILLED_BY[name] < COUNT and kills((MUTANTS | GPT2_MUTANTS)[name], [KILLED_BY[name]]) is not None
