"""What a plan says that a rank and its host hold is what they hold, with values on the host."""

from __future__ import annotations

import pytest

from benchmarks.offload import MODELS, WAYS, held, held_without_parameters
from tests.shares import by_day

# Nothing fits where parameters and states alone take most of the budget.
FITS = [(model, way) for model in MODELS for way in WAYS if way != "dp" or model in ("gpt2", "llama")]


@pytest.mark.parametrize(("model", "way"), by_day(FITS, ("convnext", "zero3")), ids=str)
@pytest.mark.filterwarnings("ignore")
def test_peaks_are_those_of_a_rank(model, way):
    """The host all but exactly, and the device as near as plans without a host are."""
    one = held(model, way)
    assert 0.99 <= one.host <= 1.03
    assert 0.99 <= one.device <= 1.03


WHOLE = [(model, way) for model in ("gpt2", "llama", "bert") for way in WAYS]


@pytest.mark.parametrize(("model", "way"), by_day(WHOLE, ("gpt2", "dp"), ("bert", "zero3")), ids=str)
@pytest.mark.filterwarnings("ignore")
def test_so_are_those_of_a_rank_whose_parameters_lie_on_the_host(model, way):
    """A shared table goes with its last reader, and a gather is finished before the next one begins."""
    one = held_without_parameters(model, way)
    assert one.plan.wholly_hosted == set(one.plan.parameters)
    assert one.host == pytest.approx(1)
    assert 0.99 <= one.device <= 1.03
