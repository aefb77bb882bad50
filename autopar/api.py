"""`plan` and `autoparallelize`: the compiler in one sentence.

    graph = trace(model, meta_inputs)        # autopar/tracer      Module -> Graph
    space = shardings(graph, mesh)           # autopar/sharding    Graph  -> Space
    plan  = solve(space)                     # autopar/solver      Space  -> Plan
    model = lower(graph, plan)               # autopar/codegen     Plan   -> ParallelModule
"""

from __future__ import annotations

import functools
import gc
import math
import numbers
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.codegen import lower, parallelise
from autopar.letters import BadBudget, BadConstraint, BadPlan, BadPreset, BadSharding, NotServed
from autopar.runtime.world import all_ranks_hold, coordinate, from_rank_0, start_world, world_size
from autopar.sharding.cluster import Cluster
from autopar.sharding.costs import OPTIMIZERS
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.presets import constraints_of
from autopar.sharding.shardings import shardings
from autopar.solver.meshes import best_mesh, meshes
from autopar.solver.plan import Plan
from autopar.solver.program import peak_where_nothing_is_dear, solve
from autopar.tracer import Assume, ColoTracer
from autopar.tracer.precision import Precision


def plan(
    model: torch.nn.Module,
    meta_inputs: Any,
    mesh: DeviceMesh | tuple[int, ...] | int | None = None,
    cluster: Cluster | str | None = None,
    memory_budget: int | str | None = None,
    optimizer: str | float = "adamw",
    precision: Precision | None = None,
    recompute: str = "auto",
    loss: Callable[..., Any] | None = None,
    parallel: str | Mapping[str, Any] | None = None,
    constraints: Mapping[str, Any] | None = None,
    assume: Assume | None = None,
    strict: bool = False,
    accumulation: int = 1,
    kernels: bool = True,
    solver: str = "cbc",
    time_limit: float | None = None,
    gap: float = 0.0,
) -> Plan:
    """The fastest plan found for one training step of `model` on `mesh`, with a bound on any: `plan.gap`. Needs no device, no process group and no weights.

    `meta_inputs` are example tensors (meta ones are enough) of the global shapes, as a dict or a tuple. `loss(outputs,
    inputs)` is planned with the model. `constraints` pin what they name. With `accumulation`, the inputs are one of so many
    micro-batches of a step. After `time_limit` seconds a plan
    that was found is not improved. The model is not modified.
    """
    started = time.monotonic()
    _refuse_unserved(recompute=(recompute, ("auto", "none")),
                     kernels=(kernels, (True, False)))
    if not isinstance(gap, (int, float)) or not 0 <= gap < 1:
        raise NotServed(f"gap={gap!r} is no share of the step time", advice="gap=0.01")
    if not isinstance(solver, str) or not isinstance(strict, bool) or not (loss is None or callable(loss)) or not (assume is None or isinstance(assume, Assume)):
        raise NotServed("solver, strict, loss or assume is of another kind than it may be", seen=f"solver={solver!r}, strict={strict!r}, loss={loss!r}, assume={assume!r}", advice='solver="cbc", loss=callable, assume=autopar.Assume(...)')
    if optimizer not in OPTIMIZERS if isinstance(optimizer, str) else isinstance(optimizer, bool) or not isinstance(optimizer, (int, float)) or not 0 <= optimizer < 1e6:
        raise NotServed(f"optimizer={optimizer!r} is not known", seen=f"known: {', '.join(OPTIMIZERS)}", advice="one of these, or the bytes of its states for each parameter: 8 for AdamW in float32")
    if isinstance(accumulation, bool) or not isinstance(accumulation, int) or not 1 <= accumulation < 2**20:
        raise NotServed(f"accumulation={accumulation!r} is no number of micro-batches", advice="accumulation=4; meta_inputs are one micro-batch")
    if time_limit is not None and (isinstance(time_limit, bool) or not isinstance(time_limit, (int, float)) or not time_limit > 0):
        raise NotServed(f"time_limit={time_limit!r} is no number of seconds", advice="time_limit=10.0; without one the same inputs give the same plan")
    hardware = Cluster.of(cluster)
    precision = _precision(precision)
    graph = ColoTracer().trace(model, meta_inputs, assume=assume, loss=loss, precision=precision)
    budget = _bytes(memory_budget, hardware)
    reduce = precision.reduce if precision else ""
    words: dict[str, Any] = dict(precision=precision and (precision.param, precision.reduce), solver=solver, gap=gap, until=math.inf if time_limit is None else started + time_limit, assumptions=graph.assumptions, defaults=_defaults(mesh, cluster, memory_budget, hardware, recompute, precision, time_limit))

    @_without_collections
    def on(logical: DeviceMesh, known: float = math.inf) -> Plan:
        try:
            return planned(logical, known)
        except BadConstraint as e:
            if parallel is None or constraints:
                raise
            raise BadPreset(f"parallel={parallel!r} does not fit this model on mesh {logical}: {e.what}", at=e.at, seen=e.seen, advice="another preset, or constraints beside it that free what is named") from e

    def planned(logical: DeviceMesh, known: float) -> Plan:
        preset = constraints_of(parallel, graph, logical) if parallel is not None else None
        space = shardings(graph, logical, hardware, constraints, optimizer, strict, preset=preset, accumulation=accumulation, reduce=reduce, known=known)
        if math.isinf(budget) or peak_where_nothing_is_dear(space) <= budget:      # else it hardly fits with every copy kept
            fastest = solve(space, **words)
            if fastest.peak_bytes <= budget:
                return fastest if memory_budget is None or math.isinf(budget) else replace(fastest, budget=int(budget))
        return solve(shardings(graph, logical, hardware, constraints, optimizer, strict, regather=True, preset=preset, accumulation=accumulation, reduce=reduce, known=known), **words, budget=budget)

    searched = mesh is None or (isinstance(mesh, numbers.Integral) and not isinstance(mesh, bool))
    return best_mesh(meshes(_devices(None if mesh is None else int(mesh), hardware)), on, words["until"]) if searched else on(DeviceMesh.of(mesh))     # type: ignore[arg-type]


