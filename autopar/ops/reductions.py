"""Reductions, scans, sorts and searches along dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops.entry import OPS, Op, T, each, op, translates
from autopar.ops.exchange import BACKWARD, Along, Exchange, LargestShapes
from autopar.ops.local import Form, Here, OpCall
from autopar.ops.rows import Row, along, dims_of, removed, resized, rule_from
from autopar.runtime import forms
from autopar.sharding.notation import Rule


def spread(name: str) -> Callable[..., Any]:
    """Variance or standard deviation; `correction` is subtracted from the count."""

    def call(input: Tensor, dim: Any = None, correction: float = 1, keepdim: bool = False) -> Any:
        return getattr(torch, name)(input, dim, correction=correction, keepdim=keepdim)

    call.__name__ = name
    return call


def renorm(arguments: Mapping[str, Any]) -> Rule:
    """The kept dim may be cut: each slice along it is normalised by itself."""
    row = Row.of(arguments["input"])
    kept = row.whole().replaced(arguments["dim"], "kept")
    return rule_from([kept], [kept])


def along_of_two(arguments: Mapping[str, Any]) -> Rule | None:
    """Two operands, broadcast; the dim along which they are combined stays whole."""
    operands = list(arguments.values())[:2]
    row = Row.of(max(operands, key=lambda tensor: len(tensor.shape)))
    if not row:
        return None
    is_cross = arguments["op"] == "linalg_cross"
    dim = arguments.get("dim", -1 if is_cross else 1)
    whole = row.whole(dim)
    return rule_from(map(whole.last, operands), [whole if is_cross else row.without(dim)], "x, y" if is_cross else "")


def quantile(arguments: Mapping[str, Any]) -> Rule:
    """The searched dim stays whole; several quantiles make a new first dim."""
    row = Row.of(arguments["input"])
    dims = dims_of(arguments)
    asked = ["q!"] if getattr(arguments["q"], "shape", ()) else []
    left = row.replaced(dims, "1") if arguments.get("keepdim") else row.without(dims)
    return rule_from([row.whole(dims), asked], [[*asked, *left]])


def diff(arguments: Mapping[str, Any]) -> Rule:
    """The dim of differences stays whole, and so do the tensors that are prepended or appended."""
    row = Row.of(arguments["input"])
    *operands, out = (row.resized(arguments.get("dim", -1), name) for name in ("in", "before", "after", "out"))
    return rule_from(operands, [out], "x+y+z" if "float" in arguments["input"].dtype else "")


def parts(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of a reduction over a cut dim: partial results, reduced over devices; else None."""
    lies = here.lies(0)
    gone = Row.of(call.arguments["input"]).places(dims_of(call.arguments))
    axes = [here.mesh.axes[a] for d, order in lies.cuts.items() if d in gone for a in order]
    if not axes:
        return None
    if call.op == "logsumexp":
        return forms.logsumexp_part, {**kwargs, "axes": axes}
    return forms.amax_part, {**kwargs, "axes": axes, "least": call.op == "amin"}


def exchanged(call: OpCall, along: Along | None) -> tuple[int, int]:
    """All-reduces of a maximum: its value and, for the gradient, the number of entries that attain it."""
    return (2 if "float" in call.outputs[0].dtype else 1), 0


def running(arguments: Mapping[str, Any]) -> Rule:
    """The dim of a sum that runs may be cut: each part begins with the totals of those before it."""
    row = Row.of(arguments["input"]).replaced(arguments["dim"], "run^")
    return rule_from([row], [row], linear="x" if "float" in arguments["input"].dtype else "")


