"""What each op of an emitted program makes of the types of its operands.

An op without a line here is one of which nothing is known where its operands are not whole; elementwise ops are known
by torch's own tag. A rule raises `Refused` where the operands cannot be combined so, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.certificate.types import (
    FREE,
    Dim,
    Refused,
    Type,
    axes_of,
    free,
    is_free,
    joined,
    plain,
    regrouped,
    same,
    size,
    whole,
    without,
)

_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an op: arguments with types in place of tensors, and the shapes of what comes out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    axes: frozenset[str]  # all of the mesh

    @property
    def types(self) -> list[Type]:
        return list(_types([self.args, self.kwargs]))

    def at(self, place: int, otherwise: Any = None) -> Any:
        return self.args[place] if place < len(self.args) else otherwise


Rule = Callable[[Call], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def add(made: Rule) -> Rule:
        RULES.update(dict.fromkeys((f"aten.{name}" for name in names), made))
        return made

    return add


def typed(target: Any, call: Call) -> Any:
    """The type of a result, or the types of several."""
    known = RULES.get(str(target))
    if known is not None:
        return known(call)
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return elementwise(call)
    return unknown(call)


def unknown(call: Call) -> Any:
    """Whole operands give whole results; of others nothing is known."""
    types = call.types
    lost = frozenset(a for t in types for a in t.known)
    is_constant = types and all(_is_constant(t) for t in types)
    if not is_constant and any(is_free(dim) for t in types for dim in t.dims):
        lost = call.axes  # constants of a part beside values
    made = [Type(free(s) if is_constant or not types else plain(s), open=lost) for s in call.shapes]
    return made if len(made) != 1 else made[0]


# -- elementwise


def elementwise(call: Call, linear: str = "") -> Type:
    """Dims that meet lie alike; a part of a sum may pass where the op is linear in it.

    `linear` is "" (in none), "first", "all" (all operands at once) or "one" (a product: in any one of them).
    """
    types, shape = call.types, call.shapes[0]
    lost = frozenset(a for t in types for a in t.open)
    if any(t.is_start for t in types):
        rest = [t for t in types if not t.is_start]
        if not rest:
            return Type((), open=lost, is_start=True)
        if all(_is_constant(t) for t in rest):  # places of the part are those of the whole
            return Type(free(shape))
    dims = tuple(_met(types, d, len(shape), shape[d], lost) for d in range(len(shape)))
    return Type(dims, sums=_summed(types, linear, lost), open=lost).opened(_doubtful(types, dims))


def _met(types: Sequence[Type], place: int, rank: int, n: int, lost: frozenset[str]) -> Dim:
    """The dim of a result, from those of the operands that meet there."""
    found: Dim | None = None
    for t in types:
        d = place - rank + len(t.dims)
        if d < 0 or (size(t.dims[d]) == 1 and n != 1):
            continue  # it is repeated along this dim
        dim = without(t.dims[d], lost)
        if found is None or is_free(found) or not found:
            found = dim
        elif not dim:
            continue  # one row, whole: it is repeated where others are cut
        elif not is_free(dim) and not same(found, dim):
            if axes_of([found]) == axes_of([dim]):
                raise ValueError(f"dims of {size(found)} and {size(dim)} rows do not meet")  # not so in this op
            raise Refused(
                f"along dim {place} one operand lies as {_said(found)} and another as {_said(dim)}",
                "both have to lie alike",
            )
    return ((n, FREE),) if found is None else found


def _said(dim: Dim) -> str:
    axes = axes_of([dim])
    return f"{size(dim)} rows cut by {', '.join(axes)}" if axes else f"{size(dim)} whole rows"


def _summed(types: Sequence[Type], linear: str, lost: frozenset[str]) -> frozenset[str]:
    """The axes along which a result is a part of a sum."""
    pending = frozenset(a for t in types for a in t.sums | t.most) - lost
    for axis in pending:
        having = [i for i, t in enumerate(types) if axis in t.sums]
        ready = [i for i, t in enumerate(types) if axis not in t.sums and not t.is_zero]
        if any(axis in t.most for t in types):
            raise Refused(f"an operand is one of those whose maximum over {axis} is meant", "the maximum comes first")
        fits = {
            "": False,
            "first": having == [0],
            "all": not ready,
            "one": len(having) == 1,
        }[linear]
        if not fits:
            others = ", and another is not" if ready and linear == "all" else ""
            raise Refused(f"an operand is a part of a sum over {axis}{others}", "it has to be summed before")
    return pending


def _doubtful(types: Sequence[Type], dims: Sequence[Dim]) -> frozenset[str]:
    """Axes that cut the result, and along which an operand is a part of a sum: it cannot be both."""
    return frozenset(axes_of(dims)) & frozenset(a for t in types for a in t.sums)


def _types(value: Any) -> Iterable[Type]:
    if isinstance(value, Type):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _types(one)
    elif isinstance(value, dict):
        yield from _types(list(value.values()))


def _is_constant(t: Type) -> bool:
    return bool(t.dims) and all(is_free(dim) or not dim for dim in t.dims) and any(map(is_free, t.dims))


def _elementwise(linear: str) -> Rule:
    return lambda call: elementwise(call, linear)


@rule("add.Tensor", "sub.Tensor", "add.Scalar", "sub.Scalar", "rsub.Scalar")
def _sum_of_two(call: Call) -> Type:
    has_number = any(isinstance(a, (int, float)) and a != 0 for a in call.args[:2])
    return elementwise(call, "" if has_number else "all")


rule("mul.Tensor")(_elementwise("one"))
rule(
    "div.Tensor", "div.Scalar", "mul.Scalar", "neg.default", "clone.default", "alias.default", "detach.default",
    "_to_copy.default", "gelu_backward.default", "silu_backward.default", "tanh_backward.default",
    "sigmoid_backward.default", "threshold_backward.default", "elu_backward.default", "leaky_relu_backward.default",
    "hardtanh_backward.default", "softplus_backward.default", "lift_fresh_copy.default", "contiguous.default",
)(_elementwise("first"))  # fmt: skip


@rule("where.self")
def _where(call: Call) -> Type:
    condition, *branches = call.args
    if isinstance(condition, Type) and condition.sums:
        raise Refused("the condition is a part of a sum", "it has to be summed before")
    sums = elementwise(replace(call, args=tuple(branches)), "all").sums
    if any(b.is_zero for b in branches):  # a device leaves out of its part of a sum what is not its own
        condition = replace(condition, open=condition.open - sums)
    dims = elementwise(replace(call, args=(condition, *(replace(b, sums=_NONE) for b in branches))))
    return replace(dims, sums=sums - dims.open)


@rule("masked_fill.Scalar")
def _masked(call: Call) -> Type:
    x, mask, value = call.args[:3]
    made = elementwise(replace(call, args=(replace(x, sums=_NONE), mask)))
    if x.sums and value != 0:
        raise Refused("a part of a sum is filled with a number", "it has to be summed before")
    return replace(made, sums=x.sums - made.open)


@rule("zeros_like.default", "ones_like.default", "full_like.default", "empty_like.default")
def _like(call: Call) -> Type:
    x = call.args[0]
    return Type(x.dims, open=x.open)


def _constant(call: Call) -> Type:
    return Type(free(call.shapes[0]))


def _zeros(call: Call) -> Type:
    return Type(free(call.shapes[0]), is_zero=True)


rule("zeros.default", "new_zeros.default")(_zeros)
rule(
    "arange.default", "arange.start", "arange.start_step", "full.default", "ones.default", "new_full.default",
    "new_ones.default", "empty.memory_format", "new_empty.default",
)(_constant)  # fmt: skip


@rule("scalar_tensor.default")
def _number(call: Call) -> Type:
    return Type((), is_zero=call.args[0] == 0)


# -- views


@rule("view.default", "reshape.default", "_unsafe_view.default", "_reshape_alias.default")
def _view(call: Call) -> Type:
    x = call.args[0]
    dims, lost = regrouped(x.dims, call.shapes[0])
    return replace(x, dims=dims).opened(call.axes if lost == frozenset(FREE) else lost)


def _permuted(x: Type, order: Sequence[int]) -> Type:
    return replace(x, dims=tuple(x.dims[d] for d in order))


@rule("t.default")
def _t(call: Call) -> Type:
    x = call.args[0]
    return _permuted(x, range(len(x.dims) - 1, -1, -1))


@rule("transpose.int")
def _transposed(call: Call) -> Type:
    x, one, other = call.args
    order = list(range(len(x.dims)))
    order[one], order[other] = order[other], order[one]
    return _permuted(x, order)


@rule("permute.default")
def _permute(call: Call) -> Type:
    x, order = call.args[:2]
    return _permuted(x, [d % len(x.dims) for d in order])


@rule("unsqueeze.default")
def _unsqueezed(call: Call) -> Type:
    x, d = call.args
    d %= len(x.dims) + 1
    return replace(x, dims=(*x.dims[:d], (), *x.dims[d:]))


@rule("squeeze.dim", "squeeze.dims", "squeeze.default")
def _squeezed(call: Call) -> Type:
    x, d = call.args[0], call.at(1, range(len(call.args[0].dims)))
    gone = {one % len(x.dims) for one in ([d] if isinstance(d, int) else d)}
    kept = [dim for i, dim in enumerate(x.dims) if i not in gone or size(dim) != 1]
    lost = axes_of(dim for i, dim in enumerate(x.dims) if i in gone and size(dim) == 1)
    return replace(x, dims=tuple(kept)).opened(lost)


@rule("expand.default")
def _expanded(call: Call) -> Type:
    x, shape = call.args[0], call.shapes[0]
    more = len(shape) - len(x.dims)
    dims = []
    for d, n in enumerate(shape):
        own = x.dims[d - more] if d >= more else ()
        dims.append(((n, FREE),) if size(own) == 1 and not axes_of([own]) else own)
    lost = axes_of(own for own, n in zip(x.dims, shape[more:]) if size(own) == 1 and n != 1)
    return replace(x, dims=tuple(dims)).opened(lost)


@rule("slice.Tensor", "slice_backward.default", "constant_pad_nd.default", "select.int", "narrow.default")
def _some_rows(call: Call) -> Type:
    """Some rows of a dim, or more of them: known where no axis cuts it."""
    x, shape = call.args[0], call.shapes[0]
    if len(shape) < len(x.dims):  # select
        d = call.args[1] % len(x.dims)
        return replace(x, dims=(*x.dims[:d], *x.dims[d + 1 :])).opened(axes_of([x.dims[d]]))
    changed = [d for d, n in enumerate(shape) if size(x.dims[d]) != n]
    dims = tuple(whole(n) if d in changed else x.dims[d] for d, n in enumerate(shape))
    return replace(x, dims=dims).opened(axes_of(x.dims[d] for d in changed))


@rule("select_backward.default")
def _selected_back(call: Call) -> Type:
    x, shape, d = call.args[:3]
    d %= len(shape)
    return replace(x, dims=(*x.dims[:d], whole(shape[d]), *x.dims[d:]))


@rule("split.Tensor", "split_with_sizes.default", "chunk.default", "unbind.int")
def _pieces(call: Call) -> list[Type]:
    x, d = call.args[0], call.at(2, 0)
    if len(call.shapes[0]) < len(x.dims):  # unbind
        d = call.at(1, 0) % len(x.dims)
        one = replace(x, dims=(*x.dims[:d], *x.dims[d + 1 :])).opened(axes_of([x.dims[d]]))
        return [one] * len(call.shapes)
    d %= len(x.dims)
    found = []
    for shape in call.shapes:
        made, lost = _piece(x.dims[d], shape[d])
        found.append(replace(x, dims=(*x.dims[:d], made, *x.dims[d + 1 :])).opened(lost))
    return found


def _piece(dim: Dim, n: int) -> tuple[Dim, list[str]]:
    """So many rows of a dim: whole blocks of it."""
    if not axes_of([dim]) or size(dim) == n:
        return (dim if size(dim) == n else whole(n)), []
    outer, inner = dim[0], dim[1:]
    if not outer[1] and inner and n % size(inner) == 0:
        return joined([(n // size(inner), ()), *inner]), []
    return whole(n), axes_of([dim])


@rule("cat.default", "stack.default")
def _side_by_side(call: Call) -> Type:
    parts, d, shape = list(_types(call.args[0])), call.at(1, 0), call.shapes[0]
    is_stack = len(shape) > len(parts[0].dims)
    d %= len(shape)
    if is_stack:
        parts = [replace(p, dims=(*p.dims[:d], (), *p.dims[d:])) for p in parts]
    parts = [p for p in parts if len(p.dims) == len(shape)]  # cat leaves out what is empty
    lost = frozenset(a for p in parts for a in p.open)
    dims = [_met(parts, k, len(shape), n, lost) if k != d else () for k, n in enumerate(shape)]
    own = [without(p.dims[d], lost) for p in parts]
    made, gone = whole(shape[d]), frozenset(axes_of(own))
    if gone and all(same(own[0], one) for one in own):
        made, gone = joined([(len(own), ()), *own[0]]), _NONE
    elif all(is_free(one) or not one for one in own) and any(map(is_free, own)):
        made = ((shape[d], FREE),)
    dims[d] = made
    return Type(tuple(dims), sums=_summed(parts, "all", lost), open=lost).opened(gone)


# -- sums over dims


def _reduced(call: Call, dims: Any, keepdim: bool, x: Type) -> tuple[tuple[Dim, ...], frozenset[str]]:
    """The dims that are left, and the axes that cut what is gone."""
    gone = {d % max(1, len(x.dims)) for d in ([dims] if isinstance(dims, int) else dims or range(len(x.dims)))}
    left = [() if d in gone else dim for d, dim in enumerate(x.dims) if d not in gone or keepdim]
    axes = frozenset(axes_of(x.dims[d] for d in gone))
    return tuple(left), axes | (call.axes if any(is_free(x.dims[d]) for d in gone if x.dims) else _NONE)


@rule("sum.dim_IntList", "sum.default")
def _sum(call: Call) -> Type:
    x = call.args[0]
    dims, axes = _reduced(call, call.at(1), bool(call.at(2, call.kwargs.get("keepdim", False))), x)
    if any(is_free(dim) for dim in x.dims) and axes == call.axes:
        return Type(dims, sums=x.sums, open=x.open).opened(axes - frozenset(axes_of(dims)))
    if x.most:
        raise Refused(f"it lies as {x}", "the maximum comes first")
    return Type(dims, sums=x.sums | axes, open=x.open)


@rule("mean.dim", "mean.default")
def _mean(call: Call) -> Type:
    x = call.args[0]
    dims, axes = _reduced(call, call.at(1), bool(call.at(2, False)), x)
    if cut := axes & frozenset(axes_of(x.dims)):
        raise Refused(
            f"a mean over rows that {', '.join(sorted(cut))} cuts counts those of one device",
            "a sum, over the count of all",
        )
    return Type(dims, sums=x.sums, open=x.open)


@rule("amax.default", "amin.default")
def _largest(call: Call) -> Type:
    x = call.args[0]
    dims, axes = _reduced(call, call.at(1), bool(call.at(2, False)), x)
    if x.sums:
        raise Refused(f"it lies as {x}", "it has to be summed before")
    return Type(dims, most=(axes & frozenset(axes_of(x.dims))) | x.most, open=x.open)


@rule("any.dim", "any.dims", "any.default", "all.dim", "all.dims", "all.default")
def _any(call: Call) -> Type:
    x = call.args[0]
    dims, axes = _reduced(call, call.at(1), bool(call.at(2, False)), x)
    return Type(dims, open=x.open).opened((axes & frozenset(axes_of(x.dims))) | x.sums | x.most)


@rule("_softmax.default", "_log_softmax.default")
def _softmax(call: Call) -> Type:
    x, d = call.args[:2]
    if x.sums | x.most:
        raise Refused(f"it lies as {x}", "a softmax is of what is summed")
    _is_whole(x, d, "a softmax")
    return Type(x.dims, open=x.open)


@rule("_softmax_backward_data.default", "_log_softmax_backward_data.default")
def _softmax_back(call: Call) -> Type:
    gradient, result, d = call.args[:3]
    _is_whole(result, d, "a softmax")
    return elementwise(replace(call, args=(gradient, result), kwargs={}), "first")


def _is_whole(x: Type, d: int, what: str) -> None:
    if cut := axes_of([x.dims[d]]):
        raise Refused(f"dim {d % len(x.dims)} is cut by {', '.join(cut)}", f"{what} needs all of it")


# -- products


def _contracted(one: Dim, other: Dim, lost: frozenset[str]) -> frozenset[str]:
    """The axes along which the sum over a dim is in parts."""
    one, other = without(one, lost), without(other, lost)
    if one and other and not is_free(one) and not is_free(other) and not same(one, other):
        raise Refused(
            f"the sum runs over {_said(one)} of one operand and {_said(other)} of the other", "both have to lie alike"
        )
    return frozenset(axes_of([one, other]))


def _product(call: Call, a: Type, b: Type, batch: int) -> Type:
    """A matrix product, behind `batch` dims that both have."""
    lost = a.open | b.open
    dims = [_met([a, b], d, batch + 2, call.shapes[0][d], lost) for d in range(batch)]
    rows, columns = without(a.dims[-2], lost), without(b.dims[-1], lost)
    sums = _contracted(a.dims[-1], b.dims[-2], lost)
    if both := frozenset(axes_of([rows])) & frozenset(axes_of([columns])):
        raise Refused(f"{', '.join(both)} cuts rows of one operand and columns of the other", "one of them is whole")
    pending = _summed([a, b], "one", lost)
    if both := sums & pending:
        raise Refused(f"a part of a sum over {', '.join(both)} is summed over it once more", "one of them")
    return Type((*dims, rows, columns), sums=sums | pending, open=lost)


@rule("mm.default", "bmm.default")
def _matrices(call: Call) -> Type:
    a, b = call.args[:2]
    return _product(call, a, b, len(a.dims) - 2)


@rule("addmm.default")
def _added_product(call: Call) -> Type:
    bias, a, b = call.args[:3]
    product = _product(call, a, b, 0)
    return elementwise(Call((product, bias), {}, call.shapes, call.axes), "all")


@rule("convolution.default")
def _convolution(call: Call) -> Type:
    x, weight, bias = call.args[:3]
    if call.args[6] or call.args[8] != 1 or axes_of(x.dims[2:]) or axes_of(weight.dims[2:]):
        return _of_rows(call, x, [weight, *_types(bias)])
    lost = x.open | weight.open
    if not weight.dims[1] or not x.dims[1]:  # one channel of each group, where groups are cut
        lost |= frozenset(axes_of([x.dims[1], weight.dims[1], weight.dims[0]]))
    sums = _contracted(without(x.dims[1], lost), without(weight.dims[1], lost), lost)
    pending = _summed([x, weight], "one", lost)
    dims = (without(x.dims[0], lost), without(weight.dims[0], lost), *plain(call.shapes[0][2:]))
    made = Type(dims, sums=sums | pending, open=lost)
    if bias is None:
        return made
    like = replace(bias, dims=(bias.dims[0], *[()] * (len(dims) - 2)))
    return elementwise(Call((made, like), {}, call.shapes, call.axes), "all")


def _of_rows(call: Call, x: Type, others: list[Type]) -> Type:
    """What is known of an op that treats rows alike: that they are cut."""
    rows = frozenset(axes_of(x.dims[:1]))
    lost = frozenset(a for t in (x, *others) for a in t.known) - rows | frozenset(a for t in others for a in t.known)
    return Type((x.dims[0], *plain(call.shapes[0][1:]))).opened(lost | x.open)


@rule("convolution_backward.default")
def _convolution_back(call: Call) -> list[Type]:
    gradient, x, weight = call.args[:3]
    is_odd = (
        not weight.dims[1]
        or not x.dims[1]
        or call.args[7]
        or call.args[9] != 1
        or axes_of([*x.dims[2:], *gradient.dims[2:], *weight.dims[2:]])
    )
    lost = gradient.open | x.open | weight.open
    rows = _met([gradient, x], 0, len(x.dims), call.shapes[0][0] if call.shapes[0] else 1, lost)
    batch, out, into = frozenset(axes_of([rows])), without(weight.dims[0], lost), without(weight.dims[1], lost)
    has = [*call.at(10, (True, True, True))]
    of_x = _summed([gradient, weight], "one", lost) if has[0] else _NONE
    of_w = _summed([gradient, x], "one", lost) if has[1] else _NONE
    of_b = _summed([gradient], "one", lost) if has[2] else _NONE
    if is_odd:
        lost |= frozenset(axes_of([*x.dims[1:], *gradient.dims[1:], *weight.dims])) - batch
        out, into = without(out, lost), without(into, lost)
    else:
        _contracted(gradient.dims[1], weight.dims[0], lost)
        _contracted(x.dims[1], weight.dims[1], lost)
    pictures = [plain(s[2:]) if len(s) > 2 else () for s in call.shapes]
    if is_odd:
        into = whole(call.shapes[0][1]) if len(call.shapes[0]) > 1 else ()
    back = Type((rows, into, *pictures[0]), sums=of_x | frozenset(axes_of([out])), open=lost)
    of_weight = Type((out, without(weight.dims[1], lost), *pictures[1]), sums=of_w | batch, open=lost)
    of_bias = Type((out,), sums=of_b | batch, open=lost)
    return [back, of_weight, of_bias]


# -- norms, tables, losses, attention


@rule("native_layer_norm.default")
def _layer_norm(call: Call) -> list[Type]:
    x, shape, weight, bias = call.args[:4]
    if x.sums | x.most:
        raise Refused(f"it lies as {x}", "a norm is of what is summed")
    for d in range(1, len(shape) + 1):
        _is_whole(x, -d, "a norm")
    lost = frozenset(a for t in _types([x, weight, bias]) for a in t.open)
    for t in _types([weight, bias]):
        if axes_of(t.dims) or t.most - lost:
            raise Refused(f"the scale of a norm lies as {t}", "it has to be whole")
    pending = _summed(list(_types([weight, bias])), "all", lost)  # it is linear in both together
    kept = len(x.dims) - len(shape)
    statistic = Type((*x.dims[:kept], *[()] * len(shape)), open=lost)
    return [replace(x, sums=pending, open=lost), statistic, statistic]


@rule("native_layer_norm_backward.default")
def _layer_norm_back(call: Call) -> list[Type]:
    gradient, x, shape, _, _, weight = call.args[:6]
    lost = gradient.open | x.open
    dims = tuple(_met([gradient, x], d, len(x.dims), n, lost) for d, n in enumerate(x.shape))
    pending = _summed([gradient, replace(x, sums=_NONE)], "first", lost)
    rows = frozenset(axes_of(dims[: len(dims) - len(shape)]))
    of_scale = Type(plain(shape), sums=pending | rows, open=lost)
    of_x = _summed([gradient, *_types(weight)], "one", lost)
    return [Type(dims, sums=of_x, open=lost), of_scale, of_scale]


@rule("native_batch_norm.default", "_native_batch_norm_legit.default")
def _batch_norm(call: Call) -> list[Type]:
    x = call.args[0]
    if call.args[5] and axes_of([x.dims[0], *x.dims[2:]]):
        raise Refused(f"it lies as {x}", "statistics are those of all rows")
    lost = frozenset(a for t in call.types for a in t.open)
    dims = tuple(without(dim, lost) for dim in x.dims)
    statistic = Type((dims[1],) if call.shapes[1] != (0,) else plain((0,)), open=lost)
    return [Type(dims, sums=_summed([x], "", lost), open=lost), statistic, statistic]


@rule("native_batch_norm_backward.default")
def _batch_norm_back(call: Call) -> list[Type]:
    gradient, x = call.args[:2]
    lost = frozenset(a for t in call.types for a in t.open)
    dims = tuple(_met([gradient, x], d, len(x.dims), n, lost) for d, n in enumerate(x.shape))
    pending = _summed([gradient, x], "first", lost)
    rows = frozenset(axes_of([dims[0], *dims[2:]]))
    of_scale = Type((dims[1],), sums=pending | rows, open=lost)
    return [Type(dims, sums=pending, open=lost), of_scale, of_scale]


@rule("embedding.default")
def _embedding(call: Call) -> Type:
    table, rows = call.args[:2]
    cut = frozenset(axes_of([table.dims[0]]))
    own = cut & rows.open  # a device looks up the rows that are its own: a part of the sum of all
    lost = table.open | (rows.open | cut) - own
    dims = (*(without(d, lost) for d in rows.dims), without(table.dims[1], lost))
    return Type(dims, sums=(table.sums | own) - lost, open=lost)


@rule("embedding_dense_backward.default")
def _embedding_back(call: Call) -> Type:
    gradient, rows = call.args[:2]
    if both := gradient.sums & rows.open:
        raise Refused(
            f"the gradient of a table's own rows is a part of a sum over {', '.join(both)}",
            "it has to be summed before",
        )
    own = gradient.open & rows.open  # of its own rows a device has the gradient
    lost = (gradient.open | rows.open) - own
    gradient, rows = replace(gradient, open=lost), replace(rows, open=lost)
    dims = [_met([gradient, replace(rows, dims=(*rows.dims, ()))], d, len(gradient.dims), n, lost)
            for d, n in enumerate(gradient.shape[:-1])]  # fmt: skip
    summed = frozenset(axes_of(dims))
    table = ((call.shapes[0][0], tuple(sorted(own))),) if own else whole(call.shapes[0][0])
    made = (table, without(gradient.dims[-1], lost))
    return Type(made, sums=(gradient.sums - lost) | summed, open=lost)


@rule("nll_loss_forward.default", "nll_loss2d_forward.default")
def _nll(call: Call) -> list[Type]:
    x, target, _, reduction = call.args[:4]
    lost = frozenset(a for t in call.types for a in t.open) | frozenset(axes_of([x.dims[min(1, len(x.dims) - 1)]]))
    if x.sums:
        raise Refused(f"it lies as {x}", "a loss is of what is summed")
    rows = tuple(without(d, lost) for d in target.dims)
    axes = frozenset(axes_of(rows))
    if reduction == 1 and axes:
        raise Refused(f"a mean over rows that {', '.join(sorted(axes))} cuts counts those of one device", "a sum")
    if reduction == 0:
        return [Type(rows, open=lost), Type((), open=lost | axes)]
    return [Type((), sums=axes, open=lost), Type((), sums=axes, open=lost)]


@rule("nll_loss_backward.default", "nll_loss2d_backward.default")
def _nll_back(call: Call) -> Type:
    gradient, x = call.args[:2]
    lost = gradient.open | x.open | frozenset(axes_of([x.dims[min(1, len(x.dims) - 1)]]))
    return Type(tuple(without(d, lost) for d in x.dims), sums=gradient.sums - lost, open=lost)


_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def _heads(types: Sequence[Type]) -> tuple[frozenset[str], tuple[Dim, Dim], list[str]]:
    """Along which axes nothing is known of an attention, how its rows and heads lie, and what cuts positions."""
    lost = frozenset(a for t in types for a in t.open)
    cut = [tuple(sorted(axes_of([t.dims[1]]))) for t in types]
    if len({tuple(a for a in c if a not in lost) for c in cut}) > 1:
        raise Refused(f"heads of queries, keys and values lie as {', '.join(map(str, types))}", "they are cut alike")
    rows = _met([replace(t, dims=(t.dims[0],)) for t in types], 0, 1, size(types[0].dims[0]), lost)
    positions = [a for t in types for a in axes_of([t.dims[2]])]
    lost |= frozenset(positions) | frozenset(a for t in types for a in axes_of([t.dims[3]]))
    return lost, (without(rows, lost), without(types[0].dims[1], lost)), positions


@rule(*(f"{name}.default" for name in _ATTENTION))
def _attention(call: Call) -> list[Type]:
    q, k, v = call.args[:3]
    if q.sums | k.sums:
        raise Refused(f"queries and keys lie as {q}, {k}", "attention is of what is summed")
    lost, (rows, heads), _ = _heads([q, k, replace(v, sums=_NONE)])
    made = Type((rows, heads, *plain(call.shapes[0][2:])), sums=v.sums - lost, open=lost)  # it is linear in values
    statistic = Type((rows, heads, *plain(call.shapes[1][2:])), open=lost) if len(call.shapes) > 1 else made
    rest = [Type(plain(s), open=lost) for s in call.shapes[2:]]
    return [made, statistic, *rest]


@rule(*(f"{name}_backward.default" for name in _ATTENTION))
def _attention_back(call: Call) -> list[Type]:
    gradient, q, k, v = call.args[:4]
    lost, (rows, _), _ = _heads([replace(gradient, sums=_NONE), q, k, replace(v, sums=_NONE)])
    of_both, of_values = _summed([gradient, v], "one", lost), gradient.sums - lost
    found = [
        Type((rows, without(t.dims[1], lost), *plain(t.shape[2:])), sums=sums, open=lost)
        for t, sums in ((q, of_both), (k, of_both), (v, of_values))
    ]
    return [*found, *(Type(plain(s), open=lost) for s in call.shapes[3:])]


@rule("gather.default")
def _gathered(call: Call) -> Type:
    x, d, places = call.args[:3]
    cut = frozenset(axes_of([x.dims[d]]))
    own = cut & places.open  # of its own columns: a part of the sum of all
    lost = x.open | (places.open | cut) - own
    places = replace(places, open=places.open - own)
    met = [_met([replace(x, dims=tuple(() if i == d % len(x.dims) else m for i, m in enumerate(x.dims))), places],
                i, len(x.dims), n, lost) for i, n in enumerate(call.shapes[0])]  # fmt: skip
    return Type(tuple(met), sums=(x.sums | own) - lost, open=lost)


@rule("scatter_add.default")
def _scattered(call: Call) -> Type:
    """Into zeros: of what goes to its own columns a device has those columns."""
    into, d, places, given = call.args[:4]
    own = places.open & given.open
    if not (into.is_zero and own) or places.sums | given.sums | given.most:
        return unknown(call)
    d %= len(into.dims)
    lost = (places.open | given.open) - own
    parts = [replace(t, dims=tuple(() if i == d else dim for i, dim in enumerate(t.dims))) for t in (places, given)]
    dims = [_met(parts, i, len(into.dims), n, lost) for i, n in enumerate(call.shapes[0])]
    dims[d] = ((call.shapes[0][d], tuple(sorted(own))),)
    return Type(tuple(dims), open=lost)


@rule("max_pool2d_with_indices.default", "avg_pool2d.default", "_adaptive_avg_pool2d.default")
def _pooled(call: Call) -> Any:
    x = call.args[0]
    lost = frozenset(axes_of(x.dims[-2:])) | x.open
    dims = (*(without(d, lost) for d in x.dims[:-2]), *plain(call.shapes[0][-2:]))
    made = Type(dims, sums=_NONE if "max" in str(len(call.shapes)) else x.sums, open=lost)
    return [made] * len(call.shapes) if len(call.shapes) > 1 else made
