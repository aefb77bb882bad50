"""The canonical ops: one line each, with the arguments by name and the spellings that mean the same.

An op is the torch function that computes it; `:T` marks its tensor operands, in the order in which rules name them. A
spelling may pass its arguments in another order; `lookup` gives them by name. A function that is in no line becomes an
op of its own name: it can be replayed, and has no rule until somebody writes one. Every op is pure: what writes in
torch is here the form that returns a new tensor.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch.distributions.dirichlet import _Dirichlet
from torch.utils import _pytree as pytree

from autopar.runtime.ctc import ctc_losses


def identity(input: Tensor) -> Tensor:
    """A value with several consumers passes through here: one conversion serves them all."""
    return input


def to(input: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast."""
    return input.to(dtype)


def view(input: Tensor, size: tuple[int, ...]) -> Tensor:
    """The same numbers in another shape: view, reshape, flatten, squeeze, unsqueeze."""
    return input.reshape(size)


def contiguous(input: Tensor) -> Tensor:
    """The same numbers in memory order."""
    return input.contiguous()


def narrow(input: Tensor, dim: int, start: int, length: int) -> Tensor:
    """A range of one dim."""
    return input.narrow(dim, start, length)


def split(input: Tensor, sections: tuple[int, ...], dim: int = 0) -> tuple[Tensor, ...]:
    """Ranges of one dim, end to end."""
    return input.split(sections, dim)


def expand(input: Tensor, size: tuple[int, ...]) -> Tensor:
    """Dims of size 1, and new dims in front, repeated without a copy."""
    return input.expand(size)


def index(input: Tensor, index: Any) -> Tensor:
    """x[index], where index holds tensors or steps; plain ranges are spelled out."""
    return input[index]


def setitem(input: Tensor, index: Any, value: Any) -> Tensor:
    """A copy with another value at [index]."""
    made = input.clone()
    made[index] = value
    return made


def copy(input: Tensor, source: Tensor) -> Tensor:
    """The source, in the shape and dtype of the input."""
    return source.expand(input.shape).to(input.dtype)


def einsum(equation: str, operands: Sequence[Any]) -> Tensor:
    """A sum of products, spelled by letters."""
    return torch.einsum(equation, *operands)


def pow(input: Any, exponent: Any) -> Tensor:
    """A power; either may be a number."""
    return torch.pow(input, exponent)


def full_like(input: Tensor, fill_value: float, dtype: torch.dtype | None = None) -> Tensor:
    """One number in the shape of another tensor."""
    return torch.full_like(input, fill_value, dtype=dtype)


def new(name: str) -> Callable[..., Tensor]:
    """A factory that takes its dtype and device from a tensor."""

    def call(input: Tensor, size: Sequence[int], dtype: torch.dtype | None = None, **fill: float) -> Tensor:
        return getattr(input, name)(tuple(size), dtype=dtype, **fill)

    call.__name__ = name
    return call


def spread(name: str) -> Callable[..., Any]:
    """Variance or deviation; `correction` is taken from the count."""

    def call(input: Tensor, dim: Any = None, correction: float = 1, keepdim: bool = False) -> Any:
        return getattr(torch, name)(input, dim, correction=correction, keepdim=keepdim)

    call.__name__ = name
    return call


def polygamma(input: Tensor, n: int) -> Tensor:
    """The n-th derivative of digamma."""
    return torch.polygamma(n, input)


def rounded(input: Tensor, decimals: int = 0) -> Tensor:
    """To the nearest, after so many decimals."""
    return torch.round(input, decimals=decimals) if decimals else torch.round(input)


