"""Fused attention; what it keeps for backward depends on the kernel that runs it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from autopar.letters import NotServed
from autopar.ops.entry import Line, op
from autopar.ops.local import Form, Here, OpCall, cuts, start_here
from autopar.ops.rows import parse
from autopar.runtime import forms
from autopar.runtime.attention import causal_attention_part
from autopar.runtime.private import plays_all_ranks
from autopar.runtime.sees import Sees, seen_pairs
from autopar.sharding.notation import Rule


def attention(arguments: Mapping[str, Any]) -> Rule:
    """The rule of attention: batch, heads and queries may be cut, keys stay whole.

    Under a causal mask, cut queries need a local form.
    """
    q = "q~" if arguments.get("is_causal") else "q"
    if arguments.get("enable_gqa") and arguments["query"].shape[-3] != arguments["key"].shape[-3]:
        mask = getattr(arguments.get("attn_mask"), "shape", (1, 1, 1))
        heads = "" if len(mask) < 3 else "... m!" if mask[-3] == 1 else "... (g r)"
        return parse(f"... (g r) {q} d!, ... g k! d!, ... g k! e!, {heads} {q} k! -> ... (g r) {q} e!", linear="z")
    return parse(f"... {q} d!, ... k! d!, ... k! e!, ... {q} k! -> ... {q} e!", linear="z")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None = None,
    counts: Tensor | None = None,
    sinks: Tensor | None = None,
    sees: str = "",
) -> Tensor:
    """Attention whose mask is a description, of queries [b, heads, s, d] and as many or fewer heads of keys and values.

    A query sees what `sees` says by places (the text of a `Sees`), and of that keys with its own number in `documents`
    ([b or 1, s]) that count ([b or 1, s]). `sinks` ([heads]) are scores that take their share of a row and give
    nothing. A query that sees nothing gets zeros.
    """
    tensors = [x for x in (query, key, value, documents, counts, sinks) if x is not None]
    if has_torch_function(tensors):
        given = query, key, value, documents, counts, sinks, sees
        made: Tensor = handle_torch_function(attend, tensors, *given)
        return made
    how = Sees.of(sees)
    factor = 1.0 / math.sqrt(query.shape[-1]) if how.scale is None else how.scale
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(-2, -1) * factor
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    seen = seen_pairs(how, query.shape[-2], key.shape[-2], documents, counts)
    scores = scores.masked_fill(~seen, -torch.inf)
    log_sum = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        log_sum = torch.logaddexp(log_sum, sinks[:, None, None])
    weights = torch.where(seen, (scores - log_sum).exp(), 0)
    return weights @ value.repeat_interleave(groups, 1)


def part_of_attention(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """Attention written out, with dropout by position, or causal attention of local queries; else None."""
    lies = here.lies(0)
    causal = call.arguments.get("is_causal")
    rank = len(call.arguments["query"].shape)
    if call.random < 0:
        if not causal or rank - 2 not in lies.cuts:
            return None
        if plays_all_ranks():
            raise NotServed(
                "causal attention of cut queries reads other keys on every rank, and LocalTensors run one program "
                "for all",
                at=call.source,
                advice="autopar.testing.on_threads or on_processes",
            )
        how = {k: v for k, v in kwargs.items() if k in ("query", "key", "value", "scale", "enable_gqa")}
        return causal_attention_part, {
            **how,
            "start": start_here(here, call.arguments["query"].shape, lies, rank - 2),
        }
    out = call.outputs[0].shape
    key = call.arguments["key"].shape
    leaves = here.leaves()
    where = (*(cuts(here, out, leaves, d) for d in range(len(out) - 1)), ())
    return forms.attention_by_position, {
        **kwargs,
        "random_key": here.random_key,
        "op": call.random,
        "shape": (*out[:-1], key[-2]),
        "cuts": where,
    }


def kept(call: OpCall, kind: str) -> Line:
    """Operands and rows that the backward keeps, by kernel.

    Flash keeps one number per row; so does the memory-efficient kernel, and the mask that only it takes. Torch's plain
    form keeps the probabilities. With dropout, autopar's own form is written out as products.
    """
    query = call.arguments["query"]
    mask = call.arguments.get("attn_mask")
    dropped = call.arguments.get("dropout_p", 0.0)
    if dropped and kind == "emitted":
        # The products keep contiguous copies of their operands, the weights before and after dropout, and the mask.
        return Line.of("", **{kind: "3*points*itemsize + pairs*(2*itemsize + 1)"})
    is_wide = query.shape[-1] > 256 and kind == "cuda"
    if (dropped and kind == "cpu") or (is_wide and query.dtype == "float32"):
        return Line.of("query key value", **{kind: "pairs*itemsize" + ("*2" if dropped else "")})
    # a mask of truth values is turned into numbers of the query's dtype, anew in each call
    is_truth = mask is not None and mask.dtype == "bool"
    values = "query key value out"
    if mask is not None and not is_truth:
        values += " attn_mask"
    line = Line.of(values, **{kind: "4*rows" if kind == "cuda" else "rows*accumulate"})
    return line.beside("attn_mask", kind, "mask*itemsize") if is_truth else line


def timed(arguments: Mapping[str, Any]) -> str:
    """Name of the kernel's time: calls with a causal mask, and with a given one, are timed apart."""
    if arguments.get("is_causal"):
        return "scaled_dot_product_attention causal"
    is_masked = arguments.get("attn_mask") is not None
    return "scaled_dot_product_attention" + (" masked" if is_masked else "")


