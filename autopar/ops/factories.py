"""Tensors without operands, constants and counts: each device makes its own part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.ops.entry import Op, T, op
from autopar.ops.local import Form, Here, OpCall, cuts, local_output
from autopar.ops.rows import parse
from autopar.runtime import forms
from autopar.sharding.notation import Rule


def full_like(input: Tensor, fill_value: float, dtype: torch.dtype | None = None) -> Tensor:
    """A constant tensor in the shape of another."""
    return torch.full_like(input, fill_value, dtype=dtype)


def filled(arguments: Mapping[str, Any]) -> Rule:
    """The rule of a constant, or of draws by position: each device makes its own part."""
    return parse(f"nothing -> {' '.join(f'a{i}*' for i in range(len(arguments['size'])))}")


def part_of_count(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The local form of a count that is cut; else None."""
    made = call.outputs[0]
    lies = here.leaves()
    if 0 not in lies.cuts:
        return None
    return forms.arange_part, {
        "start": kwargs["start"],
        "step": kwargs.get("step", 1),
        "length": local_output(here, call)[0],
        "cuts": cuts(here, made.shape, lies, 0),
        "dtype": made.torch_dtype,
    }


def with_dtype(op: Op, arguments: dict[str, Any], result: Any) -> tuple[Op, dict[str, Any]]:
    """Add the dtype of the result, as torch's default may differ at replay."""
    return op, {**arguments, "dtype": result.dtype}


op(
    "arange",
    torch.arange,
    "start, end, step=1, *, dtype=None",
    (torch.arange, "*bounds, dtype=None, **how"),
    rule="nothing -> a*",
    serves="*",
    form=part_of_count,
    counts=".*",
    keeps="",
    settle=with_dtype,
    reach="moved",
    sized=True,
)
op(
    "full",
    torch.full,
    "size:SHAPE, fill_value, *, dtype=None",
    (torch.full, "size, fill_value, *, dtype=None, **how"),
    (T.new_full, "input, size, fill_value, *, dtype=None, **how"),
    rule=filled,
    serves="*",
    keeps="",
    settle=with_dtype,
    reach="moved",
    sized=True,
)
op(
    "full_like",
    full_like,
    "input:T, fill_value, dtype=None",
    (torch.full_like, "input, fill_value, *, dtype=None, **how"),
    rule="... -> ...",
    keeps="",
    overwrites=True,
    reach="moved",
)
for name in ("zeros", "ones", "empty"):
    keeps = "" if name != "empty" else None
    reach = "moved" if name != "empty" else ""
    op(
        name,
        getattr(torch, name),
        "size:SHAPE, *, dtype=None",
        (getattr(torch, name), "*size, dtype=None, **how"),
        (getattr(T, f"new_{name}"), "input, *size, dtype=None, **how"),  # only its dtype is the input's
        rule=filled,
        serves="*",
        keeps=keeps,
        settle=with_dtype,
        reach=reach,
        sized=True,
    )
    op(
        f"{name}_like",
        getattr(torch, f"{name}_like"),
        "input:T, *, dtype=None",
        (getattr(torch, f"{name}_like"), "input, *, dtype=None, **how"),
        rule="... -> ...",
        keeps="",
        reach=reach,
    )
op(
    "tensor",
    torch.tensor,
    "data, *, dtype=None",
    (torch.tensor, "data, *, dtype=None, **how"),
    keeps="",
    settle=with_dtype,
    reach="moved",
    sized=True,
)