def unfold(input: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows along one dim, as a view."""
    return input.unfold(dimension, size, step)


def index_put(input: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    """A copy with values put, or added, at [indices]."""
    return torch.index_put(input, indices, values, accumulate)


def where(condition: Tensor, input: Any, other: Any) -> Tensor:
    """One or the other; either may be a number."""
    return torch.where(condition, input, other)


def scatter(input: Tensor, dim: int, index: Tensor, src: Any) -> Tensor:
    """A copy with entries of src, or one number, at positions along a dim."""
    return torch.scatter(input, dim, index, src)


def repeat(input: Tensor, repeats: Sequence[int]) -> Tensor:
    """The tensor, repeated along each dim."""
    return input.repeat(tuple(repeats))


def tile(input: Tensor, dims: Sequence[int]) -> Tensor:
    """The tensor, repeated along its last dims: counts may be fewer than dims, which `repeat` refuses."""
    return torch.tile(input, tuple(dims))


def drawn(name: str, first: float | None = None) -> Callable[..., Tensor]:
    """x.uniform_(...) as a function: a new tensor like x, filled with draws.

    `first` is torch's default of the first number.
    """

    def call(input: Tensor, a: float | None = None, b: float | None = None) -> Tensor:
        return getattr(torch.empty_like(input), name)(
            *(v for v in (first if a is None and b is not None else a, b) if v is not None)
        )

    call.__name__ = name
    return call


def bernoulli(input: Tensor, p: float | Tensor | None = None) -> Tensor:
    """Ones with probability p, or with the probabilities that the input holds."""
    return torch.bernoulli(input) if p is None else torch.empty_like(input).bernoulli_(p)


def updating(call: Callable[..., Tensor], *written: str) -> Callable[..., tuple[Tensor, ...]]:
    """An op that writes to some of its arguments, as one that returns their new values."""

    def pure(**arguments: Any) -> tuple[Tensor, ...]:
        fresh = {n: arguments[n].detach().clone() for n in written}
        return call(**{**arguments, **fresh}), *fresh.values()

    return pure


def normal_filled(size: Sequence[int], mean: float, std: float, dtype: torch.dtype | None = None) -> Tensor:
    """torch.normal of two numbers: draws of one distribution in a new tensor."""
    return torch.normal(mean, std, tuple(size), dtype=dtype)


def randint(size: Sequence[int], low: int, high: int, dtype: torch.dtype | None = None) -> Tensor:
    """Whole numbers from low to high - 1 in a new tensor."""
    return torch.randint(low, high, tuple(size), dtype=dtype)


def randperm(n: int, dtype: torch.dtype | None = None) -> Tensor:
    """The numbers below n in a random order."""
    return torch.randperm(n, dtype=dtype or torch.int64)


class Apply:
    """An autograd.Function as a function of tensors, forward and backward its own."""

    def __init__(self, cls: Any) -> None:
        self.cls, self.__name__ = cls, f"function {cls.__module__}.{cls.__qualname__}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cls.apply(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Apply) and self.cls is other.cls

    def __hash__(self) -> int:
        return hash(self.cls)


def dirichlet(input: Tensor) -> Tensor:
    """Draws of Dirichlet distributions along the last dim, as torch.distributions makes them."""
    return _Dirichlet.apply(input)


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """A canonical op: `call(**arguments)` computes it."""

    name: str
    call: Callable[..., Any]
    signature: inspect.Signature | None = field(
        repr=False, default=None
    )  # None: an op by its own name, arguments by position

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name; those that equal their default are left out."""
        if self.signature is None:
            return {**{f"_{i}": a for i, a in enumerate(args)}, **kwargs}
        bound = self.signature.bind(*args, **kwargs).arguments
        defaults = {n: p.default for n, p in self.signature.parameters.items() if p.default is not p.empty}
        return {n: v for n, v in bound.items() if not (n in defaults and same(v, defaults[n]))}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    @property
    def __name__(self) -> str:
        return self.name

    def operands(self, arguments: Mapping[str, Any]) -> list[Any]:
        """The arguments that rules speak of, in order.

        Tensors, numbers in a tensor's place, None where one is absent.
        """
        if self.signature is None:
            return [
                leaf for leaf in pytree.tree_leaves(list(arguments.values())) if isinstance(leaf, (fx.Node, Tensor))
            ]
        found = [arguments.get(n, default) for n, default in _tensors(self)]
        return [leaf for value in found for leaf in (value if isinstance(value, (list, tuple)) else [value])]

    def local(self, annotation: Any) -> str | None:
        """The name of the argument that is a shape (`:SHAPE`) or a list of sizes (`:SIZES`) of the output, if there is
        one.
        """
        return (
            next((n for n, p in self.signature.parameters.items() if p.annotation is annotation), None)
            if self.signature
            else None
        )

    def run(self, arguments: Mapping[str, Any]) -> Any:
        """Compute the op on arguments by name."""
        if self.signature is None:
            positional = [v for n, v in arguments.items() if n[0] == "_" and n[1:].isdigit()]
            return self.call(
                *positional, **{n: v for n, v in arguments.items() if not (n[0] == "_" and n[1:].isdigit())}
            )
        return self.call(**arguments)


@functools.cache
def _tensors(op: Op) -> tuple[tuple[str, Any], ...]:
    """The names and defaults of an op's tensor arguments, in order."""
    parameters = op.signature.parameters.items() if op.signature else ()
    return tuple((n, p.default) for n, p in parameters if p.annotation is Tensor)


def same(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, Tensor) and type(value) is type(default) and value == default)


class SHAPE:
    """Marks an argument that is the output's shape: on a device it is the local one."""


class SIZES:
    """Marks an argument that lists the outputs' sizes along `dim`."""


