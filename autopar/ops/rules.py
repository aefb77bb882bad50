"""How each op may be cut: one line an op.

Every line is a claim that `tests/sharding/test_rules.py` proves by running the op on shards. When the answer depends on
an argument, a function returns the same notation. The keys are the canonical ops of `autopar/ops/vocabulary.py`.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from autopar.letters import BadRule
from autopar.ops.declared import WHOLE
from autopar.sharding.notation import NAMES, Rule, parse

RuleOrFunction = Rule | Callable[[Mapping[str, Any]], Rule | None]
RULES: dict[str, RuleOrFunction] = {}
# Ops that lowering has a local form of, and the marks that it serves.
LOCAL_FORMS: dict[str, str] = {
    "embedding": "~",
    "cross_entropy": "~",
    "scaled_dot_product_attention": "~",
    "amax": "^",
    "amin": "^",
    "logsumexp": "^",
    "batch_norm": "^",
    "batch_norm_updating": "^",
    **dict.fromkeys(
        "arange expand rand randn randint normal_filled zeros ones full empty "
        "new_zeros new_ones new_full new_empty".split(),
        "*",
    ),
}


def rule(op: Any, text: str, linear: str = "") -> None:
    """Say how `op` may be cut: `rule("mm", "m k, k n -> m n", linear="x, y")`. `docs/rules.md` has the grammar.

    The op is a name of the vocabulary or one that a graph prints, a custom op's name (`"mylib::scan"`), or torch's
    function itself. A mark is an obligation: what is cut behind a mask (`~`), reduced inside (`^`) or made here (`*`)
    needs a local form of the op, which computes something else on a part than on the whole.
    """
    name, said = _name(op), parse(text, linear)
    known = LOCAL_FORMS.get(name, "")
    for mark, factors, meaning in (
        ("~", said.masked, "cut behind a mask"),
        ("^", said.inside, "reduced inside"),
        ("*", said.made, "made here"),
    ):
        if factors and mark not in known:
            raise BadRule(
                f"{name} has no local form for {' and '.join(sorted(factors))}{mark}: it would run as it is on "
                f"parts of what is {meaning}",
                seen=text,
                advice=f"{min(factors)}!, which stays whole",
            )
    RULES[name] = said
    WHOLE.add(name)


def _name(op: Any) -> str:
    if isinstance(op, str) and op:
        space, colons, name = op.partition("::")
        return f"ops.{space}.{name}" + ("" if "." in name else ".default") if colons else op
    if callable(op) and type(op).__name__ != "CustomOpDef":
        from autopar.ops.lookup import own_name
        from autopar.ops.vocabulary import SPELLINGS

        name = SPELLINGS[op][0].name if op in SPELLINGS else own_name(op)
        return name + ".default" if type(op).__name__ == "OpOverloadPacket" else name
    raise BadRule(
        f"{op!r} is not the name of an op",
        advice='rule("mm", "m k, k n -> m n", linear="x, y"), or rule("mylib::scan", "b s! -> b s!")',
    )


_Function = Callable[[Mapping[str, Any]], "Rule | None"]


def rule_for(*ops: str) -> Callable[[_Function], _Function]:
    """The same, where the line depends on the call.

    The function gets the arguments by name, tensors as `TensorType`, and `outputs`.
    It may return None: this call runs replicated."""

    def register(function: _Function) -> _Function:
        for op in ops:
            RULES[op] = function
        return function

    return register


def rule_of(op: str, arguments: Mapping[str, Any]) -> Rule | None:
    """The rule of one call, or None where nobody wrote one."""
    found = RULES.get(op)
    return found({**arguments, "op": op}) if callable(found) else found


# contractions; what is added to the sum is P(sum) where k is cut
rule("linear", "... k, n k, n -> ... n", linear="x+z, y+z")
rule("mm", "m k, k n -> m n", linear="x, y")
rule("mv", "m k, k -> m", linear="x, y")
rule("dot", "k, k -> ", linear="x, y")
rule("outer", "m, n -> m n", linear="x, y")
rule("bilinear", "... i, ... j, n i j, n -> ... n", linear="x+u, y+u, z+u")
rule("grouped_mm", "s! k, e! k n, e!, e! n -> s! n", linear="x+u, y+u")

# pointwise, linear
for name in (
    "identity",
    "contiguous",
    "clone",
    "detach",
    "neg",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
):  # draws depend on positions alone
    rule(name, "... -> ...", linear="x")
for name in ("add", "sub", "rsub"):
    rule(name, "..., ... -> ...", linear="x+y")
rule("mul", "..., ... -> ...", linear="x, y")
rule("where", "..., ..., ... -> ...", linear="y+z")
rule("lerp", "..., ..., ... -> ...", linear="x+y")
rule("addcmul", "..., ..., ... -> ...", linear="x+y, x+z")
rule("addcdiv", "..., ..., ... -> ...", linear="x+y")

# pointwise, not linear
for name in (
    "gelu relu silu tanh sigmoid exp log sqrt rsqrt abs cos sin tan floor ceil round trunc sign square reciprocal "
    "erf erfc log1p log2 log10 expm1 exp2 acos asin atan cosh sinh atanh "
    "isfinite isinf isnan logical_not bitwise_not nan_to_num hardswish hardsigmoid mish relu6 selu logsigmoid "
    "softsign leaky_relu elu celu hardtanh softplus threshold"
).split():
    rule(name, "... -> ...")
for name in (
    "pow eq ne lt le gt ge maximum minimum fmod remainder floor_divide atan2 logaddexp bitwise_and bitwise_or "
    "bitwise_xor logical_and logical_or logical_xor"
).split():
    rule(name, "..., ... -> ...")
rule("clamp", "..., ..., ... -> ...")

# random: each device draws for the positions that it holds
for name in (
    "alpha_dropout",
    "feature_alpha_dropout",
    "rand_like",
    "randn_like",
    "uniform_like",
    "normal_like",
    "exponential_like",
    "log_normal_like",
    "cauchy_like",
    "random_like",
    "geometric_like",
    "poisson",
    "standard_gamma",
    "rrelu",
):
    rule(name, "... -> ...")
for name in ("bernoulli", "normal"):
    rule(name, "..., ... -> ...")
rule("multinomial", "... c! -> ... n!")
rule("dirichlet", "... c! -> ... c!")
rule("randperm", "nothing -> n!")


@rule_for(
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "kl_div",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
def pointwise_loss(arguments: Mapping[str, Any]) -> Rule | None:
    """Without its reduction, the canonical form, it is pointwise."""
    if arguments.get("reduction", "mean") != "none":
        return None
    return parse(
        "..., ..., ..., ... -> ..."
        if "logits" in arguments["op"]
        else "..., ... -> ..."
        if arguments["op"] in ("smooth_l1_loss", "soft_margin_loss", "kl_div")
        else "..., ..., ... -> ..."
    )


@rule_for("div")
def div(arguments: Mapping[str, Any]) -> Rule:
    """A quotient that is rounded is not linear."""
    return parse("..., ... -> ...", linear="" if arguments.get("rounding_mode") else "x")


@rule_for("copy")
def copy(arguments: Mapping[str, Any]) -> Rule:
    """The target is overwritten: what it holds does not matter, nor whether it is a sum."""
    floats = all("float" in str(arguments[x].dtype) for x in ("input", "source"))
    return parse("..., ... -> ...", linear="y" if floats else "")


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
def matmul(arguments: Mapping[str, Any]) -> Rule:
    """A vector is a row on the left and a column on the right."""
    left, right = (len(arguments[x].shape) for x in ("input", "other"))
    if left == 1:
        return parse("k, k -> " if right == 1 else "k, ... k n -> ... n", linear="x, y")
    return parse("... m k, k -> ... m" if right == 1 else "... m k, ... k n -> ... m n", linear="x, y")


@rule_for("addmm")
def addmm(arguments: Mapping[str, Any]) -> Rule:
    """What is added may be a vector, or one number."""
    rank = len(arguments["input"].shape)
    return parse(f"{' '.join(['m', 'n'][2 - rank :])}, m k, k n -> m n", linear="x+y, x+z")


@rule_for("baddbmm", "addbmm")
def batched(arguments: Mapping[str, Any]) -> Rule:
    """What is added is broadcast; of the second, products are added over the batch too."""
    out = ["b", "m", "n"] if arguments["op"] == "baddbmm" else ["m", "n"]
    added = out[len(out) - len(arguments["input"].shape) :]
    return parse(f"{' '.join(added)}, b m k, b k n -> {' '.join(out)}", linear="x+y, x+z")


@rule_for("einsum")
def einsum(arguments: Mapping[str, Any]) -> Rule | None:
    """The equation is the rule; dots are leading dims, aligned from the right.

    A letter twice in one operand (a diagonal) and lists of numbers have none.
    """
    if not isinstance(arguments["equation"], str) or not all(hasattr(t, "shape") for t in arguments["operands"]):
        return None
    left, arrow, right = arguments["equation"].replace(" ", "").partition("->")
    pieces, ranks = left.split(","), [len(t.shape) for t in arguments["operands"]]
    if len(pieces) != len(ranks):
        return None
    dots = max((n - len(p.replace("...", "")) for p, n in zip(pieces, ranks, strict=True) if "..." in p), default=0)
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        right = "..." * bool(dots) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    rows = [_spelled(p, n - len(p.replace("...", ""))) for p, n in zip(pieces, ranks, strict=True)]
    if any(len(set(row)) < len(row) for row in rows):
        return None
    return parse(
        f"{', '.join(map(' '.join, rows))} -> {' '.join(_spelled(right, dots))}", linear=", ".join(NAMES[: len(pieces)])
    )


def _spelled(piece: str, dots: int) -> list[str]:
    """The factors of one operand of an equation: its letters, and its dots counted from the right."""
    before, _, after = piece.partition("...")
    leading = [f"dot{i}" for i in reversed(range(dots))] if "..." in piece else []
    return [*before, *leading, *after]


@rule_for("masked_fill")
def masked_fill(arguments: Mapping[str, Any]) -> Rule:
    """Filling with zeros is linear."""
    return parse("..., ..., ... -> ...", linear="x" if arguments["value"] in (0, 0.0, False) else "")


def _spatial(rank: int, first: int, letter: str) -> str:
    return " ".join(f"{letter}{i}!" for i in range(rank - first))


@rule_for("conv1d", "conv2d", "conv3d")
def convolution(arguments: Mapping[str, Any]) -> Rule:
    """Batch, input channels (a sum) and output channels are cut; with groups, batch and groups.

    Positions stay whole.
    """
    given, weight, groups = arguments["input"], arguments["weight"], arguments.get("groups", 1)
    n, here, kernel, there = _convolved(given, weight)
    if groups == 1:
        return parse(f"{n} c {here}, o c {kernel}, o -> {n} o {there}", linear="x+z, y+z")
    inside, outside = weight.shape[1], weight.shape[0] // groups
    c, o = f"(g c:{inside})", f"(g o:{outside})"
    return parse(f"{n} {c} {here}, {o} c! {kernel}, {o} -> {n} {o} {there}", linear="x+z, y+z")


@rule_for("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(arguments: Mapping[str, Any]) -> Rule:
    """The same; a weight has its input channels first. Groups stay together."""
    given, weight, groups = arguments["input"], arguments["weight"], arguments.get("groups", 1)
    n, here, kernel, there = _convolved(given, weight)
    if groups == 1:
        return parse(f"{n} c {here}, c o {kernel}, o -> {n} o {there}", linear="x+z, y+z")
    return parse(f"{n} c! {here}, c! o_in! {kernel}, o! -> {n} o! {there}", linear="x+z, y+z")


def _convolved(given: Any, weight: Any) -> tuple[str, str, str, str]:
    """The batch dim, if there is one, and the positions of a convolution's input, weight and output."""
    spatial = len(weight.shape) - 2
    here, kernel, there = (" ".join(f"{x}{i}!" for i in range(spatial)) for x in "skt")
    return "n" if len(given.shape) == spatial + 2 else "", here, kernel, there


