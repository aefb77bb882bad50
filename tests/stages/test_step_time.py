"""The executor takes the seconds that the simulation predicts, over gloo, with stages and links of known times."""

from __future__ import annotations

import pytest

from autopar.testing import on_processes
from tests.stages.slept import BY_DAY, BY_NIGHT, best, steps


@pytest.mark.machines
@pytest.mark.nightly  # seconds by the clock: others use the machine by day
@pytest.mark.parametrize("cases", [BY_DAY, *BY_NIGHT])
def test_a_step_takes_the_predicted_seconds(cases):
    ranks = on_processes(cases[0][0], steps, cases)
    found = {case: measured / predicted for case, (predicted, measured) in zip(cases, best(ranks), strict=True)}
    assert all(0.99 <= share <= 1.05 for share in found.values()), found
