"""Rules of views, and of concatenations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.certificate.calls import TypedCall, rule, types_in
from autopar.certificate.elementwise import met, summed
from autopar.certificate.readings import regrouped
from autopar.certificate.types import (
    FREE,
    Dim,
    Refused,
    Type,
    axes_of,
    is_free,
    joined,
    same,
    size,
    whole,
    without,
)

_NONE: frozenset[str] = frozenset()


VIEWS = tuple(f"aten.{name}.default" for name in ("view", "reshape", "_unsafe_view", "_reshape_alias"))


@rule(*(name.removeprefix("aten.") for name in VIEWS))
def _view(call: TypedCall) -> Type:
    x = call.args[0]
    dims, lost = regrouped(x.dims, call.shapes[0], call.wholes)
    return replace(x, dims=dims).opened(call.axes if lost == frozenset(FREE) else lost)


def _permuted(x: Type, order: Sequence[int]) -> Type:
    return replace(x, dims=tuple(x.dims[d] for d in order))


@rule("t.default")
def _t(call: TypedCall) -> Type:
    x = call.args[0]
    return _permuted(x, range(len(x.dims) - 1, -1, -1))


@rule("transpose.int")
def _transposed(call: TypedCall) -> Type:
    x, one, other = call.args
    order = list(range(len(x.dims)))
    order[one], order[other] = order[other], order[one]
    return _permuted(x, order)


@rule("permute.default")
def _permute(call: TypedCall) -> Type:
    x, order = call.args[:2]
    return _permuted(x, [d % len(x.dims) for d in order])


@rule("unsqueeze.default")
def _unsqueezed(call: TypedCall) -> Type:
    x, d = call.args
    d %= len(x.dims) + 1
    return replace(x, dims=(*x.dims[:d], (), *x.dims[d:]))


@rule("squeeze.dim", "squeeze.dims", "squeeze.default")
def _squeezed(call: TypedCall) -> Type:
    x = call.args[0]
    d = call.at(1, range(len(call.args[0].dims)))
    gone = {one % len(x.dims) for one in ([d] if isinstance(d, int) else d)}
    kept = [dim for i, dim in enumerate(x.dims) if i not in gone or size(dim) != 1]
    lost = axes_of(dim for i, dim in enumerate(x.dims) if i in gone and size(dim) == 1)
    return replace(x, dims=tuple(kept)).opened(lost)


@rule("expand.default")
def _expanded(call: TypedCall) -> Type:
    x = call.args[0]
    shape = call.shapes[0]
    more = len(shape) - len(x.dims)
    dims = []
    for d, n in enumerate(shape):
        own = x.dims[d - more] if d >= more else ()
        dims.append(((n, FREE),) if size(own) == 1 and not axes_of([own]) else own)
    lost = axes_of(own for own, n in zip(x.dims, shape[more:]) if size(own) == 1 and n != 1)
    return replace(x, dims=tuple(dims)).opened(lost)


@rule("constant_pad_nd.default")
def _padded(call: TypedCall) -> Type:
    x = call.args[0]
    padded = [len(x.dims) - 1 - i // 2 for i, n in enumerate(call.args[1]) if n]  # also where as many rows are cut off
    dims = tuple(whole(call.shapes[0][d]) if d in padded else dim for d, dim in enumerate(x.dims))
    made = replace(x, dims=dims).opened(axes_of(x.dims[d] for d in padded))
    if call.at(2, 0) == 0:
        return made
    if x.sums:
        raise Refused("a part of a sum is padded with a number", "it has to be summed before")
    return replace(made, is_zero=False)


@rule("slice.Tensor", "slice_backward.default", "select.int", "narrow.default")
def _some_rows(call: TypedCall) -> Type:
    """Some rows of a dim, or more of them: known where no axis cuts the dim."""
    x = call.args[0]
    shape = call.shapes[0]
    if len(shape) < len(x.dims):  # select
        d = call.args[1] % len(x.dims)
        return replace(x, dims=(*x.dims[:d], *x.dims[d + 1 :])).opened(axes_of([x.dims[d]]))
    changed = [d for d, n in enumerate(shape) if size(x.dims[d]) != n]
    if len(changed) == 1 and _begins_a_block(call, x.dims[changed[0]]):
        d = changed[0]
        made, lost = _piece(x.dims[d], shape[d])
        return replace(x, dims=(*x.dims[:d], made, *x.dims[d + 1 :])).opened(lost)
    dims = tuple(_fewer(x.dims[d], n) if d in changed else x.dims[d] for d, n in enumerate(shape))
    return replace(x, dims=dims).opened(axes_of(x.dims[d] for d in changed))


def _begins_a_block(call: TypedCall, dim: Dim) -> bool:
    """Whether a run of neighbouring rows begins where a block of this dim does."""
    is_run = isinstance(call.at(1, 0), int) and call.at(4, 1) == 1  # The backward has a shape there.
    return is_run and (call.at(2) or 0) % size(dim[1:]) == 0


def _fewer(dim: Dim, n: int) -> Dim:
    """`n` rows of a dim that no axis cuts; fewer rows of a free dim are free, too."""
    are_alike = len(dim) == 1 and is_free(dim) and n < size(dim)
    return ((n, FREE),) if are_alike else whole(n)


@rule("select_backward.default")
def _selected_back(call: TypedCall) -> Type:
    x, shape, d = call.args[:3]
    d %= len(shape)
    return replace(x, dims=(*x.dims[:d], whole(shape[d]), *x.dims[d:]))


@rule("split.Tensor", "split_with_sizes.default", "chunk.default", "unbind.int")
def _pieces(call: TypedCall) -> list[Type]:
    x = call.args[0]
    d = call.at(2, 0)
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
    """`n` rows of a dim as whole blocks of it, and the axes along which they do not follow."""
    if not axes_of([dim]) or size(dim) == n:
        return (dim if size(dim) == n else _fewer(dim, n)), []
    outer = dim[0]
    inner = dim[1:]
    if not outer[1] and inner and n % size(inner) == 0:
        return joined([(n // size(inner), ()), *inner]), []
    return whole(n), axes_of([dim])


@rule("cat.default", "stack.default")
def _side_by_side(call: TypedCall) -> Type:
    parts = list(types_in(call.args[0]))
    d = call.at(1, 0)
    shape = call.shapes[0]
    is_stack = len(shape) > len(parts[0].dims)
    d %= len(shape)
    if is_stack:
        parts = [replace(p, dims=(*p.dims[:d], (), *p.dims[d:])) for p in parts]
    parts = [p for p in parts if len(p.dims) == len(shape)]  # cat leaves out what is empty
    lost = frozenset(a for p in parts for a in p.open)
    dims = [met(parts, k, len(shape), n, lost) if k != d else () for k, n in enumerate(shape)]
    own = [without(p.dims[d], lost) for p in parts]
    made = whole(shape[d])
    gone = frozenset(axes_of(own))
    if gone and all(same(own[0], one) for one in own):
        made = joined([(len(own), ()), *own[0]])
        gone = _NONE
    elif all(is_free(one) or not one for one in own) and any(map(is_free, own)):
        made = ((shape[d], FREE),)
    dims[d] = made
    return Type(tuple(dims), sums=summed(parts, "all", lost), open=lost).opened(gone)
