"""Elementwise ops: arithmetic, functions of one number, activations, comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops import inverses
from autopar.ops.entry import OPS, T, each, op, spell, translates
from autopar.ops.rows import Row, parse, rule_from
from autopar.runtime.private import TO_COPY
from autopar.sharding.notation import Rule


def pow(input: Any, exponent: Any) -> Tensor:
    """A power; base or exponent may be a number."""
    return torch.pow(input, exponent)


def polygamma(input: Tensor, n: int) -> Tensor:
    """The n-th derivative of digamma."""
    return torch.polygamma(n, input)


def rounded(input: Tensor, decimals: int = 0) -> Tensor:
    """Rounding to the nearest number of so many decimals."""
    return torch.round(input, decimals=decimals) if decimals else torch.round(input)


def where(condition: Tensor, input: Any, other: Any) -> Tensor:
    """Elements of one or the other operand; either may be a number."""
    return torch.where(condition, input, other)


def to(input: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast."""
    return input.to(dtype)


def identity(input: Tensor) -> Tensor:
    """The value itself, as a node that lets one conversion serve all consumers of the value."""
    return input


def div(arguments: Mapping[str, Any]) -> Rule:
    """Division is linear in the first operand, unless it is rounded."""
    return parse("..., ... -> ...", linear="" if arguments.get("rounding_mode") else "x")


def to_rule(arguments: Mapping[str, Any]) -> Rule:
    """A cast between floating-point dtypes is linear; one from or to integers is not."""
    floats = all("float" in str(dtype) for dtype in (arguments["input"].dtype, arguments["dtype"]))
    return parse("... -> ...", linear="x" if floats else "")


def masked_fill(arguments: Mapping[str, Any]) -> Rule:
    """Filling is linear where the number is zero."""
    return parse("..., ..., ... -> ...", linear="x" if arguments["value"] in (0, 0.0, False) else "")


def prelu(arguments: Mapping[str, Any]) -> Rule:
    """The slope is one number and stays whole, or one per channel and may be cut with them."""
    row = Row.of(arguments["input"])
    shape = arguments["weight"].shape
    slope = [] if not shape else ["one!"] if shape == (1,) else [row[1]]
    return rule_from([row, slope], [row])


def numbered(name: str) -> dict[str, Any]:
    """Facts of arithmetic: a number operand is timed apart, a broadcast operand's gradient is summed."""

    def timed(arguments: Mapping[str, Any]) -> str:
        return f"{name} number" if isinstance(arguments.get("other"), (int, float)) else name

    return {"timed": timed, "spreads": True}


def timed_power(arguments: Mapping[str, Any]) -> str:
    """Name of the time: a square takes less than other powers."""
    return "pow 2" if arguments.get("exponent") == 2 else "pow"


def timed_gelu(arguments: Mapping[str, Any]) -> str:
    """Name of the time: the tanh approximation is timed apart."""
    return "gelu tanh" if arguments.get("approximate") == "tanh" else "gelu"


ONE, TWO = "... -> ...", "..., ... -> ..."
PAIR = "input:T, other:T"


