"""The gauntlet: what went wrong elsewhere is planted here, and noticed."""

from __future__ import annotations

import importlib
from collections import Counter

import pytest

from autopar.certificate import VARIABLE
from autopar.codegen import joint
from autopar.letters import Letter, NotCertified
from autopar.testing import Unequal
from tests.docs.blocks import HERE
from tests.gauntlet import refused as refusals
from tests.gauntlet import routed_plants, suites
from tests.gauntlet.__main__ import PAGE, page
from tests.gauntlet.bugs import BUGS, Bug, Place, named_test
from tests.gauntlet.ring_bugs import RINGS
from tests.gauntlet.routed_bugs import ROUTED

PLANTED = [bug for bug in BUGS if bug.plant is not None]
SHOWN = [bug for bug in BUGS if bug.plant is None]


def marks(is_nightly: bool, suite: str) -> list:
    found = [pytest.mark.nightly] if is_nightly else []
    return found + [pytest.mark.machines] * (suite in suites.IN_RANKS)


@pytest.fixture(autouse=True)
def nothing_remembered():
    joint.LOWERED.clear()
    yield
    joint.LOWERED.clear()


def sound() -> list:
    """Every suite; by day every eighth of those that have an error to notice then."""
    names = sorted({bug.suite for bug in PLANTED if not bug.suite.startswith("rule of ")})
    by_day = [name for name in names if any(bug.suite == name and not bug.is_nightly for bug in PLANTED)][::8]
    return [pytest.param(name, marks=marks(name not in by_day, name)) for name in names]


@pytest.mark.parametrize("suite", sound())
def test_the_sound_compiler_passes(suite, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    suites.prepared(suite)()


@pytest.mark.parametrize("bug", [pytest.param(b, id=b.name, marks=marks(b.is_nightly, b.suite)) for b in PLANTED])
def test_a_published_error_is_noticed(bug: Bug, monkeypatch):
    if bug.place is Place.HERE:
        check = suites.prepared(bug.suite)
        bug.plant(monkeypatch)
    elif bug.place is Place.RANKS:
        check = suites.suite_of(bug.suite)(bug.plant)
    else:
        bug.plant(monkeypatch)
        check = suites.suite_of(bug.suite)()
    with pytest.raises((Unequal, Letter)):
        check()


def asked() -> list:
    """A few of those that are refused by day, all nightly."""
    by_day = {b.name for b in [b for b in refusals.ASKED if b.name in refusals.seen() and not b.is_nightly][::8]}
    return [pytest.param(b, id=b.name, marks=marks(b.name not in by_day, b.suite)) for b in refusals.ASKED]


@pytest.mark.parametrize("bug", asked())
@pytest.mark.filterwarnings("ignore")
def test_certificate_and_witness_refuse_what_the_page_says(bug: Bug):
    assert refusals.judges_of(bug) == refusals.seen().get(bug.name, frozenset())


REFUSED = [bug for bug in (*ROUTED, *RINGS) if "certificate" in refusals.seen().get(bug.name, ())]


@pytest.mark.parametrize("bug", REFUSED, ids=lambda bug: bug.name)
def test_an_error_that_types_see_is_a_letter_before_the_first_step(bug: Bug, monkeypatch):
    check = suites.prepared(bug.suite)
    bug.plant(monkeypatch)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(NotCertified):
        check()


def test_routes_are_not_made_again_whatever_a_plan_names(monkeypatch):
    """So that a choice which would come out otherwise changes nothing."""
    check = suites.prepared("travelling_again")
    routed_plants.made_again_otherwise(monkeypatch)
    check()


@pytest.mark.parametrize("bug", SHOWN, ids=lambda bug: bug.name)
def test_what_cannot_be_planted_is_shown_by_a_test(bug: Bug):
    module, name = named_test(bug.shown_by)
    assert bug.why and callable(getattr(importlib.import_module(module), name))


def test_every_error_has_a_name_of_its_own_a_source_and_one_of_two_ends():
    assert len(BUGS) >= 45 and max(Counter(bug.name for bug in BUGS).values()) == 1
    for bug in BUGS:
        assert bug.sources and bug.what.endswith(".")
        assert (bug.plant is None) == (not bug.suite) == bool(bug.shown_by) == bool(bug.why)


def test_the_page_is_up_to_date():
    """`python -m tests.gauntlet` writes it."""
    assert (HERE / PAGE).read_text() == page()
