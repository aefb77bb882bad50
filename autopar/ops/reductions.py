"""Reductions, scans, sorts and searches along dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops.entry import OPS, Op, T, each, op, translates
from autopar.ops.local import Form, Here, OpCall
from autopar.ops.spelling import dims_of, letters_of, parse, reduced, same_dims
from autopar.runtime import forms
from autopar.sharding.notation import Rule


def spread(name: str) -> Callable[..., Any]:
    """Variance or standard deviation; `correction` is subtracted from the count."""

    def call(input: Tensor, dim: Any = None, correction: float = 1, keepdim: bool = False) -> Any:
        return getattr(torch, name)(input, dim, correction=correction, keepdim=keepdim)

    call.__name__ = name
    return call


def sum_(arguments: Mapping[str, Any]) -> Rule:
    """A summed dim may be cut and leaves P(sum); with keepdim it has size one in the output."""
    rank = len(arguments["input"].shape)
    dims = arguments.get("dim")
    dims = range(rank) if dims is None else (dims,) if isinstance(dims, int) else dims
    summed = {d % rank for d in dims} if rank else set()
    letters = [f"a{i}" for i in range(rank)]
    kept = ["1" if i in summed else letters[i] for i in range(rank) if i not in summed or arguments.get("keepdim")]
    return parse(f"{' '.join(letters)} -> {' '.join(kept)}", linear="x")


def reduction_of_parts(arguments: Mapping[str, Any]) -> Rule:
    """Reduced dims may be cut: the local form reduces partial results over devices."""
    return reduced(arguments, "^")


def reduced_whole(arguments: Mapping[str, Any]) -> Rule:
    """Reduced dims stay whole, as these reductions are not sums; without a dim all are reduced."""
    return reduced(arguments, "!")


def picked(arguments: Mapping[str, Any]) -> Rule:
    """The searched dim stays whole; it is the last where none is named."""
    return reduced(arguments, "!", -1)


def scanned(arguments: Mapping[str, Any]) -> Rule:
    """Every dim may be cut except the one that is scanned."""
    letters = letters_of(arguments["input"])
    gone = dims_of(arguments)
    row = " ".join(f"{a}!" if i in gone else a for i, a in enumerate(letters))
    return parse(f"{row} -> {', '.join([row] * len(arguments['outputs']))}")


def renorm(arguments: Mapping[str, Any]) -> Rule:
    """The kept dim may be cut: each slice along it is normalised by itself."""
    kept = dims_of(arguments)
    letters = letters_of(arguments["input"])
    return same_dims(letters, set(range(len(letters))) - kept)


def along_of_two(arguments: Mapping[str, Any]) -> Rule | None:
    """Two operands, broadcast; the dim along which they are combined stays whole."""
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


def quantile(arguments: Mapping[str, Any]) -> Rule:
    """The searched dim stays whole; several quantiles make a new first dim."""
    letters = letters_of(arguments["input"])
    gone = dims_of(arguments)
    asked = ["q!"] if getattr(arguments["q"], "shape", ()) else []
    kept = [i for i in range(len(letters)) if i not in gone or arguments.get("keepdim")]
    left = " ".join(f"{a}!" if i in gone else a for i, a in enumerate(letters))
    return parse(
        f"{left}, {' '.join(asked)} -> {' '.join([*asked, *('1' if i in gone else letters[i] for i in kept)])}"
    )


def along(arguments: Mapping[str, Any]) -> Rule:
    """Every dim may be cut except those along which the op runs."""
    return same_dims(letters_of(arguments["input"]), dims_of(arguments, 1 if arguments["op"] == "normalize" else None))


def along_and_linear(arguments: Mapping[str, Any]) -> Rule:
    """Every dim may be cut except those along which the op runs, which is linear."""
    return same_dims(letters_of(arguments["input"]), dims_of(arguments), "x")


def changed_along(arguments: Mapping[str, Any]) -> Rule:
    """One dim stays whole, and may have another size in the output."""
    letters = letters_of(arguments["input"])
    if not letters:  # A single number has no dim.
        return parse(f" -> {', '.join([''] * len(arguments['outputs']))}")
    gone = arguments.get("dim", -1) % len(letters)
    row = " ".join("out!" if i == gone else a for i, a in enumerate(letters))
    left = " ".join("in!" if i == gone else a for i, a in enumerate(letters))
    return parse(f"{left} -> {', '.join([row] * len(arguments['outputs']))}")


def diff(arguments: Mapping[str, Any]) -> Rule:
    """The dim of differences stays whole, and so do the tensors that are prepended or appended."""
    letters = letters_of(arguments["input"])
    gone = arguments.get("dim", -1) % len(arguments["input"].shape)

    def row(name: str) -> str:
        return " ".join([*letters[:gone], f"{name}!", *letters[gone + 1 :]])

    linear = "x+y+z" if "float" in arguments["input"].dtype else ""
    return parse(f"{row('in')}, {row('before')}, {row('after')} -> {row('out')}", linear=linear)


def parts(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of a reduction over a cut dim: partial results, reduced over devices; else None."""
    lies = here.lies(0)
    gone = dims_of(call.arguments)
    axes = [here.mesh.axes[a] for d, order in lies.cuts.items() if d in gone for a in order]
    if not axes:
        return None
    if call.op == "logsumexp":
        return forms.logsumexp_part, {**kwargs, "axes": axes}
    return forms.amax_part, {**kwargs, "axes": axes, "least": call.op == "amin"}