@rule_for(
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "interpolate",
)
def mean_of_positions(arguments: Mapping[str, Any]) -> Rule:
    """A mean of positions is linear."""
    return pooled(arguments, "x")


@rule_for("max_pool1d", "max_pool2d", "max_pool3d")
def largest_of_positions(arguments: Mapping[str, Any]) -> Rule:
    return pooled(arguments, "")


def pooled(arguments: Mapping[str, Any], linear: str) -> Rule:
    """Batch and channels are cut, positions stay whole.

    The op's name says how many those are, the rank whether there is a batch.
    """
    rank = len(arguments["input"].shape)
    spatial = int(re.findall(r"(\d)d", arguments["op"])[0]) if arguments["op"] != "interpolate" else rank - 2
    leading = " ".join(f"a{i}" for i in range(rank - spatial))
    row = f"{leading} {' '.join(f't{i}!' for i in range(spatial))}"
    return parse(
        f"{leading} {' '.join(f's{i}!' for i in range(spatial))} -> {', '.join([row] * len(arguments['outputs']))}",
        linear=linear,
    )


@rule_for("pixel_shuffle")
def pixel_shuffle(arguments: Mapping[str, Any]) -> Rule:
    """Channels are major, and rows and columns come out as products with the factor inside."""
    r = arguments["upscale_factor"]
    return parse(f"... (c a:{r} b:{r}) h w -> ... c (h a:{r}) (w b:{r})", linear="x")


