"""`ParameterGradients`: bytes of gradients of parameters, from where they are made to where they are reduced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch.fx as fx

from autopar.graph.graph import op_name, type_of
from autopar.space import gradient_pieces
from autopar.space.edge_passage import EdgePassage
from autopar.space.gradient_buckets import GradientBuckets
from autopar.space.gradient_pieces import GradientBytes, GradientTimes, Span
from autopar.space.lifetimes import Lifetimes
from autopar.space.local_bytes import EdgeBytes, LocalBytes, divided_by
from autopar.space.memory import Merged
from autopar.space.schedule import Schedule
from autopar.space.wiring import Wiring


class ParameterGradients:
    """The gradients that come back over edges of parameters, in the order in which edges are asked for."""

    def __init__(
        self, wiring: Wiring, schedule: Schedule, lifetimes: Lifetimes, buckets: GradientBuckets, bytes_: LocalBytes
    ) -> None:
        self.wiring = wiring
        self.schedule = schedule
        self.clock = lifetimes.clock
        self.lifetimes = lifetimes
        self.owners = lifetimes.parameters.owners
        self.buckets = buckets
        self.bytes = bytes_
        # parameter value -> gradients of its readers: (edge, bytes beyond those of the reduced one, time of backward)
        self.uses: dict[fx.Node, list[tuple[int, np.ndarray, int]]] = {}

    def merged(self, arrives: Sequence[np.ndarray]) -> tuple[Merged, ...]:
        """The edges of parameters that several ops read; `arrives` has the numbers of arriving flows, by edge."""
        found = []
        for value, uses in self.uses.items():
            edges, over, backs = zip(*uses, strict=True)
            owner, settled = self.owners[value], self.clock.settled
            waits = owner in self.buckets.wait
            spans = [(min(backs) + 1, max(backs) if waits else self.buckets.closes[owner] - 1)]
            spans += [(0, settled)] * (waits + (waits and self.buckets.adds_twice))
            spans = [span for span in spans if span[0] <= span[1]]
            if len(edges) > 1:
                found.append(Merged(edges, tuple(arrives[k] for k in edges), over, tuple(spans)))
        return tuple(found)

    def spans(self, passage: EdgePassage) -> Iterator[Span]:
        """Bytes of the gradient that comes back over an edge, until it lies as the parameter is stored.

        A partial sum stays as it comes until its bucket is full, then the bucket until it is scattered. Any other
        gradient is cut and cast where it comes.
        """
        owner, back = self.owners[passage.value], passage.back
        if owner not in self.buckets.closes:
            return
        full = self.buckets.closes[owner]
        reduced = min(self.schedule.reduction(passage.now).ends, self.buckets.under_way[owner])
        tables, width = passage.bytes, type_of(owner).itemsize / passage.type.itemsize
        whole, stored, cut = self.bytes.once(("settles", width), (tables,), lambda: _settling(tables, width))
        pair = self.bytes.once("sums", (tables,), lambda: np.where(tables.is_sum, tables.unreduced, 0.0)), stored
        scattered = self.bytes.once("scattered", pair, lambda: _scattered(*pair))
        packed = self.bytes.once("packed", pair, lambda: _packed(*pair))
        goes_on = self.schedule.reduction_goes_on(passage.now)
        in_each = passage.edge.marked(self.wiring.sites[passage.edge.source].scattered)[:, None]
        if not self._enters(passage):
            if self.lifetimes.has_several_uses(passage.value):
                is_late = tables.is_sum & ~in_each
                over = np.where(is_late, np.maximum(0.0, tables.gradient - stored), 0.0)
                self.uses.setdefault(passage.value, []).append((passage.index, over, back))
            whole = self.bytes.once(("grows", width), (tables,), lambda: _growing(tables, width))
        yield cut, back, back
        is_turned = self._is_turned(passage)
        cuts = np.zeros_like(stored)
        if not (is_turned or self._enters(passage)):
            cuts = self.bytes.once(("cuts", width), (tables,), lambda: _cut_parts(tables, stored))
        sums, others = self.bytes.once("apart", (whole, tables), lambda: divided_by(tables.is_sum, whole))
        fresh = self.bytes.once("fresh", pair, lambda: np.where(tables.is_sum, stored, 0.0))
        came = self.lifetimes.parameters.reduced_in.get(passage.value, passage.type.itemsize)
        widens = max(1.0, type_of(owner).itemsize / came)
        nbytes = GradientBytes(tables.is_sum, sums, others, cuts, packed, scattered, tables.between, fresh, widens)
        times = GradientTimes(back, full, is_turned, reduced, goes_on, self.clock.settled)
        yield from self._on_the_way(owner, nbytes, times, in_each)

    def _on_the_way(
        self, owner: fx.Node, nbytes: GradientBytes, times: GradientTimes, in_each: np.ndarray
    ) -> Iterator[Span]:
        """Bytes of a gradient and of its sum over micro-batches; `in_each` marks choices of the giver."""
        buckets = self.buckets
        if owner not in buckets.wait:
            yield from gradient_pieces.reduced(nbytes, times, buckets.accumulates)
            return
        if in_each.any():
            yield from gradient_pieces.where(in_each, gradient_pieces.reduced(nbytes, times, accumulates=True))
            yield from gradient_pieces.where(in_each, gradient_pieces.summed(nbytes, times, buckets.adds_twice))
        is_first = times.full == buckets.first_to_settle
        yield from gradient_pieces.where(~in_each, gradient_pieces.waiting(nbytes, times, buckets.adds_twice, is_first))

    def _is_turned(self, passage: EdgePassage) -> bool:
        """Whether an op such as a transpose stands between the parameter and this use; casts do not count.

        A gradient that is reduced before that op shares no message: its reduction is not the last of its steps.
        """
        value = passage.value
        while value is not self.owners[value]:
            if op_name(value) not in ("to", "identity"):
                return True
            value = next(a for a in value.all_input_nodes if a in self.owners)
        return False

    def _enters(self, passage: EdgePassage) -> bool:
        """Whether here, at a reader or where uses meet, a parameter's gradient enters ops that hand it on."""
        value = passage.value
        while value is not self.owners[value]:
            if self.lifetimes.has_several_uses(value):
                return False
            value = next(a for a in value.all_input_nodes if a in self.owners)
        return passage.taker not in self.owners or self.lifetimes.has_several_uses(passage.taker)