def exchanged(call: OpCall) -> tuple[int, int]:
    """All-reduces of a maximum: its value and, for the gradient, the number of entries that attain it."""
    return (2 if "float" in call.outputs[0].dtype else 1), 0


def _translates_spread(name: str, *functions: Any) -> None:
    """Read var(x, False), var(x, 1, False, True) and var(x, dim=1, correction=0) as one op."""

    @translates(*functions)
    def translated(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
        return OPS[name], spread_arguments(*args, **kwargs)


_translates_spread("var", torch.var, T.var)
_translates_spread("std", torch.std, T.std)
_translates_spread("var_mean", torch.var_mean)
_translates_spread("std_mean", torch.std_mean)


def spread_arguments(
    input: Tensor,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    axis: Any = None,
) -> dict[str, Any]:
    """The canonical arguments of a variance or deviation, for which torch has three signatures."""
    if isinstance(dim, bool):
        unbiased = dim
        dim = None
    dim = axis if dim is None else dim
    degrees = correction
    if degrees is None:
        degrees = 1 if unbiased is None else int(unbiased)
    said: dict[str, Any] = {"input": input}
    if dim not in (None, (), []):
        said["dim"] = tuple(dim) if isinstance(dim, (tuple, list)) else dim
    if degrees != 1:
        said["correction"] = degrees
    if keepdim:
        said["keepdim"] = True
    return said


@translates(torch.min, T.min)
def least(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Read min(a, b) as minimum, and min(x) as amin."""
    return _extreme(args, kwargs, "amin", torch.minimum)


@translates(torch.max, T.max)
def largest(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Read max(a, b) as maximum, and max(x) as amax."""
    return _extreme(args, kwargs, "amax", torch.maximum)


def _extreme(args: tuple[Any, ...], kwargs: Mapping[str, Any], of_all: str, of_two: Callable[..., Any]) -> Any:
    if len(args) == 2 and isinstance(args[1], Tensor):
        return of_two
    if len(args) < 2 and not kwargs.keys() & {"dim", "other"}:
        return OPS[of_all], {"input": args[0] if args else kwargs["input"]}
    return None


def with_dim(op: Op, arguments: dict[str, Any], result: Any) -> tuple[Op, dict[str, Any]]:
    """Add the dim that torch guesses where a softmax names none."""
    if arguments.get("dim") is None:
        arguments["dim"] = 0 if arguments["input"].dim() in (0, 1, 3) else 1
    return op, arguments


def with_dims(op: Op, arguments: dict[str, Any], result: Any) -> tuple[Op, dict[str, Any]]:
    """Add all dims where the result keeps them, as torch needs them then."""
    if "dim" not in arguments and ("keepdim" in arguments or op.name == "logsumexp"):
        given = arguments["input"]
        arguments = {"input": given, "dim": tuple(range(given.dim())) if given.dim() else 0, **arguments}
    return op, arguments


op(
    "sum",
    torch.sum,
    "input:T, dim=None, keepdim=False, *, dtype=None",
    T.sum,
    rule=sum_,
    keeps="",
    settle=with_dims,
    neutral=0,
)
op(
    "mean", torch.mean, "input:T, dim=None, keepdim=False, *, dtype=None", T.mean, settle=with_dims
)  # a sum and a quotient, to the graph
for name, neutral in (("amax", -math.inf), ("amin", math.inf)):
    dims = "input:T, dim=None, keepdim=False"
    each(name, dims, rule=reduction_of_parts, serves="^", form=parts, exchanges=exchanged, neutral=neutral)
each(
    "logsumexp",
    "input:T, dim, keepdim=False",
    rule=reduction_of_parts,
    serves="^",
    form=parts,
    exchanges=(2, 0),
    keeps="input",
    settle=with_dims,
    neutral=-math.inf,
)
each("all", "input:T, dim=None, keepdim=False", rule=reduced_whole, keeps="", neutral=1)
each("any", "input:T, dim=None, keepdim=False", rule=reduced_whole, keeps="", neutral=0)
each("argmax argmin", "input:T, dim=None, keepdim=False", rule=reduced_whole, keeps="")
each("norm", "input:T, p='fro', dim=None, keepdim=False, *, dtype=None", rule=reduced_whole, neutral=0)
each("max min", "input:T, dim, keepdim=False", rule=reduced_whole)
each("median nanmedian", "input:T, dim=None, keepdim=False", rule=reduced_whole)
op("aminmax", torch.aminmax, "input:T, *, dim=None, keepdim=False", T.aminmax, rule=reduced_whole)
each("prod nansum", "input:T, dim=None, keepdim=False, *, dtype=None", rule=reduced_whole)
each("count_nonzero", "input:T, dim=None", rule=reduced_whole)
for name in ("var", "std", "var_mean", "std_mean"):
    op(name, spread(name), "input:T, dim=None, correction=1, keepdim=False", rule=reduced_whole)
op(
    "vector_norm",
    torch.linalg.vector_norm,
    "input:T, ord=2, dim=None, keepdim=False, *, dtype=None",
    rule=reduced_whole,
)
op("mode", torch.mode, "input:T, dim=-1, keepdim=False", T.mode, rule=picked)
op("kthvalue", torch.kthvalue, "input:T, k, dim=-1, keepdim=False", T.kthvalue, rule=picked)
each("quantile nanquantile", "input:T, q:T, dim=None, keepdim=False, *, interpolation='linear'", rule=quantile)
each("trace", rule="n! m! -> ")

# along a dim
op(
    "softmax",
    torch.softmax,
    "input:T, dim, dtype=None",
    T.softmax,
    (F.softmax, "input, dim=None, _stacklevel=3, dtype=None"),
    rule=along,
    keeps="out",
    settle=with_dim,
    reach="softmax",
)
op(
    "log_softmax",
    torch.log_softmax,
    "input:T, dim, dtype=None",
    T.log_softmax,
    (F.log_softmax, "input, dim=None, _stacklevel=3, dtype=None"),
    rule=along,
    keeps="out",
    settle=with_dim,
    reach="softmax",
)
op("normalize", F.normalize, "input:T, p=2.0, dim=1, eps=1e-12, out=None", rule=along)
each("cumsum", "input:T, dim, *, dtype=None", rule=along_and_linear, keeps="", reach="running")
each("cumprod", "input:T, dim, *, dtype=None", rule=along)
each("cummax cummin logcumsumexp", "input:T, dim", rule=scanned)
each("renorm", "input:T, p, dim, maxnorm", rule=renorm)
each("diff", "input:T, n=1, dim=-1, prepend:T=None, append:T=None", rule=diff)
op("glu", F.glu, "input:T, dim=-1", rule=changed_along)
op("linalg_cross", torch.linalg.cross, "input:T, other:T, *, dim=-1", rule=along_of_two)
op("cosine_similarity", F.cosine_similarity, "x1:T, x2:T, dim=1, eps=1e-08", rule=along_of_two)

# sorts
each("topk", "input:T, k, dim=-1, largest=True, sorted=True", rule=changed_along, keeps="out")
each("sort", "input:T, dim=-1, descending=False, *, stable=None", rule=changed_along, keeps="out")
each("argsort", "input:T, dim=-1, descending=False, *, stable=None", rule=changed_along)