def work(call: OpCall) -> tuple[str, str]:
    """Formulas of temporary bytes with dropout: random bits in forward, two weight gradients in backward."""
    return ("pairs*(11 + itemsize)", "2*pairs*itemsize") if call.arguments.get("dropout_p", 0.0) else ("0", "0")


def work_of_part(call: OpCall, held: Sequence[tuple[int, ...]], kind: str, here: Here) -> tuple[int, int]:
    """Temporary bytes, forward and backward, of a part's two calls: on the keys before it and on its own.

    Forward merges their outputs, in the dtype of accumulation. In backward each call gives a gradient of the queries. A
    GPU has no fused kernel for float64: the scores of the larger call are in memory, twice in forward and three times
    in backward.
    """
    query, key, value = held[:3]
    whole = call.arguments["query"]
    if query[-2] == whole.shape[-2] or not call.arguments.get("is_causal") or call.random >= 0:
        return 0, 0
    rows = math.prod(query[:-1])
    width = value[-1]
    itemsize = whole.itemsize
    accumulate = max(4, itemsize)
    forward = rows * ((3 * width + 3) * accumulate - width * itemsize)
    backward = itemsize * math.prod(query)
    opened = 0
    if (kind, whole.dtype) == ("cuda", "float64"):
        opened = itemsize * rows * max(key[-2] - query[-2], query[-2])
    return forward + 2 * opened, backward + 3 * opened


op(
    "scaled_dot_product_attention",
    F.scaled_dot_product_attention,
    "query:T, key:T, value:T, attn_mask:T=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False",
    rule=attention,
    serves="~",
    form=part_of_attention,
    draws=True,
    keeps=kept,
    work=work,
    part_work=work_of_part,
    joint=True,
    timed=timed,
    second_size=(1, -2),
    counts="q",
    flops=(4, "e|m"),  # two products, over the width of keys and over that of values
    heads=True,
    reach="attention",
)


def rule_of_attend(arguments: Mapping[str, Any]) -> Rule:
    """The rule of a call with a description: batch, heads and queries may be cut."""
    shapes = [getattr(arguments.get(name), "shape", (1,)) for name in ("documents", "counts")]
    rows = ", ".join(f"{'b' if shape[0] > 1 else f'o{i}!'} s{i}!" for i, shape in enumerate(shapes))
    return parse(f"b (g r) q! d!, b g k! d!, b g k! e!, {rows}, (g r) -> b (g r) q! e!", linear="z")


op(
    "attention",
    attend,
    "query:T, key:T, value:T, documents:T=None, counts:T=None, sinks:T=None, sees=''",
    rule=rule_of_attend,
    joint=True,
    flops=(4, "e"),
)
