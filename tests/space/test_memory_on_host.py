"""What a plan says that a rank and its host hold is what they hold, with values on the host."""

from __future__ import annotations

import pytest

from benchmarks.offload import MODELS, WAYS, held
from tests.shares import by_day


@pytest.mark.parametrize(
    ("model", "way"), by_day([(model, way) for model in MODELS for way in WAYS], ("llama", "zero3")), ids=str
)
@pytest.mark.filterwarnings("ignore")
def test_peaks_are_those_of_a_rank(model, way):
    """The host to a hundredth; the device as near as a plan without one is."""
    one = held(model, way)
    assert 0.99 <= one.host <= 1.01 and 0.96 <= one.device <= 1.03
    assert one.plan.offloaded or not one.plan.host_bytes
