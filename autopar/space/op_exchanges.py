"""Seconds of what the local forms of ops send, beside the seconds of their kernels (`op_seconds.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from autopar.graph.graph import call_of, info
from autopar.ops.entry import exchanges_of, sends_along
from autopar.ops.exchange import FORWARD, WAYS, Along, Exchange
from autopar.ops.local import OpOnDevice
from autopar.sharding.costs import is_measured
from autopar.sharding.placement import largest_local_shape
from autopar.sharding.strategies import Choice, values
from autopar.space.chosen import Chosen, local_sizes
from autopar.space.op_seconds import OpSeconds, Ways


class Sent(NamedTuple):
    """An exchange along one mesh axis, under one choice."""

    exchange: Exchange
    axis: int
    times: int  # number of messages
    beside: float  # share of the op's compute that may hide the messages
    nbytes: float  # bytes a message
    once: float  # seconds a message

    @property
    def seconds(self) -> float:
        return self.times * self.once


def exchange_seconds(prices: OpSeconds, chosen: Chosen, compute: Ways) -> Ways:
    """Exposed seconds, by choice, of an op's messages: in all, in forward, in backward; () without any.

    `compute` are the seconds of the op itself, which may hide messages.
    """
    if not compute or not _exchanges_of(chosen, None):
        return ()
    rows, chunks = [], info(chosen.node).chunks
    for i, choice in enumerate(chosen.choices):
        sent = list(sent_under(prices, chosen, choice))
        beside = {way: float(own[i]) for way, own in zip(WAYS, compute, strict=True)}
        by_way = [[s for s in sent if s.exchange.way == way] for way in WAYS]
        rows.append([_exposed(prices, of, beside, chunks) for of in (sent, *by_way)])
    return tuple(np.array(rows, float).T)


def _exposed(prices: OpSeconds, sent: Sequence[Sent], compute: Mapping[str, float], chunks: int) -> float:
    """Seconds of messages, in each of the op's chunks, that its compute in their direction does not hide."""
    in_line, exposed = dict[tuple[int, float], int](), 0.0
    for s in sent:
        if s.beside:
            moved = s.seconds * chunks
            exposed += moved - prices.cluster.hidden * min(moved, s.beside * compute[s.exchange.way])
        else:
            in_line[s.axis, s.once] = in_line.get((s.axis, s.once), 0) + s.times
    return sum(times * once for (_, once), times in in_line.items()) * chunks + exposed


def sent_under(prices: OpSeconds, chosen: Chosen, choice: Choice) -> Iterator[Sent]:
    """The messages of an op's local form under a choice, axis by axis."""
    binding, mesh = chosen.binding, prices.mesh
    if binding is None:
        return
    cuts = [s.cut if sends_along(chosen.op, binding, s.cut) else None for s in choice.strategies]
    gone = {factor for cut in cuts if cut for factor in cut.factors} | binding.inside
    local = local_sizes(choice, binding.sizes, mesh)
    left = math.prod(n for f, n in local.items() if f not in gone) * chosen.outputs[0].itemsize
    parts = [largest_local_shape(t.shape, values(choice.operand(k)), mesh) for k, t in enumerate(chosen.operands)]
    for axis, cut in enumerate(cuts):
        n = mesh.shape[axis]
        along = Along(OpOnDevice.fullest(mesh, choice), mesh.axes[axis])
        for e in _exchanges_of(chosen, along) if cut else ():
            nbytes = left if e.nbytes is None else e.nbytes(parts, n)
            once = prices.costs.step(e.kind, 0, _levels(prices, axis, e.kind), nbytes)
            yield Sent(e, axis, e.times(n), e.hides(n), nbytes, once)


def _levels(prices: OpSeconds, axis: int, kind: str) -> Sequence[tuple[int, Any]]:
    """The links of a message.

    Parts that local forms send differ in length, which a profile may have measured.
    """
    measured = prices.cluster.levels(prices.mesh, axis, f"uneven_{kind}")
    return measured if is_measured(measured) else prices.cluster.levels(prices.mesh, axis, kind)


def _exchanges_of(chosen: Chosen, along: Along | None) -> list[Exchange]:
    """The exchanges of the op's local form, those of backward only where an output needs a gradient."""
    is_trained = any(t.requires_grad for t in chosen.outputs)
    return [e for e in exchanges_of(call_of(chosen.node), along) if e.way == FORWARD or is_trained]
