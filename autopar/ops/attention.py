"""Fused attention, with a mask as a tensor or as a description; what is kept for backward depends on the kernel.

    q alone cut    each device has its queries and all keys
    q&k            keys are cut as queries are, and go round a ring of devices
    heads          whole sequences, as what is called Ulysses

Queries that see more than others are dealt inside (`runtime/dealing.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from autopar.letters import NotServed
from autopar.ops.entry import Line, op
from autopar.ops.exchange import BACKWARD, FORWARD, WAYS, Along, Exchange, LargestShapes
from autopar.ops.limits import LIMITS
from autopar.ops.local import Form, Here, OpCall, cuts
from autopar.ops.rows import parse
from autopar.runtime import forms
from autopar.runtime.attention import attention_on_device, leading_dims, with_batch_and_heads
from autopar.runtime.attention_bytes import Shapes, bytes_of_attention
from autopar.runtime.dealing import HALVES, WORK, Cutting, Setup
from autopar.runtime.halos import has_halo, largest_halo, rows_of_halo
from autopar.runtime.private import plays_all_ranks
from autopar.runtime.rings import messages_of_ring, steps_of
from autopar.runtime.sees import SIZES, Places, Sees
from autopar.sharding.attention_ways import DESCRIBED, PLAIN
from autopar.sharding.notation import Rule
from autopar.sharding.placement import part

_BytesOf = Callable[[LargestShapes, int], float]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None = None,
    counts: Tensor | None = None,
    sinks: Tensor | None = None,
    sees: str = "",
) -> Tensor:
    """Attention whose mask is a description.

    Queries are [b, heads, s, d]; keys and values have as many heads or fewer. A query sees what `sees` says by places
    (the text of a `Sees`), and of that keys with its own number in `documents` ([b or 1, s]) that count ([b or 1, s]).
    `sinks` ([heads]) are scores that take their share of a row and give nothing. A query that sees nothing gets zeros.
    """
    tensors = [x for x in (query, key, value, documents, counts, sinks) if x is not None]
    if has_torch_function(tensors):
        given = query, key, value, documents, counts, sinks, sees
        made: Tensor = handle_torch_function(attend, tensors, *given)
        return made
    told = documents is not None, counts is not None, sinks is not None
    setup = Setup(sees, query.shape[-2], key.shape[-2], given=told)
    return attention_on_device(query, key, value, documents, counts, sinks, setup=setup.text())


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, grouped: bool, setup: str) -> Tensor:
    """A part of torch's own attention without a mask tensor, whatever its leading dims."""
    given = with_batch_and_heads(query, key, value, grouped)
    out = attention_on_device(*given, setup=setup)
    return out.reshape(*leading_dims(query, key, value, grouped), *out.shape[-2:])


def rule_with_mask(arguments: Mapping[str, Any]) -> Rule:
    """The rule of torch's attention: batch, heads and queries may be cut, keys together with them.

    Keys go round where no mask and no dropout is a tensor of queries by keys.
    """
    is_plain = not arguments.get("dropout_p") and arguments.get("attn_mask") is None
    q = "q~" if arguments.get("is_causal") else "q"
    rings = q + ("&k" if is_plain else "")
    if arguments.get("enable_gqa") and arguments["query"].shape[-3] != arguments["key"].shape[-3]:
        mask = getattr(arguments.get("attn_mask"), "shape", (1, 1, 1))
        heads = "" if len(mask) < 3 else "... m!" if mask[-3] == 1 else "... (g r+)"
        return parse(
            f"... (g r+) {rings} d!, ... g k! d!, ... g k! e!, {heads} {q} k! -> ... (g r+) {q} e!", linear="z"
        )
    return parse(f"... {rings} d!, ... k! d!, ... k! e!, ... {q} k! -> ... {q} e!", linear="z")


def rule_with_description(arguments: Mapping[str, Any]) -> Rule:
    """The rule of an attention with a description: every device knows where all documents end."""
    shapes = [getattr(arguments.get(name), "shape", (1,)) for name in ("documents", "counts")]
    told = ", ".join(f"{'b' if shape[0] > 1 else f'o{i}!'} s{i}!" for i, shape in enumerate(shapes))
    return parse(f"b (g r+) q~&k d!, b g k! d!, b g k! e!, {told}, (g r+) -> b (g r+) q~ e!", linear="z")


