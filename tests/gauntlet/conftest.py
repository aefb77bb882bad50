"""Each test of the gauntlet shows what notices an error by itself: certificates are asked for where they are meant."""

from __future__ import annotations

import pytest

from autopar.certificate import VARIABLE


@pytest.fixture(autouse=True)
def no_certificates(monkeypatch):
    monkeypatch.setenv(VARIABLE, "off")