def _cut_parts(tables: EdgeBytes, stored: np.ndarray) -> np.ndarray:
    """Stored bytes of gradients that are cut after an earlier reduction."""
    return np.where(~tables.is_sum & (tables.unreduced > 0), stored, 0.0)


def _settling(tables: EdgeBytes, width: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of a parameter's gradient until its bucket is full, once it is stored, and while it is cut.

    An element of the parameter has `width` times the bytes of one of the value that is read.
    """
    stored = np.where(tables.is_sum, tables.reduced, tables.reduced * width)
    whole = np.where(tables.is_sum, tables.gradient, stored)
    part = np.where(tables.unreduced > 0, tables.reduced, 0.0)  # the part that is cut out, before the cast
    changes = ~tables.is_sum & ((tables.unreduced > 0) | (width != 1.0))
    cut = np.where(changes, np.maximum(tables.gradient + part - stored, part), 0.0)
    return whole, stored, cut


def _growing(tables: EdgeBytes, width: float) -> np.ndarray:
    """Bytes by which a gradient that passes through here grows when it is gathered."""
    return np.where(tables.is_sum, 0.0, np.maximum(0.0, tables.reduced - tables.gradient) * width)


def _scattered(unreduced: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Bytes of a bucket until it has been scattered; 0 where a reduction leaves it as large."""
    return np.where(unreduced > stored, unreduced, 0.0)


def _packed(unreduced: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Bytes beside a bucket while it is packed.

    The scattered result is made after these are freed.
    """
    return np.where(unreduced > stored, unreduced - stored, unreduced)
