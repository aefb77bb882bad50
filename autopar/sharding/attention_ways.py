"""The ops that are attention, and the ways in which an axis may divide an attention along its sequence.

ring       queries and keys are cut, and keys go round along the first such axis; along others they are gathered in
           each step
gather     queries are cut, and every device has all keys
ulysses    heads are cut, each of which has the whole sequence
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.sharding.strategies import Strategy

PLAIN = "scaled_dot_product_attention"  # torch's own, whose mask is a tensor, or causal, or none
DESCRIBED = "attention"  # the op whose mask is a description
ATTENTIONS = (PLAIN, DESCRIBED)
RING, GATHER, ULYSSES = WAYS = ("ring", "gather", "ulysses")
STEPWISE = "stepwise"


def way_of(strategy: Strategy, dims: int) -> str:
    """The way of an attention along an axis; "" for another. `dims` are those of queries."""
    queries, keys = (flow.value for flow in strategy.operands[:2])
    if not queries.is_shard:
        return ""
    if queries.dim == dims - 2:
        return RING if keys.is_shard else GATHER
    return ULYSSES if dims > 3 and queries.dim == dims - 3 else ""


def ways_of(strategies: Sequence[Strategy], dims: int) -> list[str]:
    """The way of an attention along each axis, where `STEPWISE` is a ring inside another one."""
    ways = [way_of(strategy, dims) for strategy in strategies]
    first = ways.index(RING) if RING in ways else len(ways)
    return [STEPWISE if way == RING and axis > first else way for axis, way in enumerate(ways)]
