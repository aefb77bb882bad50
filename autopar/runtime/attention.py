"""Attention of a part of queries and keys, by parts: calls of kernels on ranges of keys, merged by log-sum-exps.

What queries see is a description (`sees.py`); which queries a device has, `dealing.py` decides. Keys are whole, or go
round a ring of devices, one step ahead of the kernels that read them; in backward their gradients go with them, and
home. A call's backward takes the *merged* output and log-sum-exp: with them its weights are those of the whole row, so
that the gradients of all calls add up. Saved are queries, keys, values, the output and one number for each row.

Backward is written by hand, as these functions are kernels of custom ops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.collectives import Axis
from autopar.runtime.dealing import Setup, deal_of, dealt, empty_rows, owners_of, room_of
from autopar.runtime.halos import halo_op, has_halo
from autopar.runtime.merged import MergedRows, Parts
from autopar.runtime.private import (
    AttentionCall,
    attention_kernel,
    fused_attention,
    fused_attention_backward,
    segmented_attention,
    segmented_attention_backward,
)
from autopar.runtime.rings import Homing, Keys, Step, axes_of_rings, messages_of_ring
from autopar.runtime.sees import FAR, SIZES, Places, Sees, Tile, ranges_of, seen_pairs
from autopar.runtime.segments import Rows, Segments, segments_of, window_of
from autopar.runtime.wires import EXCHANGING, Exchanging, wires_of

GROUPED = ("cpu", "flash")  # kernels that take fewer heads of keys than of queries


def attention_on_device(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None = None,
    counts: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    setup: str,
) -> Tensor:
    """Attention of a device's queries, which are dealt before and go back after."""
    how = Setup.of(setup)
    told = [x for x in (documents, counts) if x is not None]
    if how.dealt:
        (query,) = deal_op([query], told, setup, False, False)
        if how.rings:
            key, value = deal_op([key, value], told, setup, True, False)
    elif has_halo(how):
        key, value = halo_op([key, value], setup, False)
    tensors = [x for x in (query, key, value, documents, counts, sinks) if x is not None]
    out: Tensor = attention_op(tensors, setup)[0]
    return deal_op([out], told, setup, False, True)[0] if how.dealt else out


def with_batch_and_heads(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> list[Tensor]:
    """Query, key and value with four dims, as kernels take them: batch, heads, rows, width."""
    leading = leading_dims(query, key, value, grouped)
    found = []
    for x in (query, key, value):
        whole = (*((*leading[:-1], x.shape[-3]) if grouped else leading), *x.shape[-2:])
        x = x if x.shape == whole else x.expand(whole)
        while x.dim() < 4:
            x = x.unsqueeze(0)
        found.append(x.flatten(0, -4))
    return found


def leading_dims(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[int, ...]:
    """The result's dims before rows and width: those of all three, broadcast, with the queries' heads."""
    if not grouped:
        return tuple(torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value))))
    return (*torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value))), query.shape[-3])


@dataclass(frozen=True, slots=True)
class Given:
    """The tensors of a call."""

    query: Tensor
    key: Tensor
    value: Tensor
    documents: Tensor | None
    counts: Tensor | None
    sinks: Tensor | None

    @staticmethod
    def of(tensors: Sequence[Tensor], how: Setup) -> Given:
        more = iter(tensors[3:])
        query, key, value = tensors[:3]
        return Given(query, key, value, *(next(more) if has else None for has in how.given))


# -- what a device computes