def running_part(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of a running sum along a cut dim; else None."""
    given = call.arguments["input"]
    dim = call.arguments["dim"] % max(1, len(given.shape))
    order = here.lies(0).cuts.get(dim, [])
    if not order:
        return None
    size = 1
    cuts: tuple[tuple[str, int], ...] = ()
    for axis in reversed(order):
        size *= here.mesh.shape[axis]
        cuts = ((here.mesh.axes[axis], size), *cuts)
    return forms.cumsum_part, {**kwargs, "dim": dim, "cuts": cuts}


def totals_before(call: OpCall, along: Along | None) -> tuple[Exchange, ...]:
    """The messages of a running sum along a cut dim: totals, and the gradients of totals."""
    out = call.outputs[0]
    dim = call.arguments["dim"] % max(1, len(out.shape))

    def nbytes(shapes: LargestShapes, n: int) -> float:
        others = (size for d, size in enumerate(shapes[0]) if d != dim)
        parts = -(-out.shape[dim] // max(1, shapes[0][dim]))
        return float(parts * math.prod(others) * out.itemsize)

    back = (Exchange("all_reduce", BACKWARD, nbytes=nbytes),) if "float" in out.dtype else ()
    return Exchange("all_reduce", nbytes=nbytes), *back


def histogram(arguments: Mapping[str, Any]) -> Rule | None:
    """Counts of parts add up, where the bins do not follow from the values."""
    if not arguments.get("min", 0) < arguments.get("max", 0):
        return None
    return rule_from([Row.of(arguments["input"])], [["bins!"]])


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


DIMS = "input:T, dim=None, keepdim=False"
PARTS: dict[str, Any] = dict(rule=removed("^"), serves="^", form=parts)  # partial results, reduced over devices
op(
    "sum",
    torch.sum,
    f"{DIMS}, *, dtype=None",
    T.sum,
    rule=removed("", linear="x"),
    keeps="",
    settle=with_dims,
    neutral=0,
)
op("mean", torch.mean, f"{DIMS}, *, dtype=None", T.mean, settle=with_dims)  # a sum and a quotient, to the graph
each("amax", DIMS, exchanges=exchanged, neutral=-math.inf, **PARTS)
each("amin", DIMS, exchanges=exchanged, neutral=math.inf, **PARTS)
each(
    "logsumexp",
    "input:T, dim, keepdim=False",
    exchanges=(2, 0),
    keeps="input",
    settle=with_dims,
    neutral=-math.inf,
    **PARTS,
)
# no sums: their dims stay whole
each("all", DIMS, rule=removed(), keeps="", neutral=1)
each("any", DIMS, rule=removed(), keeps="", neutral=0)
each("argmax argmin", DIMS, rule=removed(), keeps="")
each("norm", "input:T, p='fro', dim=None, keepdim=False, *, dtype=None", rule=removed(), neutral=0)
each("max min", "input:T, dim, keepdim=False", rule=removed())
each("median nanmedian", DIMS, rule=removed())
each("aminmax", "input:T, *, dim=None, keepdim=False", rule=removed())
each("prod nansum", f"{DIMS}, *, dtype=None", rule=removed())
each("histc", "input:T, bins=100, min=0, max=0", rule=histogram, keeps="")
each("count_nonzero", "input:T, dim=None", rule=removed())
for name in ("var", "std", "var_mean", "std_mean"):
    op(name, spread(name), "input:T, dim=None, correction=1, keepdim=False", rule=removed())
op("vector_norm", torch.linalg.vector_norm, "input:T, ord=2, dim=None, keepdim=False, *, dtype=None", rule=removed())
each("mode", "input:T, dim=-1, keepdim=False", rule=removed("!", -1))
each("kthvalue", "input:T, k, dim=-1, keepdim=False", rule=removed("!", -1))
each("quantile nanquantile", "input:T, q:T, dim=None, keepdim=False, *, interpolation='linear'", rule=quantile)
each("trace", rule="n! m! -> ")

# along a dim
for name in ("softmax", "log_softmax"):
    op(
        name,
        getattr(torch, name),
        "input:T, dim, dtype=None",
        getattr(T, name),
        (getattr(F, name), "input, dim=None, _stacklevel=3, dtype=None"),
        rule=along(),
        keeps="out",
        settle=with_dim,
        reach="softmax",
    )
op("normalize", F.normalize, "input:T, p=2.0, dim=1, eps=1e-12, out=None", rule=along(1))
each(
    "cumsum",
    "input:T, dim, *, dtype=None",
    rule=running,
    serves="^",
    form=running_part,
    exchanges=totals_before,
    counts="run",
    keeps="",
    reach="running",
)
each("cumprod", "input:T, dim, *, dtype=None", rule=along())
each("cummax cummin logcumsumexp", "input:T, dim", rule=along())
each("renorm", "input:T, p, dim, maxnorm", rule=renorm)
each("diff", "input:T, n=1, dim=-1, prepend:T=None, append:T=None", rule=diff)
op("glu", F.glu, "input:T, dim=-1", rule=resized(-1))
op("linalg_cross", torch.linalg.cross, "input:T, other:T, *, dim=-1", rule=along_of_two)
op("cosine_similarity", F.cosine_similarity, "x1:T, x2:T, dim=1, eps=1e-08", rule=along_of_two)

# sorts
each("topk", "input:T, k, dim=-1, largest=True, sorted=True", rule=resized(-1), keeps="out")
each("sort", "input:T, dim=-1, descending=False, *, stable=None", rule=resized(-1), keeps="out")
each("argsort", "input:T, dim=-1, descending=False, *, stable=None", rule=resized(-1))
