"""What each op of an emitted program makes of the types of its operands.

An op without a rule is one of which nothing is known where its operands are not whole; elementwise ops are known by
torch's own tag. A rule raises `Refused` where the operands cannot be combined so, whatever the plan.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.certificate import layers, products, reductions, views  # noqa: F401  (their rules)
from autopar.certificate.calls import RULES, Call, unknown
from autopar.certificate.elementwise import elementwise


def typed(target: Any, call: Call) -> Any:
    """The type of a result, or the types of several."""
    known = RULES.get(str(target)) or RULES.get(str(target).replace("_.", ".", 1))  # in place as not in place
    if known is not None:
        return known(call)
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return elementwise(call)
    return unknown(call)
