"""Where chosen rows (`chosen.py`) come from and where they end: looks and writes at the places of a mask.

x[mask], x[places]                    the whole x, with the dims of the mask in the place of those that are looked into
out.index_add_(0, places, y)          out + sum(where(mask, y, 0)), over the dims of the mask that are no dims of out
out[mask] = y, out[places] = y        where(mask, y, out)
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.graph.graph import op_name
from autopar.ops.entry import Op
from autopar.ops.lookup import functional, lookup
from autopar.tracer.call import name_of, tensors_in
from autopar.tracer.chosen import Count, Mask, Rows, are_alike, as_chosen
from autopar.tracer.chosen_calls import beside, first_of, misfit, row_wise, shielded, write_to_rows
from autopar.tracer.chosen_labels import ctc_losses
from autopar.tracer.hits import Hits
from autopar.tracer.recorder import Recorder


def places_of(recorder: Recorder, mask: Tensor, by: str) -> tuple[Tensor, ...]:
    """The places of a mask's true elements: fakes, one for each of its dims."""
    chosen = recorder.values.chosen
    with chosen.recorded():
        known = chosen.mask_of(mask, by)
        return tuple(_place(recorder, known, dim) for dim in range(len(known.shape)))


def _place(recorder: Recorder, mask: Mask, dim: int) -> Tensor:
    """The places of a mask along one dim."""
    size = [n if d == dim else 1 for d, n in enumerate(mask.shape)]
    whole = torch.arange(mask.shape[dim]).reshape(size)
    return recorder.values.chosen.show(_fake(recorder, (recorder.values.chosen.SIZE,)), Rows(whole, mask, 0, (dim,)))


def listed_places_of(recorder: Recorder, mask: Tensor, by: str) -> Tensor:
    """The places of a mask's true elements, as a matrix of one row for each."""
    chosen = recorder.values.chosen
    with chosen.recorded():
        known = chosen.mask_of(mask, by)
        grid = torch.meshgrid(*(torch.arange(n) for n in known.shape), indexing="ij")
        whole = torch.stack(grid, -1)
    dims = tuple(range(len(known.shape)))
    return chosen.show(_fake(recorder, (recorder.values.chosen.SIZE, len(dims))), Rows(whole, known, 0, dims))


def _fake(recorder: Recorder, shape: tuple[int, ...]) -> Tensor:
    """Whole numbers of this shape, which nobody records."""
    made: Tensor = recorder.execute(torch.empty, (shape,), {"dtype": torch.long})
    return made


def is_met(recorder: Recorder, items: Sequence[Any]) -> bool:
    """Whether an index has places, or a mask that is not known."""
    return any(_chooses(recorder, item) for item in items)


def _chooses(recorder: Recorder, item: Any) -> bool:
    if not isinstance(item, Tensor):
        return False
    rows = recorder.values.chosen.of(item)
    return (item.dtype == torch.bool and item.dim() > 0) if rows is None else bool(rows.places)


@dataclass(frozen=True, slots=True)
class At:
    """Where an index looks: the dims of a tensor at which it has places of a mask, in the order of the index."""

    mask: Mask
    places: tuple[int, ...]  # dims of the mask
    dim: int  # the first dim of the tensor; the others follow
    before: int  # dims of the result before the rows

    def behind(self, tensor: Tensor) -> int:
        """Number of dims behind the places."""
        return tensor.dim() - self.dim - len(self.places)

    @property
    def missing(self) -> tuple[int, ...]:
        """Dims of the mask that the index does not have: several places may be one there."""
        return tuple(d for d in range(len(self.mask.shape)) if d not in self.places)


def _read(recorder: Recorder, by: str, tensor: Tensor, items: Sequence[Any]) -> At:
    """The part of a tensor that an index reads: at places of one mask, side by side, and in whole dims."""
    chosen = recorder.values.chosen
    found = _looked_at(recorder, by, tensor, items)
    first = found[0]
    mask = first.mask
    places = tuple(place for each in found for place in each.places)
    are_neighbours = all(one.item + 1 == other.item for one, other in itertools.pairwise(found))
    others = [item for item in items if isinstance(item, (Tensor, list, int)) and not _chooses(recorder, item)]
    are_lists = all(chosen.of(items[each.item]) is None or items[each.item].dim() == 1 for each in found)
    is_one_mask = all(are_alike(each.mask.node, mask.node) for each in found)
    if others or not (are_neighbours and are_lists and is_one_mask) or len(set(places)) < len(places):
        raise chosen.letter(mask, f"{by} looks up places of a mask beside other tensors", "places of one mask alone")
    if tuple(tensor.shape[first.dim :][: len(places)]) != tuple(mask.shape[d] for d in places):
        raise chosen.letter(mask, f"{by} looks up places of a mask in a tensor of another size", "a part of that size")
    return At(mask, places, first.dim, first.before)


