"""What padding can reach: which numbers of a program depend on what stands behind the ends of its sequences.

    two graphs    of one call as it is and as it is longer; they go op by op together
    a value       of the longer one, number by number: is it padding, or does it depend on padding; and is it known
    before anything is run, as masks are there an op         carries both on: by its rule what each number of its output
    depends on, and a few ops by what they are: a sum leaves out known zeros, a softmax known -inf,
                  a cross entropy the index that it ignores, attention what its mask or the causal order hides

What stands where a call as it is has a number must not depend on padding: `check_reach` says in a letter which op is
the first at which it does. Nothing is run but what is known, so that what is found holds for every batch. Two things
are taken as they are in practice: a number of -1e9 or less added to a score hides it, and a row of a softmax or of
attention has something that is not hidden.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.graph.graph import Graph, info, op_name, type_of, typed
from autopar.letters import BadRule, Letter, NotServed
from autopar.ops.entry import Op, rule_of
from autopar.sharding.notation import Binding

Factors = tuple[tuple[int, int], ...]  # of one dim, major first: each as it is, and as it is longer
_LOW = -1e9  # what is added to a score to hide it
_MOST = 2**28  # numbers of a value that are looked at one by one
_ADVICE = (
    "zeros for what is hidden before a sum (x * mask), masked_fill(mask == 0, -inf) before a softmax or a "
    "maximum, the sum of the mask in place of the length, targets of -100; "
    "all from a mask among the inputs whose 0 means hidden; or pad_to=None"
)


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """One value of the longer program. The tensors have its dims, of size one where all along a dim are alike."""

    dims: tuple[Factors, ...]
    pad: Tensor  # is it padding, or does it depend on padding
    known: Tensor  # is it known before anything is run,
    value: Tensor  # and what it is; 0 where it is not known

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(longer for _, longer in factors) for factors in self.dims)

    @property
    def is_reached(self) -> bool:
        """Does a number depend on padding that the call as it is has too?"""
        return bool((self.pad & ~_beyond(self.dims)).any())

    def is_(self, value: Any) -> Tensor:
        """Where it is known to be this."""
        return self.known & (self.value == value)

    def full(self, tensor: Tensor) -> Tensor:
        return tensor.expand(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One op in both programs, and what reaches its operands."""

    node: fx.Node  # of the longer program
    exact: fx.Node
    operands: list[Reach | None]  # in the order in which rules name them
    reaches: Mapping[fx.Node, Reach]  # of all values so far

    def of(self, name: str) -> Reach | None:
        """What reaches an argument; a number is known everywhere."""
        value = self.node.kwargs.get(name)
        if isinstance(value, fx.Node):
            return self.reaches[value]
        return _number(value) if isinstance(value, (int, float)) else None

    @property
    def kwargs(self) -> Mapping[str, Any]:
        return self.node.kwargs

    def dims(self, i: int = 0) -> tuple[Factors, ...]:
        """The dims of an output, as far as sizes tell."""
        here, longer = (info(n).outputs[i].shape for n in (self.exact, self.node))
        return tuple(_tidy(((e, n),)) for e, n in zip(here, longer, strict=True))

    def run(self, values: Mapping[fx.Node, Tensor]) -> Any:
        """Compute the op of the longer program on these."""
        return self.node.target.run(fx.map_arg(dict(self.node.kwargs), lambda n: values[n]))


class _Unclear(Exception):
    """What reaches an output cannot be told: as if padding reached all of it."""


def check_reach(exact: Graph, longer: Graph, fills: Mapping[str, float]) -> None:
    """Raise a letter where an output depends on padding.

    `fills` say by input of the graph what is put there, of the others 0.
    """
    first, second = list(exact.nodes), list(longer.nodes)
    if [_kind(n) for n in first] != [_kind(n) for n in second]:
        raise NotServed("with pad_to the model would run other ops at another length", advice="pad_to=None")
    with torch.device("cpu"):  # whatever the caller's default is
        reaches = _walked(first, second, fills)
    for name, value in zip(longer.output_names, longer.output.args[0], strict=False):
        reach = reaches[value]
        if reach.is_reached or any(len(factors) > 1 and any(e != n for e, n in factors) for factors in reach.dims):
            culprit = _first_reached(value, reaches) if reach.is_reached else value
            raise NotServed(
                f"with pad_to the model would compute something else: output {name!r} depends on the padding",
                at=info(culprit).source,
                seen=f"{op_name(culprit)}: {_why(culprit, first[second.index(culprit)], reaches)}",
                advice=_ADVICE,
            )


def _walked(first: Sequence[fx.Node], second: Sequence[fx.Node], fills: Mapping[str, float]) -> dict[fx.Node, Reach]:
    """What reaches each value of the longer program."""
    reaches: dict[fx.Node, Reach] = {}
    parts: dict[fx.Node, list[Reach]] = {}
    for here, node in zip(first, second, strict=True):
        kind = info(node).kind
        if kind == "op":
            operands = [
                reaches[n] if isinstance(n, fx.Node) else _number(n) if isinstance(n, (int, float)) else None
                for n in node.target.operands(node.kwargs)
            ]
            parts[node] = _reached(Call(node, here, operands, reaches))
            reaches[node] = parts[node][0]
        elif kind == "part":
            reaches[node] = parts[node.args[0]][node.args[1]]
        elif kind != "output":
            reaches[node] = _given(here, node, fills.get(info(node).key, 0.0) if kind == "input" else None)
    return reaches