OPS: dict[str, Op] = {}
SPELLINGS: dict[Callable[..., Any], tuple[Op, inspect.Signature]] = {}
WRITES: dict[
    str, tuple[Op, tuple[str, ...], str]
] = {}  # an op that writes to arguments: the pure form, to which, and the flag that says so


def op(
    name: str,
    call: Callable[..., Any],
    signature: str,
    *spellings: Callable[..., Any] | tuple[Callable[..., Any], str],
    writes: str = "",
) -> None:
    """Add an op. A spelling with a signature of its own is a pair; the names in it are the op's."""
    made = OPS[name] = Op(name, call, _signature(signature))
    SPELLINGS[call] = made, _signature(signature)
    for spelling in spellings:
        function, own = spelling if isinstance(spelling, tuple) else (spelling, signature)
        SPELLINGS[function] = made, _signature(own)
    if writes:
        names, _, flag = writes.partition(" if ")
        written = tuple(names.split(", "))
        WRITES[name] = (
            OPS.setdefault(f"{name}_updating", Op(f"{name}_updating", updating(call, *written), _signature(signature))),
            written,
            flag,
        )


def each(names: str, signature: str = "input:T") -> None:
    """Ops that are spelled alike in torch, Tensor and torch.nn.functional."""
    for name in names.split():
        first, *others = (getattr(home, name) for home in (torch, F, T) if hasattr(home, name))
        op(name, first, signature, *others)


def _signature(text: str) -> inspect.Signature:
    namespace: dict[str, Any] = {}
    exec(
        compile(f"def f({text}): ...", "<vocabulary>", "exec", dont_inherit=True),
        {"T": Tensor, "SHAPE": SHAPE, "SIZES": SIZES},
        namespace,
    )  # our own text, never a user's
    return inspect.signature(namespace["f"])


T = Tensor

# products
op("linear", F.linear, "input:T, weight:T, bias:T=None")
op("mm", torch.mm, "input:T, mat2:T", T.mm)
op("matmul", torch.matmul, "input:T, other:T", T.matmul, T.__matmul__, torch.bmm, T.bmm)
op("addmm", torch.addmm, "input:T, mat1:T, mat2:T, *, beta=1, alpha=1", T.addmm)
op("baddbmm", torch.baddbmm, "input:T, batch1:T, batch2:T, *, beta=1, alpha=1", T.baddbmm)
op("einsum", einsum, "equation, operands:T", (torch.einsum, "equation, *operands"))
op(
    "grouped_mm",
    F.grouped_mm,
    "mat_a:T, mat_b:T, *, offs:T=None, bias:T=None, out_dtype=None",
    (torch._grouped_mm, "mat_a, mat_b, offs=None, bias=None, out_dtype=None"),
)
op("bilinear", F.bilinear, "input1:T, input2:T, weight:T, bias:T=None")
op("mv", torch.mv, "input:T, vec:T", T.mv)
op("dot", torch.dot, "input:T, tensor:T", T.dot)
op("outer", torch.outer, "input:T, vec2:T", T.outer)
for d in (1, 2, 3):
    each(f"conv{d}d", "input:T, weight:T, bias:T=None, stride=1, padding=0, dilation=1, groups=1")
    each(
        f"conv_transpose{d}d",
        "input:T, weight:T, bias:T=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1",
    )

# pointwise
op("add", torch.add, "input:T, other:T, *, alpha=1", T.add, T.__add__, T.__radd__)
op("sub", torch.sub, "input:T, other:T, *, alpha=1", T.sub, T.__sub__, torch.subtract)
op("mul", torch.mul, "input:T, other:T", T.mul, T.__mul__, T.__rmul__, torch.multiply)
op("div", torch.div, "input:T, other:T, *, rounding_mode=None", T.div, T.__truediv__, torch.divide)
op("rsub", torch.rsub, "input:T, other:T, *, alpha=1")
op("pow", pow, "input:T, exponent:T", torch.pow, T.pow, T.__pow__)
op("neg", torch.neg, "input:T", T.neg, T.__neg__)
op("abs", torch.abs, "input:T", T.abs, T.__abs__)
op("bitwise_and", torch.bitwise_and, "input:T, other:T", T.bitwise_and, T.__and__, T.__rand__)
op("bitwise_or", torch.bitwise_or, "input:T, other:T", T.bitwise_or, T.__or__, T.__ror__)
op("bitwise_xor", torch.bitwise_xor, "input:T, other:T", T.bitwise_xor, T.__xor__, T.__rxor__)
op("bitwise_not", torch.bitwise_not, "input:T", T.bitwise_not, T.__invert__)
op("remainder", torch.remainder, "input:T, other:T", T.remainder, T.__mod__)
op("floor_divide", torch.floor_divide, "input:T, other:T", T.floor_divide, T.__floordiv__)
for n in ("eq", "ne", "lt", "le", "gt", "ge"):
    op(n, getattr(torch, n), "input:T, other:T", getattr(T, n), getattr(T, f"__{n}__"))
