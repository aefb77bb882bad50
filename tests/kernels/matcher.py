"""Groups of ops that kernels can replace, found in a local program itself: what a plan says of them is tested by it."""

from __future__ import annotations

from autopar.codegen.local_passes import drop_unread_ops
from autopar.graph.graph import info
from autopar.kernels import families


def found_in(program, plan):
    """The family of each group of a program before kernels take its place, by its result; no op is in two groups."""
    drop_unread_ops(program)
    taken, found = set(), {}
    for family in families(plan.kernels):
        for node in reversed(program.fx.nodes):
            place = family.find(node) if node.op == "call_function" else None
            if place is not None and taken.isdisjoint(place[0].nodes) and _saves_alike(plan, place[0].results):
                taken.update(place[0].nodes)
                found[info(node).key] = family.name
    return found


def _saves_alike(plan, results):
    about = [info(result) for result in results]
    return len({plan.recomputed.isdisjoint((one.key, *one.names)) for one in about}) == 1
