"""Rules of whole families of ops: special functions, reductions, searches, matrices, pools, recurrent modules.

The keys are the canonical ops of `autopar/ops/vocabulary.py`, the notation is that of `notation.py`, and what is
said here is proven where the other rules are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.ops.rules import dims_of, letters_of, pooled, reduced, rule, rule_for, same_dims
from autopar.sharding.notation import NAMES, Rule, parse

# pointwise, of one operand and of two
for name in (
    "acosh asinh angle digamma lgamma erfinv frac i0 isneginf isposinf sinc signbit sgn logit mvlgamma polygamma "
    "hardshrink softshrink airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 entr erfcx i0e i1 i1e log_ndtr ndtri "
    "modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 "
    "scaled_modified_bessel_k1 spherical_bessel_j0"
).split():
    rule(name, "... -> ...")
rule("frexp", "... -> ..., ...")
for name in ("deg2rad", "rad2deg"):
    rule(name, "... -> ...", linear="x")
for name in (
    "copysign hypot igamma igammac logaddexp2 nextafter xlogy gcd lcm fmax fmin bitwise_left_shift "
    "bitwise_right_shift ldexp heaviside isclose zeta xlog1py chebyshev_polynomial_t chebyshev_polynomial_u "
    "chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he "
    "laguerre_polynomial_l legendre_polynomial_p"
).split():
    rule(name, "..., ... -> ...")

# products
rule("cdist", "... p d!, ... r d! -> ... p r")
rule("pdist", "p! d! -> q!")


@rule_for("addmv")
def addmv(arguments: Mapping[str, Any]) -> Rule:
    """What is added may be one number."""
    return parse(f"{'m' if arguments['input'].shape else ''}, m k, k -> m", linear="x+y, x+z")


@rule_for("addr")
def addr(arguments: Mapping[str, Any]) -> Rule:
    """What is added is broadcast."""
    return parse(
        "..., m, n -> m n".replace("...", " ".join(["m", "n"][2 - len(arguments["input"].shape) :])), linear="x+y, x+z"
    )


# reductions
@rule_for(
    "max",
    "min",
    "median",
    "nanmedian",
    "aminmax",
    "prod",
    "nansum",
    "count_nonzero",
    "var",
    "std",
    "var_mean",
    "std_mean",
    "vector_norm",
)
def reduced_whole(arguments: Mapping[str, Any]) -> Rule:
    """What is reduced stays whole: these are no sums. Without a dim, everything is reduced."""
    return reduced(arguments, "!")


@rule_for("mode", "kthvalue")
def picked(arguments: Mapping[str, Any]) -> Rule:
    """The last dim is searched where none is named."""
    return reduced(arguments, "!", -1)


@rule_for("cummax", "cummin", "logcumsumexp")
def scanned(arguments: Mapping[str, Any]) -> Rule:
    """Every dim may be cut but the one that is scanned."""
    letters, gone = letters_of(arguments["input"]), dims_of(arguments)
    row = " ".join(f"{a}!" if i in gone else a for i, a in enumerate(letters))
    return parse(f"{row} -> {', '.join([row] * len(arguments['outputs']))}")


@rule_for("renorm")
def renorm(arguments: Mapping[str, Any]) -> Rule:
    """Each slice along the dim has a length of its own."""
    kept = dims_of(arguments)
    letters = letters_of(arguments["input"])
    return same_dims(letters, set(range(len(letters))) - kept)


rule("trace", "n! m! -> ")


@rule_for("linalg_cross", "cosine_similarity")
def along_of_two(arguments: Mapping[str, Any]) -> Rule | None:
    """Two operands, broadcast; the dim along which they meet stays whole."""
    first, second = list(arguments.values())[:2]
    rank = max(len(first.shape), len(second.shape))
    if rank == 0:
        return None
    dim = arguments.get("dim", -1 if arguments["op"] == "linalg_cross" else 1) % rank
    letters = [f"a{i}" + ("!" if i == dim else "") for i in range(rank)]
    rows = [" ".join(letters[rank - len(t.shape) :]) for t in (first, second)]
    is_cross = arguments["op"] == "linalg_cross"
    out = letters if is_cross else [a for i, a in enumerate(letters) if i != dim]
    return parse(f"{rows[0]}, {rows[1]} -> {' '.join(out)}", linear="x, y" if is_cross else "")


# matrices, one or many: leading dims are cut
@rule_for(
    "inverse",
    "det",
    "slogdet",
    "logdet",
    "matrix_exp",
    "matrix_power",
    "linalg_cholesky",
    "cholesky",
    "cholesky_inverse",
    "pinv",
    "svdvals",
    "linalg_svd",
    "svd",
    "linalg_qr",
    "eigh",
    "eigvalsh",
    "lu_factor",
)
def of_each_matrix(arguments: Mapping[str, Any]) -> Rule:
    """Each matrix by itself; its own two dims stay whole, and so does what comes of them."""
    given = next(iter(arguments.values()))
    leading = [f"a{i}" for i in range(len(given.shape) - 2)]
    rows = [
        " ".join([*leading, *_whole(f"o{k}_", len(t.shape) - len(leading))]) for k, t in enumerate(arguments["outputs"])
    ]
    tolerances = ["", ""] if arguments["op"] == "pinv" else []
    if any(getattr(arguments.get(n), "shape", ()) for n in ("rtol", "atol")):  # one for each matrix
        tolerances = [
            " ".join(leading[len(leading) - len(getattr(arguments.get(n), "shape", ())) :]) for n in ("rtol", "atol")
        ]
    return parse(f"{', '.join([' '.join([*leading, 'm!', 'n!']), *tolerances])} -> {', '.join(rows)}")


@rule_for("solve", "solve_triangular", "cholesky_solve")
def solved(arguments: Mapping[str, Any]) -> Rule | None:
    """A system of equations for each matrix; the right side may be a vector for each."""
    first, second = list(arguments.values())[:2]
    matrix, side = (second, first) if arguments["op"] == "cholesky_solve" else (first, second)
    out = arguments["outputs"][0]
    if len(side.shape) != len(out.shape):
        return None
    is_vector = arguments["op"] == "solve" and (len(side.shape) == 1 or tuple(side.shape) == tuple(matrix.shape[:-1]))
    rest = "b!" if is_vector else "b! c!"
    rows = {"matrix": "... m! n!", "side": f"... {rest}"}
    order = ("side", "matrix") if arguments["op"] == "cholesky_solve" else ("matrix", "side")
    mine = NAMES[order.index("side")]
    return parse(f"{', '.join(rows[o] for o in order)} -> ... {rest}", linear=mine)


def _whole(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}!" for i in range(count)]


@rule_for("diag_embed")
def diag_embed(arguments: Mapping[str, Any]) -> Rule:
    """The last dim becomes a diagonal of two new ones; the others keep their order."""
    given, rank = arguments["input"].shape, len(arguments["outputs"][0].shape)
    new = {arguments.get("dim1", -2) % rank, arguments.get("dim2", -1) % rank}
    leading = iter([f"a{i}" for i in range(len(given) - 1)])
    out = [f"d{i}!" if i in new else next(leading) for i in range(rank)]
    return parse(f"{' '.join([f'a{i}' for i in range(len(given) - 1)] + ['d!'])} -> {' '.join(out)}", linear="x")


# look-up and search
@rule_for("index_add", "index_copy", "index_fill", "index_reduce")
def indexed(arguments: Mapping[str, Any]) -> Rule | None:
    """The dim that is looked into stays whole, and so does the index; beside it both are cut alike."""
    given, source = arguments["input"], arguments.get("source", arguments.get("value"))
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


@rule_for("index_put")
def index_put(arguments: Mapping[str, Any]) -> Rule | None:
    """One tensor of places, or a mask, among dims that stay as they are."""
    from autopar.ops.rules import setitem

    said = tuple(slice(None) if i is None else i for i in arguments["indices"])
    found = setitem({"input": arguments["input"], "index": said, "value": arguments["values"]})
    return None if found is None else parse(found.text, linear=found.linear)


@rule_for("scatter_reduce")
def scatter_reduce(arguments: Mapping[str, Any]) -> Rule | None:
    """Other dims are cut where all agree in size."""
    given, index, source = (arguments[n].shape for n in ("input", "index", "src"))
    if not given or not len(given) == len(index) == len(source):
        return None
    dim = arguments["dim"] % len(given)
    agree = [i != dim and a == b == c for i, (a, b, c) in enumerate(zip(given, index, source, strict=True))]
    rows = [" ".join(f"a{i}" if same else f"{x}{i}!" for i, same in enumerate(agree)) for x in ("in", "at", "from")]
    return parse(f"{rows[0]}, {rows[1]}, {rows[2]} -> {rows[0]}")


@rule_for("take")
def take(arguments: Mapping[str, Any]) -> Rule:
    """Places count through the whole tensor; where they are looked up may be cut."""
    here = " ".join(letters_of(arguments["index"]))
    return parse(f"{' '.join(_whole('in', len(arguments['input'].shape)))}, {here} -> {here}", linear="x")


@rule_for("take_along_dim")
def take_along_dim(arguments: Mapping[str, Any]) -> Rule | None:
    """As gather, where both have the same dims beside the one that is looked along."""
    given, index, dim = arguments["input"].shape, arguments["indices"].shape, arguments.get("dim")
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


@rule_for("searchsorted")
def searchsorted(arguments: Mapping[str, Any]) -> Rule | None:
    """One sorted row for all values, or one for each row of them."""
    rows, values = arguments["sorted_sequence"], arguments.get("input")
    shape = getattr(values, "shape", None)
    if shape is None or arguments.get("sorter") is not None:
        return None
    if len(rows.shape) == 1:
        here = " ".join(letters_of(values))
        return parse(f"s!, {here},  -> {here}")
    leading = " ".join(letters_of(values)[:-1])
    return parse(f"{leading} s!, {leading} v,  -> {leading} v")


@rule_for("bucketize")
def bucketize(arguments: Mapping[str, Any]) -> Rule | None:
    """Boundaries stay whole; each value is looked up by itself."""
    return parse("..., b! -> ...")


@rule_for("isin")
def isin(arguments: Mapping[str, Any]) -> Rule | None:
    """What is looked for stays whole; each element is looked up by itself."""
    if any(not hasattr(arguments[n], "shape") for n in ("elements", "test_elements")):
        return None
    return parse(f"..., {' '.join(_whole('t', len(arguments['test_elements'].shape)))} -> ...")


@rule_for("embedding_bag")
def embedding_bag(arguments: Mapping[str, Any]) -> Rule | None:
    """Features are cut, and bags that are rows.

    The table stays whole, and so do tokens whose bags are said by offsets.
    """
    if arguments.get("max_norm") is not None:  # it writes to the table
        return None
    is_rows = len(arguments["input"].shape) == 2
    tokens, bags = ("b t!", "b") if is_rows else ("t!", "bags!")
    weights, offsets = arguments.get("per_sample_weights"), arguments.get("offsets")
    features = "d!" if getattr(weights, "requires_grad", False) else "d"  # its gradient is a sum over features
    rare = arguments.get("scale_grad_by_freq") and is_rows  # how often a token comes in all rows counts
    tokens, bags = (tokens.replace("b ", "b! "), "b!") if rare else (tokens, bags)
    return parse(
        f"{tokens}, v! {features}, {'o!' if offsets is not None else ''}, {tokens if weights is not None else ''} "
        f"-> {bags} {features}",
        linear="y" if arguments.get("mode", "mean") != "max" else "",
    )


@rule_for("masked_scatter")
def masked_scatter(arguments: Mapping[str, Any]) -> Rule | None:
    """The n-th place of the mask takes the n-th number: all of it counts."""
    return None


# pictures
@rule_for(
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "max_pool1d_with_indices",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "adaptive_max_pool1d_with_indices",
    "adaptive_max_pool2d_with_indices",
    "adaptive_max_pool3d_with_indices",
)
def largest_and_where(arguments: Mapping[str, Any]) -> Rule:
    """Batch and channels are cut, positions stay whole."""
    return pooled(arguments, "")


@rule_for("max_unpool1d", "max_unpool2d", "max_unpool3d")
def unpooled(arguments: Mapping[str, Any]) -> Rule:
    """Batch and channels are cut, positions stay whole; places were counted in each map by itself."""
    rank, spatial = len(arguments["input"].shape), int(arguments["op"][-2])
    leading = [f"a{i}" for i in range(rank - spatial)]
    row = " ".join([*leading, *_whole("s", spatial)])
    return parse(f"{row}, {row} -> {' '.join([*leading, *_whole('t', spatial)])}", linear="x")


@rule_for("pixel_unshuffle")
def pixel_unshuffle(arguments: Mapping[str, Any]) -> Rule:
    """Rows and columns are products with the factor inside, which become channels."""
    r = arguments["downscale_factor"]
    return parse(f"... c (h a:{r}) (w b:{r}) -> ... (c a:{r} b:{r}) h w", linear="x")


@rule_for("channel_shuffle")
def channel_shuffle(arguments: Mapping[str, Any]) -> Rule:
    """Channels change places among themselves."""
    letters = letters_of(arguments["input"])
    return same_dims(letters, {1}, "x")


@rule_for("grid_sample")
def grid_sample(arguments: Mapping[str, Any]) -> Rule:
    """Pictures and channels are cut, and the places that are looked up; the maps stay whole."""
    spatial = len(arguments["input"].shape) - 2
    maps, places = " ".join(_whole("s", spatial)), " ".join(f"p{i}" for i in range(spatial))
    return parse(f"n c {maps}, n {places} xy! -> n c {places}", linear="x")


@rule_for("affine_grid")
def affine_grid(arguments: Mapping[str, Any]) -> Rule | None:
    """Its size is a number in the program: what it makes stays whole."""
    spatial = len(arguments["size"]) - 2
    return parse(f"n! r! c! -> n! {' '.join(_whole('p', spatial))} xy!", linear="x")


@rule_for("im2col", "col2im")
def columns(arguments: Mapping[str, Any]) -> Rule:
    """Pictures are cut; their channels and positions go together."""
    given, made = len(arguments["input"].shape), len(arguments["outputs"][0].shape)
    batched = given == (4 if arguments["op"] == "im2col" else 3)
    first = ["n"] if batched else []
    left, right = [*first, *_whole("i", given - len(first))], [*first, *_whole("o", made - len(first))]
    return parse(f"{' '.join(left)} -> {' '.join(right)}", linear="x")


@rule_for("unfold")
def unfold(arguments: Mapping[str, Any]) -> Rule | None:
    """Windows along one dim, which stays whole."""
    letters = letters_of(arguments["input"])
    if not letters:
        return None
    dim = arguments["dimension"] % len(letters)
    left = " ".join(f"in{i}!" if i == dim else a for i, a in enumerate(letters))
    right = " ".join(f"out{i}!" if i == dim else a for i, a in enumerate(letters))
    return parse(f"{left} -> {right} window!", linear="x")


# losses that look at the classes of a row
@rule_for("multi_margin_loss", "multilabel_margin_loss")
def margin_loss(arguments: Mapping[str, Any]) -> Rule | None:
    """Without its reduction each row is by itself."""
    if arguments.get("reduction", "mean") != "none" or len(arguments["input"].shape) != 2:
        return None
    if arguments["op"] == "multilabel_margin_loss":
        return parse("n c!, n c! -> n")
    return parse("n c!, n, c! -> n")


@rule_for("quantile", "nanquantile")
def quantile(arguments: Mapping[str, Any]) -> Rule:
    """The dim that is searched stays whole; several quantiles stand in front."""
    letters, gone = letters_of(arguments["input"]), dims_of(arguments)
    asked = ["q!"] if getattr(arguments["q"], "shape", ()) else []
    kept = [i for i in range(len(letters)) if i not in gone or arguments.get("keepdim")]
    left = " ".join(f"{a}!" if i in gone else a for i, a in enumerate(letters))
    return parse(
        f"{left}, {' '.join(asked)} -> {' '.join([*asked, *('1' if i in gone else letters[i] for i in kept)])}"
    )


@rule_for("rot90")
def rot90(arguments: Mapping[str, Any]) -> Rule:
    """The two dims that turn stay whole."""
    rank = len(arguments["input"].shape)
    return (
        same_dims(letters_of(arguments["input"]), {d % rank for d in arguments.get("dims", (0, 1))}, "x")
        if rank
        else parse(" -> ", linear="x")
    )


# recurrent modules
@rule_for("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(arguments: Mapping[str, Any]) -> Rule | None:
    """Each row of the batch by itself; time and features stay whole."""
    given = arguments["input"]
    if not isinstance(arguments["params"], (tuple, list)) or isinstance(given, (tuple, list)) or len(given.shape) != 3:
        return None
    states = arguments["hx"] if isinstance(arguments["hx"], (tuple, list)) else (arguments["hx"],)
    row = "b t! {}!" if arguments["batch_first"] else "t! b {}!"
    weights = [" ".join(_whole(f"w{k}_", len(w.shape))) for k, w in enumerate(arguments["params"])]
    held = [f"l! b h{k}!" for k in range(len(states))]
    return parse(f"{', '.join([row.format('i'), *held, *weights])} -> {', '.join([row.format('o'), *held])}")
