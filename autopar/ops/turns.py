"""Values on an axis of time: rows of one turn, and numbers that turns add up.

No model spells them: a pass writes them into the graph of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autopar.ops.entry import op
from autopar.ops.local import Form, Here, OpCall
from autopar.ops.spelling import parse
from autopar.runtime import forms
from autopar.sharding.notation import Rule


def turn(input: Tensor, dim: int, turns: int) -> Tensor:
    """The rows of the first turn."""
    return input.narrow(dim, 0, input.shape[dim] // turns).clone()


def once(input: Tensor, turns: int) -> Tensor:
    """The value in the first turn; zeros in the others."""
    return input.clone()


def total(input: Tensor) -> Tensor:
    """The sum over turns, of one turn."""
    return input.clone()


def rows_of_a_turn(arguments: Mapping[str, Any]) -> Rule:
    """Every other dim is as it was; the rows stay whole."""
    rank, dim = len(arguments["input"].shape), arguments["dim"]
    before = " ".join("all!" if d == dim else f"a{d}" for d in range(rank))
    after = " ".join("rows!" if d == dim else f"a{d}" for d in range(rank))
    return parse(f"{before} -> {after}", linear="x")


def rows_now(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The rows of the turn that runs."""
    return forms.rows_of_turn, {**kwargs, "rows": call.outputs[0].shape[kwargs["dim"]]}


def in_first_turn(here: Here, call: OpCall, kwargs: dict[str, Any]) -> Form:
    """The value, or zeros, as the turn that runs says."""
    return forms.value_of_first_turn, kwargs


op("turn", turn, "input:T, dim, turns", rule=rows_of_a_turn, form=rows_now, keeps="")
op("once", once, "input:T, turns", rule="... -> ...", linear="x", form=in_first_turn, keeps="")
op("total", total, "input:T", rule="... -> ...", linear="x", one_gradient=True, keeps="")
