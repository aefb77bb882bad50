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
from autopar.ops.spelling import NAMES, letters_of, parse, whole_dims
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
    if arguments.get("scale_grad_by_freq"):
        tokens = " ".join(f"{a}!" for a in letters_of(arguments["input"]))
        return parse(f"{tokens}, v! d -> {tokens} d", linear="y")
    tokens = " ".join(letters_of(arguments["input"]))
    return parse(f"{tokens}, v~ d -> {tokens} d", linear="y")


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


def kept_of_rows(call: OpCall, held: Sequence[tuple[int, ...]]) -> int:
    """The bytes that a look-up in a part of the vocabulary keeps: places in the part, and masks of tokens."""
    if held[1][0] == call.arguments["weight"].shape[0]:
        return 0
    masks = 1 + (call.arguments.get("padding_idx") is not None)
    return (call.arguments["input"].itemsize + masks) * math.prod(held[0])


def index_rule(arguments: Mapping[str, Any]) -> Rule | None:
    """Dims that are looked into stay whole, all others may be cut: x[:, i] and x[:, ::2]."""
    if (places := _stepped(arguments["input"], arguments["index"])) is not None:
        return parse(f"{', '.join(map(' '.join, places[:-1]))} -> {' '.join(places[-1])}", linear="x")
    found = _looked_into(arguments["input"], arguments["index"], "")
    if found is None or found.dtype == "bool":
        return None
    return parse(f"{' '.join(found.tensor)}, {found.operands} -> {' '.join(found.result)}", linear="x")


def setitem_rule(arguments: Mapping[str, Any]) -> Rule | None:
    """Every device writes all places of its own part: x[:, i] = v."""
    found = _looked_into(arguments["input"], arguments["index"], "!")
    if found is None:
        return None
    left = " ".join(found.tensor)
    out = found.result
    value = getattr(arguments["value"], "shape", None)
    if value is None:
        return parse(f"{left}, {found.operands},  -> {left}")
    if len(value) > len(out):
        return None
    written = " ".join(out[len(out) - len(value) :])
    linear = f"x+{NAMES[2 + found.operands.count(',')]}"
    return parse(f"{left}, {found.operands}, {written} -> {left}", linear=linear)


def _stepped(tensor: Any, index: Any) -> list[list[str]] | None:
    """Letters of x[:, 1::2, 3, None], whose index holds no tensor; None for any other.

    There is one row for the dims of x, an empty one for each entry of the index, and one for the dims of the result.
    """
    if isinstance(index, list):  # places to pick, not a place in each dim
        return None
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(hasattr(e, "dtype") or isinstance(e, (bool, list, tuple)) for e in entries):
        return None
    left, out = list[str](), list[str]()
    for k, e in enumerate(_opened(entries, len(tensor.shape))):
        if e is None:
            out.append(f"new{k}!")
            continue
        left.append(f"a{k}" if e == slice(None) else f"in{k}!")
        if isinstance(e, slice):
            out.append(left[-1] if e == slice(None) else f"out{k}!")
    return [left, *([] for _ in entries), out]


class IndexLetters(NamedTuple):
    """Letters of x[:, i, j, ...], whose index holds tensors."""

    tensor: list[str]  # letters of x
    operands: str  # letters of the tensors in the index, empty for each other entry
    result: list[str]  # letters of x[:, i, j, ...]
    dtype: str  # dtype of the first tensor in the index


def _looked_into(tensor: Any, index: Any, mark: str) -> IndexLetters | None:
    """Letters of x[:, i, j, ...], whose index holds tensors among ranges; None for any other.

    Tensors are broadcast together; their dims stand in their place where they are neighbours, else in front. Integers
    beside them select before they look up, so a captured graph has none there. A mask stands alone, for all of its
    dims.
    """
    if isinstance(index, list) and not any(hasattr(e, "dtype") for e in index):
        return None
    said = list(index) if isinstance(index, (tuple, list)) else [index]
    tensors = [e for e in said if hasattr(e, "dtype")]
    if not tensors or not _holds_tensors_and_ranges(said):
        return None
    entries = _opened(said, len(tensor.shape))
    left, out, taken = list[str](), list[str](), list[str]()
    for e in entries:
        dim = len(left)
        if e is None:
            out.append(f"new{len(out)}!")
        elif isinstance(e, slice):
            left.append(f"a{dim}" if e == slice(None) else f"in{dim}!")
            out.append(f"a{dim}" if e == slice(None) else f"out{dim}!")
        else:
            taken = [f"in{dim + k}!" for k in range(_dims_taken(e))]
            left += taken
    depth = max(len(e.shape) for e in tensors)
    places = ["found!"] if _is_mask(tensors[0]) else [f"i{k}{mark}" for k in range(depth)]
    looked = [k for k, e in enumerate(entries) if not (e is None or isinstance(e, slice))]
    are_neighbours = looked[-1] - looked[0] == len(looked) - 1
    at = looked[0] if are_neighbours else 0
    out[at:at] = places

    def row(entry: Any) -> str:
        if _is_mask(entry):
            return " ".join(taken)
        return " ".join(places[depth - len(entry.shape) :]) if hasattr(entry, "dtype") else ""

    return IndexLetters(left, ", ".join(map(row, said)), out, tensors[0].dtype)


