"""Look-ups: embeddings, indices, gathers, scatters, searches in sorted rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops import inverses
from autopar.ops.entry import T, each, op
from autopar.ops.local import Form, Here, OpCall, cuts
from autopar.ops.rows import NAMES, Row, parse, rule_from, whole_dims
from autopar.runtime import forms
from autopar.sharding.notation import Rule


def index(input: Tensor, index: Any) -> Tensor:
    """x[index], where the index holds tensors or steps; other indices are replaced by views while tracing.

    A scalar tensor is an index like others, as in ATen; Python would read its value.
    """
    places = _places(index)
    return input[index] if places is None else torch.ops.aten.index.Tensor(input, places)


def setitem(input: Tensor, index: Any, value: Any) -> Tensor:
    """A copy of the input with another value at [index]."""
    if (places := _places(index)) is not None:
        put = value.to(input.dtype) if isinstance(value, Tensor) else input.new_full((), value)
        return torch.ops.aten.index_put.default(input, places, put)
    made = input.clone()
    made[index] = value
    return made


def _places(index: Any) -> list[Tensor | None] | None:
    """The index as ATen takes it, where it has a scalar tensor; else None."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(item, Tensor) and not item.dim() for item in items):
        return None
    return [item if isinstance(item, Tensor) else None for item in items]


def scatter(input: Tensor, dim: int, index: Tensor, src: Any) -> Tensor:
    """A copy with entries of `src`, or a number, at positions along a dim."""
    return torch.scatter(input, dim, index, src)


