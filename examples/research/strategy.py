"""Which strategies does a rule give, and what would a plan cost that has a certain one?"""

from __future__ import annotations

import torch
from torch import nn

import autopar
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.tracer import ColoTracer

if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    batch, loss = (torch.randn(64, 256),), lambda out, inputs: out.square().mean()
    mesh, cluster = autopar.DeviceMesh((2, 4), ("data", "model")), autopar.Cluster.of("h100-8x1")

    space = shardings(ColoTracer().trace(model, batch, loss=loss), Setting(mesh, cluster))
    site = next(s for s in space.sites if s.name == "0/linear")
    print(f"{site.name} has {len(site.choices)} choices; the quickest by itself:")
    for i in site.seconds.argsort()[:4]:
        print(f"  {site.seconds[i] * 1e6:6.2f} us  {site.choices[i]}")

    free = autopar.plan(model, batch, mesh=mesh, cluster=cluster, loss=loss)
    print(f"free:            {free.step_time_s * 1e6:.1f} us")
    for weight in ("S(0)@model", "S(1)@model", "R"):
        pinned = autopar.plan(model, batch, mesh=mesh, cluster=cluster, loss=loss, constraints={"0.weight": weight})
        print(f"{weight:<12} {pinned.step_time_s * 1e6:9.1f} us, {pinned.diff(free).splitlines()[0]}")
        assert pinned.step_time_s >= free.lower_bound_s
