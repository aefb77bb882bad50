"""A user's script, for a type checker alone: `make lint` runs mypy on it, and each ignored error has to be there."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import assert_type

import autopar


class Net(nn.Module):
    width: int = 4


def train(model: Net, batch: dict[str, torch.Tensor]) -> None:
    plan = autopar.plan(model, batch, mesh=(2, 2), memory_budget="16GiB", constraints={"x": autopar.S(0)})
    assert_type(plan, autopar.Plan)
    assert_type(plan.step_time_s, float)
    autopar.plan(model, batch, memory_budge="16GiB")  # type: ignore[call-arg]
    autopar.plan(model, batch, strict="yes")  # type: ignore[arg-type]
    parallel = autopar.autoparallelize(model, batch, plan=plan)
    assert_type(parallel, Net)
    assert_type(autopar.gather(parallel), Net)
    assert_type(autopar.gather(parallel, rank=0), Net | None)
    autopar.autoparallelize(model, batch, plan="plan.json")  # type: ignore[arg-type]
    autopar.plam(model, batch)  # type: ignore[attr-defined]