each("maximum minimum fmod atan2 logaddexp logical_and logical_or logical_xor", "input:T, other:T")
each(
    "exp log sqrt rsqrt cos sin tan tanh sigmoid floor ceil trunc sign square reciprocal erf erfc log1p log2 "
    "log10 expm1 exp2 acos asin atan cosh sinh atanh isfinite isinf isnan logical_not"
)
each("acosh asinh angle deg2rad rad2deg digamma lgamma erfinv frac i0 isneginf isposinf sinc signbit sgn")
op("round", rounded, "input:T, *, decimals=0", torch.round, T.round)
each("logit", "input:T, eps=None")
each("mvlgamma", "input:T, p")
op("polygamma", polygamma, "input:T, n", (torch.polygamma, "n, input"), (T.polygamma, "input, n"))
each("hardshrink softshrink", "input:T, lambd=0.5")
for n in (
    "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 entr erfcx i0e i1 i1e log_ndtr ndtri modified_bessel_i0 "
    "modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 "
    "scaled_modified_bessel_k1 spherical_bessel_j0"
).split():
    op(
        n,
        getattr(torch.special, n),
        "x:T"
        if n in ("airy_ai", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1", "spherical_bessel_j0")
        else "input:T",
    )
each(
    "copysign hypot igamma igammac logaddexp2 nextafter xlogy gcd lcm fmax fmin bitwise_left_shift bitwise_right_shift",
    "input:T, other:T",
)
each("ldexp", "input:T, other:T")
each("frexp")
each("heaviside", "input:T, values:T")
each("isclose", "input:T, other:T, rtol=1e-05, atol=1e-08, equal_nan=False")
op("zeta", torch.special.zeta, "input:T, other:T")
op("xlog1py", torch.special.xlog1py, "input:T, other:T")
for n in (
    "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w "
    "hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p"
).split():
    op(n, getattr(torch.special, n), "x:T, n:T")
each("clamp", "input:T, min:T=None, max:T=None")
SPELLINGS |= {
    f: (OPS["clamp"], _signature(f"input, {side}"))
    for side in ("min", "max")
    for f in (getattr(torch, f"clamp_{side}"), getattr(T, f"clamp_{side}"))
}
each("addcmul addcdiv", "input:T, tensor1:T, tensor2:T, *, value=1")
each("lerp", "input:T, end:T, weight:T")
each("nan_to_num", "input:T, nan=None, posinf=None, neginf=None")
op("where", where, "condition:T, input:T, other:T", torch.where, (T.where, "input, condition, other"))
op("masked_fill", torch.masked_fill, "input:T, mask:T, value:T", T.masked_fill)
op("gelu", F.gelu, "input:T, approximate='none'")
op("relu", torch.relu, "input:T", T.relu, (F.relu, "input, inplace=False"))
each("silu hardswish hardsigmoid mish relu6", "input:T, inplace=False")
op("selu", F.selu, "input:T, inplace=False", (torch.selu, "input"))
each("logsigmoid softsign")
each("leaky_relu", "input:T, negative_slope=0.01, inplace=False")
each("elu", "input:T, alpha=1.0, inplace=False")
op("celu", F.celu, "input:T, alpha=1.0, inplace=False", (torch.celu, "input, alpha=1.0"))
each("hardtanh", "input:T, min_val=-1.0, max_val=1.0, inplace=False")
each("softplus", "input:T, beta=1, threshold=20")
op("threshold", F.threshold, "input:T, threshold, value, inplace=False", (torch.threshold, "input, threshold, value"))
each("prelu", "input:T, weight:T")
op("glu", F.glu, "input:T, dim=-1")
each("tril triu", "input:T, diagonal=0")

# randomness
op("dropout", F.dropout, "input:T, p=0.5, training=True, inplace=False", (torch.dropout, "input, p, training"))
for n in ("dropout1d", "dropout2d", "dropout3d"):
    op(n, getattr(F, n), "input:T, p=0.5, training=True, inplace=False")
for n in ("alpha_dropout", "feature_alpha_dropout"):
    op(n, getattr(F, n), "input:T, p=0.5, training=False, inplace=False")
op("bernoulli", bernoulli, "input:T, p:T=None", (torch.bernoulli, "input, p=None"), (T.bernoulli, "input, p=None"))
for n, first in (
    ("uniform", 0.0),
    ("normal", 0.0),
    ("exponential", None),
    ("log_normal", 1.0),
    ("cauchy", 0.0),
    ("random", 0),
):
    op(f"{n}_like", drawn(f"{n}_", first), "input:T, a=None, b=None")
op("geometric_like", drawn("geometric_"), "input:T, a")
for n in ("rand", "randn"):
    op(n, getattr(torch, n), "size:SHAPE, *, dtype=None", (getattr(torch, n), "*size, dtype=None, **how"))
    op(
        f"{n}_like",
        getattr(torch, f"{n}_like"),
        "input:T, *, dtype=None",
        (getattr(torch, f"{n}_like"), "input, *, dtype=None, **how"),
    )
op(
    "multinomial",
    torch.multinomial,
    "input:T, num_samples, replacement=False",
    *((f, "input, num_samples, replacement=False, generator=None") for f in (torch.multinomial, T.multinomial)),
)
op("normal", torch.normal, "mean:T, std:T=1.0", (torch.normal, "mean, std=1.0, generator=None"))
op("normal_filled", normal_filled, "size:SHAPE, mean, std, *, dtype=None")
op("randint", randint, "size:SHAPE, low, high, *, dtype=None")
op("randperm", randperm, "n, *, dtype=None", (torch.randperm, "n, *, dtype=None, **how"))
op("poisson", torch.poisson, "input:T", (torch.poisson, "input, generator=None"))
op("standard_gamma", torch._standard_gamma, "input:T", (torch._standard_gamma, "input, generator=None"))
op("dirichlet", dirichlet, "input:T", Apply(_Dirichlet))
op(
    "rrelu",
    F.rrelu,
    "input:T, lower=0.125, upper=1/3, training=False, inplace=False",
    (torch.rrelu, "input, lower=0.125, upper=1/3, training=False, generator=None"),
)

# reductions, scans, searches
op("sum", torch.sum, "input:T, dim=None, keepdim=False, *, dtype=None", T.sum)
op("mean", torch.mean, "input:T, dim=None, keepdim=False, *, dtype=None", T.mean)
op(
    "softmax",
    torch.softmax,
    "input:T, dim, dtype=None",
    T.softmax,
    (F.softmax, "input, dim=None, _stacklevel=3, dtype=None"),
)
op(
    "log_softmax",
    torch.log_softmax,
    "input:T, dim, dtype=None",
    T.log_softmax,
    (F.log_softmax, "input, dim=None, _stacklevel=3, dtype=None"),
)
each("amax amin", "input:T, dim=None, keepdim=False")
each("logsumexp", "input:T, dim, keepdim=False")
each("all any argmax argmin", "input:T, dim=None, keepdim=False")
each("cumsum cumprod", "input:T, dim, *, dtype=None")
each("topk", "input:T, k, dim=-1, largest=True, sorted=True")
each("sort argsort", "input:T, dim=-1, descending=False, *, stable=None")
each("diff", "input:T, n=1, dim=-1, prepend:T=None, append:T=None")
each("norm", "input:T, p='fro', dim=None, keepdim=False, *, dtype=None")
each("max min", "input:T, dim, keepdim=False")
each("median nanmedian", "input:T, dim=None, keepdim=False")
op("mode", torch.mode, "input:T, dim=-1, keepdim=False", T.mode)
op("kthvalue", torch.kthvalue, "input:T, k, dim=-1, keepdim=False", T.kthvalue)
op("aminmax", torch.aminmax, "input:T, *, dim=None, keepdim=False", T.aminmax)
each("quantile nanquantile", "input:T, q:T, dim=None, keepdim=False, *, interpolation='linear'")
each("prod", "input:T, dim=None, keepdim=False, *, dtype=None")
each("nansum", "input:T, dim=None, keepdim=False, *, dtype=None")
each("count_nonzero", "input:T, dim=None")
for n in ("var", "std", "var_mean", "std_mean"):
    op(n, spread(n), "input:T, dim=None, correction=1, keepdim=False")
op("vector_norm", torch.linalg.vector_norm, "input:T, ord=2, dim=None, keepdim=False, *, dtype=None")
each("cummax cummin logcumsumexp", "input:T, dim")
each("renorm", "input:T, p, dim, maxnorm")
each("trace")
op("linalg_cross", torch.linalg.cross, "input:T, other:T, *, dim=-1")
op("cosine_similarity", F.cosine_similarity, "x1:T, x2:T, dim=1, eps=1e-08")
op("cdist", torch.cdist, "x1:T, x2:T, p=2.0, compute_mode='use_mm_for_euclid_dist_if_necessary'")
op("pdist", F.pdist, "input:T, p=2")

# matrices, one or many
LA = torch.linalg
op("inverse", LA.inv, "A:T", torch.inverse, T.inverse)
op("det", LA.det, "A:T", torch.det, T.det)
op("slogdet", LA.slogdet, "A:T", torch.slogdet, T.slogdet)
op("logdet", torch.logdet, "input:T", T.logdet)
op("matrix_exp", LA.matrix_exp, "input:T", torch.matrix_exp, T.matrix_exp)
op("matrix_power", LA.matrix_power, "input:T, n", torch.matrix_power, T.matrix_power)
op("linalg_cholesky", LA.cholesky, "input:T, *, upper=False")
op("cholesky", torch.cholesky, "input:T, upper=False", T.cholesky)
op("cholesky_inverse", torch.cholesky_inverse, "input:T, upper=False", T.cholesky_inverse)
op("pinv", LA.pinv, "input:T, *, rtol:T=None, atol:T=None, hermitian=False")
op("svdvals", LA.svdvals, "A:T, *, driver=None")
op("linalg_svd", LA.svd, "A:T, full_matrices=True, *, driver=None")
op("svd", torch.svd, "input:T, some=True, compute_uv=True", T.svd)
op("linalg_qr", LA.qr, "A:T, mode='reduced'")
op("eigh", LA.eigh, "input:T, UPLO='L'")
op("eigvalsh", LA.eigvalsh, "input:T, UPLO='L'")
op("lu_factor", LA.lu_factor, "A:T, *, pivot=True")
op("solve", LA.solve, "A:T, B:T, *, left=True")
op("solve_triangular", LA.solve_triangular, "input:T, B:T, *, upper, left=True, unitriangular=False")
op("cholesky_solve", torch.cholesky_solve, "input:T, input2:T, upper=False", T.cholesky_solve)
each("diag_embed", "input:T, offset=0, dim1=-2, dim2=-1")
each("addbmm", "input:T, batch1:T, batch2:T, *, beta=1, alpha=1")
each("addmv", "input:T, mat:T, vec:T, *, beta=1, alpha=1")
each("addr", "input:T, vec1:T, vec2:T, *, beta=1, alpha=1")

# recurrent modules: their weights come as one list
for n in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    op(
        n,
        getattr(torch, n),
        "input:T, hx:T, params:T, has_biases, num_layers, dropout, train, bidirectional, batch_first",
    )

# normalisation, attention, losses
op("layer_norm", F.layer_norm, "input:T, normalized_shape, weight:T=None, bias:T=None, eps=1e-05")
op("rms_norm", F.rms_norm, "input:T, normalized_shape, weight:T=None, eps=None")
op("group_norm", F.group_norm, "input:T, num_groups, weight:T=None, bias:T=None, eps=1e-05")
op(
    "batch_norm",
    F.batch_norm,
    "input:T, running_mean:T, running_var:T, weight:T=None, bias:T=None, training=False, momentum=0.1, eps=1e-05",
    writes="running_mean, running_var if training",
)
op(
    "instance_norm",
    F.instance_norm,
    "input:T, running_mean:T=None, running_var:T=None, weight:T=None, bias:T=None, use_input_stats=True, "
    "momentum=0.1, eps=1e-05",
    writes="running_mean, running_var if use_input_stats",
)
op("weight_norm", torch._weight_norm, "v:T, g:T, dim=0")
op("normalize", F.normalize, "input:T, p=2.0, dim=1, eps=1e-12, out=None")
op(
    "scaled_dot_product_attention",
    F.scaled_dot_product_attention,
    "query:T, key:T, value:T, attn_mask:T=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False",
)
op("mse_loss", F.mse_loss, "input:T, target:T, size_average=None, reduce=None, reduction='mean', weight:T=None")
op(
    "cross_entropy",
    F.cross_entropy,
    "input:T, target:T, weight:T=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', "
    "label_smoothing=0.0",
)
op(
    "nll_loss",
    F.nll_loss,
    "input:T, target:T, weight:T=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean'",
)
op("l1_loss", F.l1_loss, "input:T, target:T, size_average=None, reduce=None, reduction='mean', weight:T=None")
op("smooth_l1_loss", F.smooth_l1_loss, "input:T, target:T, size_average=None, reduce=None, reduction='mean', beta=1.0")
op(
    "binary_cross_entropy",
    F.binary_cross_entropy,
    "input:T, target:T, weight:T=None, size_average=None, reduce=None, reduction='mean'",
)
op(
    "binary_cross_entropy_with_logits",
    F.binary_cross_entropy_with_logits,
    "input:T, target:T, weight:T=None, size_average=None, reduce=None, reduction='mean', pos_weight:T=None",
)
op("huber_loss", F.huber_loss, "input:T, target:T, reduction='mean', delta=1.0, weight:T=None")
op("soft_margin_loss", F.soft_margin_loss, "input:T, target:T, size_average=None, reduce=None, reduction='mean'")
op(
    "multi_margin_loss",
    F.multi_margin_loss,
    "input:T, target:T, p=1, margin=1.0, weight:T=None, size_average=None, reduce=None, reduction='mean'",
)
op(
    "multilabel_margin_loss",
    F.multilabel_margin_loss,
    "input:T, target:T, size_average=None, reduce=None, reduction='mean'",
)
op("kl_div", F.kl_div, "input:T, target:T, size_average=None, reduce=None, reduction='mean', log_target=False")

op(
    "ctc_loss",
    ctc_losses,
    "log_probs:T, targets:T, input_lengths:T, target_lengths:T, blank=0, zero_infinity=False",
    torch.ops.autopar.ctc_losses,
    torch.ops.autopar.ctc_losses.default,
)

# look-up
op(
    "embedding",
    F.embedding,
    "input:T, weight:T, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False",
)
op("index", index, "input:T, index:T", T.__getitem__)
op("setitem", setitem, "input:T, index:T, value:T", T.__setitem__)
op("copy", copy, "input:T, source:T")
each("gather", "input:T, dim, index:T, *, sparse_grad=False")
each("index_select", "input:T, dim, index:T")
op("scatter", scatter, "input:T, dim, index:T, src:T", torch.scatter, T.scatter)
each("scatter_add", "input:T, dim, index:T, src:T")
each("one_hot", "input:T, num_classes=-1")
each("slice_scatter", "input:T, src:T, dim=0, start=None, end=None, step=1")
each("select_scatter", "input:T, src:T, dim, index")
each("index_add", "input:T, dim, index:T, source:T, *, alpha=1")
each("index_copy", "input:T, dim, index:T, source:T")
each("index_fill", "input:T, dim, index:T, value:T")
op("index_put", index_put, "input:T, indices:T, values:T, accumulate=False", torch.index_put, T.index_put)
each("index_reduce", "input:T, dim, index:T, source:T, reduce, *, include_self=True")
each("scatter_reduce", "input:T, dim, index:T, src:T, reduce, *, include_self=True")
each("take", "input:T, index:T")
each("take_along_dim", "input:T, indices:T, dim=None")
op(
    "searchsorted",
    torch.searchsorted,
    "sorted_sequence:T, input:T, *, out_int32=False, right=False, side=None, sorter:T=None",
)
op("bucketize", torch.bucketize, "input:T, boundaries:T, *, out_int32=False, right=False")
op("isin", torch.isin, "elements:T, test_elements:T, *, assume_unique=False, invert=False")
op(
    "embedding_bag",
    F.embedding_bag,
    "input:T, weight:T, offsets:T=None, max_norm=None, norm_type=2, scale_grad_by_freq=False, mode='mean', "
    "sparse=False, per_sample_weights:T=None, include_last_offset=False, padding_idx=None",
)
op("masked_scatter", torch.masked_scatter, "input:T, mask:T, source:T", T.masked_scatter)
each("diagonal_scatter", "input:T, src:T, offset=0, dim1=0, dim2=1")

# pictures
for d in (1, 2, 3):
    op(
        f"max_pool{d}d",
        getattr(F, f"max_pool{d}d"),
        "input:T, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False",
    )
    op(f"adaptive_avg_pool{d}d", getattr(F, f"adaptive_avg_pool{d}d"), "input:T, output_size")
each("avg_pool1d", "input:T, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True")
each(
    "avg_pool2d avg_pool3d",
    "input:T, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None",
)
op(
    "interpolate",
    F.interpolate,
    "input:T, size=None, scale_factor=None, mode='nearest', align_corners=None, recompute_scale_factor=None, "
    "antialias=False",
)
each("pixel_shuffle", "input:T, upscale_factor")
each("pixel_unshuffle", "input:T, downscale_factor")
each("channel_shuffle", "input:T, groups")
for d in (1, 2, 3):
    op(f"adaptive_max_pool{d}d", getattr(F, f"adaptive_max_pool{d}d"), "input:T, output_size, return_indices=False")
    op(
        f"max_pool{d}d_with_indices",
        getattr(F, f"max_pool{d}d_with_indices"),
        "input:T, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=True",
    )
    op(
        f"adaptive_max_pool{d}d_with_indices",
        getattr(F, f"adaptive_max_pool{d}d_with_indices"),
        "input:T, output_size, return_indices=True",
    )
    op(
        f"max_unpool{d}d",
        getattr(F, f"max_unpool{d}d"),
        "input:T, indices:T, kernel_size, stride=None, padding=0, output_size=None",
    )
op("grid_sample", F.grid_sample, "input:T, grid:T, mode='bilinear', padding_mode='zeros', align_corners=None")
op("affine_grid", F.affine_grid, "theta:T, size, align_corners=None")
op("im2col", F.unfold, "input:T, kernel_size, dilation=1, padding=0, stride=1")
op("col2im", F.fold, "input:T, output_size, kernel_size, dilation=1, padding=0, stride=1")
op("unfold", unfold, "input:T, dimension, size, step", T.unfold)
op("pad", F.pad, "input:T, pad, mode='constant', value=None")

# shapes
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
)
op(
    "expand",
    expand,
    "input:T, size:SHAPE",
    (T.expand, "input, *size"),
    (T.expand_as, "input, size"),
    (torch.broadcast_to, "input, size"),
    (T.broadcast_to, "input, *size"),
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
)
op("permute", torch.permute, "input:T, dims", (T.permute, "input, *dims"))
op("t", torch.t, "input:T", T.t)
op("detach", torch.detach, "input:T", T.detach)
op("contiguous", contiguous, "input:T", (T.contiguous, "input, memory_format=None"))
op(
    "clone",
    torch.clone,
    "input:T",
    (torch.clone, "input, *, memory_format=None"),
    (T.clone, "input, *, memory_format=None"),
)
op(
    "split",
    split,
    "input:T, sections:SIZES, dim=0",
    (T.split, "input, sections, dim=0"),
    (torch.split, "input, sections, dim=0"),
    (T.chunk, "input, sections, dim=0"),
    (torch.chunk, "input, sections, dim=0"),
    (torch.split_with_sizes, "input, sections, dim=0"),
    (torch.unsafe_split, "input, sections, dim=0"),
    (torch.unsafe_chunk, "input, sections, dim=0"),
    (T.split_with_sizes, "input, sections, dim=0"),
)
op("cat", torch.cat, "tensors:T, dim=0", torch.concat, torch.concatenate)
op("stack", torch.stack, "tensors:T, dim=0")
op("unbind", torch.unbind, "input:T, dim=0", T.unbind)
op("narrow", narrow, "input:T, dim, start, length", T.narrow, torch.narrow)
op("select", torch.select, "input:T, dim, index", T.select)
op("repeat", repeat, "input:T, repeats", (T.repeat, "input, *repeats"))
op("tile", tile, "input:T, dims", (torch.tile, "input, dims"), (T.tile, "input, *dims"))
each("repeat_interleave", "input:T, repeats:T, dim=None, *, output_size=None")
each("rot90", "input:T, k=1, dims=[0, 1]")
each("roll", "input:T, shifts, dims=None")
op("flip", torch.flip, "input:T, dims", (T.flip, "input, *dims"))
each("diagonal", "input:T, offset=0, dim1=0, dim2=1")
op("to", to, "input:T, dtype")
op("identity", identity, "input:T")