def index_put(input: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    """A copy with values put, or added, at [indices]."""
    return torch.index_put(input, indices, values, accumulate)


def embedding(arguments: Mapping[str, Any]) -> Rule | None:
    """The rule of an embedding, whose vocabulary may be cut behind a mask; None with `max_norm`.

    Scaling gradients by token counts needs the vocabulary, and all tokens, whole.
    """
    if arguments.get("max_norm") is not None:
        return None
    tokens = Row.of(arguments["input"])
    if arguments.get("scale_grad_by_freq"):
        return rule_from([tokens.whole(), ["v!", "d"]], [[*tokens.whole(), "d"]], linear="y")
    return rule_from([tokens, ["v~", "d"]], [[*tokens, "d"]], linear="y")


def rows_of_part(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of a look-up in this device's part of the vocabulary; None where it is whole."""
    lies = here.lies(1)
    if 0 not in lies.cuts:
        return None
    shape = call.arguments["weight"].shape
    how = {k: v for k, v in kwargs.items() if k in ("input", "weight")}
    if kwargs.get("padding_idx") is not None:
        how["padding_idx"] = kwargs["padding_idx"] % shape[0]
    if sums := tuple(here.mesh.axes[a] for a, placement in enumerate(lies.placements) if placement.is_partial):
        how["sums"] = sums
    return forms.embedding_part, {**how, "cuts": cuts(here, shape, lies, 0)}


def kept_of_rows(call: OpCall, held: Sequence[tuple[int, ...]], here: Here) -> int:
    """The bytes that a look-up in a part of the vocabulary keeps: places in the part, and masks of tokens."""
    if held[1][0] == call.arguments["weight"].shape[0]:
        return 0
    masks = 1 + (call.arguments.get("padding_idx") is not None)
    return (call.arguments["input"].itemsize + masks) * math.prod(held[0])


def index_rule(arguments: Mapping[str, Any]) -> Rule | None:
    """Dims that are looked into stay whole, all others may be cut: x[:, i] and x[:, ::2]."""
    found = _looked_into(arguments["input"], arguments["index"])
    if found is None or found.dtype == "bool":
        return None
    return rule_from([found.tensor, *found.operands], [found.result], linear="x")


def setitem_rule(arguments: Mapping[str, Any]) -> Rule | None:
    """Every device writes all places of its own part: x[:, i] = v."""
    found = _looked_into(arguments["input"], arguments["index"], "!")
    if found is None:
        return None
    value = arguments["value"]
    if not hasattr(value, "shape"):
        return rule_from([found.tensor, *found.operands, ()], [found.tensor])
    if len(value.shape) > len(found.result):
        return None
    linear = f"x+{NAMES[1 + len(found.operands)]}"
    return rule_from([found.tensor, *found.operands, Row(found.result).last(value)], [found.tensor], linear)


class IndexLetters(NamedTuple):
    """Letters of x[:, i, 2, ...]."""

    tensor: list[str]  # letters of x
    operands: list[Sequence[str]]  # letters of the tensors in the index, none for each other entry
    result: list[str]  # letters of x[:, i, 2, ...]
    dtype: str  # dtype of the first tensor in the index; "" without one


def _looked_into(tensor: Any, index: Any, mark: str = "") -> IndexLetters | None:
    """Letters of x[:, i, 2, ...]; None for an index that no rule reads.

    Tensors are broadcast together; their dims stand in their place where they are neighbours, else in front. Integers
    beside them select before they look up, so a captured graph has none there. A mask stands alone, for all of its
    dims.
    """
    is_one = _lists_places(index) or not isinstance(index, (tuple, list))
    said = [index] if is_one else list(index)
    tensors = [e for e in said if hasattr(e, "dtype")]
    if (isinstance(index, list) and not is_one and not tensors) or not _is_readable(said, tensors):
        return None
    entries = _opened(said, len(tensor.shape))
    left, out, taken = list[str](), list[str](), list[str]()
    for e in entries:
        dim = len(left)
        if e is None:
            out.append(f"new{len(out)}!")
        elif isinstance(e, (slice, list)):
            left.append(f"a{dim}" if e == slice(None) else f"in{dim}!")
            out.append(f"a{dim}" if e == slice(None) else f"out{dim}!")
        else:
            taken = [f"in{dim + k}!" for k in range(_dims_taken(e))]
            left += taken
    if not tensors:
        return IndexLetters(left, [()] * (len(index) if isinstance(index, (tuple, list)) else 1), out, "")
    places = _found_places(tensors, mark)
    looked = [k for k, e in enumerate(entries) if not (e is None or isinstance(e, slice))]
    are_neighbours = looked[-1] - looked[0] == len(looked) - 1
    at = looked[0] if are_neighbours else 0
    out[at:at] = places

    def row(entry: Any) -> Sequence[str]:
        if _is_mask(entry):
            return taken
        return places.last(entry) if hasattr(entry, "dtype") else ()

    return IndexLetters(left, list(map(row, said)), out, tensors[0].dtype)


def _found_places(tensors: Sequence[Any], mark: str) -> Row:
    """Letters of the dims that the tensors of an index have together."""
    if _is_mask(tensors[0]):
        return Row(["found!"])
    depth = max(len(e.shape) for e in tensors)
    return Row([f"i{k}{mark}" for k in range(depth)])


def _is_readable(index: Sequence[Any], tensors: Sequence[Any]) -> bool:
    """Whether an index holds ranges, new dims, and either integers or tensors, of which a mask is alone.

    In place of these there may be one list of places.
    """
    lists = [e for e in index if isinstance(e, (list, tuple))]
    integers = [e for e in index if isinstance(e, int)]
    if any(isinstance(e, bool) for e in index) or not all(map(_lists_places, lists)):
        return False
    if sum(map(bool, (lists, integers, tensors))) > 1 or len(lists) > 1:
        return False
    return len(tensors) == 1 or not any(map(_is_mask, tensors))


def _lists_places(entry: Any) -> bool:
    """Whether an entry of an index is a list of places, as in x[:, [0, 2]]."""
    return isinstance(entry, list) and all(isinstance(e, int) and not isinstance(e, bool) for e in entry)


def _is_mask(entry: Any) -> bool:
    return getattr(entry, "dtype", "") == "bool"


def _dims_taken(entry: Any) -> int:
    """Number of dims of a tensor that an entry of its index consumes."""
    if _is_mask(entry):
        return len(entry.shape)
    return 0 if entry is None or entry is ... else 1


def _opened(index: Sequence[Any], rank: int) -> list[Any]:
    """The entries of an index, with a full range for each dim that it does not mention."""
    missing = [slice(None)] * (rank - sum(map(_dims_taken, index)))
    at = next((i for i, e in enumerate(index) if e is ...), len(index))
    return [*index[:at], *missing, *index[at + 1 :]]


def looked_along(arguments: Mapping[str, Any]) -> Rule | None:
    """The dim that is looked along stays whole in what is looked into, and so do dims of two sizes."""
    row = Row.of(arguments["input"])
    index = arguments.get("index", arguments.get("indices"))
    if arguments.get("dim") is None or not row or len(index.shape) != len(row):
        return None
    dim = row.places(arguments["dim"])
    others = _of_other_sizes(arguments["input"], index) - dim
    operands = [row.resized(others | dim, "in"), row.resized(others, "at")]
    return rule_from(operands, [row.resized(others, "out")], linear="x")


def _of_other_sizes(*tensors: Any) -> set[int]:
    """The dims in which tensors of one rank differ in size."""
    sizes = zip(*(tensor.shape for tensor in tensors), strict=True)
    return {i for i, of_dim in enumerate(sizes) if len(set(of_dim)) > 1}


def index_select(arguments: Mapping[str, Any]) -> Rule | None:
    row = Row.of(arguments["input"])
    dim = arguments["dim"]
    return rule_from([row.replaced(dim, "in!"), ["out"]], [row.replaced(dim, "out")], linear="x") if row else None


def scattered(arguments: Mapping[str, Any]) -> Rule | None:
    """Dims other than the scattered one may be cut where all operands agree in size."""
    index = arguments["index"]
    source = arguments["src"]
    others = [index, source] if hasattr(source, "shape") else [index]  # a number has no size
    row = Row.of(arguments["input"])
    if not row or any(len(other.shape) != len(row) for other in others):
        return None
    dim = row.places(arguments["dim"])
    whole = _of_other_sizes(arguments["input"], *others) | dim
    into, at, added = (row.resized(whole, name) for name in ("in", "at", "from"))
    if len(others) == 1:
        return rule_from([into, at, ()], [into])
    if arguments["op"] == "scatter_add" and not dim & _of_other_sizes(index, source):
        at, added = (row.replaced(dim, "e") for row in (at, added))  # parts of what is added may be added apart
    return rule_from([into, at, added], [into], linear="" if arguments["op"] == "scatter_reduce" else "x+z")


def indexed(arguments: Mapping[str, Any]) -> Rule | None:
    """The dim that is looked into stays whole, and so does the index; other dims are cut alike."""
    row = Row.of(arguments["input"])
    if not row:
        return None
    dim = arguments["dim"]
    into = row.resized(dim, "in")
    places = ["at!"] if arguments["index"].shape else []
    if arguments["op"] == "index_fill":
        return rule_from([into, places, ()], [into])
    source = arguments["source"]
    if len(source.shape) != len(row):
        return None
    added = row.replaced(dim, "from!")
    if arguments["op"] == "index_add" and arguments["index"].shape == (source.shape[dim],):
        places = ["e"]  # parts of what is added may be added apart
        added = row.replaced(dim, "e")
    linear = "x+z" if arguments["op"] in ("index_add", "index_copy") else ""
    return rule_from([into, places, added], [into], linear)


def index_put_rule(arguments: Mapping[str, Any]) -> Rule | None:
    """As for setitem: one tensor of places, or a mask, among dims that stay as they are."""
    said = tuple(slice(None) if i is None else i for i in arguments["indices"])
    return setitem_rule({"input": arguments["input"], "index": said, "value": arguments["values"]})


def take(arguments: Mapping[str, Any]) -> Rule:
    """The input stays whole, as places count through all of it; the places that are looked up may be cut."""
    places = Row.of(arguments["index"])
    return rule_from([whole_dims("in", len(arguments["input"].shape)), places], [places], linear="x")


def counted(arguments: Mapping[str, Any]) -> Rule | None:
    """Places are counted over all of a tensor, which stays whole."""
    return rule_from([Row.of(arguments["input"]).whole()], [["places!", "dims!"]])


def searchsorted(arguments: Mapping[str, Any]) -> Rule | None:
    """Values and leading dims may be cut; each sorted row stays whole."""
    rows = arguments["sorted_sequence"]
    values = arguments.get("input")
    shape = getattr(values, "shape", None)
    if shape is None or arguments.get("sorter") is not None:
        return None
    row = Row.of(values)
    leading = row[:-1] if len(rows.shape) > 1 else ()
    return rule_from([[*leading, "s!"], row, ()], [row])


def isin(arguments: Mapping[str, Any]) -> Rule | None:
    """Elements may be cut; the list that is searched stays whole."""
    if any(not hasattr(arguments[n], "shape") for n in ("elements", "test_elements")):
        return None
    return rule_from([["..."], whole_dims("t", len(arguments["test_elements"].shape))], [["..."]])


def embedding_bag(arguments: Mapping[str, Any]) -> Rule | None:
    """The rule of an embedding bag: features may be cut, and bags that are rows; None with `max_norm`.

    The table stays whole, and so do tokens in bags by offsets.
    """
    if arguments.get("max_norm") is not None:  # The op then writes to the table.
        return None
    is_rows = len(arguments["input"].shape) == 2
    tokens, bags = ("b t!", "b") if is_rows else ("t!", "bags!")
    weights, offsets = arguments.get("per_sample_weights"), arguments.get("offsets")
    features = "d!" if getattr(weights, "requires_grad", False) else "d"  # The weights' gradient sums over features.
    rare = arguments.get("scale_grad_by_freq") and is_rows  # how often a token comes in all rows counts
    tokens, bags = (tokens.replace("b ", "b! "), "b!") if rare else (tokens, bags)
    return parse(
        f"{tokens}, v! {features}, {'o!' if offsets is not None else ''}, {tokens if weights is not None else ''} "
        f"-> {bags} {features}",
        linear="y" if arguments.get("mode", "mean") != "max" else "",
    )


def masked_scatter(arguments: Mapping[str, Any]) -> Rule | None:
    """None: the n-th place of the mask takes the n-th number, so nothing can be cut."""
    return None


op(
    "embedding",
    F.embedding,
    "input:T, weight:T, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False",
    rule=embedding,
    serves="~",
    form=rows_of_part,
    counts="v",
    keeps="input",
    part_keeps=kept_of_rows,
)
op(
    "embedding_bag",
    F.embedding_bag,
    "input:T, weight:T, offsets:T=None, max_norm=None, norm_type=2, scale_grad_by_freq=False, mode='mean', "
    "sparse=False, per_sample_weights:T=None, include_last_offset=False, padding_idx=None",
    rule=embedding_bag,
)
op(
    "index",
    index,
    "input:T, index:T",
    T.__getitem__,
    rule=index_rule,
    keeps="index",
    reach="moved",
    inverse=inverses.index,
)
op("setitem", setitem, "input:T, index:T, value:T", T.__setitem__, rule=setitem_rule, keeps="index")
each("gather", "input:T, dim, index:T, *, sparse_grad=False", rule=looked_along, keeps="index")
each("index_select", "input:T, dim, index:T", rule=index_select, keeps="index")
op("scatter", scatter, "input:T, dim, index:T, src:T", torch.scatter, T.scatter, rule=scattered, keeps="index")
each("scatter_add", "input:T, dim, index:T, src:T", rule=scattered, keeps="index")
each("scatter_reduce", "input:T, dim, index:T, src:T, reduce, *, include_self=True", rule=scattered)
each("one_hot", "input:T, num_classes=-1", rule="... -> ... classes!", keeps="")
each("index_add", "input:T, dim, index:T, source:T, *, alpha=1", rule=indexed)
each("index_copy", "input:T, dim, index:T, source:T", rule=indexed)
each("index_fill", "input:T, dim, index:T, value:T", rule=indexed)
each("index_reduce", "input:T, dim, index:T, source:T, reduce, *, include_self=True", rule=indexed)
op(
    "index_put",
    index_put,
    "input:T, indices:T, values:T, accumulate=False",
    torch.index_put,
    T.index_put,
    rule=index_put_rule,
)
each("masked_scatter", "input:T, mask:T, source:T", rule=masked_scatter)
each("nonzero_static", "input:T, *, size, fill_value=-1", rule=counted)
each("take", "input:T, index:T", rule=take)
each("take_along_dim", "input:T, indices:T, dim=None", rule=looked_along)
each(
    "searchsorted",
    "sorted_sequence:T, input:T, *, out_int32=False, right=False, side=None, sorter:T=None",
    rule=searchsorted,
)
each("bucketize", "input:T, boundaries:T, *, out_int32=False, right=False", rule="..., b! -> ...")
op("isin", torch.isin, "elements:T, test_elements:T, *, assume_unique=False, invert=False", rule=isin)
