"""Processes that are ranks, as torchrun starts them, and what they say held against one device."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed.tensor import DTensor


def as_torchrun(rank, ranks):
    """The environment that torchrun gives; the group is there already."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.update(TORCHELASTIC_RUN_ID="tests", LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK="0")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29501", ACCELERATE_USE_CPU="true")


def weights_of(model):
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.state_dict().items()}
    return {n: p.detach().clone() for n, p in whole.items()}


def check_alike(found, right):
    (said, weights), (expected, others) = found, right
    assert said == pytest.approx(expected[-len(said) :], rel=1e-4, abs=1e-6)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-4, atol=2e-5, msg=name)
