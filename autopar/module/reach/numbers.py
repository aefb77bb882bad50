"""Reach of elementwise ops whose results some operands decide alone: a product with zero, a branch that is known."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.graph.graph import op_name
from autopar.module.reach.pairs import OpPair, type_of_output
from autopar.module.reach.values import LOW, Reach, any_of, lined_up, need, reach_of


def absorbed(pair: OpPair, reach: Reach) -> Reach:
    """The reach of an op, with what is known of a result where only one operand is known.

    Products with known zeros are known, and sums with known -inf that hide scores.
    """
    name = op_name(pair.node)
    if name not in ("mul", "bitwise_and", "logical_and", "bitwise_or", "logical_or", "div", "add", "sub"):
        return reach
    _, lined = lined_up([r for r in pair.operands if r is not None])
    known, value = reach.known, reach.value
    if name in ("mul", "bitwise_and", "logical_and"):
        known, value = _set(known, value, any_of([r.is_(0) for r in lined]), 0)
    elif name in ("bitwise_or", "logical_or") and value.dtype == torch.bool:
        known, value = _set(known, value, any_of([r.is_(1) for r in lined]), 1)
    elif name == "div":
        known, value = _set(known, value, lined[0].is_(0) & ~lined[1].pad, 0)
    elif name in ("add", "sub") and value.is_floating_point() and pair.kwargs.get("alpha", 1) == 1:
        other = lined[1].value
        if name == "sub" and other.dtype != torch.bool:
            other = -other
        hidden = (lined[0].known & (lined[0].value <= LOW)) | (lined[1].known & (other <= LOW))
        known, value = _set(known, value, hidden & reach.pad, -math.inf)
    return reach_of(reach.dims, reach.pad, known, value)


def _set(known: Tensor, value: Tensor, where: Tensor, what: float) -> tuple[Tensor, Tensor]:
    return known | where, torch.where(where, torch.tensor(what, dtype=value.dtype), value)


def where(pair: OpPair) -> Reach:
    """The reach of the elements that the condition selects; of both branches where it is not known."""
    names = ("condition", "input", "other") if op_name(pair.node) == "where" else ("mask", "value", "input")
    dims, (condition, one, other) = lined_up([need(pair.of(n)) for n in names])
    chosen = condition.value.bool()
    pad = condition.pad | torch.where(condition.known, torch.where(chosen, one.pad, other.pad), one.pad | other.pad)
    known = condition.known & torch.where(chosen, one.known, other.known)
    value = torch.where(chosen, one.value, other.value).to(type_of_output(pair, 0))
    return reach_of(dims, pad, known, value)