@translates(
    *(T.to, T.float, T.double, T.half, T.bfloat16, T.type_as, T.type, T.long, T.int, T.bool, T.short, T.char, T.byte),
    *(T.cpu, TO_COPY),
)
def cast(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Read casts by any name as one to the dtype of the result."""
    return (OPS["to"], {"input": args[0], "dtype": result.dtype}) if isinstance(result, Tensor) else None


op(
    "identity",
    identity,
    "input:T",
    rule=ONE,
    linear="x",
    keeps="",
    free=True,
    same=True,
    moved=True,
    inverse=inverses.same,
)
op("detach", torch.detach, "input:T", T.detach, rule=ONE, linear="x", keeps="", inverse=inverses.same)
op("to", to, "input:T, dtype", rule=to_rule, keeps="", same=True, moved=True, inverse=inverses.same)

# arithmetic
SUM: dict[str, Any] = dict(rule=TWO, linear="x+y", keeps="")
op("add", torch.add, f"{PAIR}, *, alpha=1", T.add, T.__add__, T.__radd__, **SUM, **numbered("add"))
op("sub", torch.sub, f"{PAIR}, *, alpha=1", T.sub, T.__sub__, torch.subtract, **SUM, **numbered("sub"))
op("rsub", torch.rsub, f"{PAIR}, *, alpha=1", **SUM)
each("mul", PAIR, rule=TWO, linear="x, y", keeps="input:other other:input", **numbered("mul"))
spell("mul", (T.__mul__, T.__rmul__, torch.multiply, PAIR))
each("div", f"{PAIR}, *, rounding_mode=None", rule=div, keeps="input:other other", **numbered("div"))
spell("div", (T.__truediv__, torch.divide, f"{PAIR}, *, rounding_mode=None"))
op("pow", pow, "input:T, exponent:T", torch.pow, T.pow, T.__pow__, rule=TWO, keeps="input exponent", timed=timed_power)
op("neg", torch.neg, "input:T", T.neg, T.__neg__, rule=ONE, linear="x", keeps="")
op("abs", torch.abs, "input:T", T.abs, T.__abs__, rule=ONE, keeps="input")
op("remainder", torch.remainder, PAIR, T.remainder, T.__mod__, rule=TWO)
op("floor_divide", torch.floor_divide, PAIR, T.floor_divide, T.__floordiv__, rule=TWO)
op("round", rounded, "input:T, *, decimals=0", torch.round, T.round, rule=ONE, keeps="")
each("addcmul", "input:T, tensor1:T, tensor2:T, *, value=1", rule="..., ..., ... -> ...", linear="x+y, x+z")
each("addcdiv", "input:T, tensor1:T, tensor2:T, *, value=1", rule="..., ..., ... -> ...", linear="x+y")
each("lerp", "input:T, end:T, weight:T", rule="..., ..., ... -> ...", linear="x+y")
each("deg2rad rad2deg", rule=ONE, linear="x")

# functions of one number
each("exp sqrt rsqrt tanh sigmoid reciprocal", rule=ONE, keeps="out")
each("log cos sin square erf log1p", rule=ONE, keeps="input")
each("floor ceil trunc sign", rule=ONE, keeps="")
each("isfinite isnan logical_not", rule=ONE, keeps="", truth=True)
each("isinf", rule=ONE, truth=True)
each(
    "tan erfc log2 log10 expm1 exp2 acos asin atan cosh sinh atanh acosh asinh angle digamma lgamma erfinv frac "
    "i0 isneginf isposinf sinc signbit sgn",
    rule=ONE,
)
each("logit", "input:T, eps=None", rule=ONE)
each("mvlgamma", "input:T, p", rule=ONE)
each("nan_to_num", "input:T, nan=None, posinf=None, neginf=None", rule=ONE)
each("frexp", rule="... -> ..., ...")
op("polygamma", polygamma, "input:T, n", (torch.polygamma, "n, input"), (T.polygamma, "input, n"), rule=ONE)
each(
    "bessel_j0 bessel_j1 bessel_y0 bessel_y1 entr erfcx i0e i1 i1e log_ndtr ndtri modified_bessel_i0 "
    "modified_bessel_i1 modified_bessel_k0 modified_bessel_k1",
    homes=[torch.special],
    rule=ONE,
)
each(
    "airy_ai scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0",
    "x:T",
    homes=[torch.special],
    rule=ONE,
)

# functions of two numbers
each("maximum minimum", PAIR, rule=TWO, keeps="input other")
each("fmod atan2 logaddexp", PAIR, rule=TWO)
each("copysign hypot igamma igammac logaddexp2 nextafter xlogy gcd lcm fmax fmin ldexp", PAIR, rule=TWO)
each("heaviside", "input:T, values:T", rule=TWO)
each("zeta xlog1py", PAIR, homes=[torch.special], rule=TWO)
each(
    "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w "
    "hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p",
    "x:T, n:T",
    homes=[torch.special],
    rule=TWO,
)

# comparisons, bits and truth
for name in ("eq", "ne", "lt", "le", "gt", "ge"):
    op(name, getattr(torch, name), PAIR, getattr(T, name), getattr(T, f"__{name}__"), rule=TWO, keeps="", truth=True)
for name, also in dict(ne="not_equal", lt="less", le="less_equal", gt="greater", ge="greater_equal").items():
    spell(name, (getattr(torch, also), getattr(T, also), PAIR))
op("bitwise_and", torch.bitwise_and, PAIR, T.bitwise_and, T.__and__, T.__rand__, rule=TWO, keeps="")
op("bitwise_or", torch.bitwise_or, PAIR, T.bitwise_or, T.__or__, T.__ror__, rule=TWO, keeps="")
op("bitwise_xor", torch.bitwise_xor, PAIR, T.bitwise_xor, T.__xor__, T.__rxor__, rule=TWO)
op("bitwise_not", torch.bitwise_not, "input:T", T.bitwise_not, T.__invert__, rule=ONE, keeps="")
each("bitwise_left_shift bitwise_right_shift", PAIR, rule=TWO)
each("logical_and logical_or", PAIR, rule=TWO, keeps="", truth=True)
each("logical_xor", PAIR, rule=TWO, truth=True)
each("isclose", f"{PAIR}, rtol=1e-05, atol=1e-08, equal_nan=False", rule=TWO)

# one or the other
each("clamp", "input:T, min:T=None, max:T=None", rule="..., ..., ... -> ...", keeps="input")
spell("clamp", (torch.clamp_min, T.clamp_min, "input, min"), (torch.clamp_max, T.clamp_max, "input, max"))
op(
    "where",
    where,
    "condition:T, input:T, other:T",
    torch.where,
    (T.where, "input, condition, other"),
    rule="..., ..., ... -> ...",
    linear="y+z",
    keeps="condition",
    reach="choice",
)
each("masked_fill", "input:T, mask:T, value:T", rule=masked_fill, keeps="mask", reach="choice")

# activations
op("gelu", F.gelu, "input:T, approximate='none'", rule=ONE, keeps="input", timed=timed_gelu)
op("relu", torch.relu, "input:T", T.relu, (F.relu, "input, inplace=False"), rule=ONE, keeps="out")
each("silu hardswish hardsigmoid mish relu6", "input:T, inplace=False", rule=ONE, keeps="input")
op("selu", F.selu, "input:T, inplace=False", (torch.selu, "input"), rule=ONE)
each("logsigmoid softsign", rule=ONE)
each("leaky_relu", "input:T, negative_slope=0.01, inplace=False", rule=ONE, keeps="input")
each("elu", "input:T, alpha=1.0, inplace=False", rule=ONE, keeps="input")
op("celu", F.celu, "input:T, alpha=1.0, inplace=False", (torch.celu, "input, alpha=1.0"), rule=ONE)
each("hardtanh", "input:T, min_val=-1.0, max_val=1.0, inplace=False", rule=ONE, keeps="out")
each("softplus", "input:T, beta=1, threshold=20", rule=ONE, keeps="input")
each("hardshrink softshrink", "input:T, lambd=0.5", rule=ONE)
op(
    "threshold",
    F.threshold,
    "input:T, threshold, value, inplace=False",
    (torch.threshold, "input, threshold, value"),
    rule=ONE,
)
each("prelu", "input:T, weight:T", rule=prelu)
