"""Rotary position embedding of queries and keys together: they share their angles, and one launch."""

from __future__ import annotations

from torch import Tensor

from autopar.graph.graph import type_of
from autopar.kernels import backend, rotary
from autopar.kernels.custom_ops import backward_of, call_of, custom_op
from autopar.kernels.family import Family, through
from autopar.kernels.patterns import Match, Pattern


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The ops of the group."""
    return rotary.reference(q, cos, sin), rotary.reference(k, cos, sin)


def _laid_out_like(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotary.room_for(q), rotary.room_for(k)


@custom_op("autopar::rotary_pair", fake=_laid_out_like)
def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Each head of each position, rotated by its angles; laid out like `q` and `k`."""
    if backend.runs(q):
        return rotary.launch((q, k), cos, sin, is_back=False)
    one, other = reference(q, k, cos, sin)
    return rotary.room_for(q).copy_(one), rotary.room_for(k).copy_(other)


@backward_of(rotated, "q k", fake=_laid_out_like)
def rotated_backward(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of queries and keys; laid out like `dq` and `dk`."""
    if backend.runs(dq):
        return rotary.launch((dq, dk), cos, sin, is_back=True)
    one, other = through(lambda q, k: reference(q, k, cos, sin), (dq, dk), dq, dk)
    return rotary.room_for(dq).copy_(one), rotary.room_for(dk).copy_(other)


rotary_pair = call_of(rotated, reference)


def _is_served(found: Match) -> bool:
    """Whether queries and keys have the same batch, positions and angles."""
    q, k = found["q"], found["k"]
    one, other = type_of(q), type_of(k)
    is_served = rotary.are_served(found, q) and rotary.are_served(found, k) and one.dtype == other.dtype
    return is_served and (one.shape[0], *one.shape[2:]) == (other.shape[0], *other.shape[2:])


FAMILY = Family(
    "rotary_pair",
    (Pattern.of(f"{rotary.TURN.format(x='q', n='_q')}{rotary.TURN.format(x='k', n='_k')}y_q, y_k"),),
    rotary_pair,
    reference,
    _is_served,
)