class AttentionOnDevice:
    """One call on one device."""

    def __init__(self, tensors: Sequence[Tensor], axes: Sequence[Axis], setup: str) -> None:
        self.how = Setup.of(setup)
        self.sees = Sees.of(self.how.sees)
        self.given = Given.of(tensors, self.how)
        query = self.given.query
        self.scale = 1.0 / math.sqrt(query.shape[-1]) if self.sees.scale is None else self.sees.scale
        sizes = self.how.queries, self.how.keys
        self.places = Places.of(self.sees, sizes, self.given.documents, self.given.counts)
        owners = owners_of(self.how, lambda: self.places) if self.how.dealt else None
        self.keys = Keys(self.how, owners, axes)
        self.queries = ranges_of(deal_of(setup, owners, False).here)
        self.wide = torch.promote_types(query.dtype, torch.float32)

    def tiles(self, step: Step) -> Iterator[Tile]:
        block = SIZES.block if self.kernel != "flash" else FAR
        return self.places.tiles(self.sees, self.queries, ranges_of(self.keys.rows(step)), block)

    def calls(self, step: Step) -> Iterable[Segments]:
        """The calls of kernels for a step."""
        if self.kernel != "flash":
            return (Segments([tile], window_of(tile)) for tile in self.tiles(step))
        batch, _, rows, _ = self.given.query.shape
        return segments_of(self.tiles(step), batch, rows)

    @functools.cached_property
    def kernel(self) -> str:
        if self.sees.softcap is not None:
            return ""
        return attention_kernel(*_of_one_width(self.given.query, self.given.key, self.given.value))

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exps of rows."""
        given = self.given
        q, k, v = _of_one_width(given.query, given.key, given.value)
        found = MergedRows(q.shape, self.wide, q)
        for step, keys, values in self._blocks(k, v):
            for tiles in self.calls(step):
                if len(tiles.tiles) > 1:
                    found.merge_rows(*self._attend_together(tiles, q, keys, values))
                else:
                    found.merge(tiles.tiles[0], *self._attend(tiles.tiles[0], q, keys, values))
        if given.sinks is not None:
            found.add_sinks(given.sinks)
        out = found.found()[..., : given.value.shape[-1]]
        return _laid(out, given.query.dtype), found.log_sum.contiguous()

    def backward(self, out: Tensor, log_sum: Tensor, gradient: Tensor) -> list[Tensor]:
        """Gradients of queries, keys, values and sinks."""
        given = self.given
        q, k, v, g, o = _of_one_width(given.query, given.key, given.value, gradient, out)
        of_query = Parts(q.shape, self.wide, q)
        halves: Sequence[Tensor] = ()
        homing = Homing(self.keys)
        for step, keys, values in self._blocks(k, v):
            own = [Parts(x.shape, self.wide, x) for x in (keys, values)]
            for tiles in self.calls(step):
                self._go_back(tiles, (g, q, keys, values, o, log_sum), (of_query, *own))
            if len(self.keys.steps) == 1:
                halves = [own.pop(0).found() for _ in range(2)]
                break
            totals = [parts.total() for parts in own]
            own.clear()
            homing.take(totals, step)
        if not halves:
            halves = homing.home().split(k.shape[-1], -1)
        if (missing := k.shape[-2] - halves[0].shape[-2]) > 0:
            halves = [F.pad(x, (0, 0, 0, missing)) for x in halves]
        wide = [of_query.found(), *halves]
        del of_query, halves
        likes = given.query, given.key, given.value
        made = [_laid(wide.pop(0)[..., : like.shape[-1]], like.dtype) for like in likes]
        if given.sinks is not None:
            shares = (given.sinks.to(log_sum.dtype)[:, None] - log_sum).exp()
            heads = zip(gradient.unbind(1), out.unbind(1), strict=True)  # one by one: products are in the wide dtype
            dots = torch.stack([(of.to(self.wide) * x.to(self.wide)).sum(-1) for of, x in heads], 1)
            made.append(-(dots * shares).sum((0, 2)).to(given.sinks.dtype))
        return made

    def _go_back(self, call: Segments, tensors: Sequence[Tensor], parts: Sequence[Parts]) -> None:
        """Add a call's share of the gradients of queries, keys and values."""
        if len(call.tiles) == 1:
            (tile,) = call.tiles
            found = self._attend_backward(tile, tensors[:5], tensors[5])
            for part, where, x in zip(parts, (tile.of_queries, tile.of_keys, tile.of_keys), found, strict=True):
                part.add(where, x)
            return
        g, q, k, v, o, log_sum = tensors
        of_queries = call.rows(q, of_keys=False)
        of_keys = call.rows(k, of_keys=True)
        packed = [of.packed(x) for of, x in ((of_queries, g), (of_queries, q), (of_keys, k), (of_keys, v))]
        packed += [of_queries.packed(o), of_queries.packed(log_sum).t()]
        how = AttentionCall("flash", False, self.scale, call.window)
        found = segmented_attention_backward(how, call.lengths(q), packed)
        for part, rows, x in zip(parts, (of_queries, of_keys, of_keys), found, strict=True):
            part.add_rows(rows, x)

    def _attend_together(self, call: Segments, q: Tensor, k: Tensor, v: Tensor) -> tuple[Rows, Tensor, Tensor]:
        of_queries = call.rows(q, of_keys=False)
        of_keys = call.rows(k, of_keys=True)
        packed = of_queries.packed(q), of_keys.packed(k), of_keys.packed(v)
        how = AttentionCall("flash", False, self.scale, call.window)
        return of_queries, *segmented_attention(how, call.lengths(q), *packed)

    def _blocks(self, key: Tensor, value: Tensor) -> Iterator[tuple[Step, Tensor, Tensor]]:
        """Keys and values step by step."""
        if len(self.keys.steps) == 1:
            yield self.keys.steps[0], key, value
            return
        for step, packed in self.keys.blocks(torch.cat([key, value], -1)):
            yield step, *packed.split(key.shape[-1], -1)

    def _calls(self, tile: Tile, query: Tensor) -> AttentionCall:
        """The call of a kernel that computes a tile."""
        if tile.is_square or (tile.first is None and tile.last is None):
            return AttentionCall(self.kernel, tile.is_square, self.scale)
        if self.kernel == "cpu":
            hidden = torch.zeros((), dtype=query.dtype).masked_fill(~seen_pairs(tile, query.device), -torch.inf)
            return AttentionCall("cpu", False, self.scale, mask=hidden)
        return AttentionCall("flash", False, self.scale, window_of(tile))

    def _is_written_out(self, tile: Tile) -> bool:
        """Whether no kernel computes a tile."""
        is_plain = tile.is_square or (tile.first is None and tile.last is None)
        return not self.kernel or not (is_plain or self.kernel in GROUPED)

    def _attend(self, tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = _cut(tile, q, k, v)
        if self.kernel not in GROUPED:
            key, value = (_by_head(x, query) for x in (key, value))
        if not self._is_written_out(tile):
            return fused_attention(self._calls(tile, query), query, key, value)
        found = []
        for rows, seen in self._by_rows(tile, query, key):
            scores = self._scores(query[:, :, rows], key, seen)[0]
            log_sum = scores.logsumexp(-1)
            found.append(((scores - log_sum.unsqueeze(-1)).exp_().to(value.dtype) @ value, log_sum))
        outs, sums = zip(*found, strict=True)
        return torch.cat(outs, -2), torch.cat(sums, -1)

    def _attend_backward(self, tile: Tile, tensors: Sequence[Tensor], log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A tile's share of the gradients, from the log-sum-exps of whole rows."""
        g, q, k, v, o = tensors
        query, key, value = _cut(tile, q, k, v)
        gradient, out, sums = (x[tile.of_queries] for x in (g, o, log_sum))
        groups = key.shape[1]
        if self.kernel not in GROUPED:
            key, value = (_by_head(x, query) for x in (key, value))
        if not self._is_written_out(tile):
            call = self._calls(tile, query)
            if self.kernel == "cpu":
                # Else each call's share of a gradient is rounded, and shares are larger than their sum.
                call = replace(call, mask=call.mask if call.mask is None else call.mask.to(self.wide))
                gradient, query, key, value, out = (x.to(self.wide) for x in (gradient, query, key, value, out))
            found = fused_attention_backward(call, gradient, query, key, value, out, sums)
            return found[0], _by_group(found[1], groups), _by_group(found[2], groups)
        of_query = []
        of_key, of_value = (torch.zeros(x.shape, dtype=self.wide, device=x.device) for x in (key, value))
        for part, seen in self._by_rows(tile, query, key):
            scores, slope = self._scores(query[:, :, part], key, seen)
            weights = (scores - sums[:, :, part, None]).exp_()
            g_here = gradient[:, :, part]
            of_value += weights.to(value.dtype).transpose(-2, -1) @ g_here
            dots = (g_here * out[:, :, part]).sum(-1, keepdim=True, dtype=weights.dtype)
            of_scores = (weights * (g_here @ value.transpose(-2, -1) - dots) * slope * self.scale).to(query.dtype)
            of_query.append(of_scores @ key)
            of_key += of_scores.transpose(-2, -1) @ query[:, :, part]
        return torch.cat(of_query, -2), _by_group(of_key, groups), _by_group(of_value, groups)

    def _by_rows(self, tile: Tile, query: Tensor, key: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Rows of a tile whose scores are in memory at once, and the pairs of them that see each other."""
        each = max(1, SIZES.scores // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
        for first in range(0, query.shape[2], each):
            stop = min(query.shape[2], first + each)
            yield slice(first, stop), seen_pairs(tile.part(first, stop), query.device)

    def _scores(self, query: Tensor, key: Tensor, seen: Tensor) -> tuple[Tensor, Tensor | float]:
        """Scores in the dtype of accumulation, and the slope of what they pass through."""
        scores = (query @ key.transpose(-2, -1)).to(self.wide) * self.scale
        slope: Tensor | float = 1.0
        if (cap := self.sees.softcap) is not None:
            bent = torch.tanh(scores / cap)
            scores = cap * bent
            slope = 1 - bent * bent
        return scores.masked_fill(~seen, -torch.inf), slope


def _laid(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor whose memory has rows before heads, as models join heads behind an attention."""
    is_laid = x.dtype == dtype and x.transpose(1, 2).is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x if is_laid else empty_rows(x, x.shape[2], x.shape[3], dtype).copy_(x)


def _cut(tile: Tile, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query[tile.of_queries], key[tile.of_keys], value[tile.of_keys]


def _of_one_width(*tensors: Tensor) -> list[Tensor]:
    """The tensors padded with zeros to one width, on a GPU a multiple of 8, with contiguous rows.

    Kernels need this. Zeros add nothing to a score, and give columns of the result that are cut off again.
    """
    width = max(x.shape[-1] for x in tensors)
    if tensors[0].device.type == "cuda":
        width = -(-width // 8) * 8
    filled = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors)
    return [x if x.stride(-1) == 1 else x.contiguous() for x in filled]


def _by_head(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values repeated so that there is one for every head of the queries."""
    return x if x.shape[1] == query.shape[1] else x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _by_group(gradient: Tensor, groups: int) -> Tensor:
    """The adjoint of `_by_head`: gradients summed over the query heads that share a key or value."""
    return gradient if gradient.shape[1] == groups else gradient.unflatten(1, (groups, -1)).sum(2)


# -- as ops: in a program the names of axes become axes, and the functions are called instead


def attention_forward(tensors: Sequence[Tensor], axes: Sequence[Axis], setup: str) -> tuple[Tensor, Tensor]:
    """The output of a device's queries, and the log-sum-exps of their rows.

    `tensors` are queries, keys, values, and of documents, counts and sinks what there is.
    """
    return AttentionOnDevice(tensors, axes, setup).forward()


def attention_backward(
    tensors: Sequence[Tensor], axes: Sequence[Axis], made: Sequence[Tensor], gradient: Tensor, setup: str
) -> list[Tensor]:
    """Gradients of queries, keys and values, and of sinks where there are any."""
    return AttentionOnDevice(tensors, axes, setup).backward(made[0], made[1], gradient)


def deal(
    tensors: Sequence[Tensor], axes: Sequence[Axis], told: Sequence[Tensor], setup: str, of_keys: bool, is_back: bool
) -> list[Tensor]:
    """Rows of queries, or of keys and values, where they are computed; or back where they lie."""
    how = Setup.of(setup)
    more = iter(told)
    documents, counts = (next(more) if has else None for has in how.given[:2])
    sizes = how.queries, how.keys
    owners = owners_of(how, lambda: Places.of(Sees.of(how.sees), sizes, documents, counts))
    wires = wires_of((cut.axis for cut in how.axes(of_keys)), axes)
    return dealt(tensors, deal_of(setup, owners, of_keys), wires, room_of(setup, of_keys, is_back), is_back)


@torch.library.custom_op("autopar::deal", mutates_args=())
def deal_op(
    tensors: Sequence[Tensor], told: Sequence[Tensor], setup: str, of_keys: bool, is_back: bool
) -> list[Tensor]:
    return deal(tensors, (), told, setup, of_keys, is_back)


@deal_op.register_fake
def _(tensors: Sequence[Tensor], told: Sequence[Tensor], setup: str, of_keys: bool, is_back: bool) -> list[Tensor]:
    room = room_of(setup, of_keys, is_back)
    return [empty_rows(x, room, x.shape[3]) for x in tensors]


@torch.library.custom_op("autopar::attention", mutates_args=())
def attention_op(tensors: Sequence[Tensor], setup: str) -> tuple[Tensor, Tensor]:
    return attention_forward(tensors, (), setup)


@attention_op.register_fake
def _(tensors: Sequence[Tensor], setup: str) -> tuple[Tensor, Tensor]:
    query, _, value = tensors[:3]
    log_sum = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
    return empty_rows(query, query.shape[2], value.shape[3]), log_sum


@torch.library.custom_op("autopar::attention_backward", mutates_args=())
def attention_backward_op(
    tensors: Sequence[Tensor], made: Sequence[Tensor], gradient: Tensor, setup: str
) -> list[Tensor]:
    return attention_backward(tensors, (), made, gradient, setup)


@attention_backward_op.register_fake
def _(tensors: Sequence[Tensor], made: Sequence[Tensor], gradient: Tensor, setup: str) -> list[Tensor]:
    given = Given.of(tensors, Setup.of(setup))
    trained = (given.query, given.key, given.value)
    of_sinks = [] if given.sinks is None else [torch.empty_like(given.sinks)]
    return [empty_rows(x, x.shape[2], x.shape[3]) for x in trained] + of_sinks


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.setup = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gradient: Tensor | None, _: Any) -> tuple[list[Tensor | None], None]:
    *tensors, out, log_sum = ctx.saved_tensors
    how = Setup.of(ctx.setup)
    if gradient is None:
        return [None] * len(tensors), None
    found = attention_backward_op(tensors, [out, log_sum], gradient.contiguous(), ctx.setup)
    told = [None] * sum(how.given[:2])
    return [*found[:3], *told, *found[3:]], None


attention_op.register_autograd(_gradients, setup_context=_remember)


def _remember_deal(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, told, *ctx.how = inputs
    ctx.save_for_backward(*told)


def _dealt_back(ctx: Any, gradients: Sequence[Tensor]) -> tuple[Any, ...]:
    told = ctx.saved_tensors
    setup, of_keys, is_back = ctx.how
    found = deal_op([g.contiguous() for g in gradients], told, setup, of_keys, not is_back)
    return found, [None] * len(told), None, None, None


deal_op.register_autograd(_dealt_back, setup_context=_remember_deal)


def _rings(*arguments: Any) -> tuple[str, ...]:
    return axes_of_rings(Setup.of(arguments[-1]))


def _sent(is_back: bool, *arguments: Any) -> Iterator[tuple[str, str, int]]:
    for axis, messages in messages_of_ring(arguments[-1]).items():
        for m in messages:
            yield axis, m.kind, sum(m.backward) + sum(m.home) if is_back else sum(m.forward)


def _cuts(tensors: Any, told: Any, setup: str, of_keys: bool, is_back: bool) -> tuple[str, ...]:
    return tuple(cut.axis for cut in Setup.of(setup).axes(of_keys))


def _sent_by_deal(*arguments: Any) -> Iterator[tuple[str, str, int]]:
    return ((axis, "all_to_all", 1) for axis in _cuts(*arguments))


EXCHANGING[torch.ops.autopar.attention.default] = Exchanging(attention_forward, _rings, functools.partial(_sent, False))
EXCHANGING[torch.ops.autopar.attention_backward.default] = Exchanging(
    attention_backward, _rings, functools.partial(_sent, True)
)
EXCHANGING[torch.ops.autopar.deal.default] = Exchanging(deal, _cuts, _sent_by_deal)