# from nothing
op("arange", torch.arange, "start, end, step=1, *, dtype=None", (torch.arange, "*bounds, dtype=None, **how"))
op("full", torch.full, "size:SHAPE, fill_value, *, dtype=None", (torch.full, "size, fill_value, *, dtype=None, **how"))
op(
    "full_like",
    full_like,
    "input:T, fill_value, dtype=None",
    (torch.full_like, "input, fill_value, *, dtype=None, **how"),
)
for n in ("zeros", "ones", "empty"):
    op(n, getattr(torch, n), "size:SHAPE, *, dtype=None", (getattr(torch, n), "*size, dtype=None, **how"))
    op(
        f"{n}_like",
        getattr(torch, f"{n}_like"),
        "input:T, *, dtype=None",
        (getattr(torch, f"{n}_like"), "input, *, dtype=None, **how"),
    )
    op(
        f"new_{n}",
        new(f"new_{n}"),
        "input:T, size:SHAPE, *, dtype=None",
        (getattr(T, f"new_{n}"), "input, *size, dtype=None, **how"),
    )
op(
    "new_full",
    new("new_full"),
    "input:T, size:SHAPE, fill_value, *, dtype=None",
    (T.new_full, "input, size, fill_value, *, dtype=None, **how"),
)
op("tensor", torch.tensor, "data, *, dtype=None", (torch.tensor, "data, *, dtype=None, **how"))

CASTS = frozenset(
    {
        T.to,
        T.float,
        T.double,
        T.half,
        T.bfloat16,
        T.type_as,
        T.type,
        T.long,
        T.int,
        T.bool,
        T.short,
        T.char,
        T.byte,
        T.cpu,
        torch.ops.aten._to_copy.default,
    }
)
