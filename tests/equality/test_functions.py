"""Functions that were once computed wrong, or not at all: each under random legal plans, held against eager."""

from __future__ import annotations

import copy

import pytest
import torch

import autopar
from autopar.testing import Equality
from tests.equality.functions import FUNCTIONS
from tests.models import FunctionModel
from tests.random_plans import random_plan
from tests.shares import diagonal
from tests.training import whole

MESHES = [autopar.DeviceMesh((2,)), autopar.DeviceMesh((3,)), autopar.DeviceMesh((2, 2), ("dp", "tp"))]


@pytest.mark.parametrize("name, mesh", diagonal(list(FUNCTIONS), MESHES, 2 * len(MESHES)), ids=str)
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_it_is_right_under_random_plans(name, mesh, threads):
    check(name, threads, range(1), [mesh])


@pytest.mark.nightly
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_it_is_right_under_many_random_plans(name, threads):
    check(name, threads, range(1, 10))


def check(name, threads, seeds, meshes=MESHES):
    model, batch = FunctionModel(FUNCTIONS[name], 6, 6), {"x": torch.randn(6, 6).double()}
    reference = copy.deepcopy(model)
    loss = reference(**batch)
    loss.backward()
    expected = {
        "loss": loss.detach(),
        "weight": reference.weight.grad,
        "mean": reference.mean + 1,
        "var": reference.var,
    }

    def body(rank, plan):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        loss = mine(**batch)
        loss.backward()
        return {"loss": loss.detach(), "weight": whole(mine.weight.grad), "mean": mine.mean + 1, "var": mine.var}

    for mesh in meshes:
        for seed in seeds:
            for result in threads(mesh.size, body, random_plan(model, batch, mesh, seed)):
                Equality.in_float64(f"{name} on {mesh}, plan {seed}", result, expected, 1e-9).check()
