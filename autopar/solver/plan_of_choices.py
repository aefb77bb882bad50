"""Builds the `Plan` of the picked choices of a space: decisions, conversions, seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from autopar.sharding.certainty import source_of_links
from autopar.sharding.convert import Step
from autopar.sharding.placement import Sharding
from autopar.sharding.strategies import gradients, values
from autopar.solver.decision import Conversion, Decision, states_of
from autopar.solver.offload import states_on_host
from autopar.solver.plan import Plan
from autopar.solver.points import Point
from autopar.space.space import Edge, Flows, Space, reduces
from autopar.space.timeline import Timeline
from autopar.space.windows import LINKS, seconds_on_host

if TYPE_CHECKING:
    from autopar.space.kernel_sites import KernelSites


def plan_of(space: Space, point: Point, bound: float, budget: float = math.inf) -> Plan:
    """The plan of a point's choices and states; no plan takes less than `bound` seconds."""
    picked = point.picked
    chosen = list(zip(space.sites, picked, strict=True))
    conversions, moved = _conversions(space, picked)
    beside, hidden = _overlap(space, picked)
    hidden += point.recompute_hidden_s
    on_host = _hidden_on_host(space, picked)
    hidden_on_host_s = sum(on_host.values())
    decisions = _decisions(space, picked)
    step = sum(d.seconds for d in decisions.values())
    for seconds in moved:
        step += seconds
    step += point.recompute_s - hidden - hidden_on_host_s
    memory, peak_at = _peak(space, point)
    names = _named_for_policies(space)
    regathered = {name for name, (s, i) in zip(names, chosen, strict=True) if s.regathered and s.regathered[i]}
    plan = Plan(
        mesh=space.setting.mesh,
        cluster=str(space.setting.cluster),
        decisions=decisions,
        conversions=conversions,
        step_time_s=step,
        lower_bound_s=min(bound, step),
        parameter_bytes={s.name: s.bytes for s in space.sites if s.kind == "parameter"},
        digest=space.digest,
        window_bytes=space.setting.window_bytes,
        optimizer=space.setting.optimizer,
        without_rule=tuple(s.name for s in space.sites if not s.has_rule),
        memory=memory,
        peak_at=peak_at,
        budget=float(int(budget)) if math.isfinite(budget) else math.inf,
        beside_s=beside,
        hidden_s=hidden,
        hidden_on_host_s=hidden_on_host_s,
        accumulation=space.setting.accumulation,
        microbatches=space.setting.turns,
        compiled=space.setting.compiled,
        kernels=space.setting.kernels,
        sources=_sources(space, point, sum(moved) - hidden, on_host),
        scattered=frozenset(name for name, (s, i) in zip(names, chosen, strict=True) if s.scattered and s.scattered[i]),
        first_peak_bytes=round(space.memory.first(picked, space.edges, point.held)) if space.memory else 0,
        states=states_of(point.recomputed, point.passing, regathered, point.offloaded),
        host_bytes=round(point.host_bytes + states_on_host(space, picked)),
        hosted=frozenset(s.name for s, i in chosen if s.has_on_host(i)),
        wholly_hosted=frozenset(s.name for s, i in chosen if s.has_on_host(i) and s.policies[i].with_part),
        recompute_s=point.recompute_s,
        needed=_needed(space, point) if point.recomputed or point.offloaded else {},
        unaligned={} if space.unaligned is None else space.unaligned({s.name: s.choices[i] for s, i in chosen}),
        warnings=space.warnings,
        suspected=tuple(sorted({(s.op, s.suspected) for s in space.sites if s.suspected})),
    )
    return replace(plan, fused={} if space.kernels is None else fused_of(space.kernels, plan))


def with_states(plan: Plan, space: Space, point: Point) -> Plan:
    """The plan with the states of a point of its own choices."""
    other = plan_of(space, point, plan.lower_bound_s)
    return replace(
        plan,
        step_time_s=other.step_time_s,
        memory=other.memory,
        peak_at=other.peak_at,
        hidden_s=other.hidden_s,
        sources=other.sources,
        first_peak_bytes=other.first_peak_bytes,
        states=other.states,
        recompute_s=other.recompute_s,
        needed=other.needed,
        fused=other.fused,
    )


def fused_of(sites: KernelSites, plan: Plan) -> dict[str, str]:
    """The families of the kernels that can stand in a plan's program, by results of groups."""
    choices = {name: decision.choice for name, decision in plan.decisions.items()}
    steps = {(c.target, c.operand): (c.forward, c.backward) for c in plan.conversions}
    return sites.fused(plan.mesh, choices, steps, plan.recomputed)


def _decisions(space: Space, picked: Sequence[int]) -> dict[str, Decision]:
    reads: list[list[tuple[int, str]]] = [[] for _ in space.sites]
    for e in space.edges:
        reads[e.target].append((e.operand, space.sites[e.source].name))
    decisions = {}
    for s, i, read in zip(space.sites, picked, reads, strict=True):
        names = tuple(name for _, name in sorted(read))
        decisions[s.name] = Decision(s.op, s.kind, s.choices[i], float(s.seconds[i]), s.source, s.outputs, names)
    return decisions


