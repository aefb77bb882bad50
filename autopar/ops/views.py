"""Ops on shapes: views, ranges, repetitions, concatenations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops import inverses
from autopar.ops.entry import T, each, op, spell, translates
from autopar.ops.lookup import by_own_name
from autopar.ops.refinement import view_rule
from autopar.ops.rows import NAMES, Row, along, parse, removed, resized, rule_from, whole_dims
from autopar.sharding.notation import Rule


def view(input: Tensor, size: tuple[int, ...]) -> Tensor:
    """The same numbers in another shape: view, reshape, flatten, squeeze, unsqueeze."""
    return input.reshape(size)


def contiguous(input: Tensor) -> Tensor:
    """The same numbers in contiguous memory."""
    return input.contiguous()


def narrow(input: Tensor, dim: int, start: int, length: int) -> Tensor:
    """A range of one dim."""
    return input.narrow(dim, start, length)


def slice_scatter(
    input: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """A copy with another value in a range of one dim."""
    return _put_in(torch.slice_scatter, input, src, dim, start, end, step)


def select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """A copy with another value at one place of a dim."""
    return _put_in(torch.select_scatter, input, src, dim, index)


def _put_in(function: Callable[..., Tensor], input: Tensor, src: Tensor, dim: int, *place: int | None) -> Tensor:
    """Call a scatter of torch, which differentiates complex ones only as pairs of real numbers."""
    if not input.is_complex():
        return function(input, src, dim, *place)
    pairs = [torch.view_as_real(t.resolve_conj()) for t in (input, src)]
    return torch.view_as_complex(function(*pairs, dim % input.dim(), *place))


def split(input: Tensor, sections: tuple[int, ...], dim: int = 0) -> tuple[Tensor, ...]:
    """Consecutive ranges of one dim."""
    return input.split(sections, dim)


def expand(input: Tensor, size: tuple[int, ...]) -> Tensor:
    """Dims of size 1, and new leading dims, repeated without a copy."""
    return input.expand(size)


def repeat(input: Tensor, repeats: Sequence[int]) -> Tensor:
    """The tensor, repeated along each dim."""
    return input.repeat(tuple(repeats))


def tile(input: Tensor, dims: Sequence[int]) -> Tensor:
    """The tensor, repeated along its last dims: repeats may be fewer than dims, which `repeat` refuses."""
    return torch.tile(input, tuple(dims))


def unfold(input: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows along one dim, as a view."""
    return input.unfold(dimension, size, step)


def copy(input: Tensor, source: Tensor) -> Tensor:
    """The source, in the shape and dtype of the input."""
    return source.expand(input.shape).to(input.dtype)


def transpose(arguments: Mapping[str, Any]) -> Rule:
    """All dims may be cut; they come out in another order."""
    row = Row.of(arguments["input"])
    rank = len(row)
    order = list(range(rank))
    if "dims" in arguments:
        order = [d % rank for d in arguments["dims"]]
    elif rank > 1:
        first, second = arguments.get("dim0", 0) % rank, arguments.get("dim1", 1) % rank
        order[first], order[second] = second, first
    return rule_from([row], [[row[d] for d in order]], linear="x")


def split_rule(arguments: Mapping[str, Any]) -> Rule | None:
    """The parts stand end to end in the operand: they are cut together, each by itself."""
    if 0 in arguments["sections"]:
        return None
    row = Row.of(arguments["input"])
    dim = arguments.get("dim", 0)
    parts = [f"p{i}" for i in range(len(arguments["sections"]))]
    return rule_from([row.replaced(dim, "|".join(parts))], [row.replaced(dim, p) for p in parts], linear="x")


def cat(arguments: Mapping[str, Any]) -> Rule:
    """The operands stand end to end in the output."""
    row = Row.of(arguments["tensors"][0])
    dim = arguments.get("dim", 0)
    parts = [f"p{i}" for i in range(len(arguments["tensors"]))]
    linear = "+".join(NAMES[: len(parts)])
    return rule_from([row.replaced(dim, p) for p in parts], [row.replaced(dim, "|".join(parts))], linear)


def stack(arguments: Mapping[str, Any]) -> Rule:
    """The new dim stays whole; all others may be cut."""
    row = Row.of(arguments["tensors"][0])
    count = len(arguments["tensors"])
    return rule_from([row] * count, [row.insert(arguments.get("dim", 0), "new!")], "+".join(NAMES[:count]))


