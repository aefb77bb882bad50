"""Sums of products: linear layers, matrices, contractions, convolutions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops.entry import INTENSITY, OPS, Op, RuleFunction, T, each, op, spell
from autopar.ops.local import Form, Here, OpCall
from autopar.ops.rows import NAMES, Row, parse, rule_from, whole_dims
from autopar.runtime.grouped import grouped_mm
from autopar.runtime.private import grouped_mm as private_grouped_mm
from autopar.sharding.notation import Rule
from autopar.sharding.placement import local_shape


def einsum(equation: str, operands: Sequence[Any]) -> Tensor:
    """A sum of products, spelled by an equation.

    torch contracts a dim of one row with whatever stands beside it. On a device such a row may be a part of more: its
    dim keeps its place here, as it has for more rows.
    """
    letters = _batched(equation, operands)
    if letters is None or all(n != 1 for x in operands for n in x.shape):
        return torch.einsum(equation, *operands)
    (left, right), result = letters
    batch = [c for c in left if c in right and c in result]
    mine = [c for c in left if c not in right]
    summed = [c for c in left if c in right and c not in result]
    other = [c for c in right if c not in left]
    sizes = dict(zip(left + right, (*operands[0].shape, *operands[1].shape), strict=True))

    def turned(x: Tensor, names: str, *groups: list[str]) -> Tensor:
        return x.permute([names.index(c) for group in groups for c in group])

    def matrices(x: Tensor, names: str, *groups: list[str]) -> Tensor:
        shape = [math.prod(map(sizes.__getitem__, group)) for group in groups]
        return turned(x, names, *groups).reshape(shape)

    made = [*batch, *mine, *other]
    order = [made.index(c) for c in result]
    if not (mine or other):
        products = turned(operands[0], left, batch, summed) * turned(operands[1], right, batch, summed)
        return (products.sum([*range(len(batch), products.dim())]) if summed else products).permute(order)
    x = matrices(operands[0], left, batch, mine, summed)
    y = matrices(operands[1], right, batch, summed, other)
    return torch.bmm(x, y).view([sizes[c] for c in made]).permute(order)


def _batched(equation: str, operands: Sequence[Any]) -> tuple[list[str], str] | None:
    """The letters of two operands and of the result of a batched product; None for any other equation."""
    match = re.fullmatch(r"(\w+),(\w+)->(\w*)", equation.replace(" ", ""))
    if match is None or len(operands) != 2:
        return None
    *names, result = match.groups()
    if any(len(set(letters)) < len(letters) for letters in (*names, result)):
        return None
    sizes: dict[str, int] = {}
    for letters, x in zip(names, operands, strict=True):
        if len(letters) != x.dim() or any(sizes.setdefault(c, n) != n for c, n in zip(letters, x.shape, strict=True)):
            return None
    in_one = set(names[0]) ^ set(names[1])
    return (names, result) if in_one <= set(result) <= set(sizes) else None


def matmul(arguments: Mapping[str, Any]) -> Rule:
    """A vector is a row on the left and a column on the right."""
    left, right = (len(arguments[x].shape) for x in ("input", "other"))
    if left == 1:
        return parse("k, k -> " if right == 1 else "k, ... k n -> ... n", linear="x, y")
    return parse("... m k, k -> ... m" if right == 1 else "... m k, ... k n -> ... m n", linear="x, y")


def added_to(product: str, out: str) -> RuleFunction:
    """Make the rule function of a product plus a term that is broadcast."""

    def rule(arguments: Mapping[str, Any]) -> Rule:
        return parse(f"{Row(out.split()).last(arguments['input'])}, {product} -> {out}", linear="x+y, x+z")

    return rule


def einsum_rule(arguments: Mapping[str, Any]) -> Rule | None:
    """The equation is the rule; dots are leading dims, aligned from the right.

    None for a letter twice in one operand (a diagonal), and for equations as lists of numbers.
    """
    if not isinstance(arguments["equation"], str) or not all(hasattr(t, "shape") for t in arguments["operands"]):
        return None
    left, arrow, right = arguments["equation"].replace(" ", "").partition("->")
    pieces = left.split(",")
    ranks = [len(t.shape) for t in arguments["operands"]]
    if len(pieces) != len(ranks):
        return None
    dots = max((n - len(p.replace("...", "")) for p, n in zip(pieces, ranks, strict=True) if "..." in p), default=0)
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        right = "..." * bool(dots) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    rows = [_spelled(p, n - len(p.replace("...", ""))) for p, n in zip(pieces, ranks, strict=True)]
    if any(len(set(row)) < len(row) for row in rows):
        return None
    return rule_from(rows, [_spelled(right, dots)], linear=", ".join(NAMES[: len(pieces)]))


def _spelled(piece: str, dots: int) -> list[str]:
    """The factors of one operand of an equation: its letters, and its dots numbered from the right."""
    before, _, after = piece.partition("...")
    leading = [f"dot{i}" for i in reversed(range(dots))] if "..." in piece else []
    return [*before, *leading, *after]


def convolution(arguments: Mapping[str, Any]) -> Rule:
    """Batch, input channels (a sum) and output channels may be cut; with groups, batch and groups.

    Positions stay whole.
    """
    o, c = arguments["weight"].shape[:2]
    groups = arguments.get("groups", 1)
    if groups == 1:
        return _convolved(arguments, "c", ("o", "c"), "o")
    out = f"(g o:{o // groups})"
    return _convolved(arguments, f"(g c:{c})", (out, "c!"), out)


def timed_convolution(arguments: Mapping[str, Any]) -> str:
    """Name of the time: windows of one point, and windows that do not overlap, run as plain products."""
    kernel = arguments["weight"].shape[2:]
    stride = arguments.get("stride", 1)
    steps = [stride] * len(kernel) if isinstance(stride, int) else list(stride)
    if all(size == 1 for size in kernel):
        return f"conv{len(kernel)}d points"
    are_apart = all(step >= size for step, size in zip(steps, kernel, strict=False))
    return f"conv{len(kernel)}d" + (" apart" if are_apart else "")


def transposed_convolution(arguments: Mapping[str, Any]) -> Rule:
    """Batch, input channels (a sum) and output channels may be cut; with groups, only the batch.

    The weight has its input channels first.
    """
    if arguments.get("groups", 1) == 1:
        return _convolved(arguments, "c", ("c", "o"), "o")
    return _convolved(arguments, "c!", ("c!", "o_in!"), "o!")


def _convolved(arguments: Mapping[str, Any], channels: str, weight: tuple[str, str], out: str) -> Rule:
    """The rule of a convolution by the letters of its channels, in the input, the weight and the output."""
    spatial = len(arguments["weight"].shape) - 2
    here, kernel, there = (whole_dims(x, spatial) for x in "skt")
    batch = ["n"] if len(arguments["input"].shape) == spatial + 2 else []
    given = [*batch, channels, *here]
    return rule_from([given, [*weight, *kernel], [out]], [[*batch, out, *there]], linear="x+z, y+z")


def grouped(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of an op by groups of channels: fewer groups where they are cut; else None."""
    name = "groups" if "groups" in call.arguments else "num_groups"
    groups = call.arguments.get(name, 1)
    given = call.arguments["input"].shape
    local = local_shape(given, here.lies(0), here.mesh, here.coordinate)
    channels = 1
    if name == "groups":  # an image without a batch dim has its channels first
        channels = len(given) - len(call.arguments["weight"].shape) + 1
    if groups == 1 or local[channels] == given[channels]:
        return None
    return OPS[call.op], {**kwargs, name: groups * local[channels] // given[channels]}


def in_one_list(op: Op, arguments: dict[str, Any], result: Any) -> tuple[Op, dict[str, Any]]:
    """Turn einsum(equation, [x, y]) into einsum(equation, x, y)."""
    operands = arguments["operands"]
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        arguments["operands"] = tuple(operands[0])
    return op, arguments


LOOPS = (2, "")  # FLOPs for each point of the space of the factors
PRODUCT: dict[str, Any] = dict(flops=LOOPS, one_dtype=True)
op(
    "linear",
    F.linear,
    "input:T, weight:T, bias:T=None",
    rule="... k, n k, n -> ... n",
    linear="x+z, y+z",
    keeps="input:weight weight:input",
    second_size=INTENSITY,
    **PRODUCT,
)
each("mm", "input:T, mat2:T", rule="m k, k n -> m n", linear="x, y", keeps="input:mat2 mat2:input", **PRODUCT)
each("matmul", "input:T, other:T", rule=matmul, keeps="input:other other:input", **PRODUCT)
spell("matmul", (T.__matmul__, torch.bmm, T.bmm, "input:T, other:T"))
each(
    "addmm",
    "input:T, mat1:T, mat2:T, *, beta=1, alpha=1",
    rule=added_to("m k, k n", "m n"),
    keeps="mat1:mat2 mat2:mat1",
    **PRODUCT,
)
each(
    "baddbmm",
    "input:T, batch1:T, batch2:T, *, beta=1, alpha=1",
    rule=added_to("b m k, b k n", "b m n"),
    keeps="batch1:batch2 batch2:batch1",
    **PRODUCT,
)
each("addbmm", "input:T, batch1:T, batch2:T, *, beta=1, alpha=1", rule=added_to("b m k, b k n", "m n"))
each("addmv", "input:T, mat:T, vec:T, *, beta=1, alpha=1", rule=added_to("m k, k", "m"))
each("addr", "input:T, vec1:T, vec2:T, *, beta=1, alpha=1", rule=added_to("m, n", "m n"))
each("mv", "input:T, vec:T", rule="m k, k -> m", linear="x, y", **PRODUCT)
each("dot", "input:T, tensor:T", rule="k, k -> ", linear="x, y", **PRODUCT)
each("outer", "input:T, vec2:T", rule="m, n -> m n", linear="x, y", flops=LOOPS)
op(
    "einsum",
    einsum,
    "equation, operands:T",
    (torch.einsum, "equation, *operands"),
    rule=einsum_rule,
    settle=in_one_list,
    keeps="operands",
    flops=LOOPS,
)
op(
    "bilinear",
    F.bilinear,
    "input1:T, input2:T, weight:T, bias:T=None",
    rule="... i, ... j, n i j, n -> ... n",
    linear="x+u, y+u, z+u",
    **PRODUCT,
)
op(
    "grouped_mm",
    grouped_mm,
    "mat_a:T, mat_b:T, *, offs:T=None, bias:T=None, out_dtype=None",
    F.grouped_mm,
    (private_grouped_mm, "mat_a, mat_b, offs=None, bias=None, out_dtype=None"),
    rule="s! k, e! k n, e!, e! n -> s! n",
    linear="x+u, y+u",
    keeps="mat_a mat_b offs",
    flops=(2, "e"),  # a row goes to one expert
)
op(
    "cdist",
    torch.cdist,
    "x1:T, x2:T, p=2.0, compute_mode='use_mm_for_euclid_dist_if_necessary'",
    rule="... p d!, ... r d! -> ... p r",
)
op("pdist", F.pdist, "input:T, p=2", rule="p! d! -> q!")

# no pair of operands kept for one another: a convolution's backward is one op, which takes both
CONVOLUTION: dict[str, Any] = dict(keeps="input weight", windows=True, second_size=INTENSITY, one_dtype=True)
each(
    "conv1d conv2d conv3d",
    "input:T, weight:T, bias:T=None, stride=1, padding=0, dilation=1, groups=1",
    rule=convolution,
    form=grouped,
    flops=(2, r"s\d+"),
    timed=timed_convolution,
    **CONVOLUTION,
)
each(
    "conv_transpose1d conv_transpose2d conv_transpose3d",
    "input:T, weight:T, bias:T=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1",
    rule=transposed_convolution,
    flops=(2, r"t\d+"),
    **CONVOLUTION,
)
