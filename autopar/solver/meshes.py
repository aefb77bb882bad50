"""The search over meshes: every ordered factorisation of a number of devices into axes is planned, the fastest taken.

The order of axes is their mapping to links: ranks are row-major, so the last axis joins neighbours. Two axes at most: a
third multiplies the choices of every op (LLaMA's shape on 64 devices: 25 s a mesh, against 1.3 s, and none of seven was
faster than the best of two axes), and is for those who name it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autopar.letters import BadConstraint, BadPreset, BadSharding, Infeasible, Letter
from autopar.sharding.mesh import DeviceMesh
from autopar.solver.figures import size
from autopar.solver.limits import LIMITS
from autopar.solver.plan import Plan
from autopar.space.space import Outdone

_LIMITS = LIMITS.meshes


def meshes(devices: int, axes: int = _LIMITS.axes) -> list[DeviceMesh]:
    """All meshes of this number of devices, those of few axes first."""
    if devices < 1:
        raise BadSharding(f"{devices} is not a valid number of devices")
    return [DeviceMesh(shape) for shape in sorted(_factored(devices, axes), key=lambda shape: (len(shape), shape))]


def _factored(n: int, axes: int) -> Iterator[tuple[int, ...]]:
    yield (n,)
    if axes > 1:
        for first in sorted({d for k in range(2, math.isqrt(n) + 1) if n % k == 0 for d in (k, n // k)}):
            if first < n:
                yield from ((first, *rest) for rest in _factored(n // first, axes - 1))


def best_mesh(
    candidates: Sequence[DeviceMesh],
    on: Callable[[DeviceMesh, float], Plan],
    until: float = math.inf,
    known: float = math.inf,
    floor: Callable[[DeviceMesh, float], float] | None = None,
    is_near: bool = False,
) -> Plan:
    """The fastest plan over meshes, or one on fewer axes about as fast; its `meshes` lists all of them.

    A mesh that the budget, a preset or a constraint refuses, or on which a bound says that no plan would be taken, is
    listed with the reason. `on` plans on a mesh, and is told the seconds that a plan has to go below. `floor` gives the
    seconds that no plan on a mesh goes below: the least of them is planned first, as it leaves most others out. If it
    `is_near` what plans take, a floor that leaves a mesh behind the least so far is high enough. Once there is a plan,
    none is made after the time `until`. Raises `Outdone` where a bound says of all meshes that no plan takes less than
    `known` seconds.
    """
    plans = list[Plan]()
    table = dict[DeviceMesh, tuple[str, float, float, int, str]]()
    refused = dict[DeviceMesh, Letter]()
    floors = [0.0] * len(candidates)
    if floor is not None and len(candidates) > 1:
        enough = known
        for k, mesh in reversed([*enumerate(candidates)]):  # Few neighbours on the last axis are mostly fastest.
            floors[k] = floor(mesh, enough)
            enough = min(enough, (1 + _LIMITS.alike) * floors[k]) if is_near else known
    for least, mesh in sorted(zip(floors, candidates, strict=True), key=_promise):
        if plans and time.monotonic() > until:
            table[mesh] = str(mesh), 0.0, 0.0, 0, "not planned: the time limit"
            continue
        below = min(known, _to_be_taken(mesh, plans))
        try:
            plan = on(mesh, below) if least < below else None
            if plan is None:
                raise Outdone(least)
        except Outdone as e:
            table[mesh] = str(mesh), 0.0, e.floor, 0, "no plan on it is so much faster that it would be taken"
            continue
        except (Infeasible, BadPreset, BadConstraint) as e:
            refused[mesh] = e
            table[mesh] = str(mesh), 0.0, 0.0, 0, e.what
            continue
        plans = _still_alike([*plans, plan])
        table[mesh] = str(mesh), plan.step_time_s, plan.lower_bound_s, plan.peak_bytes, ""
    rows = tuple(table[mesh] for mesh in candidates)
    outdone = [row for row in rows if row[4].startswith("no plan on it")]
    if outdone and not plans:
        raise Outdone(min(bound for _, _, bound, _, _ in outdone))
    if not plans:
        raise _least([(mesh, refused[mesh]) for mesh in candidates])
    best, said = _of_fewest_axes(plans)
    return replace(best, meshes=rows, defaults=(*best.defaults, *said)) if len(candidates) > 1 else best


def _promise(floor_on: tuple[float, DeviceMesh]) -> float:
    """The floor of a mesh, as one of fewer axes would have it that is taken as readily."""
    floor, mesh = floor_on
    return floor * (1 + _LIMITS.alike) ** (len(mesh.shape) > 1)


def _to_be_taken(mesh: DeviceMesh, plans: Sequence[Plan]) -> float:
    """The seconds that a plan on a mesh has to go below to be taken; more axes have to be worth it."""
    alike = 1 + _LIMITS.alike

    def below(plan: Plan) -> float:
        more = len(mesh.shape) - len(plan.mesh.shape)
        return plan.step_time_s / alike if more > 0 else plan.step_time_s * (alike if more < 0 else 1.0)

    return min(map(below, plans), default=math.inf)


def _still_alike(plans: Sequence[Plan]) -> list[Plan]:
    """The plans that may be taken: others, and the spaces that they keep, are dropped."""
    most = (1 + _LIMITS.alike) * min(plan.step_time_s for plan in plans)
    return [plan for plan in plans if plan.step_time_s <= most]


def _of_fewest_axes(plans: Sequence[Plan]) -> tuple[Plan, list[tuple[str, str]]]:
    """The fastest plan, or one of fewer axes that is about as fast; and a line about that choice.

    The times of the two cannot be told apart. Every axis has process groups of its own, and ranks that wait on one are
    late on the next.
    """
    fastest = min(plans, key=lambda p: p.step_time_s)
    alike = [p for p in plans if p.step_time_s <= (1 + _LIMITS.alike) * fastest.step_time_s]
    best = min(alike, key=lambda p: (len(p.mesh.shape), p.step_time_s))
    if len(best.mesh.shape) == len(fastest.mesh.shape):
        return fastest, []
    share = best.step_time_s / fastest.step_time_s - 1
    said = f"{best.mesh}, of fewer axes: the plan on {fastest.mesh} is {share:.1%} faster, which nothing tells apart"
    return best, [("mesh", said)]


def _least(refused: Sequence[tuple[DeviceMesh, Letter]]) -> Letter:
    """The letter that stands for those of all meshes, one about the budget before one about a preset.

    It names the least that any plan needs on any mesh, and the smallest plan of all.
    """
    over = [(mesh, e) for mesh, e in refused if isinstance(e, Infeasible)]
    counted = [(mesh, e) for mesh, e in over if e.smallest]
    if len(counted) < 2:
        return (over or refused)[0][1]
    needs = min(e.needs for _, e in counted)
    (on, smallest) = min(counted, key=lambda pair: pair[1].smallest)
    others = f"; {len(refused) - len(counted)} more cannot carry what was asked" if len(counted) < len(refused) else ""
    unaided = " that recomputes nothing" if needs > smallest.smallest else ""
    return Infeasible(
        f"{smallest.what.partition(' on mesh ')[0]} on any mesh of {on.size} devices",
        at=smallest.at,
        seen=(
            f"{size(needs)} are needed by any plan{unaided} on any of {len(counted)} meshes{others}; "
            f"the smallest plan is on mesh {on}: {smallest.fullest}"
        ),
        advice=smallest.advice,
        needs=needs,
        smallest=smallest.smallest,
        fullest=smallest.fullest,
    )
