"""Every function of torch that a model may call: what plans may do with it is proven, or it is computed whole."""

from __future__ import annotations

import pytest

from tests.ops.audit import audit, table

SHARES, NIGHTLY = 24, range(1, 24)  # of the functions; and those that make test leaves out


def held(found) -> None:
    assert not found.raw, sorted(found.raw)
    assert not found.wrong, sorted(found.wrong)


@pytest.mark.parametrize(
    "share", [pytest.param(s, marks=pytest.mark.nightly) if s in NIGHTLY else s for s in range(SHARES)]
)
@pytest.mark.filterwarnings("ignore")
def test_one_call_of_every_function(share):
    """Its strategies compute what it computes; what has no rule is computed whole on every device."""
    found = audit(table()[share::SHARES], most=1, first=share)
    held(found)
    assert found.calls > 18 and len(found.functions) > 18  # of all shares: more than 440 functions


@pytest.mark.nightly
@pytest.mark.parametrize("share", range(16))
@pytest.mark.filterwarnings("ignore")
def test_every_call_of_every_function(share):
    held(audit(table()[share::16], most=24))
