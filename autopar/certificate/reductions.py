"""Rules of ops that run over a dim: sums, means, maxima, softmax."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.certificate.calls import TypedCall, rule, unknown
from autopar.certificate.elementwise import elementwise
from autopar.certificate.types import Dim, Refused, Type, axes_of, is_free, plain, size

_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Reduction:
    """What a reduction over some dims leaves, and along which axes it is one of parts."""

    left: tuple[Dim, ...]  # the dims that remain
    cut: frozenset[str]  # axes that cut the reduced dims
    doubtful: frozenset[str]  # axes that may cut them: a constant is as good a part as it is a whole


def _reduced(call: TypedCall, dims: Any, keepdim: bool, x: Type) -> _Reduction:
    places = {d % max(1, len(x.dims)) for d in ([dims] if isinstance(dims, int) else dims or range(len(x.dims)))}
    gone = [dim for d, dim in enumerate(x.dims) if d in places]
    left = [() if d in places else dim for d, dim in enumerate(x.dims) if d not in places or keepdim]
    may_be_parts = any(map(is_free, gone))
    # An axis that cuts another dim, or over which this is a part of a sum, cuts no constant beside it.
    doubtful = call.axes - x.known if may_be_parts else _NONE
    return _Reduction(tuple(left), frozenset(axes_of(gone)), doubtful)


@rule("sum.dim_IntList", "sum.default")
def _sum(call: TypedCall) -> Type:
    x = call.args[0]
    made = _reduced(call, call.at(1), bool(call.at(2, call.kwargs.get("keepdim", False))), x)
    if x.most:
        raise Refused(f"it lies as {x}", "the maximum comes first")
    return Type(made.left, sums=x.sums | made.cut, open=x.open, is_zero=x.is_zero).opened(made.doubtful)


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
    made = _reduced(call, call.at(1), bool(call.at(2, False)), x)
    if made.cut:
        raise Refused(
            f"a mean over rows that {', '.join(sorted(made.cut))} cuts counts those of one device",
            "a sum, over the count of all",
        )
    return Type(made.left, sums=x.sums, open=x.open).opened(made.doubtful)


@rule("amax.default")
def _largest(call: TypedCall) -> Type:
    x = call.args[0]
    made = _reduced(call, call.at(1), bool(call.at(2, False)), x)
    if x.sums:
        raise Refused(f"it lies as {x}", "it has to be summed before")
    return Type(made.left, most=made.cut | x.most, open=x.open).opened(made.doubtful)


@rule("amin.default")
def _smallest(call: TypedCall) -> Type:
    """No step takes the smallest of all parts."""
    x = call.args[0]
    if x.sums:
        raise Refused(f"it lies as {x}", "it has to be summed before")
    made = _reduced(call, call.at(1), bool(call.at(2, False)), x)
    return Type(made.left, open=x.open).opened(made.cut | made.doubtful | x.most)


@rule("logsumexp.default")
def _log_of_sums(call: TypedCall) -> Type:
    x = call.args[0]
    if x.sums | x.most:
        raise Refused(f"it lies as {x}", "a logarithm is of what is summed")
    made = _reduced(call, call.at(1), bool(call.at(2, False)), x)
    return Type(made.left, open=x.open).opened(made.cut | made.doubtful)


@rule("any.dim", "any.dims", "any.default", "all.dim", "all.dims", "all.default")
def _any(call: TypedCall) -> Type:
    x = call.args[0]
    made = _reduced(call, call.at(1), bool(call.at(2, False)), x)
    return Type(made.left, open=x.open).opened(made.cut | made.doubtful | x.sums | x.most)


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
