"""Causal attention of a part of the queries, without a mask: what a query sees follows from the keys that it is given.

    keys        0 ......... start ......... start + queries ......... keys
    they see    all of these  | these up to their own place |  none of these

All queries of the part see the keys before it (one call, without a mask), and those at the part's own places up to the
diagonal (one causal call of a square, which every kernel supports); the two results are merged by the log-sum-exps of
their rows. Queries behind the last key see all keys. Backward is that of each call, from the *merged* output and
log-sum-exp: with them a call's weights are those of the whole row, so that its gradients add up to those of the whole.
Queries, keys, values, output and one number per row are saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.private import AttentionCall, attention_kernel, fused_attention, fused_attention_backward

GROUPED = ("cpu", "flash")  # kernels that take fewer heads of keys than of queries


def causal_attention_part(
    query: Tensor, key: Tensor, value: Tensor, start: int, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:
    """Causal attention of queries whose first stands at place `start`; key and value are whole."""
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    given = _with_batch_and_heads(query, key, value, enable_gqa)
    out: Tensor = CausalAttentionPart.apply(*given, start, factor)
    return out.reshape(*_leading(query, key, value, enable_gqa), *out.shape[-2:])


def _leading(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[int, ...]:
    """The result's dims before rows and width: those of all three, broadcast, with the queries' heads."""
    if not grouped:
        return tuple(torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value))))
    return (*torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value))), query.shape[-3])


def _with_batch_and_heads(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> list[Tensor]:
    """Query, key and value with four dims, as kernels take them: batch, heads, rows, width."""
    leading = _leading(query, key, value, grouped)
    found = []
    for x in (query, key, value):
        whole = (*leading[:-1], x.shape[-3]) if grouped else leading
        x = x.expand(*whole, *x.shape[-2:])
        while x.dim() < 4:
            x = x.unsqueeze(0)
        found.append(x.flatten(0, -4))
    return found


@dataclass(frozen=True, slots=True)
class Rows:
    """Queries `first` to `last` of a part, and the ranges of keys that they see.

    Each range is (from, to, whether it is causal: up to the diagonal only).
    """

    first: int
    last: int
    sees: tuple[tuple[int, int, bool], ...]


def rows_of(start: int, queries: int, keys: int) -> list[Rows]:
    """Split the queries of a part by the keys that they see.

    The first group sees the keys before it and a causal square of its own; queries behind the last key see all keys.
    """
    before = min(start, keys)
    own = min(queries, keys - before)
    found = []
    if own:
        square = (before, before + own, True)
        found.append(Rows(0, own, ((0, before, False), square) if before else (square,)))
    if own < queries:
        found.append(Rows(own, queries, ((0, keys, False),)))
    return found


class CausalAttentionPart(torch.autograd.Function):
    """Attention calls on ranges of keys, merged by the log-sum-exps of their rows.

    Where no kernel gives log-sum-exps, attention is written out, and the scores live for one call.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float) -> Tensor:
        q, k, v = _of_one_width(query, key, value)
        kernel = attention_kernel(q, k, v)
        outs, sums = [], []
        for rows in rows_of(start, q.shape[-2], k.shape[-2]):
            here = _range(q, rows.first, rows.last)
            parts = [
                _attend(AttentionCall(kernel, diagonal, scale), here, _range(k, a, b), _range(v, a, b))
                for a, b, diagonal in rows.sees
            ]
            out, log_sum = parts[0] if len(parts) == 1 else _merged(*parts)
            outs.append(out)
            sums.append(log_sum)
        out, log_sum = _joined(outs), _joined(sums, -1)
        if out.shape[-1] != value.shape[-1]:  # drop the padding of widths
            out = out[..., : value.shape[-1]].clone()
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.start = start
        ctx.scale = scale
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        q, k, v, g, o = _of_one_width(query, key, value, gradient, out)
        of_q, of_k, of_v = [], [], []
        for rows in rows_of(ctx.start, q.shape[-2], k.shape[-2]):
            here, whole, g_here = (_range(x, rows.first, rows.last) for x in (q, o, g))
            sums = log_sum[..., rows.first : rows.last]
            found = [
                _attend_backward(
                    AttentionCall(ctx.kernel, diagonal, ctx.scale),
                    g_here,
                    here,
                    _range(k, a, b),
                    _range(v, a, b),
                    whole,
                    sums,
                )
                for a, b, diagonal in rows.sees
            ]
            of_q.append(_added([f[0] for f in found]))
            of_k.append(_reaching([f[1] for f in found], k.shape[-2]))
            of_v.append(_reaching([f[2] for f in found], k.shape[-2]))
        grads = _joined(of_q), _added(of_k), _added(of_v)
        return (
            *(
                g if g.shape[-1] == x.shape[-1] else g[..., : x.shape[-1]]
                for g, x in zip(grads, (query, key, value), strict=True)
            ),
            None,
            None,
        )