def _kind(node: fx.Node) -> Any:
    return node.op, info(node).kind, op_name(node), [(len(t.shape), t.dtype) for t in info(node).outputs]


def _first_reached(value: fx.Node, reaches: Mapping[fx.Node, Reach]) -> fx.Node:
    """The first op on the way to a value whose output padding reaches, and none of its operands."""
    while befores := [n for n in value.all_input_nodes if reaches[n].is_reached]:
        value = befores[0]
    return value


def _why(culprit: fx.Node, exact: fx.Node, reaches: Mapping[fx.Node, Reach]) -> str:
    if not _same_words(exact, culprit) and isinstance(culprit.target, Op) and culprit.target.name not in SIZED:
        return "it is given the length itself, which padding changes"
    padded = [
        f"{n} ({', '.join(map(str, info(n).outputs))})" for n in culprit.all_input_nodes if bool(reaches[n].pad.any())
    ]
    return (
        f"it mixes what stands in padding with the rest, in {', '.join(padded)}"
        if padded
        else "its numbers depend on the length"
    )


def _reached(call: Call) -> list[Reach]:
    """What reaches the outputs of an op."""
    op = call.node.target
    count = len(info(call.node).outputs)
    try:
        if not isinstance(op, Op):
            raise _Unclear
        if op.name not in SIZED and not _same_words(call.exact, call.node):
            raise _Unclear
        made = TRANSFERS.get(op.name, _by_rule)(call)
        found = made if isinstance(made, list) else [made]
        if [tuple(r.shape) for r in found] != [t.shape for t in info(call.node).outputs] or [
            _exact_shape(r) for r in found
        ] != [t.shape for t in info(call.exact).outputs]:
            raise _Unclear
    except (
        _Unclear,
        Letter,
        RuntimeError,
        ValueError,
        IndexError,
        TypeError,
    ):  # what an op does with its arguments is not foreseen here: nothing is said of it
        clean = not any(
            bool(r.pad.any()) or _is_padded(r.dims) for r in (call.reaches[n] for n in call.node.all_input_nodes)
        ) and not any(_is_padded(call.dims(i)) for i in range(count))
        clean = clean and isinstance(op, Op) and _same_words(call.exact, call.node)
        return [_unknown(call.dims(i), type_of_output(call, i), pad=not clean) for i in range(count)]
    return found


def type_of_output(call: Call, i: int) -> torch.dtype:
    return info(call.node).outputs[i].torch_dtype


def _same_words(one: fx.Node, other: fx.Node) -> bool:
    """Are the arguments that are no tensors the same?"""

    def words(node: fx.Node) -> list[Any]:
        return [
            None if isinstance(leaf, fx.Node) else leaf
            for leaf in pytree.tree_leaves(fx.map_arg(dict(node.kwargs), lambda n: None))
        ]

    mine, theirs = words(one), words(other)
    return len(mine) == len(theirs) and all(
        type(a) is type(b) and (a == b or a != a) for a, b in zip(mine, theirs, strict=True)
    )


# -- values


def _number(value: Any) -> Reach:
    return Reach((), torch.tensor(False), torch.tensor(True), torch.tensor(value))


def _unknown(dims: tuple[Factors, ...], dtype: torch.dtype, pad: bool | Tensor = False) -> Reach:
    ones = (1,) * len(dims)
    pads = pad if isinstance(pad, Tensor) else torch.full(ones, pad)
    return _made(dims, pads, torch.zeros(ones, dtype=torch.bool), torch.zeros(ones, dtype=dtype))


def _given(exact: fx.Node, node: fx.Node, fill: float | None) -> Reach:
    """A parameter or a buffer; an input with what is put into its padding."""
    dims = tuple(_tidy(((e, n),)) for e, n in zip(type_of(exact).shape, type_of(node).shape, strict=True))
    dtype, beyond = type_of(node).torch_dtype, _beyond(dims)
    if fill is None:
        return _unknown(dims, dtype)
    return _made(dims, beyond, beyond, torch.full(beyond.shape, fill).to(dtype))


def _made(dims: tuple[Factors, ...], pad: Tensor, known: Tensor, value: Tensor) -> Reach:
    """What a call as it is does not have is padding."""
    value = torch.where(known, value, torch.zeros((), dtype=value.dtype))
    return Reach(dims, _narrowed(pad | _beyond(dims)), _narrowed(known), _narrowed(value))


def _narrowed(tensor: Tensor) -> Tensor:
    """One number of each dim along which all are alike."""
    for d in range(tensor.dim()):
        if tensor.shape[d] > 1 and bool((tensor == tensor.narrow(d, 0, 1)).all()):
            tensor = tensor.narrow(d, 0, 1)
    return tensor


