"""`autopar verify`: compare the program of a plan on local ranks with one device."""

from __future__ import annotations

import argparse
import json
import logging
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import autopar
from autopar.codegen.checked import check_plan
from autopar.codegen.lower import lower
from autopar.commands.models import Named, loss_of
from autopar.graph.graph import Graph, info
from autopar.letters import BadInput, BadPlan, NotCertified
from autopar.request import Request
from autopar.runtime.world import world_size
from autopar.solver.figures import aligned
from autopar.solver.plan import Plan
from autopar.solver.staged import mesh_of
from autopar.testing.ranks import on_processes
from autopar.tracer.precision import Precision, reference

# Allowed errors as shares of a tensor's norm, by the dtype of compute.
_NEAR = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 6e-2, "float16": 1e-2}
MOST_RANKS = 16
log = logging.getLogger("autopar")
_SHOWN = 8
_Found = tuple[float, dict[str, torch.Tensor]]  # the loss, and gradients by name


def verify(asked: argparse.Namespace) -> int:
    """Print the largest errors of loss and gradients; returns 1 where one is too large."""
    plan = Plan.load(asked.plan)
    named = Named(asked.model, asked.inputs)
    if plan.devices > MOST_RANKS:
        raise BadPlan(
            f"the plan is for {plan.devices} devices, and verify starts a local process for each",
            advice=f"a plan of the same model for {MOST_RANKS} or fewer",
        )
    plan.validate(named.made()[0])
    request = Request.of(plan)
    graph = request.as_planned(request.trace(*named.made()), plan)
    check_plan(graph, plan)  # before anything runs
    torch.manual_seed(0)
    batch = named.made("cpu")[1]  # once: what torch.empty gives is another thing each time
    _refuse_no_numbers(batch)
    log.info("one step on one device")
    alone = _alone(named, plan, graph, batch)
    log.info("one step on %d local ranks", plan.devices)
    on_ranks = on_processes(plan.devices, _on_rank, named, plan, batch, timeout_s=asked.timeout)
    found = on_ranks[0][0], {name: gradient for _, some in on_ranks for name, gradient in some.items()}
    log.info("the certificate of its program")
    near = asked.near if asked.near is not None else _NEAR[plan.precision[0] if plan.precision else _dtype(named)]
    errors = _errors(alone, found)
    worst = max(errors.values(), key=lambda e: float("inf") if math.isnan(e) else e)
    is_right = worst <= near  # false where an error is NaN
    certificate = _certificate(graph, plan)
    if asked.json:
        record = {"right": is_right, "allowed": near, "errors": errors, "certificate": certificate}
        print(json.dumps(record, indent=2))
        return 0 if is_right else 1
    rows = sorted(errors.items(), key=lambda pair: -pair[1])[:_SHOWN]
    print("\n".join(aligned(("largest of all", "error"), [(name, f"{e:.2e}") for name, e in rows])))
    said = "computes what one device does" if is_right else "DIFFERS from one device"
    print(f"\nthe program on {mesh_of(plan)} {said}: {len(errors)} tensors, at most {worst:.2e} of their norm off")
    print(f"its certificate: {certificate}")
    return 0 if is_right else 1


def _certificate(graph: Graph, plan: Plan) -> str:
    """The certificate of the first device's program, as text; of stages, that of each coordinate."""
    here = (0,) * len(plan.mesh.shape)
    places = 1 if plan.pipeline is None else plan.pipeline.coordinates
    try:
        found = dict.fromkeys(str(lower(graph, plan, here, place=place).certified()) for place in range(places))
    except NotCertified as e:
        return f"refused: {e}"
    return "; ".join(found)


def _refuse_no_numbers(batch: Any) -> None:
    """Raise where an input has NaN or infinite values, with which nothing can be compared."""
    for tensor in pytree.tree_leaves(batch):
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
            raise BadInput(
                "an input has NaN or infinite values, so that no error can be told from it",
                advice="torch.randn instead of torch.empty, or --inputs",
            )


def _step(model: nn.Module, batch: Any, forward: Any) -> _Found:
    """Loss and whole gradients of one step."""
    loss = loss_of(forward, batch)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}
    return float(loss.detach()), whole


def _alone(named: Named, plan: Plan, graph: Graph, batch: Any) -> _Found:
    """Loss and gradients on one device: eager, or by autopar's own program for models with random ops.

    Autopar's program draws random numbers by position.
    """
    if any(info(node).random >= 0 for node in graph.nodes):
        return on_processes(1, _on_one, named, plan, batch)[0]
    torch.manual_seed(0)
    model = named.made("cpu")[0]
    return _step(model, batch, reference(model, Precision(*plan.precision)) if plan.precision else model)


def _on_one(rank: int, named: Named, plan: Plan, batch: Any) -> _Found:
    torch.manual_seed(0)
    model = named.made("cpu")[0]
    precision = Precision(*plan.precision) if plan.precision else None
    parallel = autopar.autoparallelize(model, batch, mesh=(1,), memory_budget="inf", precision=precision)
    torch.manual_seed(1)
    return _step(parallel, batch, parallel)


def _on_rank(rank: int, named: Named, plan: Plan, batch: Any) -> _Found:
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # no warnings about full_tensor
    torch.manual_seed(0)
    model = named.made("cpu")[0]
    parallel = autopar.autoparallelize(model, batch, plan=plan)
    torch.manual_seed(1)
    loss, gradients = _step(parallel, batch, parallel)
    firsts = [0] if plan.pipeline is None else [plan.pipeline.ranks(r)[0] for r in range(plan.pipeline.coordinates)]
    if rank not in firsts and world_size() > 1:
        return loss, {}
    sizes = {name: p.shape for name, p in parallel.named_parameters()}
    return loss, {name: g for name, g in gradients.items() if g.shape == sizes[name]}  # far stages' are empty here


def _dtype(named: Named) -> str:
    return str(next(named.made()[0].parameters()).dtype).removeprefix("torch.")


def _errors(right: _Found, found: _Found) -> dict[str, float]:
    """The error of each tensor: norm of the difference, over its own norm or a thousandth of the mean one."""
    norms = {name: float(g.double().norm()) for name, g in right[1].items()}
    mean = (sum(n * n for n in norms.values()) / max(1, len(norms))) ** 0.5
    errors = {"loss": abs(right[0] - found[0]) / max(abs(right[0]), 1e-12)}
    errors |= {name: float("inf") for name in found[1].keys() - right[1].keys()}  # a gradient that one device has not
    for name, gradient in right[1].items():
        off = float((gradient.double() - found[1][name].double()).norm()) if name in found[1] else float("inf")
        errors[name] = off / max(norms[name], 1e-3 * mean, 1e-300)
    return errors
