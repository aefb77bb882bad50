"""The search for a plan of a traced batch: over numbers of micro-batches, and over meshes.

Each graph and mesh that it comes to is planned by `planning.py`.

    plan_of      the plan of a batch
    plan_again   the plan of another batch, for a model whose parameters are stored already
"""

from __future__ import annotations

import functools
import math
import numbers
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

from autopar.arguments import check_fits, device_count
from autopar.graph.graph import Graph, info, rows_of_batch
from autopar.letters import BadConstraint, BadPreset, Infeasible, Letter, NotServed
from autopar.limits import LIMITS
from autopar.obstacles import explained
from autopar.planning import Planning, floor_of, naming_the_smaller
from autopar.progress import tell
from autopar.request import Request
from autopar.sharding.mesh import DeviceMesh
from autopar.solver.figures import size
from autopar.solver.limits import LIMITS as SOLVER
from autopar.solver.meshes import best_mesh, meshes
from autopar.solver.plan import Beside, Plan
from autopar.solver.rivals import PricedSpace
from autopar.solver.summary import rivals_of, speed_of, turns_of_rivals, verdict
from autopar.space.presets import cuts_axes_alike, of_rows_and_context
from autopar.stages.asked import Asked
from autopar.staging import staged
from autopar.turns import head_of
from autopar.workload import workload_of


def plan_of(graph: Graph, request: Request, started: float = math.inf, is_trial: bool = False) -> Plan:
    """The fastest plan found for a graph, on the mesh that is asked for or on the best one.

    `started` is the time of the monotonic clock from which the time limit counts. The caller of a trial plans otherwise
    if nothing fits.
    """
    began = time.monotonic()

    def inside(request: Request, known: float = math.inf) -> Plan:
        return _in_few_turns(graph, request, started, is_trial or request.pipeline is not None, known)

    def alone() -> Plan:
        """The plan without stages; parameters lie on the host where states alone there do not suffice."""
        try:
            return inside(request)
        except Infeasible:
            if not request.states_on_host:
                raise
            return _in_few_turns(graph, request, started, is_trial, parts_on_host=True)

    best = alone() if request.pipeline is None else staged(graph, request, inside)
    found = replace(best, workload=workload_of(graph, request))
    tell(
        "planned on mesh %s in %.1f s, gap %.2f%%: %s",
        found.mesh,
        time.monotonic() - began,
        100 * found.gap,
        _words(found),
    )
    if isinstance(found.search, PricedSpace):
        found.search.others = functools.partial(_beside, graph, request, found)
    return found


def _words(plan: Plan) -> str:
    """A line about a plan: its way, what is expected of it, and its bytes."""
    of_budget = f" of {size(plan.budget)}" if math.isfinite(plan.budget) else ""
    return f"{verdict(plan)}; {speed_of(plan)}; {size(plan.peak_bytes)}{of_budget}"


def plan_again(
    graph: Graph, request: Request, first: Plan, has_gradients: bool = True, carried: Mapping[str, str] | None = None
) -> Plan:
    """A plan of another graph of the same model, with parameters stored as in the first plan.

    So are the inputs that calls have `carried` here, as these shardings say.

    Where no plan is found, constraints and preset are dropped, then the budget.
    """
    before = first.parameters
    axes = first.mesh.axes
    asked = dict(request.constraints or {})
    stored = {
        escape(name): f"{before[name].text(axes) if name in before else 'R'}; *{_where(first, name, request)}"
        for name in graph.parameters
    }
    stored |= {escape(name): f"{text}; *" for name, text in (carried or {}).items()}
    reached = _matching(graph, asked)
    mine = {pattern: sharding for pattern, sharding in asked.items() if pattern in reached}
    turns, chunks = _turns_again(graph, request, first) if has_gradients else (1, 1)
    again = replace(request, mesh=first.mesh, time_limit=None, gap=max(request.gap, LIMITS.gap_again))
    again = replace(again, microbatches=turns, chunks=chunks, pipeline=Asked.again(first.pipeline, has_gradients))
    letter: Letter | None = None
    free: dict[str, Any] = {"constraints": stored, "parallel": None}
    ways: list[tuple[str, dict[str, Any]]] = [("", {"constraints": {**stored, **mine}})]
    if mine or request.parallel is not None:
        ways.append(("constraints and preset", free))
    for dropped, freer in (*ways, ("constraints, preset and budget", {**free, "memory_budget": math.inf})):
        try:
            found = plan_of(graph, replace(again, **freer), is_trial=True)
        except (BadConstraint, BadPreset, Infeasible) as e:
            letter = letter or e
        else:
            less = () if letter is None else (f"another batch is planned without {dropped}: {letter.what}",)
            there = first.wholly_hosted.intersection(graph.parameters)
            hosted = found.hosted | there
            return replace(found, warnings=(*less, *found.warnings), hosted=hosted, wholly_hosted=there)
    assert letter is not None
    raise letter