def _tidy(factors: Factors) -> Factors:
    """Neighbours that are not padded are one; those of size one are none."""
    found: list[tuple[int, int]] = []
    for e, n in factors:
        if e == n and found and found[-1][0] == found[-1][1]:
            found[-1] = (found[-1][0] * e, found[-1][1] * n)
        else:
            found.append((e, n))
    found = [f for f in found if f != (1, 1)]
    return tuple(found) if len(found) == len(factors) else _tidy(tuple(found))


def _is_padded(dims: Sequence[Factors]) -> bool:
    return any(e != n for factors in dims for e, n in factors)


def _is_plain(factors: Factors) -> bool:
    """Is what a call as it is has the first numbers along this dim?"""
    return len(factors) < 2 or not _is_padded([factors])


def _exact_shape(reach: Reach) -> tuple[int, ...]:
    return tuple(math.prod(e for e, _ in factors) for factors in reach.dims)


def _beyond(dims: tuple[Factors, ...]) -> Tensor:
    """Where a call as it is has nothing."""
    found = torch.zeros((1,) * len(dims), dtype=torch.bool)
    for d, factors in enumerate(dims):
        if _is_padded([factors]):
            along = torch.zeros(1, dtype=torch.bool)
            for e, n in factors:
                along = (along[:, None] | (torch.arange(n) >= e)).flatten()
            found = found | along.view([-1 if k == d else 1 for k in range(len(dims))])
    return found


def _full(reach: Reach) -> tuple[Tensor, Tensor, Tensor]:
    if math.prod(reach.shape) > _MOST:
        raise _Unclear
    return reach.full(reach.pad), reach.full(reach.known), reach.full(reach.value)


def _need(reach: Reach | None) -> Reach:
    if reach is None:
        raise _Unclear
    return reach


def _lined_up(reaches: Sequence[Reach]) -> tuple[tuple[Factors, ...], list[Reach]]:
    """Operands of one rank, as broadcasting lines them up, and the dims that come of it."""
    rank = max(len(r.dims) for r in reaches)
    found = []
    for r in reaches:
        lead = (1,) * (rank - len(r.dims))
        found.append(Reach(((),) * len(lead) + r.dims, *(t.reshape(lead + t.shape) for t in (r.pad, r.known, r.value))))
    dims = []
    for d in range(rank):
        kinds = {r.dims[d] for r in found if r.dims[d]}
        if len(kinds) > 1:
            raise _Unclear
        dims.append(kinds.pop() if kinds else ())
    return tuple(dims), found


# -- number by number


def _pointwise(call: Call) -> Reach:
    """Each number depends on those at its place."""
    present = [r for r in call.operands if r is not None]
    dims, lined = _lined_up(present)
    pad, known = _any([r.pad for r in lined]), _all([r.known for r in lined])
    if info(call.node).random >= 0:
        known = torch.zeros_like(known)
    value = torch.zeros((1,) * len(dims), dtype=type_of_output(call, 0))
    if bool(known.any()):
        places = [n for n in call.node.target.operands(call.kwargs) if isinstance(n, fx.Node)]
        try:
            value = call.run({n: call.reaches[n].value for n in places})
        except RuntimeError:  # a division by what is not known
            known = torch.zeros_like(known)
        value = value.reshape((1,) * (len(dims) - value.dim()) + value.shape)
    name = op_name(call.node)
    if name in ("mul", "bitwise_and", "logical_and"):
        known, value = _set(known, value, _any([r.is_(0) for r in lined]), 0)
    elif name in ("bitwise_or", "logical_or") and value.dtype == torch.bool:
        known, value = _set(known, value, _any([r.is_(1) for r in lined]), 1)
    elif name == "div":
        known, value = _set(known, value, lined[0].is_(0) & ~lined[1].pad, 0)
    elif name in ("add", "sub") and value.is_floating_point() and call.kwargs.get("alpha", 1) == 1:
        other = (
            lined[1].value
            if name == "add"
            else -lined[1].value
            if lined[1].value.dtype != torch.bool
            else lined[1].value
        )
        hidden = (lined[0].known & (lined[0].value <= _LOW)) | (lined[1].known & (other <= _LOW))
        known, value = _set(known, value, hidden & pad, -math.inf)
    return _made(dims, pad, known, value)


def _set(known: Tensor, value: Tensor, where: Tensor, what: float) -> tuple[Tensor, Tensor]:
    return known | where, torch.where(where, torch.tensor(what, dtype=value.dtype), value)


def _any(tensors: Sequence[Tensor]) -> Tensor:
    found = tensors[0]
    for t in tensors[1:]:
        found = found | t
    return found


def _all(tensors: Sequence[Tensor]) -> Tensor:
    found = tensors[0]
    for t in tensors[1:]:
        found = found & t
    return found


def _where(call: Call) -> Reach:
    """Where the condition is known, what it picks."""
    names = ("condition", "input", "other") if op_name(call.node) == "where" else ("mask", "value", "input")
    dims, (condition, one, other) = _lined_up([_need(call.of(n)) for n in names])
    chosen = condition.value.bool()
    pad = condition.pad | torch.where(condition.known, torch.where(chosen, one.pad, other.pad), one.pad | other.pad)
    known = condition.known & torch.where(chosen, one.known, other.known)
    value = torch.where(chosen, one.value, other.value).to(type_of_output(call, 0))
    return _made(dims, pad, known, value)


