"""Reach of ops along a dim: reductions, softmax, running sums, losses over classes and attention."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from autopar.graph.graph import op_name
from autopar.module.reach.pairs import OpPair, type_of_output
from autopar.module.reach.values import LOW, Reach, Unclear, is_padded, is_plain, lined_up, need, reach_of, unknown
from autopar.ops.entry import facts_of


def _dims_of(pair: OpPair, rank: int) -> tuple[int, ...]:
    dim = pair.kwargs.get("dim")
    named = range(rank) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    return tuple(sorted({int(d) % max(rank, 1) for d in named}))


def reduced(pair: OpPair) -> Reach:
    """The reach of a reduction, less elements known to be neutral: zeros in a sum, -inf in a maximum."""
    given = need(pair.of("input"))
    neutral = facts_of(op_name(pair.node)).neutral
    rank = len(given.dims)
    gone = _dims_of(pair, rank)
    keeps = bool(pair.kwargs.get("keepdim", False))
    if not gone:
        return replace(unknown(given.dims, type_of_output(pair, 0)), pad=given.pad)
    reached = given.pad & ~given.is_(neutral)
    pad = reached.amax(gone, keepdim=keeps) | given.pad.amin(gone, keepdim=keeps)
    dims = tuple(() if d in gone else f for d, f in enumerate(given.dims) if keeps or d not in gone)
    known = given.known.amin(gone, keepdim=keeps)
    value = torch.zeros((1,) * len(dims), dtype=type_of_output(pair, 0))
    if bool(known.any()):
        sizes = [n if d in gone else given.value.shape[d] for d, n in enumerate(given.shape)]
        value = pair.run({pair.kwargs["input"]: given.value.expand(sizes)})
    return reach_of(dims, pad, known, value)


def softmax(pair: OpPair) -> Reach:
    """The reach of a softmax: each element depends on all of its row except for known -inf."""
    given = need(pair.of("input"))
    dim = int(pair.kwargs["dim"]) % len(given.dims)
    hidden = given.is_(-math.inf)
    pad = given.pad & ~hidden
    row = pad.amax(dim, keepdim=True)
    alone = hidden & given.pad & ~row  # hidden in a row that is not padding
    hidden_value = 0 if op_name(pair.node) == "softmax" else -math.inf
    value = torch.full((), hidden_value, dtype=type_of_output(pair, 0))
    return reach_of(given.dims, row | given.pad, alone, value.expand(alone.shape))


def running(pair: OpPair) -> Reach:
    """The reach of a running sum: each element depends on those before it."""
    given = need(pair.of("input"))
    dim = int(pair.kwargs["dim"]) % len(given.dims)
    reached = given.pad & ~given.is_(0)
    sizes = [given.shape[d] if d == dim else n for d, n in enumerate(reached.shape)]
    pad = reached.expand(sizes).to(torch.uint8).cummax(dim).values.bool()
    if bool(given.known.all()):
        value = pair.run({pair.kwargs["input"]: given.full(given.value)})
        return reach_of(given.dims, pad, torch.ones((1,) * len(given.dims), dtype=torch.bool), value)
    return unknown(given.dims, type_of_output(pair, 0), pad)


def loss_of_classes(pair: OpPair) -> Reach:
    """The reach of a loss over classes, in which ignored targets do not count."""
    logits, target = need(pair.of("input")), need(pair.of("target"))
    reduction = pair.kwargs.get("reduction", "mean")
    if target.value.is_floating_point() or reduction not in ("sum", "none") or len(logits.dims) != len(target.dims) + 1:
        raise Unclear
    classes = 1 if len(logits.dims) > 1 else 0
    if is_padded([logits.dims[classes]]):
        raise Unclear
    rows = Reach(
        logits.dims[:classes] + logits.dims[classes + 1 :],
        logits.pad.amax(classes),
        torch.zeros((1,) * len(target.dims), dtype=torch.bool),
        torch.zeros((1,) * len(target.dims)),
    )
    dims, (given, wanted) = lined_up([rows, target])
    ignored = wanted.is_(pair.kwargs.get("ignore_index", -100))
    pad = given.pad | wanted.pad
    if reduction == "none":
        return reach_of(dims, pad, ignored, torch.zeros(ignored.shape, dtype=type_of_output(pair, 0)))
    return unknown((), type_of_output(pair, 0), (pad & ~ignored).any())


def attention(pair: OpPair) -> Reach:
    """The reach of attention: a query sees the keys that neither the mask nor the causal order hides."""
    query, key, value = (need(pair.of(n)) for n in ("query", "key", "value"))
    mask = pair.of("attn_mask")
    if not all(is_plain(r.dims[-2]) for r in (query, key, value)) or key.dims[-2] != value.dims[-2]:
        raise Unclear
    if any(is_padded([r.dims[-1]]) for r in (query, key, value)):
        raise Unclear
    seen = _heads_alike(key.pad.amax(-1)[..., None, :]) | _heads_alike(value.pad.amax(-1)[..., None, :])
    hidden = torch.zeros((1, 1), dtype=torch.bool)
    if pair.kwargs.get("is_causal"):
        hidden = ~torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if mask is not None:
        hidden = hidden | (mask.known & (~mask.value if mask.value.dtype == torch.bool else mask.value <= LOW))
        seen = seen | mask.pad
    reached = (seen & ~hidden).any(-1, keepdim=True)
    rank = len(query.dims)
    pad = query.pad.amax(-1, keepdim=True) | reached
    if pad.dim() > rank:
        raise Unclear
    dims = (*query.dims[:-1], value.dims[-1])
    return unknown(dims, type_of_output(pair, 0), pad)


def _heads_alike(pad: Tensor) -> Tensor:
    """Padding joined over heads, as a group of query heads reads one head of keys."""
    return pad.amax(-3, keepdim=True) if pad.dim() > 3 else pad
