"""Type the result of each op of an emitted program from the types of its operands.

For an op without a rule nothing is known of the result where operands are not whole; elementwise ops are recognised by
torch's own tag. A rule raises `Refused` where operands cannot be combined so under any plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopar.certificate import attention, experts, layers, products, reductions, views  # noqa: F401  (their rules)
from autopar.certificate.calls import RULES, TypedCall, unknown
from autopar.certificate.elementwise import elementwise
from autopar.certificate.types import Type

# operands, by their places, of which one that is zero makes the result zero; rules of elements say that themselves
_LINEAR_IN = {
    **{f"aten.{name}.default": (0,) for name in ("roll", "flip", "tril", "triu", "cumsum")},
    **{f"aten.{name}.default": (0, 1) for name in ("mm", "bmm")},
    # backwards of one gradient, their first operand; others have several, of which one may be zero
    **{f"aten.native_{name}_norm_backward.default": (0,) for name in ("layer", "group", "batch")},
    "aten.convolution_backward.default": (0,),
}


def typed(target: Any, call: TypedCall) -> Any:
    """Type of an op's result, or a list of types where it has several."""
    made = _by_rule(target, call)
    if not _is_zero(str(target), call):
        return made
    return type(made)(_zero(t) for t in made) if isinstance(made, (list, tuple)) else _zero(made)


def _by_rule(target: Any, call: TypedCall) -> Any:
    """Type of an op's result, without regard to operands that are zero."""
    known = RULES.get(str(target)) or RULES.get(str(target).replace("_.", ".", 1))  # In-place ops share a rule.
    if known is not None:
        return known(call)
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return elementwise(call)
    return unknown(call)


def _is_zero(name: str, call: TypedCall) -> bool:
    """Whether an operand is zero that makes the result zero."""
    operands = (call.args[place] for place in _LINEAR_IN.get(name, ()))
    return any(isinstance(t, Type) and t.is_zero for t in operands)


def _zero(made: Any) -> Any:
    return replace(made, is_zero=True) if isinstance(made, Type) else made
