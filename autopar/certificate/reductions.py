"""Rules of ops that run over a dim: sums, means, maxima, softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.certificate.calls import TypedCall, rule, unknown
from autopar.certificate.elementwise import elementwise
from autopar.certificate.types import Dim, Refused, Type, axes_of, is_free, plain, size

_NONE: frozenset[str] = frozenset()


def _reduced(call: TypedCall, dims: Any, keepdim: bool, x: Type) -> tuple[tuple[Dim, ...], frozenset[str]]:
    """The dims that remain after a reduction, and the axes that cut the reduced ones."""
    gone = {d % max(1, len(x.dims)) for d in ([dims] if isinstance(dims, int) else dims or range(len(x.dims)))}
    left = [() if d in gone else dim for d, dim in enumerate(x.dims) if d not in gone or keepdim]
    axes = frozenset(axes_of(x.dims[d] for d in gone))
    return tuple(left), axes | (call.axes if any(is_free(x.dims[d]) for d in gone if x.dims) else _NONE)


@rule("sum.dim_IntList", "sum.default")
def _sum(call: TypedCall) -> Type:
    x = call.args[0]
    dims, axes = _reduced(call, call.at(1), bool(call.at(2, call.kwargs.get("keepdim", False))), x)
    if x.most:
        raise Refused(f"it lies as {x}", "the maximum comes first")
    if axes - frozenset(axes_of(x.dims)):  # a constant was summed: over a part, or over the whole
        return Type(dims, sums=x.sums, open=x.open).opened(axes - frozenset(axes_of(dims)))
    return Type(dims, sums=x.sums | axes, open=x.open, is_zero=x.is_zero)


@rule("histc.default")
def _counted(call: TypedCall) -> Type:
    """Counts of entries in ranges, which are partial sums where the ranges do not follow the entries."""
    x = call.args[0]
    if x.sums | x.most:
        raise Refused(f"it lies as {x}", "entries are counted once they are summed")
    axes = frozenset(axes_of(x.dims))
    made = Type(plain(call.shapes[0]), sums=axes, open=x.open)
    if any(map(is_free, x.dims)):  # constants were counted: of a part, or of the whole
        return made.opened(call.axes)
    follow_entries = call.at(2, 0) == call.at(3, 0)  # The ranges are then those of a device's own entries.
    return made.opened(axes) if follow_entries else made


@rule("mean.dim", "mean.default")
def _mean(call: TypedCall) -> Type:
    x = call.args[0]
    dims, axes = _reduced(call, call.at(1), bool(call.at(2, False)), x)
    if cut := axes & frozenset(axes_of(x.dims)):
        raise Refused(
            f"a mean over rows that {', '.join(sorted(cut))} cuts counts those of one device",
            "a sum, over the count of all",
        )
    return Type(dims, sums=x.sums, open=x.open)


@rule("amax.default")
def _largest(call: TypedCall) -> Type:
    x = call.args[0]
    dims, axes = _reduced(call, call.at(1), bool(call.at(2, False)), x)
    if x.sums:
        raise Refused(f"it lies as {x}", "it has to be summed before")
    return Type(dims, most=(axes & frozenset(axes_of(x.dims))) | x.most, open=x.open)


@rule("amin.default")
def _smallest(call: TypedCall) -> Type:
    """No step takes the smallest of all parts."""
    x = call.args[0]
    if x.sums:
        raise Refused(f"it lies as {x}", "it has to be summed before")
    dims, axes = _reduced(call, call.at(1), bool(call.at(2, False)), x)
    return Type(dims, open=x.open).opened((axes & frozenset(axes_of(x.dims))) | x.most)


@rule("logsumexp.default")
def _log_of_sums(call: TypedCall) -> Type:
    x = call.args[0]
    if x.sums | x.most:
        raise Refused(f"it lies as {x}", "a logarithm is of what is summed")
    dims, axes = _reduced(call, call.at(1), bool(call.at(2, False)), x)
    return Type(dims, open=x.open).opened(axes & frozenset(axes_of(x.dims)))


@rule("any.dim", "any.dims", "any.default", "all.dim", "all.dims", "all.default")
def _any(call: TypedCall) -> Type:
    x = call.args[0]
    dims, axes = _reduced(call, call.at(1), bool(call.at(2, False)), x)
    return Type(dims, open=x.open).opened((axes & frozenset(axes_of(x.dims))) | x.sums | x.most)


@rule("_safe_softmax.default")
def _safe_softmax(call: TypedCall) -> Type:
    """A softmax of an attention, around which views do not tell a single row from its sum."""
    if any(size(dim) == 1 and axes_of([dim]) for dim in call.args[0].dims):
        made: Type = unknown(call)
        return made
    return _softmax(call)


@rule("_softmax.default", "_log_softmax.default")
def _softmax(call: TypedCall) -> Type:
    x, d = call.args[:2]
    if x.sums | x.most:
        raise Refused(f"it lies as {x}", "a softmax is of what is summed")
    needs_whole(x, d, "a softmax")
    return Type(x.dims, open=x.open)


@rule("_softmax_backward_data.default", "_log_softmax_backward_data.default")
def _softmax_back(call: TypedCall) -> Type:
    gradient, result, d = call.args[:3]
    needs_whole(result, d, "a softmax")
    return elementwise(replace(call, args=(gradient, result), kwargs={}), "first")


def needs_whole(x: Type, d: int, what: str) -> None:
    if cut := axes_of([x.dims[d]]):
        raise Refused(f"dim {d % len(x.dims)} is cut by {', '.join(cut)}", f"{what} needs all of it")