@rule_for("prelu")
def prelu(arguments: Mapping[str, Any]) -> Rule:
    """One slope, or one for each channel."""
    letters = letters_of(arguments["input"])
    slope = "one!" if arguments["weight"].shape in ((), (1,)) else letters[1]
    return parse(f"{' '.join(letters)}, {slope if arguments['weight'].shape else ''} -> {' '.join(letters)}")


@rule_for("group_norm")
def group_norm(arguments: Mapping[str, Any]) -> Rule:
    """Rows and groups are cut; the channels of a group and positions stay whole."""
    inside = arguments["input"].shape[1] // arguments["num_groups"]
    c, s = f"(g c:{inside}!)", _spatial(len(arguments["input"].shape), 2, "s")
    return parse(f"n {c} {s}, {c}, {c} -> n {c} {s}", linear="y+z")


@rule_for("batch_norm", "batch_norm_updating")
def batch_norm(arguments: Mapping[str, Any]) -> Rule | None:
    """Statistics are those of the whole batch: where it is cut, the local form exchanges sums.

    With running statistics it is a scale of each channel.
    """
    training = arguments.get("training", False)
    rank, mark = len(arguments["input"].shape), "^" if training else ""
    if rank < 2:
        return None
    rest = " ".join(f"s{i}{mark}" for i in range(rank - 2))
    row = f"n{mark} c {rest}"
    return parse(
        f"{row}, c, c, c, c -> {', '.join([row, 'c', 'c'][: len(arguments['outputs'])])}",
        linear="u+v" if len(arguments["outputs"]) == 1 else "",
    )


