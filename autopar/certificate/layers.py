"""Rules of norms, look-ups, losses, attention and pools."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.certificate.calls import TypedCall, rule, types_in, unknown
from autopar.certificate.elementwise import met, summed
from autopar.certificate.reductions import needs_whole
from autopar.certificate.types import Dim, Refused, Type, axes_of, is_free, joined, plain, same, size, whole, without

_NONE: frozenset[str] = frozenset()


@rule("native_layer_norm.default")
def _layer_norm(call: TypedCall) -> list[Type]:
    x, shape, weight, bias = call.args[:4]
    if x.sums | x.most:
        raise Refused(f"it lies as {x}", "a norm is of what is summed")
    for d in range(1, len(shape) + 1):
        needs_whole(x, -d, "a norm")
    lost = frozenset(a for t in types_in([x, weight, bias]) for a in t.open)
    for t in types_in([weight, bias]):
        if axes_of(t.dims) or t.most - lost:
            raise Refused(f"the scale of a norm lies as {t}", "it has to be whole")
    pending = summed(list(types_in([weight, bias])), "all", lost)  # The result is linear in both together.
    kept = len(x.dims) - len(shape)
    statistic = Type((*x.dims[:kept], *[()] * len(shape)), open=lost)
    return [Type(x.dims, sums=pending).opened(lost), statistic, statistic]


@rule("native_layer_norm_backward.default")
def _layer_norm_back(call: TypedCall) -> list[Type]:
    gradient, x, shape, mean, root, weight = call.args[:6]
    lost = gradient.open | x.open
    statistics = list(types_in([mean, root]))
    dims = tuple(met([gradient, x, *statistics], d, len(x.dims), n, lost) for d, n in enumerate(x.shape))
    pending = summed([gradient, x, *statistics], "first", lost)
    rows = frozenset(axes_of(dims[: len(dims) - len(shape)]))
    of_scale = Type(plain(shape), sums=pending | rows, open=lost)
    of_x = summed([gradient, *types_in(weight)], "one", lost)
    return [Type(dims, sums=of_x, open=lost), of_scale, of_scale]


@rule("native_batch_norm.default", "_native_batch_norm_legit.default")
def _batch_norm(call: TypedCall) -> list[Type]:
    x, weight, bias = call.args[:3]
    if call.args[5] and axes_of([x.dims[0], *x.dims[2:]]):
        raise Refused(f"it lies as {x}", "statistics are those of all rows")
    lost = frozenset(a for t in call.types for a in t.open)
    if (x.sums | x.most) - lost:
        raise Refused(f"it lies as {x}", "a norm is of what is summed")
    each = [replace(x, dims=x.dims[1:2]), *types_in(call.args[1:5])]  # types along channels
    channels = met(each, 0, 1, x.shape[1], lost)
    dims = (without(x.dims[0], lost), channels, *(without(dim, lost) for dim in x.dims[2:]))
    if any((t.sums | t.most) - lost for t in types_in(call.args[3:5])):
        raise Refused("the running statistics are a part of a sum", "they have to be summed before")
    pending = summed(list(types_in([weight, bias])), "all", lost)  # The result is linear in both together.
    statistic = Type((dims[1],) if call.shapes[1] != (0,) else plain((0,)), open=lost)
    return [Type(dims, sums=pending, open=lost), statistic, statistic]


@rule("native_batch_norm_backward.default")
def _batch_norm_back(call: TypedCall) -> list[Type]:
    gradient, x, weight = call.args[:3]
    lost = frozenset(a for t in call.types for a in t.open)
    statistics = list(types_in(call.args[3:7]))
    dims = [met([gradient, x], d, len(x.dims), n, lost) for d, n in enumerate(x.shape)]
    each = [replace(x, dims=(dims[1],)), *types_in(weight), *statistics]  # types along channels
    dims[1] = met([t for t in each if t.shape != (0,)], 0, 1, x.shape[1], lost)
    pending = summed([gradient, x, *statistics], "first", lost)
    rows = frozenset(axes_of([dims[0], *dims[2:]]))
    if call.args[7] and rows:
        raise Refused(f"rows lie as {x}", "statistics are those of all rows")
    of_scale = Type((dims[1],), sums=pending | rows, open=lost)
    of_x = summed([gradient, *types_in(weight)], "one", lost)
    return [Type(tuple(dims), sums=of_x, open=lost), of_scale, of_scale]


@rule("embedding.default")
def _embedding(call: TypedCall) -> Type:
    table, rows = call.args[:2]
    cut = frozenset(axes_of([table.dims[0]]))
    own = cut & rows.places  # a device looks up the rows that are its own: a part of the sum of all
    lost = table.open | (rows.open | cut) - own
    dims = (*(without(d, lost) for d in rows.dims), without(table.dims[1], lost))
    return Type(dims, sums=(table.sums | own) - lost, open=lost)


@rule("embedding_dense_backward.default")
def _embedding_back(call: TypedCall) -> Type:
    gradient, rows = call.args[:2]
    if both := gradient.sums & rows.places:
        raise Refused(
            f"the gradient of a table's own rows is a part of a sum over {', '.join(both)}",
            "it has to be summed before",
        )
    if call.at(4) and axes_of(rows.dims):
        raise Refused(f"rows lie as {rows}", "a gradient that is scaled by counts needs all of them")
    own = gradient.places & rows.places  # A device has the gradient of its own rows.
    lost = (gradient.open | rows.open) - own
    gradient, rows = replace(gradient, open=lost), replace(rows, open=lost)
    dims = [met([gradient, replace(rows, dims=(*rows.dims, ()))], d, len(gradient.dims), n, lost)
            for d, n in enumerate(gradient.shape[:-1])]  # fmt: skip
    summed = frozenset(axes_of(dims))
    made = (_of_own(call.shapes[0][0], own), without(gradient.dims[-1], lost))
    return Type(made, sums=(gradient.sums - lost) | summed, open=lost).opened(own if len(own) > 1 else ())


def _of_own(rows: int, own: frozenset[str]) -> Dim:
    """A dim of which each device has rows of its own; for several axes their order cannot be told."""
    return ((rows, tuple(own)),) if own else whole(rows)


@rule("nll_loss_forward.default", "nll_loss2d_forward.default")
def _nll(call: TypedCall) -> list[Type]:
    x, target, weight, reduction = call.args[:4]
    _needs_whole_weights(weight)
    of_class = min(1, len(x.dims) - 1)
    lost = frozenset(a for t in call.types for a in t.open) | frozenset(axes_of([x.dims[of_class]]))
    parts = [replace(x, dims=(*x.dims[:of_class], *x.dims[of_class + 1 :])), target]
    rows = tuple(met(parts, d, len(target.dims), n, lost) for d, n in enumerate(target.shape))
    axes = frozenset(axes_of(rows))
    if reduction == 1 and axes:
        raise Refused(f"a mean over rows that {', '.join(sorted(axes))} cuts counts those of one device", "a sum")
    pending = x.sums - lost  # The loss of a row is linear in the row.
    if reduction == 0:
        return [Type(rows, sums=pending, open=lost), Type((), open=lost | axes)]
    return [Type((), sums=axes | pending, open=lost), Type((), sums=axes, open=lost)]


def _needs_whole_weights(weight: Type | None) -> None:
    if weight is not None and (weight.sums or axes_of(weight.dims)):
        raise Refused(f"the weights of classes lie as {weight}", "they have to be whole")


@rule("nll_loss_backward.default", "nll_loss2d_backward.default")
def _nll_back(call: TypedCall) -> Type:
    gradient, x, _, weight, reduction, _, of_all = call.args[:7]
    _needs_whole_weights(weight)
    lost = gradient.open | x.open | frozenset(axes_of([x.dims[min(1, len(x.dims) - 1)]]))
    if reduction == 1 and of_all.sums - lost:
        raise Refused(f"the weight of all targets lies as {of_all}", "a mean divides by the sum")
    return Type(tuple(without(d, lost) for d in x.dims), sums=gradient.sums - lost, open=lost)


@rule("autopar.cross_entropy_part_backward.default")
def _part_back(call: TypedCall) -> Type:
    x, gradient = call.args[:2]  # The statistics of rows were reduced before.
    lost = gradient.open | x.open
    return Type(tuple(without(d, lost) for d in x.dims), sums=gradient.sums - lost, open=lost)


_ATTENTION = {  # the places of `is_causal` among the arguments of forward and of backward
    "_scaled_dot_product_flash_attention_for_cpu": (4, 7),
    "_scaled_dot_product_flash_attention": (4, 11),
    "_scaled_dot_product_efficient_attention": (6, 11),
    "_scaled_dot_product_cudnn_attention": (6, 14),
}


def _of_four(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    if len(dims) == 3:  # rows, heads and positions
        return (*dims, ())
    return (*[()] * (4 - len(dims)), *dims)


def _known_axes(dim: Dim, lost: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(axis for axis in axes_of([dim]) if axis not in lost))


@dataclass(frozen=True, slots=True)
class _Lies:
    """Rows, heads and queries of an attention, and the axes along which it is unknown."""

    rows: Dim
    heads: Dim
    queries: Dim
    lost: frozenset[str]
    inside: frozenset[str] = _NONE  # axes that cut the heads of queries that share one of keys

    @property
    def cuts(self) -> frozenset[str]:
        """The axes that cut queries, or heads that share keys: each device there has all of these."""
        return frozenset(axes_of([self.queries])) | self.inside

    def result(self, shape: Sequence[int], sums: frozenset[str] = _NONE) -> Type:
        """A result or a statistic of each query; unknown along axes that cut them where it has other rows."""
        is_known = len(shape) > 2 and shape[2] == size(self.queries)
        dims = (self.rows, self.heads, self.queries if is_known else whole(shape[2]), *plain(shape[3:]))
        return Type(dims, sums=sums, open=self.lost).opened(() if is_known else self.cuts)


def _lies(queries: Sequence[Type], keys: Sequence[Type], is_causal: bool) -> _Lies:
    """Say how an attention lies, from queries, masks and results, and from keys and values.

    The first operand has all four dims; a mask may lack the first of them, and a statistic the last.
    """
    types = [replace(t, dims=_of_four(t.dims)) for t in (*queries, *keys)]
    queries, keys = types[: len(queries)], types[len(queries) :]
    lost = frozenset(a for t in types for a in t.open)
    inside = _inside_groups(queries, keys, lost)
    rows = met([replace(t, dims=(t.dims[0],)) for t in types], 0, 1, size(types[0].dims[0]), lost)
    lost |= frozenset(a for t in keys for a in axes_of([t.dims[2]]))
    lost |= frozenset(a for t in types for a in axes_of([t.dims[3]]))
    n = size(queries[0].dims[2])
    alike = [t for t in queries if size(t.dims[2]) in (1, n)]
    if len(alike) < len(queries):  # rows that do not meet, or a statistic that is padded
        lost |= frozenset(a for t in queries for a in axes_of([t.dims[2]]))
    own = met([replace(t, dims=(t.dims[2],)) for t in alike], 0, 1, n, lost)
    if is_causal and axes_of([own]):
        raise Refused(f"queries are cut, and lie as {queries[0]}", "a mask by places counts those of the whole")
    return _Lies(without(rows, lost), without(types[0].dims[1], lost), own, lost, inside - lost)


def _inside_groups(queries: Sequence[Type], keys: Sequence[Type], lost: frozenset[str]) -> frozenset[str]:
    """The axes that cut heads of queries inside each group that shares a head of keys."""
    heads = queries[0].dims[1]
    found = _NONE
    cuts = set()
    for t in (*queries, *keys):
        dim = t.dims[1]
        if not dim or is_free(dim):  # all share a head that is the only one, or repeated
            continue
        rest = tuple(a for a in axes_of([heads]) if a not in axes_of([dim]))
        if rest and any(t is key for key in keys) and same(heads, joined([*dim, (size(heads) // size(dim), rest)])):
            found |= frozenset(rest)
            dim = heads
        cuts.add(_known_axes(dim, lost))
    if len(cuts) > 1:
        said = ", ".join(map(str, (*queries, *keys)))
        raise Refused(f"heads of queries, keys and values lie as {said}", "they are cut alike")
    return found


def _is_causal(call: TypedCall, place: int) -> bool:
    return bool(call.kwargs.get("is_causal", call.at(place, False)))


def _attention(call: TypedCall, causal: int) -> list[Type]:
    q, k, v = call.args[:3]
    masks = [*types_in(call.args[3:]), *types_in(call.kwargs)]
    if q.sums.union(k.sums, *(t.sums for t in masks)):
        raise Refused(f"queries, keys and masks lie as {', '.join(map(str, (q, k, *masks)))}", "they are summed before")
    lies = _lies([q, *masks], [k, replace(v, sums=_NONE)], _is_causal(call, causal))
    made = lies.result(call.shapes[0], v.sums - lies.lost)  # linear in v
    statistic = lies.result(call.shapes[1]) if len(call.shapes) > 1 else made
    rest = [Type(plain(s), open=lies.lost) for s in call.shapes[2:]]
    return [made, statistic, *rest]


def _attention_back(call: TypedCall, causal: int) -> list[Type]:
    gradient, q, k, v = call.args[:4]
    kept = [t for t in (*call.args[4:7], *call.kwargs.values()) if isinstance(t, Type)]
    out = [t for t in call.args[4:6] if isinstance(t, Type) and len(t.dims) == 4][-1]  # a bias may stand before it
    *of_queries, key, value = (replace(t, sums=_NONE) for t in (gradient, q, *kept, k, v))
    lies = _lies(of_queries, [key, value], _is_causal(call, causal))
    lost = lies.lost
    are_summed = not q.sums.union(k.sums, *(t.sums for t in kept if t is not out)) - lost
    if not are_summed or (out.sums ^ v.sums) - lost:
        said = ", ".join(map(str, (q, k, v, *kept)))
        raise Refused(
            f"queries, keys, values and results lie as {said}", "a part of a sum are values and results alone"
        )
    of_both = summed([gradient, v], "one", lost)
    of_values = gradient.sums - lost
    of_heads = frozenset(axes_of([q.dims[1]])) - lost
    found = []
    for t, sums in ((q, of_both), (k, of_both | lies.cuts), (v, of_values | lies.cuts)):
        is_shared = size(t.dims[1]) == 1 and not axes_of([t.dims[1]])  # All heads of queries share it.
        heads = () if is_shared else q.dims[1] if is_free(t.dims[1]) else t.dims[1]
        made = (lies.rows, without(heads, lost), lies.queries if t is q else whole(t.shape[2]), *plain(t.shape[3:]))
        found.append(Type(made, sums=sums | of_heads if is_shared else sums, open=lost))
    return [*found, *(Type(plain(s), open=lost | lies.cuts) for s in call.shapes[3:])]


for _name, (_forward, _backward) in _ATTENTION.items():
    rule(f"{_name}.default")(functools.partial(_attention, causal=_forward))
    rule(f"{_name}_backward.default")(functools.partial(_attention_back, causal=_backward))


def _with_one_row(t: Type, d: int) -> Type:
    return replace(t, dims=tuple(() if i == d else dim for i, dim in enumerate(t.dims)))


@rule("gather.default")
def _gathered(call: TypedCall) -> Type:
    x, d, places = call.args[:3]
    cut = frozenset(axes_of([x.dims[d]]))
    own = cut & places.places  # A device reads its own columns: parts of a sum.
    lost = x.open | (places.open | cut) - own
    places = replace(places, open=places.open - own)
    others = _with_one_row(x, d % len(x.dims))
    dims = [met([others, places], i, len(x.dims), n, lost) for i, n in enumerate(call.shapes[0])]
    return Type(tuple(dims), sums=(x.sums | own) - lost, open=lost)


@rule("scatter_add.default")
def _scattered(call: TypedCall) -> Type:
    """Scatter into zeros, one entry per row, of a device's own columns: the result has those columns."""
    into, d, places, given = call.args[:4]
    own = places.places & given.places
    is_one_a_row = len(into.dims) == 2 and size(places.dims[d]) == 1
    if not own:
        return _scattered_rows(call)
    if not (into.is_zero and is_one_a_row) or places.sums | given.sums | given.most:
        return unknown(call)
    d %= len(into.dims)
    lost = (places.open | given.open) - own
    parts = [_with_one_row(t, d) for t in (places, given)]
    dims = [met(parts, i, len(into.dims), n, lost) for i, n in enumerate(call.shapes[0])]
    dims[d] = _of_own(call.shapes[0][d], own)
    return Type(tuple(dims), open=lost).opened(own if len(own) > 1 else ())