def _merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over two ranges of keys, merged, with its log-sum-exp.

    Log-sum-exps and weights have the dtype of accumulation.
    """
    log_sum = torch.logaddexp(one[1], other[1])
    weights = [(part[1] - log_sum).exp().unsqueeze(-1) for part in (one, other)]
    return (one[0] * weights[0] + other[0] * weights[1]).to(one[0].dtype), log_sum


def _of_one_width(*tensors: Tensor) -> list[Tensor]:
    """The tensors padded with zeros to one width, on a GPU a multiple of 8, with contiguous rows.

    Kernels need this. Zeros add nothing to a score, and give columns of the result that are cut off again.
    """
    width = max(x.shape[-1] for x in tensors)
    if tensors[0].device.type == "cuda":
        width = -(-width // 8) * 8
    filled = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors)
    return [x if x.stride(-1) == 1 else x.contiguous() for x in filled]


def _range(x: Tensor, first: int, last: int) -> Tensor:
    return x if (first, last) == (0, x.shape[-2]) else x[..., first:last, :]


def _joined(parts: Sequence[Tensor], dim: int = -2) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _added(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else sum(parts[1:], parts[0])


def _reaching(parts: Sequence[Tensor], rows: int) -> Tensor:
    """Concatenate gradients of ranges of keys from the first key on, with zeros for the keys behind them."""
    missing = rows - sum(p.shape[-2] for p in parts)
    zeros = [parts[0].new_zeros(*parts[0].shape[:-2], missing, parts[0].shape[-1])] if missing else []
    return _joined([*parts, *zeros])


def _attend(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exps of one attention call."""
    if call.kernel in GROUPED:
        return fused_attention(call, query, key, value)
    key, value = _by_head(key, query), _by_head(value, query)
    if call.kernel:
        return fused_attention(call, query, key, value)
    scores = _scores(call, query, key)
    log_sum = scores.logsumexp(-1)
    return (scores - log_sum.unsqueeze(-1)).exp() @ value, log_sum


def _attend_backward(
    call: AttentionCall, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One call's share of the gradients of query, key and value, from the log-sum-exps of whole rows."""
    if call.kernel in GROUPED:
        return fused_attention_backward(call, gradient, query, key, value, out, log_sum)
    groups = key.shape[1]
    key, value = _by_head(key, query), _by_head(value, query)
    if call.kernel:
        of_query, of_key, of_value = fused_attention_backward(call, gradient, query, key, value, out, log_sum)
    else:
        scale = call.scale
        weights = (_scores(call, query, key) - log_sum.unsqueeze(-1)).exp()
        of_value = weights.transpose(-2, -1) @ gradient
        of_scores = weights * (gradient @ value.transpose(-2, -1) - (gradient * out).sum(-1, keepdim=True)) * scale
        of_query, of_key = of_scores @ key, of_scores.transpose(-2, -1) @ query
    return of_query, _by_group(of_key, groups), _by_group(of_value, groups)


def _scores(call: AttentionCall, query: Tensor, key: Tensor) -> Tensor:
    scores = query @ key.transpose(-2, -1) * call.scale
    if not call.is_causal:
        return scores
    ahead = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(ahead, -torch.inf)


def _by_head(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values repeated so that there is one for every head of the queries."""
    return x if x.shape[1] == query.shape[1] else x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _by_group(gradient: Tensor, groups: int) -> Tensor:
    """The adjoint of `_by_head`: gradients summed over the query heads that share a key or value."""
    return gradient if gradient.shape[1] == groups else gradient.unflatten(1, (groups, -1)).sum(2)