@rule_for("instance_norm", "instance_norm_updating")
def instance_norm(arguments: Mapping[str, Any]) -> Rule:
    """Each row by itself; running statistics are of all rows."""
    s, updates = _spatial(len(arguments["input"].shape), 2, "s"), len(arguments["outputs"]) > 1
    row = f"{'n!' if updates else 'n'} c {s}"
    return parse(
        f"{row}, c, c, c, c -> {', '.join([row, 'c', 'c'][: len(arguments['outputs'])])}",
        linear="" if updates else "u+v",
    )


@rule_for("weight_norm")
def weight_norm(arguments: Mapping[str, Any]) -> Rule:
    """The dim that keeps its own length is cut.

    -1 is torch's word for one length of all, which is one number and stays whole.
    """
    dim, rank = arguments.get("dim", 0), len(arguments["v"].shape)
    if dim == -1:
        return parse(
            f"{' '.join(f'a{i}!' for i in range(rank))}, "
            f"{' '.join(f'g{i}!' for i in range(len(arguments['g'].shape)))} -> "
            f"{' '.join(f'a{i}!' for i in range(rank))}",
            linear="y",
        )
    rows = [" ".join("o" if i == dim % rank else f"{x}{i}!" for i in range(rank)) for x in "ag"]
    return parse(f"{rows[0]}, {rows[1]} -> {rows[0]}", linear="y")


@rule_for("rms_norm")
def rms_norm(arguments: Mapping[str, Any]) -> Rule:
    whole = " ".join(f"d{i}!" for i in range(len(arguments["normalized_shape"])))
    return parse(f"... {whole}, {whole} -> ... {whole}", linear="y")


@rule_for("softmax", "log_softmax", "cumprod", "normalize")
def along(arguments: Mapping[str, Any]) -> Rule:
    """Every dim may be cut but the one that it runs along."""
    return same_dims(letters_of(arguments["input"]), dims_of(arguments, 1 if arguments["op"] == "normalize" else None))


@rule_for("cumsum", "roll", "flip")
def along_and_linear(arguments: Mapping[str, Any]) -> Rule:
    """The same, where sums pass."""
    return same_dims(letters_of(arguments["input"]), dims_of(arguments), "x")


@rule_for("tril", "triu")
def triangle(arguments: Mapping[str, Any]) -> Rule:
    """Which entries stay depends on both of the last dims."""
    rank = len(arguments["input"].shape)
    return same_dims(letters_of(arguments["input"]), {rank - 2, rank - 1}, "x")


@rule_for("amax", "amin", "logsumexp")
def reduction_of_parts(arguments: Mapping[str, Any]) -> Rule:
    """Where what is reduced is cut, the local form exchanges what the parts came to."""
    return reduced(arguments, "^")


@rule_for("all", "any", "argmax", "argmin", "norm")
def reduction(arguments: Mapping[str, Any]) -> Rule:
    """What is reduced stays whole: these are no sums."""
    return reduced(arguments, "!")


def reduced(arguments: Mapping[str, Any], mark: str, default: int | None = None) -> Rule:
    """The dims that are reduced carry a mark; all of them where none is named and `default` names none."""
    letters, gone = letters_of(arguments["input"]), dims_of(arguments, default)
    left = " ".join(f"{a}{mark}" if i in gone else a for i, a in enumerate(letters))
    kept = [i for i in range(len(letters)) if i not in gone or arguments.get("keepdim")]
    row = " ".join("1" if i in gone else letters[i] for i in kept)
    return parse(f"{left} -> {', '.join([row] * len(arguments['outputs']))}")


@rule_for("topk", "sort", "argsort", "glu")
def changed_along(arguments: Mapping[str, Any]) -> Rule:
    """One dim stays whole, and may come out with another size."""
    letters = letters_of(arguments["input"])
    if not letters:  # of one number there is nothing to choose
        return parse(f" -> {', '.join([''] * len(arguments['outputs']))}")
    gone = arguments.get("dim", -1) % len(letters)
    row = " ".join("out!" if i == gone else a for i, a in enumerate(letters))
    left = " ".join("in!" if i == gone else a for i, a in enumerate(letters))
    return parse(f"{left} -> {', '.join([row] * len(arguments['outputs']))}")