class LookedAt(NamedTuple):
    """An item of an index that has places of a mask."""

    item: int
    mask: Mask
    places: tuple[int, ...]
    dim: int  # the dim of the tensor that it takes first
    before: int  # dims of the result before it


def _looked_at(recorder: Recorder, by: str, tensor: Tensor, items: Sequence[Any]) -> list[LookedAt]:
    """The items of an index that have places of a mask."""
    rest = tensor.dim() - sum(_dims_taken(recorder, item) for item in items)
    found = []
    dim = 0
    before = 0
    for k, item in enumerate(items):
        if _chooses(recorder, item):
            mask, places = _mask_and_places(recorder, by, item)
            found.append(LookedAt(k, mask, places, dim, before))
            dim += len(places)
        elif item is Ellipsis:
            dim += rest
            before += rest
        else:
            dim += item is not None
            before += 1
    return found


def _mask_and_places(recorder: Recorder, by: str, item: Tensor) -> tuple[Mask, tuple[int, ...]]:
    """The mask of places, or a mask that stands in an index itself."""
    rows = recorder.values.chosen.of(item)
    if rows is not None:
        return rows.mask, rows.places
    with recorder.values.chosen.recorded():
        return recorder.values.chosen.mask_of(item, by), tuple(range(item.dim()))


def _dims_taken(recorder: Recorder, item: Any) -> int:
    """Number of dims of a tensor that an item of an index consumes."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if _chooses(recorder, item) and recorder.values.chosen.of(item) is None else 1


def look(recorder: Recorder, tensor: Tensor, items: Sequence[Any], by: str = "__getitem__") -> Tensor:
    """Handle x[:, places] and x[mask]."""
    ranges = [item if isinstance(item, slice) else slice(None) for item in items]
    if any(item != slice(None) for item in ranges):
        rows = look(recorder, tensor, [slice(None) if isinstance(item, slice) else item for item in items])
        at = [Ellipsis if item is Ellipsis else part for item, part in zip(items, ranges, strict=True)]
        found: Tensor = row_wise(recorder, Tensor.__getitem__, (rows, tuple(at)), {})
        return found
    at_ = _read(recorder, by, tensor, items)
    count = len(at_.places)
    index: list[Any] = []
    for item in items:
        if not _chooses(recorder, item) or recorder.values.chosen.of(item) is not None:
            index.append(item)
        else:
            index += [_fake(recorder, (recorder.values.chosen.SIZE,)) for _ in range(item.dim())]
    fake: Tensor = recorder.execute(Tensor.__getitem__, (tensor, tuple(index)), {})
    lead = [n if d in at_.places else 1 for d, n in enumerate(at_.mask.shape)]
    shape = [*fake.shape[: at_.before], *lead, *fake.shape[at_.before + 1 :]]
    order = [at_.dim + k for k in sorted(range(count), key=lambda k: at_.places[k])]
    dims = [*range(at_.dim), *order, *range(at_.dim + count, tensor.dim())]
    with recorder.values.chosen.recorded():
        whole = tensor.clone()  # rows are a copy, whatever is written to the tensor afterwards
        whole = whole if dims == sorted(dims) else whole.permute(dims)
        whole = whole if list(whole.shape) == shape else whole.reshape(shape)
        rows = Rows(whole, at_.mask, at_.before)
        if whole.is_floating_point():  # else what a row comes to that is not chosen may be too large for its dtype
            rows = replace(rows, whole=shielded(rows, 0))
    return recorder.values.chosen.show(fake, rows)


def selected(recorder: Recorder, tensor: Tensor, mask: Tensor) -> Tensor:
    """Handle torch.masked_select(x, mask), which is x[mask] of one shape."""
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    with recorder.values.chosen.recorded():
        tensor, mask = (x if x.shape == shape else x.expand(shape) for x in (tensor, mask))
    return look(recorder, tensor, [mask], "masked_select")


# -- ends

_ENDS = frozenset({"index_add", "index_put", "index_copy", "setitem", "scatter_add"})


def call(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a function of chosen rows."""
    if name_of(function) in _ENDS:
        op, arguments = lookup(function, args, kwargs)
        if recorder.values.chosen.of(arguments["input"]) is None:
            with recorder.values.chosen.rounds.ending():
                return _ended(recorder, op, arguments)
    if name_of(function) == "ctc_losses":
        return ctc_losses(recorder, *args, **kwargs)
    if name_of(function) == "unbind" and (hits := _hits(recorder, *args, **kwargs)) is not None:
        return hits
    return row_wise(recorder, function, args, kwargs)


