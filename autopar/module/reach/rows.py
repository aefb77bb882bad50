"""Reach of ops along a dim that hide what is known: softmax, running sums, losses over classes and attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.graph.graph import op_name
from autopar.module.reach.by_rule import by_rule
from autopar.module.reach.pairs import OpPair, type_of_output
from autopar.module.reach.values import LOW, Reach, Unclear, is_padded, is_plain, lined_up, need, reach_of, unknown
from autopar.runtime.sees import Sees, all_pairs


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
    whole = by_rule(pair)[0]
    return reach_of(given.dims, pad, whole.known, whole.value)


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
    query, key, value, seen = _operands_of_attention(pair)
    mask = pair.of("attn_mask")
    hidden = torch.zeros((1, 1), dtype=torch.bool)
    if pair.kwargs.get("is_causal"):
        hidden = ~torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if mask is not None:
        hidden = hidden | (mask.known & (~mask.value if mask.value.dtype == torch.bool else mask.value <= LOW))
        seen = seen | mask.pad
    return _reach_of_queries(pair, query, value, (seen & ~hidden).any(-1, keepdim=True))


def described_attention(pair: OpPair) -> Reach:
    """The reach of attention whose mask is a description.

    A query sees the keys in its window, of its document, that count.
    """
    query, key, value, seen = _operands_of_attention(pair)
    hidden = ~all_pairs(Sees.of(pair.kwargs.get("sees", "")), query.shape[-2], key.shape[-2])
    by_document = torch.zeros((1, 1, 1, 1), dtype=torch.bool)
    counts = pair.of("counts")
    if counts is not None:
        hidden = hidden | (counts.known & (counts.value == 0))[:, None, None, :]
        seen = seen | counts.pad[:, None, None, :]
    documents = pair.of("documents")
    if documents is not None:
        seen = seen | documents.pad[:, None, None, :]
        by_document = documents.pad[:, None, :, None]
    sinks = pair.of("sinks")
    if sinks is not None and is_padded(sinks.dims):
        raise Unclear
    return _reach_of_queries(pair, query, value, (seen & ~hidden).any(-1, keepdim=True) | by_document)


def _operands_of_attention(pair: OpPair) -> tuple[Reach, Reach, Reach, Tensor]:
    """Queries, keys and values, and the pairs through which padding would reach a query that sees them."""
    query, key, value = (need(pair.of(n)) for n in ("query", "key", "value"))
    if not all(is_plain(r.dims[-2]) for r in (query, key, value)) or key.dims[-2] != value.dims[-2]:
        raise Unclear
    if any(is_padded([r.dims[-1]]) for r in (query, key, value)):
        raise Unclear
    seen = _heads_alike(key.pad.amax(-1)[..., None, :]) | _heads_alike(value.pad.amax(-1)[..., None, :])
    return query, key, value, seen


def _reach_of_queries(pair: OpPair, query: Reach, value: Reach, reached: Tensor) -> Reach:
    """The reach of the output, where `reached` says which queries see padding."""
    rank = len(query.dims)
    pad = query.pad.amax(-1, keepdim=True) | reached
    if pad.dim() > rank:
        raise Unclear
    dims = (*query.dims[:-1], value.dims[-1])
    return unknown(dims, type_of_output(pair, 0), pad)


def _heads_alike(pad: Tensor) -> Tensor:
    """Padding joined over heads, as a group of query heads reads one head of keys."""
    return pad.amax(-3, keepdim=True) if pad.dim() > 3 else pad