@rule_for("diff")
def diff(arguments: Mapping[str, Any]) -> Rule:
    """Neighbours are needed; what is put before or after is put there whole."""
    letters, gone = letters_of(arguments["input"]), arguments.get("dim", -1) % len(arguments["input"].shape)
    rows = [
        " ".join(f"{x}!" if i == gone else a for i, a in enumerate(letters)) for x in ("in", "before", "after", "out")
    ]
    return parse(f"{', '.join(rows[:3])} -> {rows[3]}", linear="x+y+z" if "float" in arguments["input"].dtype else "")


def dims_of(arguments: Mapping[str, Any], default: int | None = None) -> set[int]:
    """The dims that a call names; all, where it names none."""
    rank = len(arguments["input"].shape)
    named = arguments.get("dim", arguments.get("dims", default))
    if named is None:
        return set(range(rank))
    return {d % rank for d in ((named,) if isinstance(named, int) else named)} if rank else set()


@rule_for("embedding")
def embedding(arguments: Mapping[str, Any]) -> Rule | None:
    """The vocabulary is cut behind a mask. Counting tokens for the gradient needs them all."""
    if arguments.get("max_norm") is not None:
        return None
    if arguments.get("scale_grad_by_freq"):
        tokens = " ".join(f"{a}!" for a in letters_of(arguments["input"]))
        return parse(f"{tokens}, v! d -> {tokens} d", linear="y")
    tokens = " ".join(letters_of(arguments["input"]))
    return parse(f"{tokens}, v~ d -> {tokens} d", linear="y")


@rule_for("cross_entropy")
def cross_entropy(arguments: Mapping[str, Any]) -> Rule | None:
    """A sum over tokens and over the vocabulary: the log-sum-exp counts once, the target's logit where it lies.

    Without its reduction each token is by itself, and its classes stay whole.
    """
    logits, target = arguments["input"], arguments["target"]
    reduction = arguments.get("reduction", "mean")
    if (
        reduction == "mean"
        or "int" not in target.dtype
        or len(logits.shape) < 2
        or any(arguments.get(k) is not None for k in ("size_average", "reduce"))
    ):
        return None
    rest = " ".join(f"a{i}" for i in range(len(logits.shape) - 2))
    if reduction == "none":
        return parse(f"n c! {rest}, n {rest}, c! -> n {rest}")
    return parse(f"n c~ {rest}, n {rest}, c~ -> ")


@rule_for("scaled_dot_product_attention")
def attention(arguments: Mapping[str, Any]) -> Rule:
    """Batch and heads are cut; queries too, where a causal mask counts them from where the part begins.

    Keys stay whole.
    """
    q = "q~" if arguments.get("is_causal") else "q"
    if arguments.get("enable_gqa") and arguments["query"].shape[-3] != arguments["key"].shape[-3]:
        mask = getattr(arguments.get("attn_mask"), "shape", (1, 1, 1))
        heads = "" if len(mask) < 3 else "... m!" if mask[-3] == 1 else "... (g r)"
        return parse(f"... (g r) {q} d!, ... g k! d!, ... g k! e!, {heads} {q} k! -> ... (g r) {q} e!", linear="z")
    return parse(f"... {q} d!, ... k! d!, ... k! e!, ... {q} k! -> ... {q} e!", linear="z")


@rule_for("view")
def view(arguments: Mapping[str, Any]) -> Rule:
    """Dims of both shapes are products of the factors of their common refinement; where there is none, they stay whole.

    In a first dim that is flattened, (batch, sequence, ...), the sequence may be cut inside each batch.
    """
    before, after = arguments["input"].shape, arguments["size"]
    if math.prod(before) == 0:
        return parse(
            " ".join(f"a{i}!" for i in range(len(before))) + " -> " + " ".join(f"b{i}!" for i in range(len(after))),
            linear="x",
        )
    sides: tuple[list[str], list[str]] = ([], [])
    i = j = names = 0
    while i < len(before) or j < len(after):
        a, b = i, j
        left, right = before[i] if i < len(before) else 1, after[j] if j < len(after) else 1
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while left != right:  # the smallest groups of dims that hold the same numbers
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
                    second = "+" if not side else ""
                    side.append(
                        "("
                        + " ".join(f"{f}:{size}{second if i == 1 else ''}" for i, (f, size) in enumerate(inside))
                        + ")"
                        if len(inside) > 1
                        else inside[0][0]
                    )
                total = inner
        names += len(marks)
    return parse(" ".join(sides[0]) + " -> " + " ".join(sides[1]), linear="x")