def _holds_tensors_and_ranges(index: Sequence[Any]) -> bool:
    """Whether an index holds only tensors, ranges and new dims, or one mask among ranges."""
    if any(isinstance(e, (bool, int, list, tuple)) for e in index):
        return False
    places = [e for e in index if hasattr(e, "dtype")]
    return len(places) == 1 or not any(map(_is_mask, places))


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


def gather(arguments: Mapping[str, Any]) -> Rule | None:
    """The dim that is looked along stays whole; the places that are looked up may be cut."""
    given, index = arguments["input"].shape, arguments["index"].shape
    if not given or len(given) != len(index):
        return None
    dim = arguments["dim"] % len(given)
    rows: tuple[list[str], list[str]] = ([], [])
    for i, (a, b) in enumerate(zip(given, index, strict=True)):
        rows[0].append(f"in{i}!" if i == dim or a != b else f"a{i}")
        rows[1].append(f"a{i}" if i == dim or a == b else f"out{i}!")
    return parse(f"{' '.join(rows[0])}, {' '.join(rows[1])} -> {' '.join(rows[1])}", linear="x")


def index_select(arguments: Mapping[str, Any]) -> Rule | None:
    letters = letters_of(arguments["input"])
    if not letters:
        return None
    dim = arguments["dim"] % len(letters)
    left = " ".join("in!" if i == dim else a for i, a in enumerate(letters))
    return parse(f"{left}, out -> {' '.join('out' if i == dim else a for i, a in enumerate(letters))}", linear="x")


def scatter_rule(arguments: Mapping[str, Any]) -> Rule | None:
    """Dims other than the scattered one may be cut where all operands agree in size."""
    given = arguments["input"].shape
    index = arguments["index"].shape
    source = getattr(arguments["src"], "shape", None)
    if not given or len(given) != len(index) or (source is not None and len(source) != len(given)):
        return None
    dim = arguments["dim"] % len(given)
    agree = [
        i != dim and a == b and (source is None or source[i] == b)
        for i, (a, b) in enumerate(zip(given, index, strict=True))
    ]
    into, at, added = (_where_sizes_agree(agree, name) for name in ("in", "at", "from"))
    if source is None:
        return parse(f"{' '.join(into)}, {' '.join(at)},  -> {' '.join(into)}")
    if arguments["op"] == "scatter_add" and source[dim] == index[dim]:  # parts of what is added may be added apart
        at[dim] = added[dim] = "e"
    return parse(f"{' '.join(into)}, {' '.join(at)}, {' '.join(added)} -> {' '.join(into)}", linear="x+z")


def _where_sizes_agree(agree: Sequence[bool], prefix: str) -> list[str]:
    """Letters of a tensor's dims: a common one where all tensors agree in size, else its own, kept whole."""
    return [f"a{i}" if same else f"{prefix}{i}!" for i, same in enumerate(agree)]


def one_hot(arguments: Mapping[str, Any]) -> Rule:
    return parse("... -> ... classes!")


def indexed(arguments: Mapping[str, Any]) -> Rule | None:
    """The dim that is looked into stays whole, and so does the index; other dims are cut alike."""
    given = arguments["input"]
    source = arguments.get("source", arguments.get("value"))
    rank = len(given.shape)
    if rank == 0:
        return None
    dim = arguments["dim"] % rank
    row = " ".join(f"in{i}!" if i == dim else f"a{i}" for i in range(rank))
    place = "at!" if arguments["index"].shape else ""
    shape = getattr(source, "shape", None)
    if arguments["op"] == "index_fill":
        return parse(f"{row}, {place}, {''} -> {row}")
    if shape is None or len(shape) != rank:
        return None
    if arguments["op"] == "index_add":  # parts of what is added may be added apart
        place = "e" if arguments["index"].shape and arguments["index"].shape[0] == shape[dim] else place
    mine = " ".join((place if place == "e" else "from!") if i == dim else f"a{i}" for i in range(rank))
    linear = {"index_add": "x+z", "index_copy": "x+z"}.get(arguments["op"], "")
    return parse(f"{row}, {place}, {mine} -> {row}", linear=linear)


def index_put_rule(arguments: Mapping[str, Any]) -> Rule | None:
    """As for setitem: one tensor of places, or a mask, among dims that stay as they are."""
    said = tuple(slice(None) if i is None else i for i in arguments["indices"])
    found = setitem_rule({"input": arguments["input"], "index": said, "value": arguments["values"]})
    return None if found is None else parse(found.text, linear=found.linear)