def pad_rule(arguments: Mapping[str, Any]) -> Rule:
    """A padded dim stays whole, even where it keeps its size; padding with zeros is linear."""
    row = Row.of(arguments["input"])
    padded = {-1 - i // 2 for i, size in enumerate(arguments["pad"]) if size}  # two sizes a dim, the last dim first
    is_zero = not arguments.get("value") and arguments.get("mode", "constant") == "constant"
    return rule_from([row.resized(padded, "in")], [row.resized(padded, "out")], linear="x" if is_zero else "")


def expand_rule(arguments: Mapping[str, Any]) -> Rule:
    """Repeated dims are made on each device, as often as it needs."""
    before = arguments["input"].shape
    after = arguments["size"]
    extra = len(after) - len(before)
    left = ["1" if n == 1 and after[extra + i] != 1 else f"a{extra + i}" for i, n in enumerate(before)]
    right = [f"a{i}" if i >= extra and left[i - extra] != "1" else f"a{i}*" for i in range(len(after))]
    return rule_from([left], [right], linear="x")


def repeat_rule(arguments: Mapping[str, Any]) -> Rule | None:
    """A dim that is repeated stays whole."""
    repeats = arguments.get("repeats", arguments.get("dims"))
    is_flat = arguments["op"] == "repeat_interleave" and arguments.get("dim") is None
    if is_flat or not isinstance(repeats, (int, tuple, list)):
        return None
    before = arguments["input"].shape
    after = arguments["outputs"][0].shape
    extra = len(after) - len(before)
    repeated = {i for i, n in enumerate(after) if i < extra or n != before[i - extra]}
    row = Row.of(arguments["outputs"][0])
    left = row.resized(repeated, "in")[extra:]
    return rule_from([left, ()] if isinstance(repeats, int) else [left], [row.resized(repeated, "out")], linear="x")


def diagonal(arguments: Mapping[str, Any]) -> Rule:
    """The two dims of the diagonal stay whole, whether it is read or written."""
    row = Row.of(arguments["input"])
    dims = (arguments.get("dim1", 0), arguments.get("dim2", 1))
    taken = row.without(dims).insert(-1, "diagonal!")
    if "src" in arguments:
        return rule_from([row.whole(dims), taken], [row.whole(dims)], linear="x+y")
    return rule_from([row.whole(dims)], [taken], linear="x")


def put(arguments: Mapping[str, Any]) -> Rule:
    """The dim along which values are written stays whole."""
    row = Row.of(arguments["input"])
    dim = arguments.get("dim", 0)
    source = row.without(dim) if "index" in arguments else row.replaced(dim, "put!")
    return rule_from([row.whole(dim), source], [row.whole(dim)], linear="x+y")


def copy_rule(arguments: Mapping[str, Any]) -> Rule:
    """All dims may be cut; the op is linear in the source alone, as the target is overwritten."""
    floats = all("float" in str(arguments[x].dtype) for x in ("input", "source"))
    return parse("..., ... -> ...", linear="y" if floats else "")


def diag_embed(arguments: Mapping[str, Any]) -> Rule:
    """The last dim stays whole and becomes a diagonal of two new dims; others may be cut."""
    row = Row.of(arguments["input"])
    made = row.without(-1)
    rank = len(row) + 1
    for dim in sorted((arguments.get("dim1", -2) % rank, arguments.get("dim2", -1) % rank)):
        made = made.insert(dim, f"d{dim}!")
    return rule_from([row.whole(-1)], [made], linear="x")


def rot90(arguments: Mapping[str, Any]) -> Rule:
    """A dim that is reversed stays whole; a quarter turn reverses one of the two, and swaps them."""
    row = Row.of(arguments["input"])
    first, second = (d % len(row) for d in arguments.get("dims", (0, 1)))
    quarters = arguments.get("k", 1) % 4
    given = row.whole(((), second, (first, second), first)[quarters])
    swapped = given.replaced(first, given[second]).replaced(second, given[first])
    return rule_from([given], [swapped if quarters % 2 else given], linear="x")


def unfold_rule(arguments: Mapping[str, Any]) -> Rule | None:
    """The dim of windows stays whole; all others may be cut."""
    row = Row.of(arguments["input"])
    dim = arguments["dimension"]
    if not row:
        return None
    return rule_from([row.resized(dim, "in")], [row.resized(dim, "out").insert(-1, "window!")], linear="x")


def columns(arguments: Mapping[str, Any]) -> Rule:
    """Only the batch may be cut: channels and positions go together."""
    given = len(arguments["input"].shape)
    made = len(arguments["outputs"][0].shape)
    batch = ["n"] if given == (4 if arguments["op"] == "im2col" else 3) else []
    left, right = (whole_dims(name, rank - len(batch)) for name, rank in (("i", given), ("o", made)))
    return rule_from([batch + left], [batch + right], linear="x")


ONE = "... -> ..."


@translates(T.view)
def bits_as(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Read x.view(dtype), which reinterprets bits, as an op of its own."""
    dtypes = any(isinstance(a, torch.dtype) for a in args)
    return by_own_name(T.view, args, kwargs) if dtypes else None


VIEW: dict[str, Any] = dict(keeps="", free=True, moved=True)
PERMUTED: dict[str, Any] = dict(rule=transpose, same=True, reach="moved")
op(
    "view",
    view,
    "input:T, size:SHAPE",
    (T.unsqueeze, torch.unsqueeze, torch.reshape, T.view_as, T.reshape_as, "input, size"),
    (T.view, T.reshape, T.squeeze, torch.squeeze, "input, *size"),
    (T.flatten, torch.flatten, T.unflatten, torch.unflatten, "input, *size, **by"),
    rule=view_rule,
    same=True,
    reach="view",
    sized=True,
    inverse=inverses.view,
    **VIEW,
)
op(
    "expand",
    expand,
    "input:T, size:SHAPE",
    (T.expand_as, torch.broadcast_to, "input, size"),
    (T.expand, T.broadcast_to, "input, *size"),
    rule=expand_rule,
    serves="*",
    keeps="",
    free=True,
    same=True,
    reach="moved",
    sized=True,
)
each("transpose", "input:T, dim0, dim1", inverse=inverses.transpose, **PERMUTED, **VIEW)
spell("transpose", (torch.swapaxes, T.swapaxes, torch.swapdims, T.swapdims, "input:T, dim0, dim1"))
op("permute", torch.permute, "input:T, dims", (T.permute, "input, *dims"), inverse=inverses.permute, **PERMUTED, **VIEW)
each("t", keeps="", free=True, inverse=inverses.t, **PERMUTED)
op(
    "contiguous",
    contiguous,
    "input:T",
    (T.contiguous, "input, memory_format=None"),
    rule=ONE,
    linear="x",
    keeps="",
    moved=True,
    inverse=inverses.same,
)
op(
    "clone",
    torch.clone,
    "input:T",
    (torch.clone, T.clone, "input, *, memory_format=None"),
    rule=ONE,
    linear="x",
    moved=True,
    inverse=inverses.same,
)
op(
    "split",
    split,
    "input:T, sections:SIZES, dim=0",
    (T.split, torch.split, T.chunk, torch.chunk, "input, sections, dim=0"),
    (torch.unsafe_split, torch.unsafe_chunk, torch.split_with_sizes, T.split_with_sizes, "input, sections, dim=0"),
    rule=split_rule,
    reach="moved",
    sized=True,
    inverse=inverses.split,
    **VIEW,
)
each("unbind", "input:T, dim=0", rule=removed("!", 0, linear="x"), keeps="", inverse=inverses.unbind)
op(
    "narrow",
    narrow,
    "input:T, dim, start, length",
    T.narrow,
    torch.narrow,
    rule=resized(linear="x"),  # a range of all of it too: its length is a number in the program
    reach="moved",
    sized=True,
    inverse=inverses.narrow,
    **VIEW,
)
each(
    "select",
    "input:T, dim, index",
    rule=removed(linear="x"),
    reach="moved",
    sized=True,
    inverse=inverses.select,
    **VIEW,
)
op("unfold", unfold, "input:T, dimension, size, step", T.unfold, rule=unfold_rule)

# together, and into one another
PUT: dict[str, Any] = dict(rule=put, keeps="", reach="moved")
op("cat", torch.cat, "tensors:T, dim=0", torch.concat, torch.concatenate, rule=cat, keeps="", reach="moved")
op("stack", torch.stack, "tensors:T, dim=0", rule=stack, keeps="", reach="moved")
op("copy", copy, "input:T, source:T", rule=copy_rule, keeps="")
op(
    "slice_scatter",
    slice_scatter,
    "input:T, src:T, dim=0, start=None, end=None, step=1",
    torch.slice_scatter,
    T.slice_scatter,
    sized=True,
    **PUT,
)
op("select_scatter", select_scatter, "input:T, src:T, dim, index", torch.select_scatter, T.select_scatter, **PUT)
each("diagonal", "input:T, offset=0, dim1=0, dim2=1", rule=diagonal, keeps="", inverse=inverses.diagonal)
each("diagonal_scatter", "input:T, src:T, offset=0, dim1=0, dim2=1", rule=diagonal)
each("diag_embed", "input:T, offset=0, dim1=-2, dim2=-1", rule=diag_embed)
# the last two dims say which entries of a matrix are kept
each("tril triu", "input:T, diagonal=0", rule=along((-2, -1), linear="x"), keeps="", reach="moved")

each("view_as_real", "input:T", rule="... -> ... parts!", linear="x", keeps="")
each("view_as_complex", "input:T", rule="... parts! -> ...", linear="x", keeps="")

# again, and in another order
op("repeat", repeat, "input:T, repeats", (T.repeat, "input, *repeats"), rule=repeat_rule, keeps="")
op("tile", tile, "input:T, dims", (torch.tile, "input, dims"), (T.tile, "input, *dims"), rule=repeat_rule, keeps="")
each("repeat_interleave", "input:T, repeats:T, dim=None, *, output_size=None", rule=repeat_rule)
each("rot90", "input:T, k=1, dims=(0, 1)", rule=rot90)
each("roll", "input:T, shifts, dims=None", rule=along(linear="x"), keeps="")
op("flip", torch.flip, "input:T, dims", (T.flip, "input, *dims"), rule=along(linear="x"), keeps="")
op("pad", F.pad, "input:T, pad, mode='constant', value=None", rule=pad_rule, keeps="", moved=True, reach="moved")
op("im2col", F.unfold, "input:T, kernel_size, dilation=1, padding=0, stride=1", rule=columns)
op("col2im", F.fold, "input:T, output_size, kernel_size, dilation=1, padding=0, stride=1", rule=columns)
