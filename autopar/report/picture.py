"""The graph of a plan as a page draws it: places that decide alike as one node, and the values between them."""

from __future__ import annotations

from typing import Any

from autopar.graph.layers import folded
from autopar.sharding.strategies import values
from autopar.solver.plan import Plan
from autopar.solver.text_of_states import state_of

_ENDS = ("input", "output", "update")  # places of no cost, where values come in and leave


def alike(plan: Plan) -> list[list[str]]:
    """Groups of ops that decide alike, equal layers together, in the order of the step."""
    groups: dict[Any, list[str]] = {}
    for name, d in plan.decisions.items():
        if d.kind == "op":
            groups.setdefault((folded(name), repr(d.choice), state_of(plan, name)), []).append(name)
    return list(groups.values())


def cuts(plan: Plan, name: str) -> list[str]:
    """Placement of a place's first output on each axis: `R`, `S0`, `P`."""
    return list(map(_first, values(plan.decisions[name].flows()).placements))


def drawn(plan: Plan, groups: list[list[str]]) -> dict[str, list[Any]]:
    """Nodes and lines of the graph: groups in the order of the page's table, then inputs and outputs.

    A line has its source and target, how the value lies, its shape, conversions and their seconds, and whether it goes
    back to an earlier node, which is a later layer of the same kind.
    """
    nodes = [[folded(members[0]), k] for k, members in enumerate(groups)]
    of = {name: k for k, members in enumerate(groups) for name in members}
    order = {name: i for i, name in enumerate(plan.decisions)}
    first = [order[members[0]] for members in groups]
    for name, d in plan.decisions.items():
        if d.kind in _ENDS:
            of[name] = len(nodes)
            nodes.append([name, -1])
            first.append(order[name])
    found = {(c.source, c.target, c.operand): c for c in plan.conversions}
    lines: dict[tuple[int, int, str], list[Any]] = {}
    for name, d in plan.decisions.items():
        for operand, source in enumerate(d.reads):
            if name not in of or source not in of:
                continue  # a parameter, which is told with its op
            c = found.get((source, name, operand))
            steps = ", ".join(step.text(plan.mesh.axes) for step in c.forward) if c else ""
            made = plan.decisions[source]
            ends = (of[source], of[name])
            cut = cuts(plan, source) if made.kind != "input" else ["R"] * len(plan.mesh.shape)
            back = first[ends[0]] >= first[ends[1]]
            line = lines.setdefault((*ends, steps), [*ends, cut, made.outputs[:1], steps, 0.0, back])
            line[5] += c.seconds if c else 0.0
    return {"nodes": nodes, "lines": list(lines.values())}


def _first(placement: Any) -> str:
    return "R" if placement.is_replicated else f"S{placement.dim}" if placement.is_shard else "P"