@rule_for("transpose", "permute", "t")
def transpose(arguments: Mapping[str, Any]) -> Rule:
    """The same dims in another order."""
    letters = letters_of(arguments["input"])
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
    letters, dim = letters_of(arguments["input"]), arguments.get("dim", 0) % len(arguments["input"].shape)
    parts = [f"p{i}" for i in range(len(arguments["sections"]))]
    rows = [" ".join([*letters[:dim], p, *letters[dim + 1 :]]) for p in ("|".join(parts), *parts)]
    return parse(f"{rows[0]} -> {', '.join(rows[1:])}", linear="x")


@rule_for("cat")
def cat(arguments: Mapping[str, Any]) -> Rule:
    """The operands stand end to end in the output."""
    tensors = arguments["tensors"]
    letters, dim = letters_of(tensors[0]), arguments.get("dim", 0) % len(tensors[0].shape)
    parts = [f"p{i}" for i in range(len(tensors))]
    rows = [" ".join([*letters[:dim], p, *letters[dim + 1 :]]) for p in (*parts, "|".join(parts))]
    return parse(f"{', '.join(rows[:-1])} -> {rows[-1]}", linear="+".join(NAMES[: len(tensors)]))


@rule_for("narrow", "pad", "select")
def ranges(arguments: Mapping[str, Any]) -> Rule:
    """A dim of which a range is taken, or that is padded, stays whole."""
    before, after = arguments["input"].shape, arguments["outputs"][0].shape
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
    left, right = ([f"{a}{side}!" if i in changed else a for i, a in enumerate(letters)] for side in ("_in", "_out"))
    return parse(" ".join(left) + " -> " + " ".join(right), linear=linear)


def letters_of(tensor: Any) -> list[str]:
    return [f"a{i}" for i in range(len(tensor.shape))]


def same_dims(letters: list[str], whole: set[int], linear: str = "") -> Rule:
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


@rule_for("expand")
def expand(arguments: Mapping[str, Any]) -> Rule:
    """What is repeated is made here: each device repeats as often as it needs."""
    before, after = arguments["input"].shape, arguments["size"]
    extra = len(after) - len(before)
    left = ["1" if n == 1 and after[extra + i] != 1 else f"a{extra + i}" for i, n in enumerate(before)]
    right = [f"a{i}" if i >= extra and left[i - extra] != "1" else f"a{i}*" for i in range(len(after))]
    return parse(f"{' '.join(left)} -> {' '.join(right)}", linear="x")


for name in ("full_like", "zeros_like", "ones_like", "empty_like"):
    rule(name, "... -> ...")


@rule_for("arange")
def arange(arguments: Mapping[str, Any]) -> Rule:
    """Each device counts from where its part begins."""
    return parse("nothing -> a*")


@rule_for(
    "rand",
    "randn",
    "randint",
    "normal_filled",
    "zeros",
    "ones",
    "full",
    "empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
)
def filled(arguments: Mapping[str, Any]) -> Rule:
    """The same number everywhere, or draws that depend on positions alone: each device makes its own part."""
    made = " ".join(f"a{i}*" for i in range(len(arguments["size"])))
    unused = " ".join(f"x{i}!" for i in range(len(arguments["input"].shape))) if "input" in arguments else None
    return parse(f"{'nothing' if unused is None else unused} -> {made}")


@rule_for("stack")
def stack(arguments: Mapping[str, Any]) -> Rule:
    """A new dim, which stays whole."""
    tensors = arguments["tensors"]
    letters, rank = letters_of(tensors[0]), len(tensors[0].shape) + 1
    dim = arguments.get("dim", 0) % rank
    return parse(
        f"{', '.join([' '.join(letters)] * len(tensors))} -> {' '.join([*letters[:dim], 'new!', *letters[dim:]])}",
        linear="+".join(NAMES[: len(tensors)]),
    )


@rule_for("unbind")
def unbind(arguments: Mapping[str, Any]) -> Rule:
    letters, dim = letters_of(arguments["input"]), arguments.get("dim", 0) % len(arguments["input"].shape)
    row = " ".join(a for i, a in enumerate(letters) if i != dim)
    return parse(
        f"{' '.join(f'{a}!' if i == dim else a for i, a in enumerate(letters))} -> "
        f"{', '.join([row] * len(arguments['outputs']))}",
        linear="x",
    )


@rule_for("repeat", "repeat_interleave", "tile")
def repeat(arguments: Mapping[str, Any]) -> Rule | None:
    """A dim that is repeated stays whole."""
    before, after = arguments["input"].shape, arguments["outputs"][0].shape
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


