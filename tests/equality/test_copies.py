"""Copies at which gradients stop, on one device and on four, under random plans: eager's gradients and buffers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar
from autopar.testing import Equality
from autopar.testing.ranks import on_threads
from tests.random_plans import random_plan
from tests.shares import one_in
from tests.tracer.copies import READS, SPELLINGS, Copier
from tests.training import whole

READ = [read for read in READS if not read.startswith("written") and read != "returned"]


class ReadEverywhere(nn.Module):
    """A copy of a value and one of a parameter, each read in every way."""

    def __init__(self, spelling):
        super().__init__()
        self.copiers = nn.ModuleList(Copier(spelling, READ, of_parameter) for of_parameter in (False, True))

    def forward(self, x):
        return sum(copier(x) for copier in self.copiers)


def left(model, x, value):
    value(x=x).backward()
    gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return gradients, {n: whole(b) for n, b in model.named_buffers()}


def on_a_rank(rank, model, x, plan):
    mine = copy.deepcopy(model)
    parallel = autopar.autoparallelize(mine, {"x": x}, plan=plan)
    return left(parallel, x, parallel)


SPELLED = [spelling for spelling in SPELLINGS if spelling != "with gradient: out=empty"]  # eager refuses that one


@pytest.mark.parametrize("spelling", one_in(40, SPELLED))
def test_a_gradient_stops_at_a_copy_on_any_number_of_devices(spelling):
    torch.manual_seed(0)
    model, x = ReadEverywhere(spelling), torch.randn(8, 4)
    expected = copy.deepcopy(model)
    gradients, buffers = left(expected, x, expected)
    for devices in (1, 4):
        plan = random_plan(model, {"x": x}, autopar.DeviceMesh((devices,)), seed=len(spelling))
        for found, held in on_threads(devices, on_a_rank, model, x, plan):
            Equality.in_float64(f"{spelling} on {devices}: gradients", found, gradients, 1e-4).check()
            Equality.in_float64(f"{spelling} on {devices}: buffers", held, buffers, 1e-5).check()
