"""Types after collectives and local steps; each function has the name of the step in the emitted program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autopar.certificate.calls import is_constant
from autopar.certificate.types import FREE, Dim, Refused, Type, axes_of, is_free, joined, plain, size, whole, without


def after(name: str, x: Type, axis: str, numbers: Sequence[Any], shape: Sequence[int], cuts_constants: bool) -> Type:
    """The type after a step with this name, of which this device has a result of this shape."""
    if name in ("slice", "reduce_scatter"):
        here = shape[numbers[0]] if len(shape) > numbers[0] else -1
        if name == "slice" and cuts_constants and is_constant(x):
            x = replace(x, dims=plain(x.shape))  # Each device has other rows of it from here on.
        return _STEPS[name](x, axis, *numbers, here=here)
    if name == "all_to_all":
        here = shape[numbers[3]] if len(shape) > numbers[3] else -1
        return all_to_all(x, axis, tuple(numbers), here=here)
    return _STEPS[name](x, axis, *numbers)


def all_reduce(x: Type, axis: str) -> Type:
    ones = [d for d, dim in enumerate(x.dims) if _is_cut_to_one_row(dim, axis)]
    if ones:  # one row of a dim that is cut is also a part of the sum over the dim
        return replace(x, dims=_with(x, ones[0], without(x.dims[ones[0]], frozenset({axis}))))
    # One row of a repeated dim equals its own sum over the dim, so it may be a part of a sum.
    is_repeated = any(is_free(dim) and size(dim) == 1 for dim in x.dims)
    may_be_a_part = axis in x.sums | x.open or x.is_zero or is_constant(x) or is_repeated
    _needs(may_be_a_part, x, f"what is summed over {axis} has to be a part of a sum there")
    return _settled(x, axis)


def _is_cut_to_one_row(dim: Dim, axis: str) -> bool:
    return any(n == 1 and axis in axes for n, axes in dim)


def all_reduce_max(x: Type, axis: str) -> Type:
    is_cut = axis in x.sums or axis in axes_of(x.dims)
    _needs(not is_cut, x, f"the largest over {axis} has to be one of several there")
    return _settled(x, axis)


def all_gather(x: Type, axis: str, dim: int, length: int, blocks: Any = ()) -> Type:
    if not x.dims[dim] and axis in x.sums:  # one row of a dim that is cut is also a part of the sum over the dim
        return replace(x, dims=_with(x, dim, whole(length))).opened([axis])
    is_repeated = is_free(x.dims[dim]) or (axis not in x.open and not x.dims[dim])
    if is_repeated:  # Repeated rows are as good as parts of any whole.
        return replace(x, dims=_with(x, dim, ((length, FREE),)), open=x.open - {axis})
    if axis not in x.open:
        cut = axes_of([x.dims[dim]])
        _needs(axis in cut, x, f"what is gathered along dim {dim} over {axis} has to be cut there")
    return _gathered(replace(x, open=x.open - {axis}), dim, axis, length)


def reduce_scatter(x: Type, axis: str, dim: int, length: int, blocks: Any = (), here: int = -1) -> Type:
    return _cut(all_reduce(x, axis), axis, dim, blocks, here)


def all_to_all(x: Type, axis: str, numbers: tuple[Any, ...], here: int = -1) -> Type:
    dim, length, blocks, to_dim, _, to_blocks = numbers
    return _cut(all_gather(x, axis, dim, length, blocks), axis, to_dim, to_blocks, here)


def slice(x: Type, axis: str, dim: int, length: int, blocks: Any = (), here: int = -1) -> Type:
    if axis in x.open and not is_free(x.dims[dim]):
        others = axes_of([x.dims[dim]])
        if len(x.dims[dim]) == 1 and others:
            return replace(x, dims=_with(x, dim, ((here, tuple(others)),)))
        return replace(x, dims=_with(x, dim, whole(here))).opened(others)
    is_whole = axis in x.open or (axis not in x.sums | x.most and axis not in axes_of(x.dims))
    _needs(is_whole, x, f"what is cut over {axis} has to be whole there")
    return _cut(x, axis, dim, blocks, here)


def lodge(x: Type, axis: str) -> Type:
    if axis in x.open:
        return x
    is_whole = axis not in x.sums | x.most and axis not in axes_of(x.dims)
    _needs(is_whole, x, f"what becomes a part of a sum over {axis} has to be whole there")
    return replace(x, sums=x.sums | {axis})


_STEPS: dict[str, Callable[..., Type]] = {
    f.__name__: f for f in (all_reduce, all_reduce_max, all_gather, reduce_scatter, all_to_all, slice, lodge)
}


def _needs(holds: bool, x: Type, expected: str) -> None:
    if not holds:
        raise Refused(f"it lies as {x}", expected)


def _settled(x: Type, axis: str) -> Type:
    return replace(x, sums=x.sums - {axis}, most=x.most - {axis}, open=x.open - {axis})


def _with(x: Type, dim: int, made: Dim) -> tuple[Dim, ...]:
    return (*x.dims[:dim], made, *x.dims[dim + 1 :])


def _gathered(x: Type, dim: int, axis: str, length: int) -> Type:
    """`x` with a dim of `length` rows that the axis no longer cuts.

    The axis must be the innermost of those that cut the dim: else nothing is known along the others.
    """
    rest = [a for a in axes_of([x.dims[dim]]) if a != axis]
    if not rest:
        return replace(x, dims=_with(x, dim, whole(length)))
    if len(x.dims[dim]) == 1 and x.dims[dim][0][1][-1] == axis:
        return replace(x, dims=_with(x, dim, ((length, tuple(rest)),)))
    return replace(x, dims=_with(x, dim, whole(length))).opened(rest)


def _cut(x: Type, axis: str, dim: int, blocks: Any, here: int) -> Type:
    """`x` with a dim that an axis cuts innermost, so that `here` rows remain; each block is cut by itself."""
    before = x.dims[dim]
    if is_free(before):
        return replace(x, dims=_with(x, dim, ((here, FREE),)))
    if blocks:
        if len(set(blocks)) > 1 or here % len(blocks) or axes_of([before]):
            return replace(x, dims=_with(x, dim, whole(here))).opened([axis, *axes_of([before])])
        made: Dim = joined([(len(blocks), ()), (here // len(blocks), (axis,))])
        return replace(x, dims=_with(x, dim, made))
    if not before or len(before) == 1:
        axes = before[0][1] if before else ()
        return replace(x, dims=_with(x, dim, ((here, (*axes, axis)),)))
    return replace(x, dims=_with(x, dim, whole(here))).opened([axis, *axes_of([before])])