@rule_for("diagonal", "diagonal_scatter")
def diagonal(arguments: Mapping[str, Any]) -> Rule:
    """The two dims of the diagonal stay whole, whether it is taken out or put there."""
    letters, rank = letters_of(arguments["input"]), len(arguments["input"].shape)
    gone = {arguments.get("dim1", 0) % rank, arguments.get("dim2", 1) % rank}
    row = " ".join(f"{a}!" if i in gone else a for i, a in enumerate(letters))
    taken = f"{' '.join(a for i, a in enumerate(letters) if i not in gone)} diagonal!"
    return (
        parse(f"{row}, {taken} -> {row}", linear="x+y")
        if "src" in arguments
        else parse(f"{row} -> {taken}", linear="x")
    )


@rule_for("slice_scatter", "select_scatter")
def put(arguments: Mapping[str, Any]) -> Rule:
    """The dim along which something is put stays whole."""
    letters, dim = letters_of(arguments["input"]), arguments.get("dim", 0) % len(arguments["input"].shape)
    row = [f"{a}!" if i == dim else a for i, a in enumerate(letters)]
    source = (
        [a for i, a in enumerate(letters) if i != dim]
        if "index" in arguments
        else ["put!" if i == dim else a for i, a in enumerate(letters)]
    )
    return parse(f"{' '.join(row)}, {' '.join(source)} -> {' '.join(row)}", linear="x+y")


@rule_for("gather")
def gather(arguments: Mapping[str, Any]) -> Rule | None:
    """What is looked along stays whole; where it is looked up may be cut."""
    given, index = arguments["input"].shape, arguments["index"].shape
    if not given or len(given) != len(index):
        return None
    dim = arguments["dim"] % len(given)
    rows: tuple[list[str], list[str]] = ([], [])
    for i, (a, b) in enumerate(zip(given, index, strict=True)):
        rows[0].append(f"in{i}!" if i == dim or a != b else f"a{i}")
        rows[1].append(f"a{i}" if i == dim or a == b else f"out{i}!")
    return parse(f"{' '.join(rows[0])}, {' '.join(rows[1])} -> {' '.join(rows[1])}", linear="x")


@rule_for("index_select")
def index_select(arguments: Mapping[str, Any]) -> Rule | None:
    letters = letters_of(arguments["input"])
    if not letters:
        return None
    dim = arguments["dim"] % len(letters)
    left = " ".join("in!" if i == dim else a for i, a in enumerate(letters))
    return parse(f"{left}, out -> {' '.join('out' if i == dim else a for i, a in enumerate(letters))}", linear="x")


@rule_for("scatter", "scatter_add")
def scatter(arguments: Mapping[str, Any]) -> Rule | None:
    """Other dims are cut where all agree in size."""
    given, index, source = arguments["input"].shape, arguments["index"].shape, getattr(arguments["src"], "shape", None)
    if not given or len(given) != len(index) or (source is not None and len(source) != len(given)):
        return None
    dim = arguments["dim"] % len(given)
    agree = [
        i != dim and a == b and (source is None or source[i] == b)
        for i, (a, b) in enumerate(zip(given, index, strict=True))
    ]
    added = (
        arguments["op"] == "scatter_add" and source is not None and source[dim] == index[dim]
    )  # parts of what is added may be added apart
    rows = [
        " ".join(
            f"a{i}" if same else "e" if added and i == dim and x != "in" else f"{x}{i}!" for i, same in enumerate(agree)
        )
        for x in ("in", "at", "from")
    ]
    return parse(
        f"{rows[0]}, {rows[1]}, {rows[2] if source is not None else ''} -> {rows[0]}",
        linear="x+z" if source is not None else "",
    )


@rule_for("one_hot")
def one_hot(arguments: Mapping[str, Any]) -> Rule:
    return parse("... -> ... classes!")


@rule_for("ctc_loss")
def ctc_loss(arguments: Mapping[str, Any]) -> Rule:
    """Each sequence by itself, where each has a row of targets; targets that stand end to end stay whole."""
    if len(arguments["targets"].shape) == 1:
        return parse("t! n! c!, s!, n!, n! -> n!", linear="")
    return parse("t! n c!, n s!, n, n -> n", linear="")


@rule_for("nll_loss")
def nll_loss(arguments: Mapping[str, Any]) -> Rule | None:
    """A sum over rows of log-probabilities looked up by class; without its reduction each row is by itself."""
    reduction = arguments.get("reduction", "mean")
    if (
        reduction == "mean"
        or len(arguments["input"].shape) < 2
        or any(arguments.get(k) is not None for k in ("size_average", "reduce"))
    ):
        return None
    rest = " ".join(f"a{i}" for i in range(len(arguments["input"].shape) - 2))
    return parse(f"n c! {rest}, n {rest}, c! -> {'' if reduction == 'sum' else f'n {rest}'}", linear="x")


