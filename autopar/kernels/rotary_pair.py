"""Rotary position embedding of queries and keys together: they share their angles, and one launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels import backend, rotary
from autopar.kernels.family import Family, through
from autopar.kernels.patterns import Match, Pattern


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The ops of the group."""
    return rotary.reference(q, cos, sin), rotary.reference(k, cos, sin)


@torch.library.custom_op("autopar::rotary_pair", mutates_args=())
def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Each head of each position, rotated by its angles; laid out like `q` and `k`."""
    if backend.runs(q):
        one, other = rotary.launch((q, k), cos, sin, is_back=False)
        return one, other
    one, other = reference(q, k, cos, sin)
    return rotary.room_for(q).copy_(one), rotary.room_for(k).copy_(other)


@rotated.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotary.room_for(q), rotary.room_for(k)


@torch.library.custom_op("autopar::rotary_pair_backward", mutates_args=())
def rotated_backward(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of queries and keys; laid out like `dq` and `dk`."""
    if backend.runs(dq):
        one, other = rotary.launch((dq, dk), cos, sin, is_back=True)
        return one, other
    one, other = through(lambda q, k: reference(q, k, cos, sin), (dq, dk), dq, dk)
    return rotary.room_for(dq).copy_(one), rotary.room_for(dk).copy_(other)


@rotated_backward.register_fake
def _(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotary.room_for(dq), rotary.room_for(dk)


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[2:])


def _gradients(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return *rotated_backward(dq, dk, *ctx.saved_tensors), None, None


rotated.register_autograd(_gradients, setup_context=_remember)


def rotary_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The group by its kernel, or by its ops where a program holds no custom ops."""
    return (rotated if backend.is_traced(q.device.type) else reference)(q, k, cos, sin)


def _arguments(found: Match) -> Mapping[str, Any] | None:
    """Arguments of the call, or None unless queries and keys have the same batch, positions and angles."""
    q, k = found["x_q"], found["x_k"]
    one, other = type_of(q), type_of(k)
    is_served = rotary.are_served(found, q) and rotary.are_served(found, k) and one.dtype == other.dtype
    is_served = is_served and (one.shape[0], *one.shape[2:]) == (other.shape[0], *other.shape[2:])
    return {"q": q, "k": k, "cos": found["cos"], "sin": found["sin"]} if is_served else None


FAMILY = Family(
    "rotary_pair",
    (Pattern.of(f"{rotary.TURN.format(n='_q')}{rotary.TURN.format(n='_k')}y_q, y_k"),),
    rotary_pair,
    reference,
    _arguments,
)