def _sources(space: Space, point: Point, exposed: float, hidden: Mapping[int, float]) -> dict[str, float]:
    """Seconds of the step by their source; recompute is divided among sources as the ops are.

    `hidden` are seconds of parameters on the host that take none of the step, by site.
    """
    found: dict[str, float] = {}
    for k, (site, i) in enumerate(zip(space.sites, point.picked, strict=True)):
        if site.priced_by and site.seconds[i]:
            found[site.priced_by] = found.get(site.priced_by, 0.0) + float(site.seconds[i]) - hidden.get(k, 0.0)
    computed = sum(found.values())
    found = {source: s * (1 + point.recompute_s / computed) for source, s in found.items()}
    if exposed > 0:
        links = source_of_links(space.setting.cluster)
        found[links] = found.get(links, 0.0) + exposed
    return dict(sorted(found.items()))


def _needed(space: Space, point: Point) -> dict[str, tuple[int, float]]:
    """Bytes and seconds of each run whose values backward needs and could do without saving."""
    line = Timeline.of(space, point.picked, point.held, point.momentary)
    found = {}
    for run in line.runs:
        able = [v for v in run.makes if not line.fixed[v]]
        if able and (run.name in point.recomputed or not line.needed.isdisjoint(able)):
            found[run.name] = round(sum(float(line.bytes[v]) for v in able)), run.seconds
    return found


def _conversions(space: Space, picked: Sequence[int]) -> tuple[tuple[Conversion, ...], list[float]]:
    """The conversions that have steps, and the seconds of every edge."""
    conversions = []
    moved = []
    for e in space.edges:
        f, g = int(e.given_by[picked[e.source]]), int(e.taken_by[picked[e.target]])
        seconds = float(e.seconds[f, g])
        moved.append(seconds)
        if e.given[f] != e.taken[g]:
            conversion = _conversion(space, e, e.given[f], e.taken[g], seconds)
            if conversion.forward or conversion.backward:
                conversions.append(conversion)
    return tuple(conversions), moved


def _conversion(space: Space, e: Edge, given: Flows, taken: Flows, seconds: float) -> Conversion:
    value = values(given), values(taken)
    gradient = (gradients(taken), gradients(given)) if e.type.requires_grad else None
    forward = (e.ahead or space.conversions).path(e.type.shape, e.type.itemsize, *value).steps
    backward = _backward(space, e, given, taken, gradient) if gradient else ()
    source, target = space.sites[e.source].name, space.sites[e.target].name
    return Conversion(source, target, e.operand, value, gradient, forward, backward, seconds)


def _backward(
    space: Space, e: Edge, given: Flows, taken: Flows, gradient: tuple[Sharding, Sharding]
) -> tuple[Step, ...]:
    """The steps of a gradient's conversion, which may be reduced in another dtype and travel in buckets."""
    is_reduced = e.reduced_in and reduces([taken], [given]).any()
    itemsize = e.reduced_in if is_reduced else e.type.itemsize
    return (e.back or space.conversions).path(e.type.shape, itemsize, *gradient).steps


def _overlap(space: Space, picked: Sequence[int]) -> tuple[float, float]:
    """Seconds of communication in windows, and the part of them that compute hides."""
    pairs = [(w.times, *w.seconds(picked, space.edges)) for w in space.windows if w.lane == LINKS]
    # A window's seconds are the share of its communication that can be hidden; the rest of it is always exposed.
    beside = sum(times * moved / space.setting.cluster.hidden for times, moved, _ in pairs)
    hidden = sum(times * min(moved, run) for times, moved, run in pairs)
    return float(beside), float(hidden)


def _hidden_on_host(space: Space, picked: Sequence[int]) -> dict[int, float]:
    """Seconds of parameters on the host that compute hides, by site."""
    found = seconds_on_host(space.windows, picked, space.edges)
    return {k: hidden for k, (_, hidden) in found.items()}


def held_of(space: Space, point: Point) -> dict[str, np.ndarray]:
    """Bytes at every time of the step, by kind; {} where memory is not counted."""
    if space.memory is None:
        return {}
    held = space.memory.held(point.picked, space.edges)
    if point.recomputed or point.offloaded:  # less is saved, and what is made again is there for a while
        saved = "saved activations"
        held[saved] = held[saved] + point.held - np.sum(list(held.values()), axis=0)
    return held


def _peak(space: Space, point: Point) -> tuple[dict[str, int], str]:
    """Bytes at the fullest time by kind, and the name of that time."""
    if space.memory is None:
        return {}, ""
    held = held_of(space, point)
    time = int(np.sum(list(held.values()), axis=0).argmax())
    return {kind: round(float(n[time])) for kind, n in held.items()}, space.memory.when(time)


def _named_for_policies(space: Space) -> list[str]:
    """The name by which each site's policy goes: for a cast, the parameter that it casts."""
    parameter_of = {}
    for e in space.edges:
        if space.sites[e.target].policies:
            parameter_of[e.target] = e.source
    return [space.sites[parameter_of.get(k, k)].name for k in range(len(space.sites))]
