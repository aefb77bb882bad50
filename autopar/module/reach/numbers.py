"""Reach of elementwise ops, and of values made of sizes: each element depends on those at its place."""

from __future__ import annotations

import math

import torch
import torch.fx as fx
from torch import Tensor

from autopar.graph.graph import info, op_name, type_of
from autopar.module.reach.pairs import OpPair, type_of_output
from autopar.module.reach.values import LOW, MOST, Reach, Unclear, all_of, any_of, is_plain, lined_up, need, reach_of


def pointwise(pair: OpPair) -> Reach:
    """The reach of an elementwise op; products with known zeros, and sums that hide scores, are known."""
    present = [r for r in pair.operands if r is not None]
    dims, lined = lined_up(present)
    pad = any_of([r.pad for r in lined])
    known = all_of([r.known for r in lined])
    if info(pair.node).random >= 0:
        known = torch.zeros_like(known)
    value = torch.zeros((1,) * len(dims), dtype=type_of_output(pair, 0))
    if bool(known.any()):
        places = [n for n in pair.node.target.operands(pair.kwargs) if isinstance(n, fx.Node)]
        try:
            value = pair.run({n: pair.reaches[n].value for n in places})
        except RuntimeError:  # a division by what is not known
            known = torch.zeros_like(known)
        value = value.reshape((1,) * (len(dims) - value.dim()) + value.shape)
    name = op_name(pair.node)
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
        known, value = _set(known, value, hidden & pad, -math.inf)
    return reach_of(dims, pad, known, value)


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


def triangle(pair: OpPair) -> Reach:
    """The reach of tril and triu: elements outside the triangle are known zeros."""
    given = need(pair.of("input"))
    if not all(is_plain(f) for f in given.dims[-2:]):
        raise Unclear
    stays = getattr(torch, op_name(pair.node))(
        torch.ones(given.shape[-2:], dtype=torch.bool), pair.kwargs.get("diagonal", 0)
    )
    return reach_of(
        given.dims,
        given.pad,
        given.known | ~stays,
        torch.where(stays, given.value, torch.zeros((), dtype=given.value.dtype)),
    )


def from_nothing(pair: OpPair) -> Reach:
    """The reach of a value made of sizes alone: it is known, and must begin alike in both programs."""

    def made(node: fx.Node) -> Tensor:
        kwargs = fx.map_arg(
            dict(node.kwargs), lambda n: torch.empty((), dtype=type_of(n).torch_dtype).expand(type_of(n).shape)
        )
        found = node.target.run(kwargs)
        return found if isinstance(found, Tensor) else torch.as_tensor(found)

    if math.prod(type_of(pair.node).shape) > MOST:
        raise Unclear
    here = made(pair.exact)
    longer = made(pair.node)
    dims = pair.dims()
    shared = longer
    for d, n in enumerate(here.shape):
        shared = shared.narrow(d, 0, n)
    differs = shared != here
    pad = torch.zeros(longer.shape, dtype=torch.bool)
    pad[tuple(slice(0, n) for n in here.shape)] = differs
    return reach_of(dims, pad, torch.ones((1,) * longer.dim(), dtype=torch.bool), longer)