def _where(first: Plan, name: str, request: Request) -> str:
    """Fields of a constraint by which a parameter that lies on the host stays there; "" of any other.

    A request may know of no host, as that of a plan from a file.
    """
    return "; *; *; all" if name in first.wholly_hosted and request.states_on_host else ""


def _beside(graph: Graph, request: Request, of: Plan) -> tuple[Beside, ...]:
    """Step time and memory of presets on the devices of a plan, without a budget or constraints."""
    mesh = of.mesh
    turns = turns_of_rivals(of)
    if of.pipeline is not None:
        mesh = DeviceMesh((of.devices,), ("devices",), of.pipeline.mesh.ranks)
    freer: dict[str, Any] = {"mesh": mesh, "memory_budget": math.inf, "constraints": None, "pipeline": None}
    freer |= {"microbatches": turns, "time_limit": None}
    found = []
    for name in rivals_of(of):
        parallel = of_rows_and_context(rows_of_batch(graph) // turns, mesh) if name == "fsdp+cp" else name
        try:
            plan = _in_few_turns(graph, replace(request, **freer, parallel=parallel))
            found.append(Beside(name, plan.step_time_s, plan.peak_bytes, plan.peak_bytes <= request.budget))
        except (BadConstraint, BadPreset, Infeasible):
            found.append(Beside(name, math.inf, 0, False, "does not go with this model or mesh"))
    return tuple(found)


def _in_few_turns(
    graph: Graph,
    request: Request,
    started: float = math.inf,
    is_trial: bool = False,
    known: float = math.inf,
    parts_on_host: bool = False,
) -> Plan:
    """The fastest plan found for a graph; with "auto", in as few micro-batches as fit in the budget.

    Raises `Outdone` where a bound says that none takes less than `known` seconds.
    """
    until = math.inf if request.time_limit is None else started + request.time_limit
    of_turns = functools.partial(Planning, request, until=until, parts_on_host=parts_on_host)
    if request.microbatches != "auto":
        planning = of_turns(request.in_turns(graph, int(request.microbatches)), is_trial=is_trial)
        try:
            return _on_meshes(planning, known)
        except Infeasible as e:
            raise _explained(planning, e) from e
    letters: dict[int, Infeasible] = {}  # number of micro-batches -> the letter that refused it
    whole: Planning | None = None  # The batch is planned at once.
    for turns in _numbers_of_turns(rows_of_batch(graph)):
        if letters and _are_too_few(letters, turns, request.budget):
            continue
        try:
            turned = request.in_turns(graph, turns)
            planning = of_turns(turned, is_trial=is_trial or turns > 1)
            whole = whole or planning
            return _on_meshes(planning, known)
        except Infeasible as e:
            letters[turns] = e
            if not _may_fit(letters, request.budget):
                break
        except (NotServed, BadConstraint, BadPreset):
            if not letters:
                raise
            break  # the model looks at all rows, or devices cannot share so few
    assert whole is not None
    raise _explained(whole, _of_the_smallest(letters))


def _on_meshes(planning: Planning, known: float) -> Plan:
    """The fastest plan found on the mesh that is asked for, or on the best one."""
    request = planning.request
    candidates = _candidates(request)
    if len(candidates) > 1 and _are_alike(request, candidates):
        first, *others = candidates
        plan = planning.on(first, known)
        why = f"not planned: {request.parallel!r} cuts all axes alike, over links of one kind"
        rows = [(str(mesh), 0.0, 0.0, 0, why) for mesh in others]
        return replace(plan, meshes=((str(first), plan.step_time_s, plan.lower_bound_s, plan.peak_bytes, ""), *rows))
    # A plan without a budget costs little more than its bound, and tells more in the table of meshes.
    has_budget = math.isfinite(request.budget)
    floor = functools.partial(floor_of, planning) if has_budget or math.isfinite(known) else None
    return best_mesh(candidates, planning.on, planning.until, known, floor, is_near=not has_budget)


def _candidates(request: Request) -> list[DeviceMesh]:
    """The mesh that is asked for, or all meshes of a number of devices, those of few axes first."""
    asked = request.mesh
    if asked is None or (isinstance(asked, numbers.Integral) and not isinstance(asked, bool)):
        count = device_count(None if asked is None else int(asked), request.hardware)
        check_fits(count, request.hardware)
        return meshes(count)
    mesh = DeviceMesh.of(asked)
    check_fits(mesh.size, request.hardware)
    return [mesh]


def _are_alike(request: Request, candidates: Sequence[DeviceMesh]) -> bool:
    """Whether plans on all meshes differ only in messages that several axes send in parts.

    That is so where a preset cuts all axes alike, nothing else names an axis, and one kind of link joins all devices.
    """
    hardware = request.hardware
    if request.parallel is None or request.constraints or hardware.measured:
        return False
    axes = [(mesh, a) for mesh in candidates for a in range(len(mesh.shape))]
    links = {id(link) for mesh, a in axes for _, link in hardware.levels(mesh, a)}
    return len(links) == 1 and all(cuts_axes_alike(request.parallel, mesh) for mesh in candidates)


def _explained(planning: Planning, letter: Infeasible) -> Infeasible:
    """The letter, explained by constraints and presets where one mesh is planned, not as a trial."""
    candidates = _candidates(planning.request)
    has_more_room = planning.request.states_on_host and not planning.parts_on_host
    if planning.is_trial or has_more_room or (len(candidates) > 1 and not _are_alike(planning.request, candidates)):
        return letter
    return explained(letter, planning, candidates[0])


def _turns_again(graph: Graph, request: Request, first: Plan) -> tuple[int | str, int | str]:
    """Micro-batches and chunks for another batch: as many as are asked for, as far as it has the rows."""
    turns = request.microbatches if first.pipeline is None else first.microbatches
    rows = rows_of_batch(graph)
    chunks = request.chunks
    head = head_of(graph, request.keeps_outputs).head
    return (
        turns if turns == "auto" else max(n for n in range(1, int(turns) + 1) if rows % n == 0),
        chunks if chunks == "auto" else min(int(chunks), 1 if head is None else head.rows),
    )


def _may_fit(letters: Mapping[int, Infeasible], budget: float) -> bool:
    """Whether more turns may fit in the budget, after these did not.

    At best a part of what they need is proportional to the rows of a turn: the last two numbers of turns say how large
    that part is, and what is left without it. The first few smallest plans are not known well enough to say.
    """
    *_, last = letters
    if letters[last].is_of_states:
        return False
    if len(letters) < 2:
        return True
    *_, before, last = letters
    saved = (letters[before].smallest - letters[last].smallest) * before / (last - before)
    return letters[last].smallest - saved <= budget * (SOLVER.recompute.far if len(letters) < LIMITS.turns else 1.0)


def _are_too_few(letters: Mapping[int, Infeasible], turns: int, budget: float) -> bool:
    """Whether so many turns are not worth a search, after the smallest plan in fewer.

    At best all that does not stand is proportional to the rows of a turn.
    """
    *_, last = letters
    letter = letters[last]
    return letter.stands + (letter.smallest - letter.stands) * last / turns > SOLVER.recompute.far * budget


def _of_the_smallest(letters: Mapping[int, Infeasible]) -> Infeasible:
    """The letter about the whole batch; it names a plan in micro-batches if a smaller one was found."""
    turns = min(letters, key=lambda turns: letters[turns].smallest)
    return naming_the_smaller(
        letters[1], letters[turns].smallest, f"in {turns} micro-batches", "that was met of the whole batch at once"
    )


def _numbers_of_turns(rows: int) -> Iterator[int]:
    """Divisors of the rows of a batch, from 1 on, each at least a third more than the one before."""
    before = 0
    for turns in range(1, max(rows, 1) + 1):
        if rows % turns == 0 and 3 * turns >= 4 * before:
            yield turns
            before = turns


def _matching(graph: Graph, patterns: Mapping[str, Any]) -> set[str]:
    """The patterns that match a name in this graph: another batch may not reach all that the first did."""
    names = {"out", *(f"out.{name}" for name in graph.output_names)}
    for node in graph.nodes:
        about = info(node)
        names.update(name for name in (about.key, about.module, *about.names) if name)
    return {pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)}