@rule("topk.default", "sort.default", "sort.stable")
def _largest_of_rows(call: TypedCall) -> list[Type]:
    """Values and places of the largest entries along a dim, of which a device has to have all."""
    x = call.args[0]
    is_stable = len(call.args) > 1 and isinstance(call.args[1], bool)
    named = call.kwargs.get("dim", call.at(2, -1) if len(call.shapes) and call.shapes[0] != x.shape else None)
    d = (named if named is not None else call.at(1, -1) if not is_stable else -1) % len(x.dims)
    if x.sums | x.most:
        raise Refused(f"it lies as {x}", "the largest entries are of what is summed")
    needs_whole(x, d, "the largest entries along a dim")
    return [replace(x, dims=(*x.dims[:d], whole(shape[d]), *x.dims[d + 1 :])) for shape in call.shapes]


@rule("max.dim", "min.dim")
def _largest_of_each_row(call: TypedCall) -> list[Type]:
    """The largest entry along a dim and its place."""
    x = call.args[0]
    d = call.args[1] % len(x.dims)
    if x.sums | x.most:
        raise Refused(f"it lies as {x}", "the largest entry is of what is summed")
    needs_whole(x, d, "the largest entry along a dim")
    made = replace(x, dims=(*x.dims[:d], *([()] if call.at(2, False) else []), *x.dims[d + 1 :]))
    return [made, made]


