"""What a preset or constraints have to do with a budget that no plan keeps to."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from autopar.letters import BadConstraint, BadPreset, Infeasible
from autopar.limits import LIMITS
from autopar.planning import Planning
from autopar.sharding.mesh import DeviceMesh
from autopar.solver.figures import size
from autopar.space.saved import bytes_that_stand


def explained(letter: Infeasible, planning: Planning, mesh: DeviceMesh) -> Infeasible:
    """The letter about a mesh, with what the request's preset or constraints have to do with it."""
    asked = planning.request
    if (asked.parallel is None and not asked.constraints) or math.isinf(asked.budget):
        return letter
    if not letter.is_of_states:
        return letter.but(seen=f"{letter.seen}; {_in_the_way(planning, mesh)}")
    advice = "none of these constraints, which keep them whole"
    if asked.parallel is not None:
        advice = f"another preset than {asked.parallel!r}, or none"
    return letter.but(seen=f"{letter.seen}; {_stored_apart(planning, mesh)}", advice=advice)


def _in_the_way(planning: Planning, mesh: DeviceMesh) -> str:
    """Text about the constraints that a budget breaks on: those without which there is a plan."""
    asked = planning.request

    def fits(**freer: Any) -> bool:
        try:
            replace(planning, request=replace(asked, **freer), is_trial=True).on(mesh)
        except (Infeasible, BadConstraint, BadPreset):
            return False
        return True

    given = dict(asked.constraints or {})
    parts: list[tuple[str, dict[str, Any]]] = []
    if asked.parallel is not None:
        parts.append((f"parallel={asked.parallel!r}", {"parallel": None}))
    for pattern in list(given)[: LIMITS.constraints]:
        others = {p: sharding for p, sharding in given.items() if p != pattern}
        parts.append((f"the constraint {pattern!r}", {"constraints": others}))
    if not fits(parallel=None, constraints=None):
        return "without the constraints there is none either"
    guilty = [what for what, freer in parts if fits(**freer)] if len(parts) > 1 else [parts[0][0]]
    return f"there is one without {' or without '.join(guilty) if guilty else 'all of the constraints together'}"


def _stored_apart(planning: Planning, mesh: DeviceMesh) -> str:
    """Text about the bytes of parameters, gradients and states, if they were divided among all devices."""
    stands = bytes_that_stand(planning.graph, planning.request.optimizer)
    return f"on all {mesh.size} devices in parts it takes {size(stands / mesh.size)}"
