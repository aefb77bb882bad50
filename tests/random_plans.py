"""Legal plans that nobody would choose: the cheapest under costs that are drawn.

They are right too, or a plan could change more than speed and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from autopar import DeviceMesh
from autopar.graph.graph import Graph, type_of
from autopar.sharding.placement import Sharding
from autopar.solver import Plan, solve
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.space.space import Site, Space
from autopar.tracer import ColoTracer
from tests.models import eager_links


def random_plan(model: nn.Module, batch: dict, mesh: DeviceMesh, seed: int) -> Plan:
    """A random plan of the model under which no weight is gathered again."""
    space = shardings(ColoTracer().trace(model, batch), Setting(mesh, eager_links()))
    return cheapest_at_random(space, np.random.default_rng(seed))


def random_plan_of(graph: Graph, mesh: DeviceMesh, rng: np.random.Generator) -> Plan:
    """A random plan of the graph; in half of them weights may be gathered again."""
    setting = Setting(mesh, eager_links(), regather=bool(rng.integers(2)), turns=graph.turns)
    return cheapest_at_random(shardings(graph, setting), rng)


class NoneUneven(Exception):
    """Raised where random plans of a graph cut no parameter unevenly."""


def uneven_plan_of(graph: Graph, mesh: DeviceMesh, rng: np.random.Generator) -> Plan:
    """A random plan under which devices hold unequal parts of a parameter, and backward recomputes some values."""
    for _ in range(20):
        plan = random_plan_of(graph, mesh, rng)
        if any(_is_uneven(plan.parameters[n], type_of(node).shape, mesh) for n, node in graph.parameters.items()):
            return with_random_states(plan, rng, (0.2, 0.5, 1.0))
    raise NoneUneven("twenty random plans cut no parameter unevenly")


def _is_uneven(sharding: Sharding, shape: Sequence[int], mesh: DeviceMesh) -> bool:
    cuts = zip(sharding.placements, mesh.shape, strict=True)
    return any(p.is_shard and not p.blocks and shape[p.dim] % n for p, n in cuts)


def with_random_states(plan: Plan, rng: np.random.Generator, shares: Sequence[float] = (0.0, 0.2, 0.5, 1.0)) -> Plan:
    """The plan where backward recomputes some of its values, all or none of them; now and then some in passing."""
    ops = [name for name, d in plan.decisions.items() if d.kind == "op"]
    share = rng.choice(shares)
    recomputed = frozenset(v for v in [*ops, *(c.name for c in plan.conversions)] if rng.random() < share)
    if not recomputed or rng.random() < 0.5:
        return plan.recomputing(recomputed)
    passing = {name: str(rng.choice(ops)) for name in sorted(recomputed) if rng.random() < 0.5}
    return plan.recomputing(recomputed, passing)


def random_plan_with(
    cut: tuple[str, int | None, str], model: nn.Module, batch: dict, mesh: DeviceMesh, seed: int
) -> Plan:
    """A random plan in which, of each op of a name, an operand has one placement on every axis; None: its output."""
    op, operand, placement = cut

    def refused(site: Site) -> list[bool]:
        if site.op != op:
            return [False] * len(site.choices)
        ends = (choice.output() if operand is None else choice.operand(operand) for choice in site.choices)
        return [any(repr(flow.value) != placement for flow in flows) for flows in ends]

    space = shardings(ColoTracer().trace(model, batch), Setting(mesh, eager_links()))
    return cheapest_at_random(space, np.random.default_rng(seed), refused)


def cheapest_at_random(
    space: Space, rng: np.random.Generator, refused: Callable[[Site], list[bool]] | None = None
) -> Plan:
    """The cheapest plan of the space under random costs; choices that are refused cost without end."""
    sites = []
    for site in space.sites:
        seconds = rng.random(len(site.choices))
        if refused is not None:
            seconds[refused(site)] = np.inf
        sites.append(replace(site, seconds=seconds))
    edges = []
    for edge in space.edges:
        seconds = rng.random(edge.seconds.shape)
        edges.append(replace(edge, seconds=np.where(np.isfinite(edge.seconds), seconds, np.inf)))
    return solve(replace(space, sites=tuple(sites), edges=tuple(edges)))
