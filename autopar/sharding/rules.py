"""How each op may be cut: one line an op.

Every line is a claim that `tests/sharding/test_rules.py` proves by running the op on shards. When the answer depends on an
argument, a function returns the same notation. The keys are the canonical ops of `autopar/tracer/vocabulary.py`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from autopar.letters import BadRule
from autopar.sharding.notation import NAMES, Rule, parse

RuleOrFunction = Rule | Callable[[Mapping[str, Any]], Rule | None]
RULES: dict[str, RuleOrFunction] = {}


def rule(op: str, text: str, linear: str = "") -> None:
    """Say how `op` may be cut: `rule("mm", "m k, k n -> m n", linear="x, y")`. `docs/rules.md` has the grammar."""
    if not isinstance(op, str) or not op:
        raise BadRule(f"{op!r} is not the name of an op", advice='rule("mm", "m k, k n -> m n", linear="x, y")')
    RULES[op] = parse(text, linear)


_Function = Callable[[Mapping[str, Any]], "Rule | None"]


def rule_for(*ops: str) -> Callable[[_Function], _Function]:
    """The same, where the line depends on the call: the function gets the arguments by name, tensors as `TensorType`, and `outputs`.
    It may return None: this call runs replicated."""

    def register(function: _Function) -> _Function:
        for op in ops:
            RULES[op] = function
        return function

    return register


def rule_of(op: str, arguments: Mapping[str, Any]) -> Rule | None:
    """The rule of one call, or None where nobody wrote one."""
    found = RULES.get(op)
    return found(arguments) if callable(found) else found


# contractions; the bias is added once per sum, so where k is cut it must be P(sum) too
rule("linear",     "... k, n k, n -> ... n",  linear="x+z, y+z")
rule("mm",         "m k, k n -> m n",         linear="x, y")
rule("detach",     "... -> ...",              linear="x")

# pointwise, linear
rule("identity",   "... -> ...",              linear="x")
rule("contiguous", "... -> ...",              linear="x")
rule("dropout",    "... -> ...",              linear="x")      # its draws depend on positions alone
rule("neg",        "... -> ...",              linear="x")
rule("add",        "..., ... -> ...",         linear="x+y")
rule("sub",        "..., ... -> ...",         linear="x+y")
rule("mul",        "..., ... -> ...",         linear="x, y")

# pointwise, not linear
for name in ("gelu", "relu", "silu", "tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "abs", "cos", "sin"):
    rule(name,     "... -> ...")
for name in ("pow", "eq", "ne"):
    rule(name,     "..., ... -> ...")
rule("mse_loss",   "..., ... -> ...")          # reduction="none": the canonical form


@rule_for("div")
def div(arguments: Mapping[str, Any]) -> Rule:
    """A quotient that is rounded is not linear."""
    return parse("..., ... -> ...", linear="" if arguments.get("rounding_mode") else "x")


@rule_for("to")
def to(arguments: Mapping[str, Any]) -> Rule:
    """A cast from or to whole numbers is not linear."""
    floats = all("float" in str(dtype) for dtype in (arguments["input"].dtype, arguments["dtype"]))
    return parse("... -> ...", linear="x" if floats else "")


@rule_for("layer_norm")
def layer_norm(arguments: Mapping[str, Any]) -> Rule:
    """The normalised dims stay whole; every leading dim may be cut."""
    whole = " ".join(f"d{i}!" for i in range(len(arguments["normalized_shape"])))
    return parse(f"... {whole}, {whole}, {whole} -> ... {whole}", linear="y+z")


@rule_for("matmul")
def matmul(arguments: Mapping[str, Any]) -> Rule | None:
    """Vectors have no line of their own yet."""
    if min(len(arguments[x].shape) for x in ("input", "other")) < 2:
        return None
    return parse("... m k, ... k n -> ... m n", linear="x, y")


@rule_for("rms_norm")
def rms_norm(arguments: Mapping[str, Any]) -> Rule:
    whole = " ".join(f"d{i}!" for i in range(len(arguments["normalized_shape"])))
    return parse(f"... {whole}, {whole} -> ... {whole}", linear="y")


@rule_for("softmax")
def softmax(arguments: Mapping[str, Any]) -> Rule:
    """Every dim may be cut but the one being normalised."""
    letters, whole = _letters(arguments["input"]), arguments["dim"]
    return _same_dims(letters, {whole % len(letters)} if whole is not None else set(range(len(letters))))


@rule_for("embedding")
def embedding(arguments: Mapping[str, Any]) -> Rule | None:
    """The vocabulary is cut behind a mask. Counting tokens for the gradient needs them all."""
    if arguments.get("max_norm") is not None:
        return None
    if arguments.get("scale_grad_by_freq"):
        tokens = " ".join(f"{a}!" for a in _letters(arguments["input"]))
        return parse(f"{tokens}, v! d -> {tokens} d", linear="y")
    tokens = " ".join(_letters(arguments["input"]))
    return parse(f"{tokens}, v~ d -> {tokens} d", linear="y")


@rule_for("cross_entropy")
def cross_entropy(arguments: Mapping[str, Any]) -> Rule | None:
    """A sum over tokens and over the vocabulary: the log-sum-exp counts once, the target's logit where it lies."""
    logits, target = arguments["input"], arguments["target"]
    if arguments.get("reduction", "mean") != "sum" or "int" not in target.dtype or len(logits.shape) < 2:
        return None
    smoothing, weight = arguments.get("label_smoothing", 0.0), arguments.get("weight") is not None
    rest = " ".join(f"a{i}" for i in range(len(logits.shape) - 2))
    classes = "c!" if smoothing or weight else "c~"
    return parse(f"n {classes} {rest}, n {rest}, c! -> " if weight else f"n {classes} {rest}, n {rest}, one! -> ")


