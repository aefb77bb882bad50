"""`look_at_link`: a bound of plans whose values wait on the host, by the time that forward gives the link.

    bytes(x, t) <= budget + rate * forward(x)     what is away at the priced time has left before forward ended
    other(x, u) <= budget                         at a later time, of the bytes that no states change

Seconds of forward are a sum of tables, and of what windows expose. At a price of a byte each of its seconds is worth
price * rate, since the link carries meanwhile: where that is no more than a second, the least of

    seconds(x) - price * rate * forward(x) + price * (bytes(x, t) - budget)

is a bound of all plans, however long they take otherwise: a slow step on the host's CPUs gives the link no time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.once import Once
from autopar.sharding.host import Host
from autopar.solver.eliminate import Found, minimise
from autopar.solver.joint import JointPrices, JointTables
from autopar.solver.joint_search import JointSearch
from autopar.solver.limits import LIMITS
from autopar.solver.lined import Lined
from autopar.solver.points import Point
from autopar.solver.prices import prices_of
from autopar.solver.tables import Factor, Problem

_LIMITS = LIMITS.recompute


def look_at_link(joint: JointSearch, host: Host, budget: float, near: Lined) -> None:
    """Raise the bound of a joint search under a budget, near the sharding of a plan that fits."""
    time = joint.tables.time
    # Behind the priced time values come back and go: what no states change is dearest where there is most of it.
    tables = JointTables(joint.task.counted, time, time + 1 + int(near.line.other[time + 1 :].argmax()))
    met = {tuple(lined.point.picked): lined for lined in (*joint.met.values(), near)}
    for _ in range(_LIMITS.rounds_for_bound):
        at = _prices(list(met.values()), tables, host, budget)
        if any(at.is_near(tried) for tried in joint.beside_link):
            break
        least = least_beside_link(tables, at, near, host)
        joint.beside_link[at] = least.bound
        point = joint.task.counted.point(least.picked)
        if not math.isfinite(point.seconds):
            break
        near = met.setdefault(tuple(point.picked), Lined.of(joint.task, point))
        near.states.of(tables.prices.cheapest(near.line, at.of_byte, at.exposed))


def least_beside_link(tables: JointTables, at: JointPrices, near: Lined, host: Host) -> Found:
    """The sharding of least cost at some prices of these tables, near another sharding."""
    worth = tables.prices.worth([near.laid], at.of_byte, at.exposed)
    return minimise(_discounted(tables, tables.problem(at, worth), at.of_byte * host.down_bytes_per_s), tries=1)


def _prices(met: Sequence[Lined], tables: JointTables, host: Host, budget: float) -> JointPrices:
    """Prices that maximise the least cost of what was met.

    As much is away as the link carries in forward. Prices are those of the tables: a second of forward counts less, and
    so does what windows expose.
    """
    time = tables.time
    plans = [_with_away(lined, plan, time) for lined in met for plan in lined.frontier(time)]
    prices, _ = prices_of(plans, {time: budget, tables.step: budget}, tables.counted.kinds)
    of_byte = min(prices.of_bytes.get(time, 0.0), 1 / host.down_bytes_per_s)
    left = 1 - of_byte * host.down_bytes_per_s
    return JointPrices(of_byte, tuple(share * left for share in prices.exposed), prices.of_bytes.get(tables.step, 0.0))


def _with_away(lined: Lined, plan: Point, time: int) -> Point:
    """A plan without the bytes that the link can carry in its forward."""
    held = np.array(plan.held)
    held[time] -= 0.0 if lined.packing is None else lined.packing.carried
    return replace(plan, held=held)


def _discounted(tables: JointTables, problem: Problem, share: float) -> Problem:
    """A problem in which a share of the seconds of a micro-batch's forward does not count."""
    once = Once()
    space = tables.space
    costs = list(problem.costs)
    factors = list(problem.factors)

    def less(table: np.ndarray, seconds: Sequence[np.ndarray]) -> np.ndarray:
        return once("less", (table, *seconds), lambda: table - share * sum(seconds))

    for op in tables.passages.ops:
        ways = 2 if op.in_chunks else 1  # The backward of a chunk is among the forward of others.
        if compute := space.sites[op.site].compute:
            costs[op.site] = less(costs[op.site], compute[:ways])
        for k in op.edges:
            if k not in tables.passages.gathered:
                edge = space.edges[k]
                table = less(factors[k].table, (edge.forward, edge.backward)[:ways])
                factors[k] = Factor(factors[k].scope, factors[k].classes, table)
    return replace(problem, costs=costs, factors=factors, once=Once())
