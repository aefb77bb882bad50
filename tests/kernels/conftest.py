"""Fixtures of kernels: `interpret` runs them on a CPU, `as_ops` puts their custom ops into programs."""

from __future__ import annotations

import pytest

from autopar.kernels import can_run

if not can_run():
    collect_ignore_glob = [
        "test_numerics.py",
        "test_mutants.py",
        "test_ahead_of_time.py",
        "test_adamw.py",
        "test_draws.py",
    ]


@pytest.fixture
def interpret(monkeypatch):
    from tests.kernels.interpreter import repair

    repair(monkeypatch)
    monkeypatch.setenv("AUTOPAR_KERNELS", "interpret")


@pytest.fixture
def as_ops(monkeypatch):
    monkeypatch.setenv("AUTOPAR_KERNELS", "ops")