def _without_collections(planning: Callable[..., Plan]) -> Callable[..., Plan]:
    """Planning makes many small objects that all stay and hold no cycles: the garbage collector would look through them, and all of torch, again and again. It rests for the while."""
    @functools.wraps(planning)
    def run(*arguments: Any) -> Plan:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return planning(*arguments)
        finally:
            if was_on:
                gc.enable()
    return run


def _devices(mesh: int | None, cluster: Cluster) -> int:
    """How many devices there are to search meshes of."""
    if mesh is not None:
        return mesh
    if world_size() > 1 or "WORLD_SIZE" in os.environ:
        return max(world_size(), int(os.environ.get("WORLD_SIZE", "1")))
    if re.search(r"-\d+x\d+$", cluster.name):
        return cluster.devices_per_node * cluster.nodes
    raise BadSharding("mesh=None, and nothing says how many devices there are", advice='mesh=8, cluster="h100-8x4", or torchrun')


_RESERVE = 0.1                                                 # of a device's memory, for what no plan counts: the allocator's gaps, the libraries
_UNITS = {"": 1, "B": 1, **{f"{u}iB": 2**(10 * (i + 1)) for i, u in enumerate("KMGT")}, **{f"{u}B": 10**(3 * (i + 1)) for i, u in enumerate("KMGT")}}


def _bytes(given: Any, cluster: Cluster) -> float:
    """A budget in bytes from what a caller may pass."""
    if given is None:
        return cluster.device.memory_bytes * (1 - _RESERVE)
    if isinstance(given, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?|inf)\s*([A-Za-z]*)\s*", given)) and match[2] in _UNITS:
        given = float(match[1]) * _UNITS[match[2]]
    if isinstance(given, bool) or not isinstance(given, numbers.Real) or not float(given) >= 1 or (isinstance(given, int) and given > 2**62):
        raise BadBudget(f"memory_budget={given!r} is no number of bytes", advice='bytes, or text such as "16GiB"; float("inf") for no limit')
    return float(given)


