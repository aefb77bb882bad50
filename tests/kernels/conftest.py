"""Fixtures of kernels: `interpret` runs them on a CPU, `as_ops` puts their custom ops into programs."""

from __future__ import annotations

import pytest
import torch

from autopar.kernels import can_run

if not can_run():
    collect_ignore_glob = [
        "test_numerics.py",
        "test_mutants.py",
        "test_ahead_of_time.py",
        "test_adamw.py",
        "test_draws.py",
        "test_gpu.py",
        "test_slot_sums.py",
    ]


@pytest.fixture
def interpret(monkeypatch):
    from tests.kernels.interpreter import repair

    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled here: test_gpu.py runs them")

    repair(monkeypatch)
    monkeypatch.setenv("AUTOPAR_KERNELS", "interpret")


@pytest.fixture
def as_ops(monkeypatch):
    monkeypatch.setenv("AUTOPAR_KERNELS", "ops")
