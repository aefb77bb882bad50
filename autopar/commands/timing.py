"""`autopar timeline`: the predicted step of a plan, and a measured one beside it."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

import torch

import autopar
from autopar.commands.models import Named, loss_of
from autopar.commands.planning import asked_of
from autopar.commands.verifying import MOST_RANKS
from autopar.letters import BadPlan, NotServed
from autopar.solver.lanes import Event
from autopar.solver.plan import Plan
from autopar.solver.profiled import measured
from autopar.testing.ranks import on_processes

_WARM = 2  # steps before the one that is measured


def timeline(asked: argparse.Namespace) -> int:
    """Write a trace of the predicted step; with `--measure`, also of one on local ranks."""
    named = Named(asked.model, asked.inputs)
    plan = autopar.plan(*named.made(), **asked_of(asked))
    predicted = plan.timeline()
    real: list[Event] = []
    if asked.measure:
        if plan.pipeline is not None:
            raise NotServed(
                "--measure compares all of a step, of which ranks of a pipeline run parts", advice="no stages"
            )
        if plan.mesh.size > MOST_RANKS:
            raise BadPlan(
                f"the plan is for {plan.mesh.size} devices, and --measure starts a local process for each",
                advice=f"--mesh of {MOST_RANKS} or fewer",
            )
        torch.manual_seed(0)
        batch = named.made("cpu")[1]  # once: what torch.empty gives is another thing each time
        real = on_processes(plan.mesh.size, _measured, named, plan, batch, timeout_s=asked.timeout)[0]
    path = predicted.save(asked.out, real or None)
    if asked.json:
        kinds = {kind: {"predicted": p, "measured": m} for kind, (p, m) in predicted.by_kind(real).items()}
        print(json.dumps({"timeline": str(path), "seconds": kinds}, indent=2))
        return 0
    if real:
        print(predicted.compare(real) + "\n")
    if real:
        print(f"predicted for {plan.cluster.partition(' ')[0]}; `autopar calibrate` measures this machine\n")
    print(f"{path}: open it at ui.perfetto.dev")
    return 0


def _measured(rank: int, named: Named, plan: Plan, batch: Any) -> list[Event]:
    """Events of a step on rank 0; empty on other ranks."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = named.made("cpu")[0]
    parallel = autopar.autoparallelize(model, batch, plan=plan)
    for _ in range(_WARM):
        _step(parallel, batch)
    with torch.profiler.profile() as profile:
        _step(parallel, batch)
    return measured(profile) if rank == 0 else []


def _step(model: Any, batch: Any) -> None:
    loss_of(model, batch).backward()
    model.zero_grad(set_to_none=True)