def autoparallelize(
    model: torch.nn.Module,
    meta_inputs: Any,
    *,
    plan: Plan | None = None,
    inputs: str = "global",
    outputs: str = "auto",
    compile: bool = False,
    sync: bool = True,
    pad_to: int | None = None,
    init: str = "module",
    weights: str | None = None,
    **planning: Any,
) -> torch.nn.Module:
    """Turn `model` into its parallel self, in place, and return it: an instance of its own class, to be trained as before.

    Runs on every rank (torchrun), or on one process. Takes a `plan`, or any of `autopar.plan`'s arguments; then rank 0
    plans and the others receive. `sync` takes parameters and buffers from rank 0.
    """
    _refuse_unserved(pad_to=pad_to, weights=weights, inputs=(inputs, ("global",)), outputs=(outputs, ("auto",)), compile=(compile, (False,)), init=(init, ("module",)))
    if plan is not None and set(planning) - {"loss", "assume"}:
        raise BadPlan(f"plan= is given, and so is {', '.join(sorted(set(planning) - {'loss', 'assume'}))}", advice="one or the other: a plan already decides it")
    device = start_world()
    precision = _precision(planning.get("precision")) if plan is None else Precision(*plan.precision) if plan.precision else None
    graph = ColoTracer().trace(model, meta_inputs, assume=planning.get("assume"), loss=planning.get("loss"), precision=precision)
    chosen = plan if plan is not None else from_rank_0(lambda: _plan(model, meta_inputs, planning))
    mesh = chosen.mesh.to_torch(device)
    lowered = lower(graph, chosen, coordinate(chosen.mesh), device)
    all_ranks_hold("programs", (chosen.digest, chosen.mesh, lowered.joint.collectives))
    return parallelise(model, lowered, mesh, sync)


def _precision(given: Any) -> Precision | None:
    if given is not None and not isinstance(given, Precision):
        raise NotServed(f"precision={given!r} is no Precision", advice='autopar.Precision(param="bfloat16", reduce="float32")')
    return given


def _plan(model: torch.nn.Module, meta_inputs: Any, planning: Mapping[str, Any]) -> Plan:
    return plan(model, meta_inputs, **{"mesh": world_size(), **planning})


def _refuse_unserved(**arguments: Any) -> None:
    """An argument that no stage serves yet is a letter, unless it has its default."""
    for name, value in arguments.items():
        given, served = value if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], tuple) else (value, (None,))
        if given not in served:
            raise NotServed(f"{name}={given!r} is not served by any stage yet", advice=f"leave {name} at its default")


def _defaults(mesh: Any, cluster: Any, budget: Any, hardware: Cluster, recompute: str, precision: Precision | None, time_limit: float | None) -> list[tuple[str, str]]:
    """What arguments left at their default meant, and what is priced that is not run so yet."""
    said = [("recompute", "none: no stage drops activations yet"),
            ("overlap", "gathers of parameters and reductions of their gradients are priced beside compute; this version runs them in line")]
    if time_limit is not None:
        said.append(("time_limit", f"{time_limit:g} s: what was found by then; another run may give another plan"))
    if precision is None:
        said.insert(0, ("precision", "the model's own dtypes"))
    if budget is None:
        said.insert(0, ("memory_budget", f"{1 - _RESERVE:.0%} of the {hardware.device.memory_bytes / 2**30:.0f} GiB of a device"))
    if cluster is None:
        said.insert(0, ("cluster", "generic: a documented stand-in, no machine was measured"))
    return said if recompute == "auto" else [s for s in said if s[0] != "recompute"]
