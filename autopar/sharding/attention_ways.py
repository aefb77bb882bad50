"""The ops that are attention, and the ways in which an axis may divide an attention along its sequence.

ring       queries and keys are cut, and keys go round
gather     queries are cut, and every device has all keys
ulysses    heads are cut, each of which has the whole sequence
"""

from __future__ import annotations

from autopar.sharding.strategies import Strategy

PLAIN = "scaled_dot_product_attention"  # torch's own, whose mask is a tensor, or causal, or none
DESCRIBED = "attention"  # the op whose mask is a description
ATTENTIONS = (PLAIN, DESCRIBED)
RING, GATHER, ULYSSES = WAYS = ("ring", "gather", "ulysses")


def way_of(strategy: Strategy, dims: int) -> str:
    """The way of an attention along an axis; "" for another. `dims` are those of queries."""
    queries, keys = (flow.value for flow in strategy.operands[:2])
    if not queries.is_shard:
        return ""
    if queries.dim == dims - 2:
        return RING if keys.is_shard else GATHER
    return ULYSSES if dims > 3 and queries.dim == dims - 3 else ""
