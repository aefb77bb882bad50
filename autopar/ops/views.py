"""Ops on shapes: views, ranges, repetitions, concatenations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops import inverses
from autopar.ops.entry import T, each, op, translates
from autopar.ops.lookup import by_own_name
from autopar.ops.reductions import along_and_linear
from autopar.ops.refinement import view_rule
from autopar.ops.spelling import NAMES, letters_of, parse, same_dims, whole_dims
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
    letters = letters_of(arguments["input"])
    order = list(range(len(letters)))
    if "dims" in arguments:
        order = [d % len(letters) for d in arguments["dims"]]
    elif len(letters) > 1:
        first, second = arguments.get("dim0", 0) % len(letters), arguments.get("dim1", 1) % len(letters)
        order[first], order[second] = second, first
    return parse(" ".join(letters) + " -> " + " ".join(letters[d] for d in order), linear="x")


def split_rule(arguments: Mapping[str, Any]) -> Rule | None:
    """The parts stand end to end in the operand: they are cut together, each by itself."""
    if 0 in arguments["sections"]:
        return None
    letters = letters_of(arguments["input"])
    dim = arguments.get("dim", 0) % len(arguments["input"].shape)
    parts = [f"p{i}" for i in range(len(arguments["sections"]))]
    rows = [" ".join([*letters[:dim], p, *letters[dim + 1 :]]) for p in ("|".join(parts), *parts)]
    return parse(f"{rows[0]} -> {', '.join(rows[1:])}", linear="x")


def cat(arguments: Mapping[str, Any]) -> Rule:
    """The operands stand end to end in the output."""
    tensors = arguments["tensors"]
    letters = letters_of(tensors[0])
    dim = arguments.get("dim", 0) % len(tensors[0].shape)
    parts = [f"p{i}" for i in range(len(tensors))]
    rows = [" ".join([*letters[:dim], p, *letters[dim + 1 :]]) for p in (*parts, "|".join(parts))]
    return parse(f"{', '.join(rows[:-1])} -> {rows[-1]}", linear="+".join(NAMES[: len(tensors)]))


def ranges(arguments: Mapping[str, Any]) -> Rule:
    """A dim of which a range is taken, or that is padded, stays whole."""
    before = arguments["input"].shape
    after = arguments["outputs"][0].shape
    letters = letters_of(arguments["input"])
    if "index" in arguments:
        gone = arguments["dim"] % len(before)
        return parse(
            " ".join(f"{a}!" if i == gone else a for i, a in enumerate(letters))
            + " -> "
            + " ".join(a for i, a in enumerate(letters) if i != gone),
            linear="x",
        )
    shifts = arguments.get("pad", ())  # pairs, last dim first; a shift may leave the size as it was
    taken = (
        arguments["dim"] % len(before) if "length" in arguments else -1
    )  # a range of all of it too: its length is a number in the program
    changed = [
        i
        for i in range(len(before))
        if before[i] != after[i] or any(shifts[2 * (len(before) - 1 - i) :][:2]) or i == taken
    ]
    linear = "" if arguments.get("value") or arguments.get("mode", "constant") != "constant" else "x"
    left, right = list(letters), list(letters)
    for i in changed:
        left[i], right[i] = f"{letters[i]}_in!", f"{letters[i]}_out!"
    return parse(" ".join(left) + " -> " + " ".join(right), linear=linear)


def expand_rule(arguments: Mapping[str, Any]) -> Rule:
    """Repeated dims are made on each device, as often as it needs."""
    before = arguments["input"].shape
    after = arguments["size"]
    extra = len(after) - len(before)
    left = ["1" if n == 1 and after[extra + i] != 1 else f"a{extra + i}" for i, n in enumerate(before)]
    right = [f"a{i}" if i >= extra and left[i - extra] != "1" else f"a{i}*" for i in range(len(after))]
    return parse(f"{' '.join(left)} -> {' '.join(right)}", linear="x")


def stack(arguments: Mapping[str, Any]) -> Rule:
    """The new dim stays whole; all others may be cut."""
    tensors = arguments["tensors"]
    letters = letters_of(tensors[0])
    rank = len(tensors[0].shape) + 1
    dim = arguments.get("dim", 0) % rank
    return parse(
        f"{', '.join([' '.join(letters)] * len(tensors))} -> {' '.join([*letters[:dim], 'new!', *letters[dim:]])}",
        linear="+".join(NAMES[: len(tensors)]),
    )


def unbind(arguments: Mapping[str, Any]) -> Rule:
    letters = letters_of(arguments["input"])
    dim = arguments.get("dim", 0) % len(arguments["input"].shape)
    row = " ".join(a for i, a in enumerate(letters) if i != dim)
    return parse(
        f"{' '.join(f'{a}!' if i == dim else a for i, a in enumerate(letters))} -> "
        f"{', '.join([row] * len(arguments['outputs']))}",
        linear="x",
    )


def repeat_rule(arguments: Mapping[str, Any]) -> Rule | None:
    """A dim that is repeated stays whole."""
    before = arguments["input"].shape
    after = arguments["outputs"][0].shape
    repeats = arguments.get("repeats", arguments.get("dims"))
    if not isinstance(repeats, (int, tuple, list)) or (
        arguments["op"] == "repeat_interleave" and arguments.get("dim") is None
    ):
        return None
    extra = len(after) - len(before)
    letters = [f"a{extra + i}" if n == after[extra + i] else f"a{extra + i}_in!" for i, n in enumerate(before)]
    right = [
        letters[i - extra] if i >= extra and not letters[i - extra].endswith("!") else f"a{i}_out!"
        for i in range(len(after))
    ]
    operands = " ".join(letters) + (", " if isinstance(repeats, int) else "")
    return parse(f"{operands} -> {' '.join(right)}", linear="x")


def as_real(arguments: Mapping[str, Any]) -> Rule:
    """A dim more, of real and imaginary parts, which stays whole."""
    letters = " ".join(letters_of(arguments["input"]))
    return parse(f"{letters} -> {letters} parts!", linear="x")


def as_complex(arguments: Mapping[str, Any]) -> Rule:
    """The last dim has real and imaginary parts, and stays whole."""
    letters = " ".join(letters_of(arguments["input"])[:-1])
    return parse(f"{letters} parts! -> {letters}", linear="x")


def triangle(arguments: Mapping[str, Any]) -> Rule:
    """The last two dims stay whole, as both say which entries are kept."""
    rank = len(arguments["input"].shape)
    return same_dims(letters_of(arguments["input"]), {rank - 2, rank - 1}, "x")


def diagonal(arguments: Mapping[str, Any]) -> Rule:
    """The two dims of the diagonal stay whole, whether it is read or written."""
    letters = letters_of(arguments["input"])
    rank = len(arguments["input"].shape)
    gone = {arguments.get("dim1", 0) % rank, arguments.get("dim2", 1) % rank}
    row = " ".join(f"{a}!" if i in gone else a for i, a in enumerate(letters))
    taken = f"{' '.join(a for i, a in enumerate(letters) if i not in gone)} diagonal!"
    return (
        parse(f"{row}, {taken} -> {row}", linear="x+y")
        if "src" in arguments
        else parse(f"{row} -> {taken}", linear="x")
    )


def put(arguments: Mapping[str, Any]) -> Rule:
    """The dim along which values are written stays whole."""
    letters = letters_of(arguments["input"])
    dim = arguments.get("dim", 0) % len(arguments["input"].shape)
    row = [f"{a}!" if i == dim else a for i, a in enumerate(letters)]
    source = (
        [a for i, a in enumerate(letters) if i != dim]
        if "index" in arguments
        else ["put!" if i == dim else a for i, a in enumerate(letters)]
    )
    return parse(f"{' '.join(row)}, {' '.join(source)} -> {' '.join(row)}", linear="x+y")


def copy_rule(arguments: Mapping[str, Any]) -> Rule:
    """All dims may be cut; the op is linear in the source alone, as the target is overwritten."""
    floats = all("float" in str(arguments[x].dtype) for x in ("input", "source"))
    return parse("..., ... -> ...", linear="y" if floats else "")


def diag_embed(arguments: Mapping[str, Any]) -> Rule:
    """The last dim stays whole and becomes a diagonal of two new dims; others may be cut."""
    given = arguments["input"].shape
    rank = len(arguments["outputs"][0].shape)
    new = {arguments.get("dim1", -2) % rank, arguments.get("dim2", -1) % rank}
    leading = iter([f"a{i}" for i in range(len(given) - 1)])
    out = [f"d{i}!" if i in new else next(leading) for i in range(rank)]
    return parse(f"{' '.join([f'a{i}' for i in range(len(given) - 1)] + ['d!'])} -> {' '.join(out)}", linear="x")


def rot90(arguments: Mapping[str, Any]) -> Rule:
    """The two dims that are rotated stay whole."""
    rank = len(arguments["input"].shape)
    return (
        same_dims(letters_of(arguments["input"]), {d % rank for d in arguments.get("dims", (0, 1))}, "x")
        if rank
        else parse(" -> ", linear="x")
    )


def unfold_rule(arguments: Mapping[str, Any]) -> Rule | None:
    """The dim of windows stays whole; all others may be cut."""
    letters = letters_of(arguments["input"])
    if not letters:
        return None
    dim = arguments["dimension"] % len(letters)
    left = " ".join(f"in{i}!" if i == dim else a for i, a in enumerate(letters))
    right = " ".join(f"out{i}!" if i == dim else a for i, a in enumerate(letters))
    return parse(f"{left} -> {right} window!", linear="x")


def columns(arguments: Mapping[str, Any]) -> Rule:
    """Only the batch may be cut: channels and positions go together."""
    given = len(arguments["input"].shape)
    made = len(arguments["outputs"][0].shape)
    batched = given == (4 if arguments["op"] == "im2col" else 3)
    first = ["n"] if batched else []
    left, right = [*first, *whole_dims("i", given - len(first))], [*first, *whole_dims("o", made - len(first))]
    return parse(f"{' '.join(left)} -> {' '.join(right)}", linear="x")


ONE = "... -> ..."


@translates(T.view)
def bits_as(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Read x.view(dtype), which reinterprets bits, as an op of its own."""
    dtypes = any(isinstance(a, torch.dtype) for a in args)
    return by_own_name(T.view, args, kwargs) if dtypes else None


