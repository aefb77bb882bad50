"""The equality tests can fail: every broken compiler of `tests/mutants.py` is noticed by a small suite of them."""

from __future__ import annotations

import pytest

from autopar.certificate import VARIABLE
from autopar.codegen import joint
from autopar.testing import Unequal
from tests.equality.suites import TABLES, gpt2_plan, gpt2_suite, own_suite, suite
from tests.mutants import GPT2_MUTANTS, MUTANTS, OWN_MUTANTS

# the plan that notices a broken compiler, where it is not the first
NOTICED_BY = {
    "an axis is swapped": "megatron",
    "a bias is added once per device": "contracted",
    "gelu is called linear": "through gelu",
    "a gradient buffer is handed out twice": TABLES,
}


@pytest.fixture(autouse=True)
def nothing_remembered():
    joint.LOWERED.clear()
    yield
    joint.LOWERED.clear()


def test_the_sound_compiler_passes(threads):
    suite(threads)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_compiler_is_noticed(mutant, threads, monkeypatch):
    monkeypatch.setenv(VARIABLE, "off")  # by its values, not by its types
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(Unequal):
        suite(threads, first=NOTICED_BY.get(mutant))


@pytest.fixture(scope="module")
def sound_plan():
    """Made once: mutants of GPT-2 break what is made of a plan."""
    return gpt2_plan()


def test_the_sound_compiler_passes_gpt2(threads, sound_plan):
    gpt2_suite(threads, sound_plan)


@pytest.mark.parametrize("mutant", GPT2_MUTANTS)
def test_a_broken_compiler_is_noticed_by_gpt2(mutant, threads, sound_plan, monkeypatch):
    monkeypatch.setenv(VARIABLE, "off")
    GPT2_MUTANTS[mutant](monkeypatch)
    with pytest.raises(Unequal):
        gpt2_suite(threads, sound_plan)


@pytest.mark.parametrize("mutant", OWN_MUTANTS)
def test_a_broken_compiler_is_noticed_by_a_model_of_its_own(mutant, threads, monkeypatch):
    breaks, function = OWN_MUTANTS[mutant]
    own_suite(threads, function)  # the sound compiler passes
    joint.LOWERED.clear()
    monkeypatch.setenv(VARIABLE, "off")
    breaks(monkeypatch)
    with pytest.raises(Unequal):
        own_suite(threads, function)