@rule("scatter.src", "scatter.value")
def _scattered_rows(call: TypedCall) -> Type:
    """Entries at places of a dim that no axis cuts; the result is linear in what is put in.

    A number that is put in, other than 0, is part of no sum.
    """
    into, d, places, given = call.args[:4]
    types = [into, places, *types_in(given)]
    d %= len(into.dims)
    lost = frozenset(a for t in types for a in t.open)
    has_other_rows = any(size(t.dims[i]) != n for t in types for i, n in enumerate(call.shapes[0]) if i != d)
    if has_other_rows or axes_of([t.dims[d] for t in types]) or (places.sums | places.most) - lost:
        return unknown(call)
    parts = [_with_one_row(t, d) for t in types]
    dims = [met(parts, i, len(into.dims), n, lost) for i, n in enumerate(call.shapes[0])]
    dims[d] = whole(call.shapes[0][d])
    put_in = types_in(given) if isinstance(given, Type) else [Type((), is_zero=given == 0)]
    return Type(tuple(dims), sums=summed([into, *put_in], "all", lost), open=lost)


@rule("slice_scatter.default", "select_scatter.default")
def _put_in(call: TypedCall) -> Type:
    """A run of rows of a dim, of which a device has all, is replaced, or one of them."""
    into, given = call.args[:2]
    d = call.at(2, 0) % len(into.dims)
    if len(given.dims) < len(into.dims):
        given = replace(given, dims=(*given.dims[:d], (), *given.dims[d:]))
    lost = into.open | given.open
    if axes_of([into.dims[d], given.dims[d]]):
        return unknown(call)
    parts = [_with_one_row(t, d) for t in (into, given)]
    dims = [met(parts, i, len(into.dims), n, lost) for i, n in enumerate(call.shapes[0])]
    dims[d] = whole(call.shapes[0][d])
    return Type(tuple(dims), sums=summed([into, given], "all", lost), open=lost)