def sees_of(call: OpCall) -> Sees:
    """The description of a call, also of one of torch's."""
    arguments = call.arguments
    if call.op == DESCRIBED:
        return Sees.of(arguments.get("sees", ""))
    return Sees(right=0 if arguments.get("is_causal") else None, scale=arguments.get("scale"))


def setup_at(here: Here, call: OpCall) -> Setup:
    """The setup of a call on a device."""
    queries, keys = (call.arguments[name].shape[-2] for name in ("query", "key"))
    cuts, rings = (_cuttings(here, i, len(call.arguments[name].shape) - 2) for i, name in enumerate(("query", "key")))
    documents, counts, sinks = (call.arguments.get(name) is not None for name in ("documents", "counts", "sinks"))
    parts = tuple(cut.parts for cut in cuts)
    dealt = _dealt(sees_of(call), queries, keys, parts, documents or counts)
    return Setup(sees_of(call).text(), queries, keys, cuts, rings, dealt, (documents, counts, sinks))


def _cuttings(here: Here, operand: int, dim: int) -> tuple[Cutting, ...]:
    axes = here.lies(operand).cuts.get(dim, [])
    return tuple(Cutting(here.mesh.axes[a], here.mesh.shape[a], here.coordinate[a]) for a in axes)


def _dealt(sees: Sees, queries: int, keys: int, parts: tuple[int, ...], is_told: bool) -> str:
    """Say how queries are dealt: by halves where the last sees most, by work where documents end anywhere."""
    if not parts or queries != keys:
        return ""
    if not is_told and (sees.left, sees.right, sees.chunk) == (None, 0, None):
        return HALVES
    if is_told and (sees.left is None or sees.right is None):
        return WORK
    rows = max(z - a for a, z in _parts(0, queries, parts))
    even = rows * float(_pairs(sees, queries, keys).mean())
    return WORK if pairs_of_fullest(sees, queries, keys, parts, "") > LIMITS.uneven * even else ""


@functools.lru_cache(maxsize=32)  # each has a number for each place
def _pairs(sees: Sees, queries: int, keys: int) -> np.ndarray:
    """The keys that each query sees, with documents of the length that is assumed."""
    if sees.length is not None:
        sees = replace(sees, chunk=min(sees.length, sees.chunk or sees.length))
    return Places.of(sees, (queries, keys), None, None).seen(sees, queries)


def keys_seen(call: OpCall, here: Here) -> float:
    """The number of keys that a query of the fullest device sees in the mean."""
    how = setup_at(here, call)
    parts = tuple(cut.parts for cut in how.cuts)
    pairs = pairs_of_fullest(sees_of(call), how.queries, how.keys, parts, how.dealt)
    return pairs / max(1, _most(how.queries, how.cuts))


@functools.lru_cache(maxsize=1024)
def pairs_of_fullest(sees: Sees, queries: int, keys: int, parts: tuple[int, ...], dealt: str) -> float:
    """Pairs of a query and a key that the fullest of the devices that cut queries computes."""
    seen = _pairs(sees, queries, keys)
    if dealt:
        return float(seen.sum()) / math.prod(parts)
    ends = np.cumsum(seen)
    return max(float(ends[z - 1] - ends[a] + seen[a]) for a, z in _parts(0, queries, parts) if a < z)