def _triangle(call: Call) -> Reach:
    """Zeros above or below a diagonal."""
    given = _need(call.of("input"))
    if not all(_is_plain(f) for f in given.dims[-2:]):
        raise _Unclear
    stays = getattr(torch, op_name(call.node))(
        torch.ones(given.shape[-2:], dtype=torch.bool), call.kwargs.get("diagonal", 0)
    )
    return _made(
        given.dims,
        given.pad,
        given.known | ~stays,
        torch.where(stays, given.value, torch.zeros((), dtype=given.value.dtype)),
    )


# -- places


def _permuted(call: Call) -> Reach:
    given, name = _need(call.of("input")), op_name(call.node)
    rank = len(given.dims)
    order = list(range(rank))
    if name == "permute":
        order = [int(d) % rank for d in call.kwargs["dims"]]
    elif rank > 1:
        a, b = (0, 1) if name == "t" else (int(call.kwargs[d]) % rank for d in ("dim0", "dim1"))
        order[a], order[b] = order[b], order[a]
    return Reach(
        tuple(given.dims[d] for d in order), *(t.permute(order) for t in (given.pad, given.known, given.value))
    )


def _view(call: Call) -> Reach:
    """The same factors, shared out among other dims."""
    given = _need(call.of("input"))
    left = [f for factors in given.dims for f in factors]
    if not math.prod(given.shape) or not math.prod(_exact_shape(given)):
        raise _Unclear
    dims = []
    for e, n in zip(type_of(call.exact).shape, type_of(call.node).shape, strict=True):
        mine: list[tuple[int, int]] = []
        while (e, n) != (1, 1):
            if not left:
                raise _Unclear
            a, b = left.pop(0)
            if e % a == 0 and n % b == 0:
                mine.append((a, b))
                e, n = e // a, n // b
            elif (
                a % e == 0 and b % n == 0 and a // e == b // n
            ):  # the major part of a factor, and what is behind it is not padded
                mine.append((e, n))
                left.insert(0, (a // e, b // n))
                e, n = 1, 1
            else:
                raise _Unclear
        dims.append(_tidy(tuple(mine)))
    if left:
        raise _Unclear
    shape = type_of(call.node).shape
    return _made(tuple(dims), *(_reshaped(t, given.shape, shape) for t in (given.pad, given.known, given.value)))


def _reshaped(tensor: Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> Tensor:
    """The tensor in another shape, where dims that go with each other and are all alike stay of size one."""
    sizes: list[int] = []
    shown: list[int] = []
    i = j = 0
    while i < len(before) or j < len(after):  # dims of both shapes that hold the same numbers
        first, other, a, b = i, j, 1, 1
        if i < len(before):
            a, i = before[i], i + 1
        if j < len(after):
            b, j = after[j], j + 1
        while a != b:
            if a < b:
                a, i = a * before[i], i + 1
            else:
                b, j = b * after[j], j + 1
        alike = all(tensor.shape[d] == 1 for d in range(first, i))
        sizes += [1 if alike else n for n in before[first:i]]
        shown += [1 if alike else n for n in after[other:j]]
    if math.prod(sizes) > _MOST:
        raise _Unclear
    return tensor.expand(sizes).reshape(shown)


def _expanded(call: Call) -> Reach:
    given = _need(call.of("input"))
    dims = call.dims()
    lead = len(dims) - len(given.dims)
    kept = tuple(given.dims[d - lead] if d >= lead and given.shape[d - lead] > 1 else dims[d] for d in range(len(dims)))
    return _made(kept, *(t.reshape((1,) * lead + t.shape) for t in (given.pad, given.known, given.value)))


def _ranged(given: Reach, dim: int, starts: tuple[int, int], lengths: tuple[int, int]) -> Reach:
    """A range of a dim, which begins and ends in both programs there."""
    if _is_padded([given.dims[dim]]) and (starts[0] != starts[1] or starts[0] < 0 or len(given.dims[dim]) > 1):
        raise _Unclear
    if starts[0] != starts[1]:
        raise _Unclear
    start, dims = starts[1] % max(given.shape[dim], 1), list(given.dims)
    dims[dim] = _tidy(((lengths[0], lengths[1]),))
    return _made(
        tuple(dims),
        *(t if t.shape[dim] == 1 else t.narrow(dim, start, lengths[1]) for t in (given.pad, given.known, given.value)),
    )


def _narrow(call: Call) -> Reach:
    given = _need(call.of("input"))
    both = [n.kwargs for n in (call.exact, call.node)]
    starts, lengths = (tuple(int(k[name]) for k in both) for name in ("start", "length"))
    return _ranged(given, int(call.kwargs["dim"]) % len(given.dims), starts, lengths)  # type: ignore[arg-type]


def _select(call: Call) -> Reach:
    given = _need(call.of("input"))
    dim = int(call.kwargs["dim"]) % len(given.dims)
    starts = tuple(int(n.kwargs["index"]) for n in (call.exact, call.node))
    one = _ranged(given, dim, starts, (1, 1))  # type: ignore[arg-type]
    return Reach(one.dims[:dim] + one.dims[dim + 1 :], *(t.squeeze(dim) for t in (one.pad, one.known, one.value)))


def _split(call: Call) -> list[Reach]:
    given = _need(call.of("input"))
    dim = int(call.kwargs.get("dim", 0)) % len(given.dims)
    sizes = [[t.shape[dim] for t in info(n).outputs] for n in (call.exact, call.node)]
    starts = [list(itertools.accumulate(s, initial=0)) for s in sizes]
    return [_ranged(given, dim, (starts[0][i], starts[1][i]), (sizes[0][i], sizes[1][i])) for i in range(len(sizes[0]))]


def _end_to_end(call: Call) -> Reach:
    """Only what stands last may be padded: else what follows it begins elsewhere."""
    given = [_need(r) for r in call.operands]
    rank = len(type_of(call.node).shape)
    dim = int(call.kwargs.get("dim", 0)) % rank
    if op_name(call.node) == "stack":
        given = [
            Reach((*r.dims[:dim], (), *r.dims[dim:]), *(t.unsqueeze(dim) for t in (r.pad, r.known, r.value)))
            for r in given
        ]
    along = [r.dims[dim] for r in given]
    if any(_is_padded([f]) for f in along[:-1]) or not _is_plain(along[-1]):
        raise _Unclear
    dims, _ = _lined_up([replace(r, dims=tuple(() if d == dim else f for d, f in enumerate(r.dims))) for r in given])

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        sizes = [max(t.shape[d] for t in tensors) for d in range(rank)]
        return torch.cat(
            [
                t.expand([r.shape[d] if d == dim else sizes[d] for d in range(rank)])
                for t, r in zip(tensors, given, strict=True)
            ],
            dim,
        )

    out = call.dims()
    return _made(
        tuple(out[dim] if d == dim else f for d, f in enumerate(dims)),
        joined([r.pad for r in given]),
        joined([r.known for r in given]),
        joined([r.value.to(type_of_output(call, 0)) for r in given]),
    )


def _more_at_the_ends(call: Call) -> Reach:
    """Constants put before and behind. Behind padding, the padding must be that constant already."""
    given, amounts, fill = _need(call.of("input")), list(call.kwargs["pad"]), call.kwargs.get("value") or 0
    if call.kwargs.get("mode", "constant") != "constant":
        raise _Unclear
    dims, (pad, known, value) = list(given.dims), (given.pad, given.known, given.value)
    for k in range(len(amounts) // 2):
        d, (left, right) = len(dims) - 1 - k, (int(n) for n in amounts[2 * k : 2 * k + 2])
        if (left, right) == (0, 0):
            continue
        if not _is_plain(dims[d]) or (left < 0 and _is_padded([dims[d]])):
            raise _Unclear
        here, size = (math.prod(f[i] for f in dims[d]) for i in (0, 1))
        pad, known, value = (
            t.expand([size if i == d else n for i, n in enumerate(t.shape)]) for t in (pad, known, value)
        )
        ends = [0, 0] * (len(dims) - 1 - d) + [left, right]
        pad, known, value = (
            torch.nn.functional.pad(pad, ends, value=False),
            torch.nn.functional.pad(known, ends, value=True),
            torch.nn.functional.pad(value, ends, value=fill),
        )
        if here != size and right > 0:
            new = [slice(None)] * d + [slice(left + here, left + here + right)]
            pad = pad.clone()
            pad[tuple(new)] = ~(known & (value == fill))[tuple(new)]
        dims[d] = _tidy(((here + left + right, size + left + right),))
    return _made(tuple(dims), pad, known, value)


def _overwritten(call: Call) -> Reach:
    """A range, or one place, of a dim with other numbers.

    Behind a range that is longer where padding is, nothing may follow.
    """
    given, source, name = _need(call.of("input")), _need(call.of("src")), op_name(call.node)
    rank = len(given.dims)
    dim = int(call.kwargs.get("dim", 0)) % rank
    if name == "select_scatter":
        source = Reach(
            (*source.dims[:dim], (), *source.dims[dim:]),
            *(t.unsqueeze(dim) for t in (source.pad, source.known, source.value)),
        )
    starts = [
        int(n.kwargs.get("index" if name == "select_scatter" else "start", 0) or 0) for n in (call.exact, call.node)
    ]
    lengths, sizes = ([math.prod(f[i] for f in r.dims[dim]) for i in (0, 1)] for r in (source, given))
    if (
        int(call.kwargs.get("step", 1)) != 1
        or starts[0] != starts[1]
        or starts[0] < 0
        or not _is_plain(given.dims[dim])
        or not _is_plain(source.dims[dim])
    ):
        raise _Unclear
    if lengths[0] != lengths[1] and starts[0] + lengths[0] != sizes[0]:
        raise _Unclear
    dims, (one, other) = _lined_up(
        [replace(r, dims=tuple(() if d == dim else f for d, f in enumerate(r.dims))) for r in (given, source)]
    )
    found = []
    for mine, theirs in ((one.pad, other.pad), (one.known, other.known), (one.value, other.value.to(one.value.dtype))):
        alike = [max(a, b) for a, b in zip(mine.shape, theirs.shape, strict=True)]
        here, there = ([n if d == dim else size for d, size in enumerate(alike)] for n in (sizes[1], lengths[1]))
        found.append(
            torch.slice_scatter(mine.expand(here), theirs.expand(there), dim, starts[1], starts[1] + lengths[1])
        )
    return _made(tuple(given.dims[dim] if d == dim else f for d, f in enumerate(dims)), *found)


def _looked_up(call: Call) -> Reach | list[Reach]:
    """x[index], where all indices are known: the numbers that they name."""
    given, places = (
        _need(call.of("input")),
        [n for n in pytree.tree_leaves(fx.map_arg(call.kwargs["index"], lambda n: n)) if isinstance(n, fx.Node)],
    )
    indices = [call.reaches[n] for n in places]
    if not all(_is_plain(f) for r in (given, *indices) for f in r.dims):
        raise _Unclear
    for entry, dims in _dims_looked_into(call, given):
        if not _is_padded(dims):
            continue
        if isinstance(entry, slice) and ((entry.start or 0) < 0 or (entry.step or 1) < 0):
            raise _Unclear  # counted from the end, which is elsewhere in a longer one
        if isinstance(entry, int) and entry < 0:
            raise _Unclear
        if isinstance(entry, fx.Node) and (
            type_of(entry).dtype == "bool" or bool((call.reaches[entry].value < 0).any())
        ):
            raise _Unclear
    if not all(bool(r.known.all()) for r in indices):
        return _by_rule(call)
    if any(r.is_reached for r in indices):
        raise _Unclear
    index = {n: r.full(r.value) for n, r in zip(places, indices, strict=True)}
    pad, known, value = (call.run({**index, call.kwargs["input"]: t}) for t in _full(given))
    return _made(call.dims(), pad, known, value)


def _dims_looked_into(call: Call, given: Reach) -> list[tuple[Any, tuple[Factors, ...]]]:
    """Each entry of an index, and the dims that it looks into."""
    entries = call.kwargs["index"] if isinstance(call.kwargs["index"], (tuple, list)) else (call.kwargs["index"],)
    widths = [
        0
        if e is None or e is Ellipsis
        else len(type_of(e).shape)
        if isinstance(e, fx.Node) and type_of(e).dtype == "bool"
        else 1
        for e in entries
    ]
    found, at = [], 0
    for entry, width in zip(entries, widths, strict=True):
        if entry is Ellipsis:
            at = len(given.dims) - sum(widths) + at
        found.append((entry, given.dims[at : at + width]))
        at += width
    return found


def _from_nothing(call: Call) -> Reach:
    """What is made of sizes alone is known; it must begin alike in both programs."""

    def made(node: fx.Node) -> Tensor:
        kwargs = fx.map_arg(
            dict(node.kwargs), lambda n: torch.empty((), dtype=type_of(n).torch_dtype).expand(type_of(n).shape)
        )
        found = node.target.run(kwargs)
        return found if isinstance(found, Tensor) else torch.as_tensor(found)

    if math.prod(type_of(call.node).shape) > _MOST:
        raise _Unclear
    here, longer, dims = made(call.exact), made(call.node), call.dims()
    shared = longer
    for d, n in enumerate(here.shape):
        shared = shared.narrow(d, 0, n)
    differs = shared != here
    pad = torch.zeros(longer.shape, dtype=torch.bool)
    pad[tuple(slice(0, n) for n in here.shape)] = differs
    return _made(dims, pad, torch.ones((1,) * longer.dim(), dtype=torch.bool), longer)


# -- along a dim


def _dims_of(call: Call, rank: int) -> tuple[int, ...]:
    dim = call.kwargs.get("dim")
    named = range(rank) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    return tuple(sorted({int(d) % max(rank, 1) for d in named}))


_NEUTRAL = {"sum": 0, "amax": -math.inf, "amin": math.inf, "any": 0, "all": 1, "logsumexp": -math.inf, "norm": 0}


def _reduced(call: Call) -> Reach:
    """What is known to change nothing is left out: a zero of a sum, an -inf of a maximum."""
    given, name = _need(call.of("input")), op_name(call.node)
    rank = len(given.dims)
    gone, keeps = _dims_of(call, rank), bool(call.kwargs.get("keepdim", False))
    if not gone:
        return replace(_unknown(given.dims, type_of_output(call, 0)), pad=given.pad)
    reached = given.pad & ~given.is_(_NEUTRAL[name])
    pad = reached.amax(gone, keepdim=keeps) | given.pad.amin(gone, keepdim=keeps)
    dims = tuple(() if d in gone else f for d, f in enumerate(given.dims) if keeps or d not in gone)
    known, value = given.known.amin(gone, keepdim=keeps), torch.zeros((1,) * len(dims), dtype=type_of_output(call, 0))
    if bool(known.any()):
        sizes = [n if d in gone else given.value.shape[d] for d, n in enumerate(given.shape)]
        value = call.run({call.kwargs["input"]: given.value.expand(sizes)})
    return _made(dims, pad, known, value)


def _softmax(call: Call) -> Reach:
    """Each number depends on all of its row but what is known to be -inf."""
    given = _need(call.of("input"))
    dim = int(call.kwargs["dim"]) % len(given.dims)
    hidden = given.is_(-math.inf)
    pad = given.pad & ~hidden
    row = pad.amax(dim, keepdim=True)
    alone = hidden & given.pad & ~row  # hidden in a row that is not padding
    value = (
        torch.zeros((), dtype=type_of_output(call, 0))
        if op_name(call.node) == "softmax"
        else torch.full((), -math.inf, dtype=type_of_output(call, 0))
    )
    return _made(given.dims, row | given.pad, alone, value.expand(alone.shape))


def _running(call: Call) -> Reach:
    """Each number depends on those before it."""
    given = _need(call.of("input"))
    dim = int(call.kwargs["dim"]) % len(given.dims)
    reached = given.pad & ~given.is_(0)
    sizes = [given.shape[d] if d == dim else n for d, n in enumerate(reached.shape)]
    pad = reached.expand(sizes).to(torch.uint8).cummax(dim).values.bool()
    if bool(given.known.all()):
        value = call.run({call.kwargs["input"]: given.full(given.value)})
        return _made(given.dims, pad, torch.ones((1,) * len(given.dims), dtype=torch.bool), value)
    return _unknown(given.dims, type_of_output(call, 0), pad)


def _loss_of_classes(call: Call) -> Reach:
    """Targets that are ignored count for nothing."""
    logits, target = _need(call.of("input")), _need(call.of("target"))
    reduction = call.kwargs.get("reduction", "mean")
    if target.value.is_floating_point() or reduction not in ("sum", "none") or len(logits.dims) != len(target.dims) + 1:
        raise _Unclear
    classes = 1 if len(logits.dims) > 1 else 0
    if _is_padded([logits.dims[classes]]):
        raise _Unclear
    rows = Reach(
        logits.dims[:classes] + logits.dims[classes + 1 :],
        logits.pad.amax(classes),
        torch.zeros((1,) * len(target.dims), dtype=torch.bool),
        torch.zeros((1,) * len(target.dims)),
    )
    dims, (given, wanted) = _lined_up([rows, target])
    ignored = wanted.is_(call.kwargs.get("ignore_index", -100))
    pad = given.pad | wanted.pad
    if reduction == "none":
        return _made(dims, pad, ignored, torch.zeros(ignored.shape, dtype=type_of_output(call, 0)))
    return _unknown((), type_of_output(call, 0), (pad & ~ignored).any())


def _attention(call: Call) -> Reach:
    """A query sees the keys that neither the mask nor the causal order hides."""
    query, key, value = (_need(call.of(n)) for n in ("query", "key", "value"))
    mask = call.of("attn_mask")
    if not all(_is_plain(r.dims[-2]) for r in (query, key, value)) or key.dims[-2] != value.dims[-2]:
        raise _Unclear
    if any(_is_padded([r.dims[-1]]) for r in (query, key, value)):
        raise _Unclear
    seen = _heads_alike(key.pad.amax(-1)[..., None, :]) | _heads_alike(value.pad.amax(-1)[..., None, :])
    hidden = torch.zeros((1, 1), dtype=torch.bool)
    if call.kwargs.get("is_causal"):
        hidden = ~torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if mask is not None:
        hidden = hidden | (mask.known & (~mask.value if mask.value.dtype == torch.bool else mask.value <= _LOW))
        seen = seen | mask.pad
    reached = (seen & ~hidden).any(-1, keepdim=True)
    rank = len(query.dims)
    pad = query.pad.amax(-1, keepdim=True) | reached
    if pad.dim() > rank:
        raise _Unclear
    dims = (*query.dims[:-1], value.dims[-1])
    return _unknown(dims, type_of_output(call, 0), pad)


def _heads_alike(pad: Tensor) -> Tensor:
    """Groups of query heads read one head of keys: what reaches one, reaches all."""
    return pad.amax(-3, keepdim=True) if pad.dim() > 3 else pad


# -- by rules


def _by_rule(call: Call) -> Reach | list[Reach]:
    """What the rule of an op says of it: a dim of an output that may be cut depends on the same place of the operands.

    What stays whole, or is summed, mixes.
    """
    op = call.node.target
    rule = rule_of(op.name, {**typed(call.kwargs), "outputs": info(call.node).outputs})
    if rule is None:
        raise _Unclear
    if (
        all(d.factor == "..." for row in (*rule.operands, *rule.outputs) for d in row)
        and len(rule.outputs) == 1
        and all(len(row) == 1 for row in (*rule.operands, *rule.outputs))
    ):
        return _pointwise(call)
    try:
        binding = rule.bind(
            [None if r is None else r.shape for r in call.operands], [t.shape for t in info(call.node).outputs]
        )
    except BadRule as e:
        raise _Unclear from e
    return _of_binding(call, binding)


def _of_binding(call: Call, binding: Binding) -> list[Reach]:
    factors = list(binding.sizes)
    at = {f: i for i, f in enumerate(factors)}
    sizes: dict[str, Factors] = {}
    pads: dict[int, Tensor] = {}
    zeros: dict[int, Tensor] = {}
    for i, (row, reach) in enumerate(zip(binding.operands, call.operands, strict=True)):
        if row is None or reach is None:
            continue
        for dim, along in zip(row, reach.dims, strict=True):
            if len(dim.factors) != 1:
                if _is_padded([along]) or (dim.factors and any(t.shape[row.index(dim)] > 1 for t in (reach.pad,))):
                    raise _Unclear
            elif along and sizes.setdefault(dim.factor, along) != along:
                raise _Unclear
        pads[i], zeros[i] = (
            _on_factors(t, row, at)
            for t in (reach.pad, reach.is_(0).expand(torch.broadcast_shapes(reach.known.shape, reach.value.shape)))
        )
    kept = {f for row in binding.outputs for d in row for f in d.factors}
    mixed = [f for f in factors if f in binding.whole or f in binding.inside or f not in kept]
    summed = all(f not in binding.whole and f not in binding.inside for f in mixed if _is_padded([sizes.get(f, ())]))
    space = (1,) * len(factors)
    term = _any([torch.zeros(space, dtype=torch.bool), *pads.values()])
    neutral = torch.zeros(space, dtype=torch.bool)
    for group in binding.groups if summed else ():
        members = [
            i for i in group if i in pads and any(f in mixed for d in binding.operands[i] or () for f in d.factors)
        ]
        neutral = neutral | _all([zeros[i] for i in members]) if members else neutral
    gone = tuple(at[f] for f in mixed)
    shape = torch.broadcast_shapes(term.shape, neutral.shape)
    reached, term = (term & ~neutral).expand(shape), term.expand(shape)
    pad = reached.amax(gone, keepdim=True) | term.amin(gone, keepdim=True) if gone else reached
    return [
        _unknown(_dims_by(call, i, row, sizes), type_of_output(call, i), _on_dims(pad, row, at))
        for i, row in enumerate(binding.outputs)
    ]


def _on_factors(tensor: Tensor, row: Sequence[Any], at: Mapping[str, int]) -> Tensor:
    """The tensor of an operand, a dim for each factor of the rule."""
    order = [(at[d.factor], k) for k, d in enumerate(row) if len(d.factors) == 1]
    rest = [k for k, d in enumerate(row) if len(d.factors) != 1]
    for k in rest:
        tensor = tensor.amax(k, keepdim=True)
    moved = tensor.permute([k for _, k in sorted(order)] + rest)
    shape = [1] * len(at)
    for (place, _), n in zip(sorted(order), moved.shape, strict=False):
        shape[place] = n
    return moved.reshape(shape)


def _on_dims(tensor: Tensor, row: Sequence[Any], at: Mapping[str, int]) -> Tensor:
    """What is said of factors, on the dims of an output."""
    places = [at[d.factor] if len(d.factors) == 1 else None for d in row]
    used = [p for p in places if p is not None]
    rest = tuple(p for p in range(tensor.dim()) if p not in used)
    flat = tensor.amax(rest, keepdim=True) if rest else tensor
    flat = flat.permute(used + list(rest)).reshape([flat.shape[p] for p in used])
    sizes = iter(flat.shape)
    return flat.reshape([1 if p is None else next(sizes) for p in places])


def _dims_by(call: Call, i: int, row: Sequence[Any], sizes: Mapping[str, Factors]) -> tuple[Factors, ...]:
    own = call.dims(i)
    found = []
    for dim, along in zip(row, own, strict=True):
        known = sizes.get(dim.factor) if len(dim.factors) == 1 else None
        if len(dim.factors) > 1 and _is_padded([along]):
            raise _Unclear
        found.append(known if known is not None and along else along)
    return tuple(found)


SIZED = frozenset(
    {
        "view",
        "expand",
        "narrow",
        "select",
        "split",
        "arange",
        "full",
        "zeros",
        "ones",
        "empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "tensor",
        "slice_scatter",
    }
)  # whose arguments may follow a length
TRANSFERS: dict[str, Callable[[Call], Reach | list[Reach]]] = {
    "where": _where,
    "masked_fill": _where,
    "tril": _triangle,
    "triu": _triangle,
    "transpose": _permuted,
    "permute": _permuted,
    "t": _permuted,
    "view": _view,
    "expand": _expanded,
    "narrow": _narrow,
    "select": _select,
    "split": _split,
    "cat": _end_to_end,
    "stack": _end_to_end,
    "pad": _more_at_the_ends,
    "slice_scatter": _overwritten,
    "select_scatter": _overwritten,
    "index": _looked_up,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "cumsum": _running,
    "cross_entropy": _loss_of_classes,
    "nll_loss": _loss_of_classes,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(_NEUTRAL, _reduced),
    **dict.fromkeys(
        (
            "arange",
            "full",
            "full_like",
            "zeros",
            "ones",
            "zeros_like",
            "ones_like",
            "new_zeros",
            "new_ones",
            "new_full",
            "tensor",
        ),
        _from_nothing,
    ),
}
