"""Plans whose values wait on the host for backward, and counts of what waits there."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace

import pytest
import torch

import autopar
from autopar import Cluster, DeviceMesh, Plan
from autopar.codegen import joint
from autopar.runtime.host import HOST
from autopar.sharding.host import Host
from autopar.space import timeline
from tests.models import eager_links
from tests.stages.models import case

MESHES = {
    "one device": dict(mesh=(1,)),
    "dp": dict(mesh=DeviceMesh((2,), ("dp",)), parallel="dp"),
    "zero3": dict(mesh=DeviceMesh((2,), ("dp",)), parallel="zero3"),
    "megatron": dict(mesh=DeviceMesh((2,), ("tp",)), parallel="megatron"),
    "both": dict(mesh=DeviceMesh((2, 2), ("dp", "tp")), parallel=dict(tensor=2, data=dict(size=2, zero=3))),
    "turns of two": dict(mesh=DeviceMesh((2,), ("dp",)), parallel="zero3", microbatches=2),
}
BY_DAY = {("unet", "one device", "float32"), ("decoder", "zero3", "bfloat16")}
CASES = [
    pytest.param(name, how, dtype, marks=[] if (name, how, dtype) in BY_DAY else pytest.mark.nightly)
    for name in ("decoder", "encoder and decoder", "unet")
    for how in MESHES
    for dtype in ("float32", "bfloat16")
]


def planned(model, batch, how, wholly=(), **more):
    """A plan on a mesh, by its name; the parameters `wholly` named, or "*", lie on the host."""
    plan = autopar.plan(
        model,
        batch,
        memory_budget="inf",
        host_budget="1GiB",
        cluster=with_host(eager_links()),
        optimizer=autopar.optim.AdamW,
        **MESHES[how],
        **more,
    )
    there = frozenset(plan.parameters if wholly == "*" else wholly)
    return replace(plan, hosted=there, wholly_hosted=there) if there else plan


def travels(plan: Plan, wanted=lambda name: True, ahead: int = 2) -> dict[str, tuple[str, str]]:
    """Where values of a plan may travel: gone some ops behind the last that reads them, and back as many before.

    By how many differs from value to value, from none to `ahead`.
    """
    ops = [name for name, d in plan.decisions.items() if d.kind == "op"]
    at = {name: i for i, name in enumerate(ops)}
    last = dict(at)
    for name in ops:
        for source in plan.decisions[name].reads:
            if source in last:
                last[source] = max(last[source], at[name])
    last |= {c.name: at.get(c.target, len(ops) - 1) for c in plan.conversions}
    again = {*plan.recomputed, *plan.regathered}
    found = {}
    for i, (name, read) in enumerate(last.items()):
        if wanted(name) and name not in again:
            op = ops[min(read + i % (ahead + 1), len(ops) - 1)]
            found[name] = op, op
    return found


@contextlib.contextmanager
def small_values_travel():
    """Values of any size may leave, and what has left is overwritten on the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "SMALL", 0)
        patch.setattr(HOST, "overwrites", True)
        joint.LOWERED.clear()
        HOST.restart()
        yield patch
    joint.LOWERED.clear()


def with_host(cluster: Cluster, rate: float = 1e12, params_per_s: float = 1e12, latency_s: float = 1e-9) -> Cluster:
    """A cluster whose devices reach their host at a rate each way, and whose CPUs step so many parameters a second."""
    host = Host("a link", rate, rate, latency_s, 2**40, adamw_params_per_s=params_per_s)
    return replace(cluster, name=f"{cluster.name}-with-host", host=host)


def model_in(name, dtype):
    model, batch = case(name)
    kind = getattr(torch, dtype)
    return model.to(kind), {k: v.to(kind) if v.is_floating_point() else v for k, v in batch.items()}


def stepped(mine, batch, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = mine(**batch)
        getattr(outputs, "loss", outputs).backward()
        optimizer.step()


def broken(joint, half, how):
    """The program with a copy of one half that `how` has changed."""
    graph = copy.deepcopy(getattr(joint, half))
    for mine, theirs in zip(graph.nodes, getattr(joint, half).nodes, strict=True):
        mine.meta = dict(theirs.meta)
    how(graph)
    return replace(joint, **{half: graph})


def first(graph, target):
    return graph.find_nodes(op="call_function", target=target)[0]
