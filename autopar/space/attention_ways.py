"""The ways in which an axis may divide an attention along its sequence.

ring       queries and keys are cut, and keys go round
gather     queries are cut, and every device has all keys
ulysses    heads are cut, each of which has the whole sequence
"""

from __future__ import annotations

from autopar.sharding.strategies import Strategy

RING, GATHER, ULYSSES = WAYS = ("ring", "gather", "ulysses")


def way_of(strategy: Strategy, dims: int) -> str:
    """The way of an attention along an axis; "" for another. `dims` are those of queries."""
    queries, keys = (flow.value for flow in strategy.operands[:2])
    if not queries.is_shard:
        return ""
    if queries.dim == dims - 2:
        return RING if keys.is_shard else GATHER
    return ULYSSES if dims > 3 and queries.dim == dims - 3 else ""
