"""Replace indexing, and assignment to ranges, by views and scatters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.fx as fx

from autopar.graph.graph import Graph, TensorType, type_of
from autopar.tracer.rewriting import emit, forward_past, rewriting, stopped_like


def indexing_is_spelled_out(graph: Graph) -> None:
    """Replace basic indexing by narrow, select and view; slices of a whole dim vanish.

    before    y = x[..., 1:]                                       # x is i64[4, 17]
    after     y = narrow(x, dim=1, start=1, length=16)
    """
    with rewriting(graph, "index") as nodes:
        for node in nodes:
            given = node.kwargs["input"]
            index = _basic_index(node.kwargs["index"], len(type_of(given).shape))
            if index is not None:
                with graph.fx.inserting_before(node):
                    forward_past(node, stopped_like(node, _indexed(node, given, index)))


def _indexed(node: fx.Node, value: Any, index: tuple[Any, ...]) -> Any:
    """Emit the value at a basic index, one dim at a time."""
    dim = 0
    for i in index:
        type_ = type_of(value)
        if isinstance(i, int):
            out = _with_dims(type_, dim, 1)
            value = emit(node, "select", out, input=value, dim=dim, index=i % type_.shape[dim])
            continue
        if isinstance(i, slice):
            start, stop, _ = i.indices(type_.shape[dim])
            if (start, stop) != (0, type_.shape[dim]):
                length = max(0, stop - start)
                out = _with_dims(type_, dim, 1, length)
                value = emit(node, "narrow", out, input=value, dim=dim, start=start, length=length)
        else:
            out = _with_dims(type_, dim, 0, 1)
            value = emit(node, "view", out, input=value, size=out.shape)
        dim += 1
    return value


def _with_dims(type_: TensorType, at: int, taken: int, *sizes: int) -> TensorType:
    """The type with `taken` dims from `at` replaced by dims of these sizes."""
    return replace(type_, shape=(*type_.shape[:at], *sizes, *type_.shape[at + taken :]))


def assignments_are_spelled_out(graph: Graph) -> None:
    """Replace assignment to ranges by scatters, one for each dim that is not whole.

    A number under a mask becomes masked_fill, a tensor that is broadcast there becomes where.

    before    y = setitem(x, (slice(None), slice(1, None)), v)     # x is f32[4, 16], v is f32[4, 15]
    after     y = slice_scatter(x, v, dim=1, start=1, end=16)
    """
    with rewriting(graph, "setitem") as nodes:
        for node in nodes:
            with graph.fx.inserting_before(node):
                made = _assigned(node)
                if made is not None:
                    forward_past(node, stopped_like(node, made))


def _assigned(node: fx.Node) -> fx.Node | None:
    """The value of an assignment in canonical ops; None where it must stay as it is."""
    given, index, value = (node.kwargs[k] for k in ("input", "index", "value"))
    whole = type_of(given)
    if isinstance(index, fx.Node) and type_of(index).dtype == "bool":
        if not isinstance(value, fx.Node):
            is_full = len(type_of(index).shape) >= len(whole.shape)
            mask = index if is_full else _aligned(node, index, whole)
            return emit(node, "masked_fill", input=given, mask=mask, value=value)
        if len(type_of(value).shape) <= len(whole.shape) - len(type_of(index).shape):
            mask = _aligned(node, index, whole)
            return emit(node, "where", condition=mask, input=_as_dtype(node, value, whole), other=given)
    basic = _basic_index(index, len(whole.shape))
    if basic is None or None in basic:
        return None
    is_overwritten = all(isinstance(i, slice) and i == slice(None) for i in basic)
    if is_overwritten and type_of(node).requires_grad:  # The overwritten tensor still gets a gradient of zeros.
        return None
    return _scattered(node, given, list(enumerate(basic)), value)


def _aligned(node: fx.Node, mask: fx.Node, whole: TensorType) -> fx.Node:
    """A mask of leading dims, with dims of size 1 appended."""
    shape = type_of(mask).shape
    return emit(node, "view", input=mask, size=(*shape, *[1] * (len(whole.shape) - len(shape))))


def _as_dtype(node: fx.Node, value: fx.Node, whole: TensorType) -> fx.Node:
    """The value cast to the dtype of `whole`."""
    return value if type_of(value).dtype == whole.dtype else emit(node, "to", input=value, dtype=whole.torch_dtype)


def _scattered(node: fx.Node, given: Any, index: list[tuple[int, Any]], value: Any) -> fx.Node:
    """`given` with `value` at the rest of an index, one dim at a time.

    Inner parts are written first, and put back into those around them.
    """
    shape = type_of(given).shape
    while index and _is_whole(index[0][1], shape[index[0][0]]):
        index = index[1:]
    if not index:
        return _spread(node, given, value)
    dim, at = index[0]
    rest = index[1:]
    if isinstance(at, int):
        place = at % shape[dim]
        inner = emit(node, "select", input=given, dim=dim, index=place)
        part = _scattered(node, inner, [(d - 1, i) for d, i in rest], value)
        return emit(node, "select_scatter", input=given, src=part, dim=dim, index=place)
    start, stop, _ = at.indices(shape[dim])
    inner = emit(node, "narrow", input=given, dim=dim, start=start, length=max(0, stop - start))
    part = _scattered(node, inner, rest, value)
    return emit(node, "slice_scatter", input=given, src=part, dim=dim, start=start, end=max(start, stop))


def _spread(node: fx.Node, given: Any, value: Any) -> fx.Node:
    """The value expanded and cast to the shape and dtype of `given`."""
    whole = type_of(given)
    if not isinstance(value, fx.Node):
        return emit(node, "full_like", input=given, fill_value=value)
    if type_of(value).shape != whole.shape:
        extra = len(type_of(value).shape) - len(whole.shape)  # leading dims of size 1
        if extra > 0:
            value = emit(node, "view", input=value, size=type_of(value).shape[extra:])
        value = emit(node, "expand", input=value, size=whole.shape)
    return _as_dtype(node, value, whole)


def _is_whole(index: Any, size: int) -> bool:
    """Whether an index is a slice of all of a dim."""
    return isinstance(index, slice) and index.indices(size)[:2] == (0, size)


def _basic_index(index: Any, rank: int) -> tuple[Any, ...] | None:
    """The index with an entry per dim and None per new dim; None for one with tensors, lists or steps."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(map(_is_basic, index)):
        return None
    missing = rank - sum(i is not None and i is not ... for i in index)
    where = index.index(...) if ... in index else len(index)
    return (*index[:where], *[slice(None)] * missing, *index[where + (... in index) :])


def _is_basic(index: Any) -> bool:
    """Whether an item of an index is an integer, a slice without a step, None or an ellipsis."""
    if isinstance(index, slice):
        return index.step in (None, 1)
    return isinstance(index, (int, type(None), type(...))) and not isinstance(index, bool)
