"""Plans in stages: the plan of the whole program on the mesh of one stage, cut where its step is fastest.

Choices inside a stage do not depend on where the model is cut, as a value leaves a stage as it lies. So one plan prices
every cut: its seconds and bytes by block make up those of any stage (`solver/by_block.py`), and cuts and orders are
searched among them (`stages/search.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Protocol

from autopar.arguments import check_fits
from autopar.collector import without_collections
from autopar.cutting import Cutting, Slower, starts_of
from autopar.graph.graph import Graph, rows_of_batch
from autopar.letters import BadPreset, Infeasible, Letter, NotServed
from autopar.limits import LIMITS
from autopar.request import Request
from autopar.sharding.mesh import DeviceMesh
from autopar.solver.plan import Plan
from autopar.solver.rivals import PricedSpace
from autopar.space.space import Outdone
from autopar.stages.asked import Asked
from autopar.stages.cuts import blocks_of, units_of
from autopar.stages.pipeline import FORWARD, Pipeline, forward_orders


class Inside(Protocol):
    """Plans what a stage does; raises `Outdone` where a bound says that no plan takes less than `known` seconds."""

    def __call__(self, request: Request, known: float = math.inf) -> Plan: ...


@without_collections
def staged(graph: Graph, request: Request, inside: Inside) -> Plan:
    """The fastest plan found of a graph in stages; `inside` plans what a stage does."""
    asked = request.pipeline
    assert isinstance(asked, Asked)
    if asked.mesh is not None:
        check_fits(asked.mesh.size, request.hardware)
    if asked.schedule == FORWARD:
        plan = inside(_of_a_stage(request, asked))
        pipeline = Pipeline(
            asked.whole(plan.mesh), asked.axis, FORWARD, asked.place, asked.cuts, forward_orders(asked.place)
        )
        return replace(plan, pipeline=pipeline, cluster=str(request.hardware))
    if asked.size != "auto":
        return _in_stages(graph, request, asked, inside)
    return _in_any_number(graph, request, asked, inside)


def _in_any_number(graph: Graph, request: Request, asked: Asked, inside: Inside) -> Plan:
    """The fastest plan found in any power of two of stages; its `meshes` lists all of them."""
    assert isinstance(request.mesh, int)
    devices = request.mesh
    plans: list[Plan] = []
    letters: list[Letter] = []
    rows: list[tuple[str, float, float, int, str]] = []
    for count in (2**k for k in range(devices.bit_length()) if devices % 2**k == 0):
        known = plans[0].step_time_s if plans else math.inf
        of_count = replace(asked, size=count) if count > 1 else None
        asking = replace(request, mesh=devices // count, pipeline=of_count)
        name = f"{count} stages"
        try:
            plan = _in_stages(graph, asking, of_count, inside, known) if of_count else inside(asking)
            plans = [plan] if plan.step_time_s < known else plans
            rows.append((f"{name} of {plan.mesh}", plan.step_time_s, plan.lower_bound_s, plan.peak_bytes, ""))
        except Outdone as e:
            rows.append((name, 0.0, e.floor, 0, "slower, even if no stage waited"))
        except Slower as e:
            rows.append((name, 0.0, e.bound, 0, "slower, whatever they hold"))
        except Letter as e:
            letters.append(e)
            rows.append((name, 0.0, 0.0, 0, e.what))
    if not plans:
        raise letters[0]
    return replace(plans[0], meshes=tuple(rows), lower_bound_s=min(bound for *_, bound, _, _ in rows if bound))


def _if_none_waits(plan: Plan) -> float:
    """Seconds of a step of a plan in stages, if no stage ever waited for another."""
    assert plan.pipeline is not None
    return plan.step_time_s * (1.0 - plan.pipeline.idle)


def _in_stages(graph: Graph, request: Request, asked: Asked, inside: Inside, known: float = math.inf) -> Plan:
    """The fastest plan found with a number of stages, of several numbers of micro-batches.

    They end where a plan would take `known` seconds even if no stage ever waited: more of them only shorten the wait.
    Raises `Outdone` where the first would.
    """
    starts_of(blocks_of(list(graph.nodes)), asked)
    plans: list[Plan] = []
    letter: Letter | None = None
    slower: Slower | None = None
    mesh = request.mesh
    too_many = set[int]()
    for turns in _numbers_of_turns(graph, request, int(asked.size), too_many):
        try:
            best = min([known, *(plan.step_time_s for plan in plans)])
            plans.append(_in_turns(graph, replace(request, microbatches=turns, mesh=mesh), asked, inside, best))
            mesh = plans[0].mesh  # meshes are searched with one number of them
            if _if_none_waits(plans[-1]) >= known:
                break
        except Outdone:
            if not plans and slower is None:
                raise
            break
        except Slower as e:
            slower = Slower(e.bound, e.mesh)  # The frames of the first hold a plan and its space.
            mesh = e.mesh
        except BadPreset as e:  # devices cannot share so few rows
            too_many.add(turns)
            letter = e
        except (Infeasible, NotServed) as e:
            letter = letter or e
    if plans:
        return min(plans, key=lambda plan: plan.step_time_s)
    if slower is not None:
        raise slower
    assert letter is not None
    raise letter


def _numbers_of_turns(graph: Graph, request: Request, stages: int, too_many: Collection[int]) -> Iterator[int]:
    """Numbers of micro-batches to try: what is asked for, or some that fill the stages.

    Those that turn out to be too many make way for others.
    """
    if request.microbatches != "auto":
        yield int(request.microbatches)
        return
    rows = rows_of_batch(graph)
    tried = set[int]()
    for fill in LIMITS.fills:
        fits = {n for n in range(1, rows + 1) if rows % n == 0}
        while left := sorted(fits - set(too_many)):
            turns = min(left, key=lambda n: abs(math.log(n / (stages * fill))))
            if turns in tried:
                break
            tried.add(turns)
            yield turns


def _in_turns(graph: Graph, request: Request, asked: Asked, inside: Inside, known: float) -> Plan:
    """The fastest plan found in some micro-batches; under a budget one that saves as much as fits.

    Where stages of the fastest shardings recompute for more than nearly nothing, shardings that save less are tried
    beside them. Raises `Outdone` where the busiest of as many stages would work for `known` seconds at least, and
    `Slower` where stages take as long without a budget: no budget is searched then.
    """
    freer = _of_a_stage(replace(request, memory_budget=math.inf), asked)
    inside = functools.partial(_shared_evenly, inside, int(asked.size), known)
    plan = inside(freer)
    turned = request.as_planned(graph, plan, asked)
    units = units_of(turned)
    letter: Infeasible | None = None
    found: Plan | None = None
    saved = _most_saved(plan)
    peak = plan.peak_bytes
    for share in LIMITS.tighter:
        less = peak - round((1 - share) * saved)
        if less <= 0:
            break
        try:
            if share < 1.0:
                plan = inside(replace(freer, memory_budget=less))
            cutting = Cutting(turned, plan, units, request, asked)
            if share == 1.0 and math.isfinite(request.budget) and math.isfinite(known):
                cutting.check(known)
            other = cutting.plan(known if found is None else found.step_time_s)
        except Infeasible as e:
            letter = letter or e
        except (Outdone, Slower):
            if found is None:
                raise
            return found
        else:
            if found is not None or other.recompute_s <= LIMITS.free * other.step_time_s:
                return other
            found = other
    if found is not None:
        return found
    assert letter is not None
    raise letter


def _shared_evenly(inside: Inside, stages: int, known: float, request: Request) -> Plan:
    """The plan of all that stages do; raises `Outdone` where an equal share of it takes `known` seconds."""
    try:
        return inside(request, known * stages)
    except Outdone as e:
        raise Outdone(e.floor / stages) from e


def _of_a_stage(request: Request, asked: Asked) -> Request:
    """The request for what a stage does, whose devices may stand apart in the mesh of all.

    What waits on the host is decided once stages are cut; optimizer states stay on devices.
    """
    mesh = asked.mesh
    if mesh is None:  # the axis of stages is the first of a mesh that is searched
        size = request.mesh if isinstance(request.mesh, int) else DeviceMesh.of(request.mesh).size
        mesh = DeviceMesh((int(asked.size), size), (asked.axis, "stage"))
    return replace(request, cluster=request.hardware.within_stages(mesh, asked.axis), host_budget=0)


def _most_saved(plan: Plan) -> float:
    """The most bytes that a plan saves for backward; the optimizer's step may hold more, and none of them."""
    search = plan.search
    assert isinstance(search, PricedSpace) and search.counted is not None
    space = search.counted.space
    assert space.memory is not None
    return float(space.memory.held(search.point.picked, space.edges)["saved activations"].max())