@rule_for("scaled_dot_product_attention")
def attention(arguments: Mapping[str, Any]) -> Rule:
    """Batch and heads are cut; queries too, unless a causal mask counts them from zero. Keys stay whole."""
    q = "q!" if arguments.get("is_causal") else "q"
    if arguments.get("enable_gqa") and arguments["query"].shape[-3] != arguments["key"].shape[-3]:
        return parse(f"... (g r) {q} d!, ... g k! d!, ... g k! e!, ... m! {q} k! -> ... (g r) {q} e!", linear="z")
    return parse(f"... {q} d!, ... k! d!, ... k! e!, ... {q} k! -> ... {q} e!", linear="z")


@rule_for("view")
def view(arguments: Mapping[str, Any]) -> Rule:
    """Dims of both shapes are products of the factors of their common refinement; where there is none, they stay whole."""
    before, after = arguments["input"].shape, arguments["size"]
    if math.prod(before) == 0:
        return parse(" ".join(f"a{i}!" for i in range(len(before))) + " -> " + " ".join(f"b{i}!" for i in range(len(after))), linear="x")
    sides: tuple[list[str], list[str]] = ([], [])
    i = j = names = 0
    while i < len(before) or j < len(after):
        a, b = i, j
        left, right = before[i] if i < len(before) else 1, after[j] if j < len(after) else 1
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while left != right:                                   # the smallest groups of dims that hold the same numbers
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        groups = [[n for n in before[a:i] if n != 1], [n for n in after[b:j] if n != 1]]
        ends = [list(itertools.accumulate(reversed(g), operator.mul)) for g in groups]
        marks = sorted({1, *ends[0], *ends[1]})
        nested = all(y % x == 0 for x, y in itertools.pairwise(marks))
        factors = {y: (f"f{names + k}", y // x) for k, (x, y) in enumerate(itertools.pairwise(marks))}
        for side, dims in zip(sides, (before[a:i], after[b:j]), strict=True):
            total = math.prod(dims)
            for n in dims:
                inner = total // n
                if n == 1:
                    side.append("1")
                elif not nested:
                    side.append(f"w{len(sides[0])}_{len(sides[1])}_{names}!")
                else:
                    inside = [factors[m] for m in reversed(marks) if inner < m <= total]
                    side.append("(" + " ".join(f"{f}:{size}" for f, size in inside) + ")" if len(inside) > 1 else inside[0][0])
                total = inner
        names += len(marks)
    return parse(" ".join(sides[0]) + " -> " + " ".join(sides[1]), linear="x")


@rule_for("transpose", "permute", "t")
def transpose(arguments: Mapping[str, Any]) -> Rule:
    """The same dims in another order."""
    letters = _letters(arguments["input"])
    order = list(range(len(letters)))
    if "dims" in arguments:
        order = [d % len(letters) for d in arguments["dims"]]
    elif len(letters) > 1:
        first, second = arguments.get("dim0", 0) % len(letters), arguments.get("dim1", 1) % len(letters)
        order[first], order[second] = second, first
    return parse(" ".join(letters) + " -> " + " ".join(letters[d] for d in order), linear="x")


@rule_for("split")
def split(arguments: Mapping[str, Any]) -> Rule | None:
    """The parts stand end to end in the operand: cut together, each by itself."""
    if 0 in arguments["sections"]:
        return None
    letters, dim = _letters(arguments["input"]), arguments.get("dim", 0) % len(arguments["input"].shape)
    parts = [f"p{i}" for i in range(len(arguments["sections"]))]
    rows = [" ".join([*letters[:dim], p, *letters[dim + 1:]]) for p in ("|".join(parts), *parts)]
    return parse(f"{rows[0]} -> {', '.join(rows[1:])}", linear="x")


@rule_for("cat")
def cat(arguments: Mapping[str, Any]) -> Rule:
    """The operands stand end to end in the output."""
    tensors = arguments["tensors"]
    letters, dim = _letters(tensors[0]), arguments.get("dim", 0) % len(tensors[0].shape)
    parts = [f"p{i}" for i in range(len(tensors))]
    rows = [" ".join([*letters[:dim], p, *letters[dim + 1:]]) for p in (*parts, "|".join(parts))]
    return parse(f"{', '.join(rows[:-1])} -> {rows[-1]}", linear="+".join(NAMES[: len(tensors)]))


@rule_for("narrow", "pad", "select")
def ranges(arguments: Mapping[str, Any]) -> Rule:
    """A dim of which a range is taken, or that is padded, stays whole."""
    before, after = arguments["input"].shape, arguments["outputs"][0].shape
    letters = _letters(arguments["input"])
    if "index" in arguments:
        gone = arguments["dim"] % len(before)
        return parse(" ".join(f"{a}!" if i == gone else a for i, a in enumerate(letters)) + " -> " + " ".join(a for i, a in enumerate(letters) if i != gone), linear="x")
    shifts = arguments.get("pad", ())                          # pairs, last dim first; a shift may leave the size as it was
    changed = [i for i in range(len(before)) if before[i] != after[i] or any(shifts[2 * (len(before) - 1 - i):][:2])]
    linear = "" if arguments.get("value") or arguments.get("mode", "constant") != "constant" else "x"
    left, right = ([f"{a}{side}!" if i in changed else a for i, a in enumerate(letters)] for side in ("_in", "_out"))
    return parse(" ".join(left) + " -> " + " ".join(right), linear=linear)


def _letters(tensor: Any) -> list[str]:
    return [f"a{i}" for i in range(len(tensor.shape))]


def _same_dims(letters: list[str], whole: set[int], linear: str = "") -> Rule:
    text = " ".join(f"{a}!" if i in whole else a for i, a in enumerate(letters))
    return parse(f"{text} -> {text}", linear=linear)


@rule_for("sum")
def sum_(arguments: Mapping[str, Any]) -> Rule:
    """A summed dim may be cut and leaves P(sum); kept, it is a dim of size one in the output."""
    rank = len(arguments["input"].shape)
    dims = arguments.get("dim")
    dims = range(rank) if dims is None else (dims,) if isinstance(dims, int) else dims
    summed = {d % rank for d in dims} if rank else set()
    letters = [f"a{i}" for i in range(rank)]
    kept = ["1" if i in summed else letters[i] for i in range(rank) if i not in summed or arguments.get("keepdim")]
    return parse(f"{' '.join(letters)} -> {' '.join(kept)}", linear="x")
