"""Reach of ops that move elements: views, ranges, concatenation, and writes into a range."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.graph.graph import info, op_name, type_of
from autopar.module.reach.pairs import OpPair, type_of_output
from autopar.module.reach.values import (
    MOST,
    Reach,
    Unclear,
    exact_shape,
    exact_size,
    is_padded,
    is_plain,
    lined_up,
    longer_size,
    need,
    reach_of,
    replaced,
    tidy,
)


def permuted(pair: OpPair) -> Reach:
    given = need(pair.of("input"))
    name = op_name(pair.node)
    rank = len(given.dims)
    order = list(range(rank))
    if name == "permute":
        order = [int(d) % rank for d in pair.kwargs["dims"]]
    elif rank > 1:
        a, b = (0, 1) if name == "t" else (int(pair.kwargs[d]) % rank for d in ("dim0", "dim1"))
        order[a], order[b] = order[b], order[a]
    return given.moved(tuple(given.dims[d] for d in order), lambda t: t.permute(order))


def view(pair: OpPair) -> Reach:
    """The reach of a view: the same factors, distributed over other dims."""
    given = need(pair.of("input"))
    left = [f for factors in given.dims for f in factors]
    if not math.prod(given.shape) or not math.prod(exact_shape(given)):
        raise Unclear
    dims = []
    for e, n in zip(type_of(pair.exact).shape, type_of(pair.node).shape, strict=True):
        mine: list[tuple[int, int]] = []
        while (e, n) != (1, 1):
            if not left:
                raise Unclear
            a, b = left.pop(0)
            if e % a == 0 and n % b == 0:
                mine.append((a, b))
                e, n = e // a, n // b
            # the dim takes the major part of a factor, whose rest is not padded
            elif a % e == 0 and b % n == 0 and a // e == b // n:
                mine.append((e, n))
                left.insert(0, (a // e, b // n))
                e, n = 1, 1
            else:
                raise Unclear
        dims.append(tidy(tuple(mine)))
    if left:
        raise Unclear
    shape = type_of(pair.node).shape
    return reach_of(tuple(dims), *(_reshaped(t, given.shape, shape) for t in given.tensors))


def _reshaped(tensor: Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> Tensor:
    """The tensor in another shape, where groups of dims along which all is alike stay of size one."""
    sizes: list[int] = []
    shown: list[int] = []
    i = j = 0
    while i < len(before) or j < len(after):  # dims of both shapes that hold the same numbers
        first = i
        other = j
        a = b = 1
        if i < len(before):
            a = before[i]
            i += 1
        if j < len(after):
            b = after[j]
            j += 1
        while a != b:
            if a < b:
                a *= before[i]
                i += 1
            else:
                b *= after[j]
                j += 1
        alike = all(tensor.shape[d] == 1 for d in range(first, i))
        sizes += [1 if alike else n for n in before[first:i]]
        shown += [1 if alike else n for n in after[other:j]]
    if math.prod(sizes) > MOST:
        raise Unclear
    return tensor.expand(sizes).reshape(shown)


def expanded(pair: OpPair) -> Reach:
    given = need(pair.of("input"))
    dims = pair.dims()
    lead = len(dims) - len(given.dims)
    kept = list(dims)
    for d, size in enumerate(given.shape):
        if size > 1:
            kept[lead + d] = given.dims[d]
    return reach_of(tuple(kept), *(t.reshape((1,) * lead + t.shape) for t in given.tensors))


def _ranged(given: Reach, dim: int, starts: tuple[int, int], lengths: tuple[int, int]) -> Reach:
    """The reach of a range of a dim, given by its start and length in both programs."""
    if is_padded([given.dims[dim]]) and (starts[0] != starts[1] or starts[0] < 0 or len(given.dims[dim]) > 1):
        raise Unclear
    if starts[0] != starts[1]:
        raise Unclear
    start = starts[1] % max(given.shape[dim], 1)
    dims = replaced(given.dims, dim, tidy((lengths,)))

    def ranged(tensor: Tensor) -> Tensor:
        return tensor if tensor.shape[dim] == 1 else tensor.narrow(dim, start, lengths[1])

    return reach_of(dims, *map(ranged, given.tensors))


def _in_both(pair: OpPair, name: str, default: int = 0) -> tuple[int, int]:
    """An integer argument in both programs: unpadded, and longer."""
    one, other = (int(n.kwargs.get(name, default) or 0) for n in (pair.exact, pair.node))
    return one, other


def narrow(pair: OpPair) -> Reach:
    given = need(pair.of("input"))
    dim = int(pair.kwargs["dim"]) % len(given.dims)
    return _ranged(given, dim, _in_both(pair, "start"), _in_both(pair, "length"))


def select(pair: OpPair) -> Reach:
    given = need(pair.of("input"))
    dim = int(pair.kwargs["dim"]) % len(given.dims)
    one = _ranged(given, dim, _in_both(pair, "index"), (1, 1))
    return one.moved(one.dims[:dim] + one.dims[dim + 1 :], lambda t: t.squeeze(dim))


def split(pair: OpPair) -> list[Reach]:
    given = need(pair.of("input"))
    dim = int(pair.kwargs.get("dim", 0)) % len(given.dims)
    found = []
    starts = (0, 0)
    for one, other in zip(info(pair.exact).outputs, info(pair.node).outputs, strict=True):
        lengths = one.shape[dim], other.shape[dim]
        found.append(_ranged(given, dim, starts, lengths))
        starts = starts[0] + lengths[0], starts[1] + lengths[1]
    return found


def end_to_end(pair: OpPair) -> Reach:
    """The reach of a concatenation, of which only the last value may be padded.

    Behind another padded value, the next one would begin elsewhere.
    """
    given = [need(r) for r in pair.operands]
    rank = len(type_of(pair.node).shape)
    dim = int(pair.kwargs.get("dim", 0)) % rank
    if op_name(pair.node) == "stack":
        given = [_unsqueezed(r, dim) for r in given]
    along = [r.dims[dim] for r in given]
    if any(is_padded([f]) for f in along[:-1]) or not is_plain(along[-1]):
        raise Unclear
    dims, _ = lined_up([r.without(dim) for r in given])

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        sizes = [*map(max, zip(*(t.shape for t in tensors), strict=True))]
        parts = []
        for t, r in zip(tensors, given, strict=True):
            sizes[dim] = r.shape[dim]
            parts.append(t.expand(sizes))
        return torch.cat(parts, dim)

    return reach_of(
        replaced(dims, dim, pair.dims()[dim]),
        joined([r.pad for r in given]),
        joined([r.known for r in given]),
        joined([r.value.to(type_of_output(pair, 0)) for r in given]),
    )


def more_at_the_ends(pair: OpPair) -> Reach:
    """The reach of an op that pads by constants at both ends.

    Where the op pads behind the input's own padding, that padding must hold the same constant already.
    """
    given = need(pair.of("input"))
    amounts = list(pair.kwargs["pad"])
    fill = pair.kwargs.get("value") or 0
    if pair.kwargs.get("mode", "constant") != "constant":
        raise Unclear
    dims = list(given.dims)
    pad = given.pad
    known = given.known
    value = given.value
    for k in range(len(amounts) // 2):
        d = len(dims) - 1 - k
        left, right = (int(n) for n in amounts[2 * k : 2 * k + 2])
        if (left, right) == (0, 0):
            continue
        if not is_plain(dims[d]) or (left < 0 and is_padded([dims[d]])):
            raise Unclear
        here, size = exact_size(dims[d]), longer_size(dims[d])
        pad, known, value = (t.expand([*t.shape[:d], size, *t.shape[d + 1 :]]) for t in (pad, known, value))
        ends = [0, 0] * (len(dims) - 1 - d) + [left, right]
        pad = torch.nn.functional.pad(pad, ends, value=False)
        known = torch.nn.functional.pad(known, ends, value=True)
        value = torch.nn.functional.pad(value, ends, value=fill)
        if here != size and right > 0:
            new = [slice(None)] * d + [slice(left + here, left + here + right)]
            pad = pad.clone()
            pad[tuple(new)] = ~(known & (value == fill))[tuple(new)]
        dims[d] = tidy(((here + left + right, size + left + right),))
    return reach_of(tuple(dims), pad, known, value)


def overwritten(pair: OpPair) -> Reach:
    """The reach of a write to a range, or to one place, of a dim.

    Where the range is longer in the longer program, nothing may follow it.
    """
    given, source = need(pair.of("input")), need(pair.of("src"))
    is_one = op_name(pair.node) == "select_scatter"
    dim = int(pair.kwargs.get("dim", 0)) % len(given.dims)
    if is_one:
        source = _unsqueezed(source, dim)
    starts = _in_both(pair, "index" if is_one else "start")
    lengths, sizes = _lengths(source, dim), _lengths(given, dim)
    is_plainly_there = is_plain(given.dims[dim]) and is_plain(source.dims[dim])
    if int(pair.kwargs.get("step", 1)) != 1 or starts[0] != starts[1] or starts[0] < 0 or not is_plainly_there:
        raise Unclear
    if lengths[0] != lengths[1] and starts[0] + lengths[0] != sizes[0]:
        raise Unclear
    dims, (one, other) = lined_up([given.without(dim), source.without(dim)])
    end = starts[1] + lengths[1]

    def written(mine: Tensor, theirs: Tensor) -> Tensor:
        alike = [*map(max, mine.shape, theirs.shape)]
        here, there = ([*alike[:dim], n, *alike[dim + 1 :]] for n in (sizes[1], lengths[1]))
        return torch.slice_scatter(mine.expand(here), theirs.to(mine.dtype).expand(there), dim, starts[1], end)

    found = map(written, one.tensors, other.tensors)
    return reach_of(replaced(dims, dim, given.dims[dim]), *found)


def _lengths(reach: Reach, dim: int) -> tuple[int, int]:
    """The size of a dim in both programs: unpadded, and longer."""
    return exact_shape(reach)[dim], reach.shape[dim]


def _unsqueezed(reach: Reach, dim: int) -> Reach:
    """The value with one more dim of size one."""
    return reach.moved((*reach.dims[:dim], (), *reach.dims[dim:]), lambda t: t.unsqueeze(dim))
