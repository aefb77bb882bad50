"""`autopar check MODEL MESH`: what a step holds on a mesh by kind, under a preset, and whether it fits."""

from __future__ import annotations

import argparse
import functools
import json
import math
from dataclasses import replace
from typing import Any

from autopar.commands.clusters import cluster_of, notes_of
from autopar.commands.models import Named, count_of
from autopar.commands.planning import number_or_name
from autopar.graph.graph import Graph
from autopar.letters import NotServed
from autopar.planning import Planning
from autopar.request import Request
from autopar.sharding.mesh import DeviceMesh
from autopar.solver.figures import aligned, size
from autopar.solver.plan import Plan
from autopar.turns import FEW, head_of, in_chunks

_WAYS = {"everything is saved": "none", "blocks are recomputed": "full"}
_GIB = 2**30
_GAP = 0.5  # gap at which a plan of the preset is good enough: its memory hardly depends on it


def check_memory(asked: argparse.Namespace) -> int:
    """Print the memory of a model's step on a mesh, by kind; returns 1 where it fits in neither way."""
    cluster = cluster_of(asked.cluster, asked.fabric)
    if asked.mesh is None:
        raise NotServed(f"on which mesh {asked.model} is to be checked is not said", advice=f"check {asked.model} 8")
    mesh = DeviceMesh.of(int(asked.mesh) if asked.mesh.isdecimal() else asked.mesh)
    preset = _preset(asked, mesh)
    request = Request(
        mesh=mesh,
        cluster=cluster,
        memory_budget=asked.budget,
        optimizer=number_or_name(asked.optimizer),
        precision=asked.precision,
        parallel=preset,
        microbatches=asked.microbatches,
    )
    model, inputs = Named(asked.model, asked.inputs).made()
    graph = request.in_turns(request.trace(model, inputs), asked.microbatches)
    plans = {said: _plan(graph, request, policy) for said, policy in _WAYS.items()}
    fits = {said: plan.peak_bytes <= request.budget for said, plan in plans.items()}
    if asked.json:
        rows = {said: {"bytes": dict(plan.memory), "fits": fits[said]} for said, plan in plans.items()}
        print(json.dumps({"budget": request.budget, "parallel": preset, "ways": rows}, indent=2))
        return 0 if any(fits.values()) else 1
    how = f"{_in_words(preset, mesh)}on mesh {mesh}"
    print(f"{asked.model}: {count_of(model)}; {how}, cluster {cluster}\n")
    print("\n".join(_table(plans)))
    print("\n" + "\n".join([_verdict(fits, request.budget, asked), *notes_of(cluster)]))
    return 0 if any(fits.values()) else 1


def _plan(graph: Graph, request: Request, policy: str) -> Plan:
    """A fast plan under the preset, without a budget. If it recomputes, its head runs in chunks."""
    head = head_of(graph, request.keeps_outputs).head if policy != "none" else None
    graph = graph if head is None else in_chunks(graph, min(FEW, head.rows), request.keeps_outputs)
    asked = replace(request, memory_budget=math.inf, recompute=policy, gap=_GAP)
    return Planning(asked, graph, math.inf).on(DeviceMesh.of(request.mesh))


def _preset(asked: argparse.Namespace, mesh: DeviceMesh) -> Any:
    """The preset that is asked for; by default FSDP on the first axis, and Megatron's on a second."""
    if asked.parallel is not None or mesh.size == 1:
        return asked.parallel
    rows, *weights = mesh.shape
    if not weights:
        return "fsdp"
    return {"data": {"size": rows, "zero": 3}, "tensor": {"size": math.prod(weights), "mode": "megatron"}}


def _in_words(preset: Any, mesh: DeviceMesh) -> str:
    if isinstance(preset, dict):
        return f"fsdp along {mesh.axes[0]}, megatron along {', '.join(mesh.axes[1:])}, "
    return "" if preset is None else f"{preset} "


def _table(plans: dict[str, Plan]) -> list[str]:
    each = tuple(plans.values())
    kinds = dict.fromkeys(kind for plan in each for kind, n in plan.memory.items() if n)
    rows = [(kind, *map(functools.partial(_bytes_of, kind), each)) for kind in kinds]
    rows.append(("together, GiB a device", *(f"{plan.peak_bytes / _GIB:.2f}" for plan in each)))
    peaks = (f"fullest at the {plan.peak_at}, where {said}" for said, plan in plans.items())
    return [*aligned(("at the fullest time", *plans), rows), *peaks]


def _bytes_of(kind: str, plan: Plan) -> str:
    return f"{plan.memory.get(kind, 0) / _GIB:.2f}"


def _verdict(fits: dict[str, bool], room: float, asked: argparse.Namespace) -> str:
    how = next((said for said, does in fits.items() if does), "")
    if how:
        return f"fits in {size(room)} where {how}"
    return (
        f"does not fit in {size(room)} in these ways; autopar plan searches for others, and --microbatches or more "
        "devices (autopar fit) need less"
    )