op(
    "view",
    view,
    "input:T, size:SHAPE",
    (T.view, "input, *size"),
    (T.reshape, "input, *size"),
    (torch.reshape, "input, size"),
    (T.flatten, "input, *size, **by"),
    (torch.flatten, "input, *size, **by"),
    (T.unsqueeze, "input, size"),
    (torch.unsqueeze, "input, size"),
    (T.squeeze, "input, *size"),
    (torch.squeeze, "input, *size"),
    (T.unflatten, "input, *size, **by"),
    (torch.unflatten, "input, *size, **by"),
    (T.view_as, "input, size"),
    (T.reshape_as, "input, size"),
    rule=view_rule,
    keeps="",
    free=True,
    same=True,
    moved=True,
    reach="view",
    sized=True,
    inverse=inverses.view,
)
op(
    "expand",
    expand,
    "input:T, size:SHAPE",
    (T.expand, "input, *size"),
    (T.expand_as, "input, size"),
    (torch.broadcast_to, "input, size"),
    (T.broadcast_to, "input, *size"),
    rule=expand_rule,
    serves="*",
    keeps="",
    free=True,
    same=True,
    reach="moved",
    sized=True,
)
op(
    "transpose",
    torch.transpose,
    "input:T, dim0, dim1",
    T.transpose,
    torch.swapaxes,
    T.swapaxes,
    torch.swapdims,
    T.swapdims,
    rule=transpose,
    keeps="",
    free=True,
    same=True,
    moved=True,
    reach="moved",
    inverse=inverses.transpose,
)
op(
    "permute",
    torch.permute,
    "input:T, dims",
    (T.permute, "input, *dims"),
    rule=transpose,
    keeps="",
    free=True,
    same=True,
    moved=True,
    reach="moved",
    inverse=inverses.permute,
)
op("t", torch.t, "input:T", T.t, rule=transpose, keeps="", free=True, same=True, reach="moved", inverse=inverses.t)
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
    (torch.clone, "input, *, memory_format=None"),
    (T.clone, "input, *, memory_format=None"),
    rule=ONE,
    linear="x",
    moved=True,
    inverse=inverses.same,
)
op(
    "split",
    split,
    "input:T, sections:SIZES, dim=0",
    *(
        (f, "input, sections, dim=0")
        for f in (
            T.split,
            torch.split,
            T.chunk,
            torch.chunk,
            torch.split_with_sizes,
            torch.unsafe_split,
            torch.unsafe_chunk,
            T.split_with_sizes,
        )
    ),
    rule=split_rule,
    keeps="",
    free=True,
    moved=True,
    reach="moved",
    sized=True,
    inverse=inverses.split,
)
op("unbind", torch.unbind, "input:T, dim=0", T.unbind, rule=unbind, keeps="", inverse=inverses.unbind)
op(
    "narrow",
    narrow,
    "input:T, dim, start, length",
    T.narrow,
    torch.narrow,
    rule=ranges,
    keeps="",
    free=True,
    moved=True,
    reach="moved",
    sized=True,
    inverse=inverses.narrow,
)
op(
    "select",
    torch.select,
    "input:T, dim, index",
    T.select,
    rule=ranges,
    keeps="",
    free=True,
    moved=True,
    reach="moved",
    sized=True,
    inverse=inverses.select,
)
op("unfold", unfold, "input:T, dimension, size, step", T.unfold, rule=unfold_rule)