@rule_for("index")
def index(arguments: Mapping[str, Any]) -> Rule | None:
    """x[:, i] and x[:, ::2]: dims that are looked into stay whole, those beside them and those of the indices may be
    cut.
    """
    if (places := _stepped(arguments["input"], arguments["index"])) is not None:
        return parse(f"{', '.join(map(' '.join, places[:-1]))} -> {' '.join(places[-1])}", linear="x")
    found = _looked_into(arguments["input"], arguments["index"], "")
    if found is None or found[3] == "bool":
        return None
    left, operands, out, _ = found
    return parse(f"{' '.join(left)}, {operands} -> {' '.join(out)}", linear="x")


@rule_for("setitem")
def setitem(arguments: Mapping[str, Any]) -> Rule | None:
    """x[:, i] = v: every device writes all places of its part."""
    found = _looked_into(arguments["input"], arguments["index"], "!")
    if found is None:
        return None
    left, operands, out, _ = found
    value = getattr(arguments["value"], "shape", None)
    if value is not None and len(value) > len(out):
        return None
    return parse(
        f"{' '.join(left)}, {operands}, {' '.join(out[len(out) - len(value) :]) if value else ''} -> {' '.join(left)}",
        linear="" if value is None else f"x+{NAMES[2 + operands.count(',')]}",
    )


def _stepped(tensor: Any, index: Any) -> list[list[str]] | None:
    """Of x[:, 1::2, 3, None] without a tensor.

    The dims of x, nothing for each entry of the index, and the dims that are left.
    """
    if isinstance(index, list):  # places to pick, not a place in each dim
        return None
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(hasattr(e, "dtype") or isinstance(e, (bool, list, tuple)) for e in entries):
        return None
    missing = [slice(None)] * (len(tensor.shape) - sum(e is not None and e is not ... for e in entries))
    at = entries.index(...) if ... in entries else len(entries)
    left, out = list[str](), list[str]()
    for k, e in enumerate([*entries[:at], *missing, *entries[at + 1 :]]):
        if e is None:
            out.append(f"new{k}!")
            continue
        left.append(f"a{k}" if e == slice(None) else f"in{k}!")
        if isinstance(e, slice):
            out.append(left[-1] if e == slice(None) else f"out{k}!")
    return [left, *([] for _ in entries), out]


def _looked_into(tensor: Any, index: Any, mark: str) -> tuple[list[str], str, list[str], str] | None:
    """Of x[:, i, j, ...] with tensors among ranges.

    The dims of x, the operands of the index, the dims of x[:, i, j, ...], and the dtype of i.

    Tensors are broadcast together; their dims stand where they do when they are neighbours, and in front when they are
    not. A number beside them is one of them. A mask stands alone, for all of its dims.
    """
    if isinstance(index, list) and not any(hasattr(e, "dtype") for e in index):
        return None
    said = list(index) if isinstance(index, (tuple, list)) else [index]
    tensors = [e for e in said if hasattr(e, "dtype")]
    if any(isinstance(e, (bool, list, tuple)) for e in said) or not tensors:
        return None
    masks = [e for e in tensors if e.dtype == "bool"]
    if masks and (len(tensors) > 1 or any(isinstance(e, int) for e in said)):
        return None
    taken = sum(
        len(e.shape) if hasattr(e, "dtype") and e.dtype == "bool" else e is not None and e is not ... for e in said
    )
    entries = list(said)
    rest = [slice(None)] * (len(tensor.shape) - taken)
    at = next((i for i, e in enumerate(entries) if e is ...), len(entries))
    entries[at : at + (at < len(entries))] = rest
    depth = max(len(e.shape) for e in tensors)
    places = ["found!"] if masks else [f"i{k}{mark}" for k in range(depth)]
    left, out, here, dim = list[str](), list[str](), list[int](), 0
    for e in entries:
        if e is None:
            out.append(f"new{len(out)}!")
        elif isinstance(e, slice):
            left.append(f"a{dim}" if e == slice(None) else f"in{dim}!")
            out.append(f"a{dim}" if e == slice(None) else f"out{dim}!")
            dim += 1
        else:
            here.append(len(out))
            width = len(e.shape) if hasattr(e, "dtype") and e.dtype == "bool" else 1
            left += [f"in{dim + k}!" for k in range(width)]
            dim += width
    advanced = [k for k, e in enumerate(entries) if not (e is None or isinstance(e, slice))]
    together = advanced == list(range(advanced[0], advanced[-1] + 1))
    out[here[0] if together else 0 : here[0] if together else 0] = places
    if masks:
        first = next(i for i, a in enumerate(left) if a.startswith("in"))
        rows = [" ".join(left[first : first + len(masks[0].shape)]) if hasattr(e, "dtype") else "" for e in said]
    else:
        rows = [" ".join(places[depth - len(e.shape) :]) if hasattr(e, "dtype") else "" for e in said]
    return left, ", ".join(rows), out, tensors[0].dtype