@rule("max_pool2d_with_indices.default")
def _largest_in_windows(call: TypedCall) -> list[Type]:
    x = call.args[0]
    if x.sums | x.most:
        raise Refused(f"it lies as {x}", "the largest of a window is of what is summed")
    return [_pictures(x, shape) for shape in call.shapes]


@rule("avg_pool2d.default", "_adaptive_avg_pool2d.default")
def _means_of_windows(call: TypedCall) -> Type:
    return _pictures(call.args[0], call.shapes[0])


def _pictures(x: Type, shape: Sequence[int]) -> Type:
    """Images of another size; nothing is known along axes that cut their height or width."""
    return replace(x, dims=(*x.dims[:-2], *plain(shape[-2:]))).opened(axes_of(x.dims[-2:]))


@rule("index_copy.default")
def _rows_written(call: TypedCall) -> Type:
    """Rows of a tensor with others written at places along a dim, which is whole in both."""
    x, dim, index, source = call.args[:4]
    if axes_of(index.dims) or index.sums | index.most:
        raise Refused(f"places lie as {index}", "every device has to write to all of them")
    for t in (x, source):
        needs_whole(t, dim, "writing by place")
    lost = x.open | index.open | source.open
    beside = [(d, n) for d, n in enumerate(x.shape) if d != dim % len(x.dims)]
    dims = [whole(n) for n in x.shape]
    for d, n in beside:
        dims[d] = met([x, source], d, len(x.dims), n, lost)
    return Type(tuple(dims), sums=summed([x, source], "all", lost), open=lost)


@rule("index_select.default")
def _rows_selected(call: TypedCall) -> Type:
    """Rows at places along a dim, which is whole."""
    x, dim, index = call.args[:3]
    needs_whole(x, dim, "reading by place")
    lost = x.open | index.open
    if index.sums | index.most:
        raise Refused(f"places lie as {index}", "they have to be summed before")
    dims = [without(d, lost) for d in x.dims]
    dims[dim % len(dims)] = without(index.dims[0], lost) if index.dims else whole(1)
    return Type(tuple(dims), sums=x.sums - lost, most=x.most - lost, open=lost)