def scatter_reduce(arguments: Mapping[str, Any]) -> Rule | None:
    """Dims other than the scattered one may be cut where all operands agree in size."""
    given, index, source = (arguments[n].shape for n in ("input", "index", "src"))
    if not given or not len(given) == len(index) == len(source):
        return None
    dim = arguments["dim"] % len(given)
    agree = [i != dim and a == b == c for i, (a, b, c) in enumerate(zip(given, index, source, strict=True))]
    into, at, added = (" ".join(_where_sizes_agree(agree, name)) for name in ("in", "at", "from"))
    return parse(f"{into}, {at}, {added} -> {into}")


def take(arguments: Mapping[str, Any]) -> Rule:
    """The input stays whole, as places count through all of it; the places that are looked up may be cut."""
    here = " ".join(letters_of(arguments["index"]))
    return parse(f"{' '.join(whole_dims('in', len(arguments['input'].shape)))}, {here} -> {here}", linear="x")


def take_along_dim(arguments: Mapping[str, Any]) -> Rule | None:
    """As for gather, where both have the same dims beside the one that is looked along."""
    given = arguments["input"].shape
    index = arguments["indices"].shape
    dim = arguments.get("dim")
    if dim is None or len(given) != len(index) or not given:
        return None
    rows: tuple[list[str], list[str]] = ([], [])
    out = arguments["outputs"][0].shape
    for i, (a, b) in enumerate(zip(given, index, strict=True)):
        along = i == dim % len(given)
        rows[0].append(f"in{i}!" if along or a != b else f"a{i}")
        rows[1].append(f"a{i}" if along or a == b else f"at{i}!")
    made = [
        f"a{i}" if i == dim % len(given) or a == b else f"out{i}!"
        for i, (a, b) in enumerate(zip(given, index, strict=True))
    ]
    if len(out) != len(made):
        return None
    return parse(f"{' '.join(rows[0])}, {' '.join(rows[1])} -> {' '.join(made)}", linear="x")


def counted(arguments: Mapping[str, Any]) -> Rule | None:
    """Places are counted over all of a tensor, which stays whole."""
    return parse(f"{' '.join(whole_dims('t', len(arguments['input'].shape)))} -> places! dims!")


def searchsorted(arguments: Mapping[str, Any]) -> Rule | None:
    """Values and leading dims may be cut; each sorted row stays whole."""
    rows = arguments["sorted_sequence"]
    values = arguments.get("input")
    shape = getattr(values, "shape", None)
    if shape is None or arguments.get("sorter") is not None:
        return None
    if len(rows.shape) == 1:
        here = " ".join(letters_of(values))
        return parse(f"s!, {here},  -> {here}")
    leading = " ".join(letters_of(values)[:-1])
    return parse(f"{leading} s!, {leading} v,  -> {leading} v")


def bucketize(arguments: Mapping[str, Any]) -> Rule | None:
    """Values may be cut; boundaries stay whole."""
    return parse("..., b! -> ...")


def isin(arguments: Mapping[str, Any]) -> Rule | None:
    """Elements may be cut; the list that is searched stays whole."""
    if any(not hasattr(arguments[n], "shape") for n in ("elements", "test_elements")):
        return None
    return parse(f"..., {' '.join(whole_dims('t', len(arguments['test_elements'].shape)))} -> ...")


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
each("gather", "input:T, dim, index:T, *, sparse_grad=False", rule=gather, keeps="index")
each("index_select", "input:T, dim, index:T", rule=index_select, keeps="index")
op("scatter", scatter, "input:T, dim, index:T, src:T", torch.scatter, T.scatter, rule=scatter_rule, keeps="index")
each("scatter_add", "input:T, dim, index:T, src:T", rule=scatter_rule, keeps="index")
each("scatter_reduce", "input:T, dim, index:T, src:T, reduce, *, include_self=True", rule=scatter_reduce)
each("one_hot", "input:T, num_classes=-1", rule=one_hot, keeps="")
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
op("masked_scatter", torch.masked_scatter, "input:T, mask:T, source:T", T.masked_scatter, rule=masked_scatter)
each("nonzero_static", "input:T, *, size, fill_value=-1", rule=counted)
each("take", "input:T, index:T", rule=take)
each("take_along_dim", "input:T, indices:T, dim=None", rule=take_along_dim)
op(
    "searchsorted",
    torch.searchsorted,
    "sorted_sequence:T, input:T, *, out_int32=False, right=False, side=None, sorter:T=None",
    rule=searchsorted,
)
op("bucketize", torch.bucketize, "input:T, boundaries:T, *, out_int32=False, right=False", rule=bucketize)
op("isin", torch.isin, "elements:T, test_elements:T, *, assume_unique=False, invert=False", rule=isin)