def _hits(recorder: Recorder, input: Any, dim: int = 0) -> Hits | None:
    """The places of a mask of one dim, where they are taken one by one, as by a loop over them."""
    rows = recorder.values.chosen.of(input)
    if rows is None or not rows.is_list or dim % input.dim() != rows.dim:
        return None
    return Hits(recorder, rows, tuple(n for d, n in enumerate(input.shape) if d != rows.dim))


def refuse_values(recorder: Recorder, function: Any, rows: Tensor) -> None:
    """Refuse a question about values of chosen rows."""
    mask = first_of(recorder, rows).mask
    raise recorder.values.chosen.letter(
        mask, f"the model asks for values of chosen rows ({name_of(function).strip('_')})"
    )


def attribute(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle an attribute of chosen rows; one size of their shape is not a number."""
    if function.__self__.__name__ != "shape":
        return call(recorder, function, args, kwargs)
    return _shape(recorder, args[0])


def _shape(recorder: Recorder, fake: Tensor) -> torch.Size:
    rows = first_of(recorder, fake)
    return torch.Size(recorder.values.chosen.count(rows) if d == rows.dim else n for d, n in enumerate(fake.shape))


def size_of(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a query about chosen rows, which may ask for their number."""
    name = name_of(function)
    rows = recorder.values.chosen.of(args[0]) if args else None
    if rows is None or name not in ("size", "numel", "nelement", "__len__"):
        return function(*args, **kwargs)
    if name == "__len__":
        raise recorder.values.chosen.count(rows).letter()
    if name != "size":
        return recorder.values.chosen.count(rows)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return _shape(recorder, args[0]) if dim is None else _shape(recorder, args[0])[dim]


def write(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a write of chosen rows to a tensor, or to chosen rows."""
    target = args[0] if args else kwargs["input"]
    for count in (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Count)):
        raise count.letter()
    if recorder.values.chosen.of(target) is not None:
        return write_to_rows(recorder, function, args, kwargs)
    op, arguments = functional(function, args, kwargs)
    if op is None or op.name not in _ENDS or not any(map(recorder.values.chosen.of, tensors_in(args, kwargs))):
        raise misfit(recorder, name_of(function), first_of(recorder, (args, kwargs)).mask)
    with recorder.values.chosen.rounds.ending():
        value = _ended(recorder, op, arguments)
        with recorder.values.chosen.recorded():
            return target.copy_(value)


def _ended(recorder: Recorder, op: Op, arguments: dict[str, Any]) -> Tensor:
    """The tensor to which chosen rows are added, or into which they are written."""
    target = arguments["input"]
    if op.name in ("setitem", "index_put"):
        index = arguments["index" if op.name == "setitem" else "indices"]
        items = [slice(None) if item is None and op.name == "index_put" else item for item in as_items(index)]
        value = arguments["value" if op.name == "setitem" else "values"]
        is_added = arguments.get("accumulate", False)
    else:
        places = arguments["index"]
        rows = recorder.values.chosen.of(places)
        value = arguments["src" if op.name == "scatter_add" else "source"]
        if op.name == "scatter_add":
            places = _along(recorder, places, value, target, arguments["dim"])
        elif rows is None or not rows.places:
            raise misfit(recorder, op.name, first_of(recorder, arguments).mask)
        items = [*[slice(None)] * (arguments["dim"] % target.dim()), places]
        is_added = op.name != "index_copy"
    if not is_met(recorder, items) or any(isinstance(item, slice) and item != slice(None) for item in items):
        raise misfit(recorder, op.name, first_of(recorder, arguments).mask)
    at = _read(recorder, op.name, target, items)
    given = _given(recorder, op, at, target, value)
    if is_added:
        return _added(recorder, at, target, given, arguments.get("alpha", 1))
    return _assigned(recorder, op, at, target, given)


def as_items(index: Any) -> list[Any]:
    """The items of an index."""
    return list(index) if isinstance(index, (tuple, list)) else [index]


def _along(recorder: Recorder, index: Any, value: Any, target: Tensor, dim: int) -> Tensor:
    """The places that a scatter repeats along the other dims, as one row of them."""
    rows = recorder.values.chosen.of(index)
    values = recorder.values.chosen.of(value)
    dim %= target.dim()
    if rows is None or len(rows.places) != 1 or values is None or rows.dim != dim or index.shape != value.shape:
        raise misfit(recorder, "scatter_add", first_of(recorder, (index, value)).mask)
    others = [n for d, n in enumerate(target.shape) if d != dim]
    if [n for d, n in enumerate(index.shape) if d != dim] != others:
        raise misfit(recorder, "scatter_add", rows.mask)
    with recorder.values.chosen.recorded():
        return _place(recorder, rows.mask, rows.places[0])


def _given(recorder: Recorder, op: Op, at: At, target: Tensor, value: Any) -> Rows:
    """Rows of the mask that are written or added: a number or a tensor is the same in each of them."""
    rows = recorder.values.chosen.of(value)
    behind = at.behind(target)
    if rows is None:
        if isinstance(value, Tensor) and value.dim() > behind:
            raise misfit(recorder, op.name, at.mask)
        with recorder.values.chosen.recorded():
            whole = torch.as_tensor(value, dtype=target.dtype) if not isinstance(value, Tensor) else value
            whole = whole.reshape(*[1] * (len(at.mask.shape) + behind - whole.dim()), *whole.shape)
        return Rows(whole, at.mask, 0)
    if not are_alike(rows.mask.node, at.mask.node):
        raise recorder.values.chosen.letter(at.mask, f"{op.name} gets rows that two masks choose", "one mask for both")
    if value.dim() - rows.dim - 1 != behind or rows.dim > at.before:
        raise misfit(recorder, op.name, at.mask)
    return rows


def _added(recorder: Recorder, at: At, target: Tensor, rows: Rows, times: Any) -> Tensor:
    """The target and the chosen rows that are added to it."""
    with recorder.values.chosen.recorded():
        value = _summed(at, rows)
        value = value if times == 1 else value * times
        return target + (value if value.dtype == target.dtype else value.to(target.dtype))


def _summed(at: At, rows: Rows) -> Tensor:
    """The chosen rows, zero for others, summed over the dims of the mask that the index does not have."""
    value = torch.where(beside(at.mask.tensor, rows), rows.whole, 0)
    if at.missing:
        value = value.sum([rows.dim + d for d in at.missing], dtype=value.dtype)
    return _in_order(at, value, rows.dim)


def _in_order(at: At, value: Tensor, dim: int) -> Tensor:
    """The value with the dims of the mask in the order of the index."""
    ranks = sorted(at.places)
    order = [dim + ranks.index(place) for place in at.places]
    dims = [*range(dim), *order, *range(dim + len(order), value.dim())]
    return value if dims == sorted(dims) else value.permute(dims)


def _assigned(recorder: Recorder, op: Op, at: At, target: Tensor, rows: Rows) -> Tensor:
    """The target, with chosen rows in their places."""
    if at.missing and not _is_single(at.mask, at.missing):
        raise recorder.values.chosen.letter(
            at.mask,
            f"{op.name} writes to places that a mask of more dims may choose twice",
            "index_add, or all of the places that torch.where gives",
        )
    with recorder.values.chosen.recorded():
        mask = at.mask.tensor.any(at.missing[0]) if at.missing else at.mask.tensor
        mask = _in_order(at, mask, 0)
        mask = mask.reshape(*mask.shape, *[1] * at.behind(target))
        value = _summed(at, rows) if at.missing else _in_order(at, rows.whole, rows.dim)
        return torch.where(mask, value if value.dtype == target.dtype else value.to(target.dtype), target)


def _is_single(mask: Mask, dims: Sequence[int]) -> bool:
    """Whether a mask has at most one true element along a dim: the places of topk are compared."""
    node = as_chosen(mask.node)
    if op_name(node) != "eq" or isinstance(node.kwargs["other"], fx.Node) or len(dims) != 1:
        return False
    ids = as_chosen(node.kwargs["input"])
    if ids.target is not operator.getitem or ids.args[1] != 1:
        return False
    largest = ids.args[0]
    dim = largest.kwargs.get("dim", -1)
    return op_name(largest) == "topk" and dim % len(mask.shape) == dims[0]