def _parts(start: int, size: int, parts: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The ranges into which axes cut a dim, major first."""
    if not parts:
        yield start, start + size
        return
    for i in range(parts[0]):
        first, length = part(size, parts[0], i)
        yield from _parts(start + first, length, parts[1:])


def _most(rows: int, cuts: Sequence[Cutting]) -> int:
    """The rows of the device that has most of them as they lie."""
    parts = tuple(cut.parts for cut in cuts)
    return max(z - a for a, z in _parts(0, rows, parts))


def scores(call: OpCall, here: Here) -> float:
    """The share of its queries by its keys that the fullest device computes."""
    return keys_seen(call, here) / max(1, _most(setup_at(here, call).keys, setup_at(here, call).rings))


def keys_at_once(call: OpCall, here: Here) -> int:
    """The number of keys that a device computes with at once, on the device that has most."""
    how = setup_at(here, call)
    if has_halo(how):
        return largest_halo(how)[0]
    return _most(how.keys, how.rings[:1])  # Others are gathered in each step of a ring.


def is_by_parts(here: Here, call: OpCall) -> bool:
    """Whether one of torch's calls runs in autopar's own form, as its queries or keys are cut."""
    how = setup_at(here, call)
    return call.random < 0 and (bool(how.rings) or bool(how.cuts and call.arguments.get("is_causal")))


def part_with_mask(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """Attention written out, with dropout by position, or attention of local queries; else None."""
    if call.random < 0:
        if not is_by_parts(here, call):
            return None
        _expect_own_program(call)
        q, k, v = (kwargs[name] for name in ("query", "key", "value"))
        how = dict(grouped=bool(kwargs.get("enable_gqa")), setup=setup_at(here, call).text())
        return attend_plainly, {"query": q, "key": k, "value": v, **how}
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


def part_with_description(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """Attention with a description on a device whose queries are cut; None where they are whole."""
    how = setup_at(here, call)
    if not how.cuts:
        return None
    _expect_own_program(call)
    given = {name: value for name, value in kwargs.items() if name != "sees"}
    return attention_on_device, {**given, "setup": how.text()}


def _expect_own_program(call: OpCall) -> None:
    if plays_all_ranks():
        raise NotServed(
            "attention of cut queries reads other keys on every rank, and LocalTensors run one program for all",
            at=call.source,
            advice="autopar.testing.on_threads or on_processes",
        )


def exchanged(call: OpCall, along: Along | None = None) -> tuple[Exchange, ...]:
    """Queries and results that are dealt, and keys on their way; in backward their gradients as well."""
    if along is None:
        return tuple(Exchange("all_to_all", way) for way in WAYS)
    how = setup_at(along.here, call)
    if along.axis not in {cut.axis for cut in how.cuts}:
        return ()
    is_ring = along.axis in {ring.axis for ring in how.rings}
    found = []
    if how.dealt:
        deals = [_dealt_bytes(call, 0, (0,)), _dealt_bytes(call, 0, (2,))]  # queries, and results
        if is_ring:
            deals.append(_dealt_bytes(call, 1, (1, 2)))
        found += [Exchange("all_to_all", way, nbytes=nbytes) for way in WAYS for nbytes in deals]
    if is_ring and has_halo(how):
        if comes := largest_halo(how)[1][along.axis]:
            nbytes = _keys_on_the_way(call, comes / rows_of_halo(how.text(), is_back=True))
            found += [Exchange("send", way, nbytes=nbytes) for way in WAYS]
    elif is_ring:
        found += _on_the_way(call, how, along)
    return tuple(found)


def _on_the_way(call: OpCall, how: Setup, along: Along) -> Iterator[Exchange]:
    """Keys that go round, or are gathered in each step; in backward their gradients as well."""
    steps = len(steps_of(how))
    wide = max(4, call.arguments["key"].itemsize) / call.arguments["key"].itemsize
    parts = {ring.axis: ring.parts for ring in how.rings}
    later = math.prod(list(parts.values())[list(parts).index(along.axis) :])
    n = parts[along.axis]
    apart = later * (n - 1) / n
    # Sizes of messages where the axis does not cut them, and what a device sends, in keys and values of a device.
    sizes = {"send": (1.0, 1.0), "all_gather": (later, apart), "all_to_all": (later * n, apart)}
    sent = []
    for m in messages_of_ring(how.text())[along.axis]:
        ways = (FORWARD, m.forward, 1.0), (BACKWARD, m.backward, 1.0), (BACKWARD, m.home, wide)
        sent += [(m.kind, way, *counts, width) for way, counts, width in ways]
    for kind, way, beside, in_line, width in sent:
        size, _ = sizes[kind]
        nbytes = _keys_on_the_way(call, size * width)
        if beside:
            besides = [(b, b * w * sizes[k][1]) for k, of, b, _, w in sent if of == way]
            own = beside * width * sizes[kind][1] / sum(weight for _, weight in besides)
            hides = own * max(b for b, _ in besides) / steps  # the same steps hide them all
            yield Exchange(kind, way, beside, nbytes=nbytes, beside=hides)
        if in_line:
            yield Exchange(kind, way, in_line, nbytes=nbytes)


def _dealt_bytes(call: OpCall, rows_of: int, widths_of: Sequence[int]) -> _BytesOf:
    """Bytes of rows of one operand with the widths of some, as if the axis did not cut them."""

    def nbytes(parts: LargestShapes, n: int) -> float:
        rows = math.prod(parts[rows_of][:-1]) * sum(parts[k][-1] for k in widths_of)
        return float(rows * n * call.arguments["query"].itemsize)

    return nbytes


def _keys_on_the_way(call: OpCall, share: float) -> _BytesOf:
    """Bytes of the keys and values that a device sends."""

    def nbytes(parts: LargestShapes, n: int) -> float:
        return share * call.arguments["key"].itemsize * (math.prod(parts[1]) + math.prod(parts[2]))

    return nbytes


def kept_with_mask(call: OpCall, kind: str) -> Line:
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


def kept_with_description(call: OpCall, kind: str) -> Line:
    """Operands, the output and a number for each row."""
    return Line.of(
        "query key value documents counts sinks out", **{kind: "rows*accumulate", "emitted": "rows*accumulate"}
    )


def timed(arguments: Mapping[str, Any]) -> str:
    """Name of the kernel's time: calls with a causal mask, and with a given one, are timed apart."""
    if arguments.get("is_causal"):
        return "scaled_dot_product_attention causal"
    is_masked = arguments.get("attn_mask") is not None
    return PLAIN + (" masked" if is_masked else "")


def work(call: OpCall) -> tuple[str, str]:
    """Formulas of temporary bytes with dropout: random bits in forward, two weight gradients in backward."""
    return ("pairs*(11 + itemsize)", "2*pairs*itemsize") if call.arguments.get("dropout_p", 0.0) else ("0", "0")


def work_of_part(call: OpCall, held: Sequence[tuple[int, ...]], kind: str, here: Here) -> tuple[int, int]:
    """Temporary bytes of autopar's own form, forward and backward, beyond results and gradients.

    They are counted, but where documents decide. Where keys have a halo, what is sent and what comes is in memory
    before, and with the halo's gradients behind.
    """
    if call.op != DESCRIBED and not is_by_parts(here, call):
        return 0, 0
    how = setup_at(here, call)
    query, key, value = held[:3]
    type_ = call.arguments["query"]
    own = type_.itemsize * max(query[-1], value[-1]) * math.prod(key[:-1])
    keys = own * keys_at_once(call, here) / max(1, key[-2])
    if how.given[0] or how.given[1] or sees_of(call).chunk:
        forward, backward = _in_tiles(call, how, (held[0], keys, own), kind)
    else:
        shapes = Shapes(*((math.prod(shape[:-3]), *shape[-3:]) for shape in _with_heads(query, key, value)))
        counted = bytes_of_attention(shapes, getattr(torch, type_.dtype), how, _kernel(call, kind))
        forward, backward = map(float, counted)
    rows = type_.itemsize * max(query[-1], value[-1]) * math.prod(query[:-1])
    if how.dealt:  # What went back to where rows lie is free by then: the results as they were dealt are kept.
        backward = max(0.0, backward - rows)
    if has_halo(how):
        forward = max(forward, 4 * (keys - own))
        backward = max(backward + 2 * (keys - own), 2 * keys + 4 * (keys - own))
    return int(forward), int(backward)


def _with_heads(*shapes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Shapes that have heads; one without has one."""
    return (shape if len(shape) > 2 else (1, *shape) for shape in shapes)


def _kernel(call: OpCall, kind: str) -> str:
    """The kernel that a kind of device has for a call; none bends scores."""
    dtype = call.arguments["query"].dtype
    if sees_of(call).softcap is not None:
        return ""
    if kind == "cpu":
        return "cpu"
    return {"float64": "", "float32": "efficient"}.get(dtype, "flash")


def _in_tiles(call: OpCall, how: Setup, held: tuple[tuple[int, ...], float, int], kind: str) -> tuple[float, float]:
    """Temporary bytes of calls of kernels on documents, from the shape of queries and the bytes of keys.

    These are all that a kernel reads at once, and those that lie on the device. Results of several calls are merged in
    the dtype of accumulation, in which gradients are added up, too. In a ring the next keys and values arrive
    meanwhile, in backward with gradients on their way. Counted, op by op, where documents had drawn lengths.
    """
    query, keys, own = held
    sees = sees_of(call)
    item = call.arguments["query"].itemsize
    rows = item * max(query[-1], call.arguments["value"].shape[-1]) * math.prod(query[:-1])
    wide = max(4, item) / item
    is_told = how.given[0] or bool(sees.chunk)
    tile = rows / 4 + keys / 4 if is_told else rows / 2 + 2 * keys
    forward = rows * (wide * (wide - 1) + 0.3 if is_told else wide**2 + 0.2)
    if how.rings and not has_halo(how):
        forward += 4.6 * keys
        backward = (3 + 8 * wide) * keys + 1.1 * wide * rows
        if len(how.rings) > 1:
            padded = 2 * keys * bool(how.keys % how.parts)  # Parts are gathered in one size, and cut.
            forward += padded + 6 * own
            backward += padded + 4 * own + (keys + own if len(steps_of(how)) > 2 else -keys)
    else:
        backward = max((wide - 1) * (rows + 2 * keys) + tile, (wide > 1) * (wide * rows + 2 * (wide - 1) * keys))
    if kind == "cuda" and is_told and how.cuts:  # Segments are brought end to end.
        forward += rows + 2 * keys
        backward += 3 * rows + 2 * keys
    if kind == "cpu":
        masks, copies = _on_cpu(how, sees, item, (rows, keys))
        forward += masks
        backward += copies
    if not _kernel(call, kind):  # Scores of a part are in memory.
        scores = max(4, item) * min(SIZES.scores, math.prod(query[:-1]) * round(keys / max(1, own)) * how.keys)
        forward += 2 * scores
        backward += 2.5 * scores
    return forward, backward


def _on_cpu(how: Setup, sees: Sees, item: int, nbytes: tuple[float, float]) -> tuple[float, float]:
    """Bytes of a window's mask in forward, and of copies in single precision on which backward computes."""
    rows, keys = nbytes
    is_told = how.given[0] or bool(sees.chunk)
    masks = 0 if sees.left is None else (item + 1) * SIZES.block * (SIZES.block + min(sees.left, how.keys))
    part = 0.25 if is_told else 1.0
    copies = part * 6 * rows + (part if is_told else 1.5) * 4 * keys
    return masks, copies if item < 4 else 0.0


def kept_of_part(call: OpCall, held: Sequence[tuple[int, ...]], here: Here) -> int:
    """Bytes of results as they were before they went back to where rows lie, or of a halo of keys."""
    if call.op != DESCRIBED and not is_by_parts(here, call):
        return 0
    query, key, value = held[:3]
    how = setup_at(here, call)
    item = call.arguments["query"].itemsize
    if has_halo(how):
        more = keys_at_once(call, here) - key[-2]
        return more * item * sum(math.prod(x[:-2]) * x[-1] for x in (key, value))
    return bool(how.dealt) * item * math.prod(query[:-1]) * value[-1]


SHARED: dict[str, Any] = dict(
    serves="~&",
    exchanges=exchanged,
    part_work=work_of_part,
    part_keeps=kept_of_part,
    joint=True,
    timed=timed,
    second_size=(1, -2),
    counts="q",
    scores=scores,
)
op(
    PLAIN,
    F.scaled_dot_product_attention,
    "query:T, key:T, value:T, attn_mask:T=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False",
    rule=rule_with_mask,
    form=part_with_mask,
    draws=True,
    keeps=kept_with_mask,
    work=work,
    flops=(4, "e|m"),  # two products, over the width of keys and over that of values
    reach="attention",
    **SHARED,
)
op(
    DESCRIBED,
    attend,
    "query:T, key:T, value:T, documents:T=None, counts:T=None, sinks:T=None, sees=''",
    rule=rule_with_description,
    form=part_with_description,
    keeps=kept_with_description,
    flops=(4, "e|s0|s1|o0|o1"),
    reach="described attention",
    **SHARED,
)
