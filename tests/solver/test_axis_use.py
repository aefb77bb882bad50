"""Axes that are alike are used as their names say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar import DeviceMesh
from autopar.solver.axis_use import use_of


def planned(axes: tuple[str, ...] | None, shape: tuple[int, ...] = (2, 2), rows: int = 1024, **how):
    """The fastest plan cuts weights along one axis, and along the other rows in half of the layers."""
    with torch.device("meta"):
        layers = [part for _ in range(2) for part in (nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))]
        model, x = nn.Sequential(*layers), torch.empty(rows, 1024)
    return autopar.plan(model, x, mesh=DeviceMesh(shape, axes), **how)


@pytest.mark.parametrize("axes", [("dp", "tp"), ("tp", "dp"), None])
def test_rows_are_cut_by_the_axis_that_is_named_for_them(axes):
    """A plan over axes without such names takes as long, but for what it says."""
    plan, unnamed = planned(axes), planned(("x", "y"))
    dp = plan.mesh.axes.index("data" if axes is None else "dp")
    data, model = use_of(plan, dp), use_of(plan, 1 - dp)
    assert data.rows > model.rows and model.weights > data.weights
    costs = plan.step_time_s / unnamed.step_time_s - 1
    assert -1e-9 <= costs <= 0.005 and (costs > 1e-9) == any(name == "axes" for name, _ in plan.defaults)


@pytest.mark.parametrize(
    "how", [{"shape": (4, 2)}, {"cluster": "h100-2x8"}, {"constraints": {"0.weight": "S(0)@y; S(0)@y"}}]
)
def test_axes_that_differ_are_not_exchanged(how):
    """Those of unequal sizes, of unequal links, and those that a constraint names: the plan is as without names."""
    plan = planned(("x", "y"), **how)
    for axes in (("dp", "tp"), ("tp", "dp")):
        constraints = {k: v.replace("y", axes[1]) for k, v in how.get("constraints", {}).items()}
        named = planned(axes, **{**how, "constraints": constraints})
        assert named.step_time_s == plan.step_time_s
        assert [use_of(named, a) for a in (0, 1)] == [use_of(plan, a) for a in (0, 1)]