# together, and into one another
op("cat", torch.cat, "tensors:T, dim=0", torch.concat, torch.concatenate, rule=cat, keeps="", reach="moved")
op("stack", torch.stack, "tensors:T, dim=0", rule=stack, keeps="", reach="moved")
op("copy", copy, "input:T, source:T", rule=copy_rule, keeps="")
op(
    "slice_scatter",
    slice_scatter,
    "input:T, src:T, dim=0, start=None, end=None, step=1",
    torch.slice_scatter,
    T.slice_scatter,
    rule=put,
    keeps="",
    reach="moved",
    sized=True,
)
op(
    "select_scatter",
    select_scatter,
    "input:T, src:T, dim, index",
    torch.select_scatter,
    T.select_scatter,
    rule=put,
    keeps="",
    reach="moved",
)
each("diagonal", "input:T, offset=0, dim1=0, dim2=1", rule=diagonal, keeps="", inverse=inverses.diagonal)
each("diagonal_scatter", "input:T, src:T, offset=0, dim1=0, dim2=1", rule=diagonal)
each("diag_embed", "input:T, offset=0, dim1=-2, dim2=-1", rule=diag_embed)
each("tril triu", "input:T, diagonal=0", rule=triangle, keeps="", reach="moved")

each("view_as_real", "input:T", rule=as_real, keeps="")
each("view_as_complex", "input:T", rule=as_complex, keeps="")

# again, and in another order
op("repeat", repeat, "input:T, repeats", (T.repeat, "input, *repeats"), rule=repeat_rule, keeps="")
op("tile", tile, "input:T, dims", (torch.tile, "input, dims"), (T.tile, "input, *dims"), rule=repeat_rule, keeps="")
each("repeat_interleave", "input:T, repeats:T, dim=None, *, output_size=None", rule=repeat_rule)
each("rot90", "input:T, k=1, dims=[0, 1]", rule=rot90)
each("roll", "input:T, shifts, dims=None", rule=along_and_linear, keeps="")
op("flip", torch.flip, "input:T, dims", (T.flip, "input, *dims"), rule=along_and_linear, keeps="")
op("pad", F.pad, "input:T, pad, mode='constant', value=None", rule=ranges, keeps="", moved=True, reach="moved")
op("im2col", F.unfold, "input:T, kernel_size, dilation=1, padding=0, stride=1", rule=columns)
op("col2im", F.fold, "input:T, output_size, kernel_size, dilation=1, padding=0, stride=1", rule=columns)
