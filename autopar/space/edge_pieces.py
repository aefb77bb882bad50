"""Memory of edges: results of conversions, messages of gathers, and gradients of parameters until they are reduced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch.fx as fx

from autopar.graph.graph import TensorType, info, op_name, type_of
from autopar.space import gradient_pieces
from autopar.space.gradient_buckets import GradientBuckets, is_always
from autopar.space.gradient_pieces import GradientBytes, GradientTimes, Span
from autopar.space.lifetimes import Clock, Lifetimes
from autopar.space.local_bytes import EdgeBytes, LocalBytes
from autopar.space.memory import Converted, Merged, Piece, Readers, View, Viewed
from autopar.space.schedule import Schedule
from autopar.space.space import Edge
from autopar.space.wiring import Wiring


@dataclass(frozen=True, slots=True, eq=False)
class _Passage:
    """A value on its way over an edge."""

    index: int
    edge: Edge
    value: fx.Node
    taker: fx.Node
    type: TensorType
    bytes: EdgeBytes
    now: int  # time at which it is taken
    back: int  # time at which its gradient comes


class EdgePieces:
    """The memory pieces of a space's edges, in the order in which edges are added."""

    def __init__(
        self, wiring: Wiring, schedule: Schedule, lifetimes: Lifetimes, buckets: GradientBuckets, bytes_: LocalBytes
    ) -> None:
        self.wiring = wiring
        self.schedule = schedule
        self.clock: Clock = lifetimes.clock
        self.lifetimes = lifetimes
        self.owners = lifetimes.parameters.owners
        self.buckets = buckets
        self.bytes = bytes_
        self.reach = dict(lifetimes.reach)  # memory -> the last time at which it is counted so far
        self.found: list[Piece] = []
        # memory -> the time until which it is counted, and its readers: (edge, bytes, first and last time, views)
        self.read: dict[int, tuple[int, list[tuple[int, np.ndarray, int, int, tuple[View, ...]]]]] = {}
        self.behind: dict[fx.Node, tuple[View, ...]] = {}  # view -> the edges by which it was made, the last first
        # value -> conversions at its readers: (edge, bytes, the time of the reader, first and last time of the piece)
        self.several: dict[fx.Node, list[tuple[int, np.ndarray, int, int, int]]] = {}
        # edge whose result has views -> its bytes, the last time its op needs it, the last time it is counted
        self.made: dict[int, tuple[np.ndarray, int, int]] = {}
        # who reads these: the views on the way, its own edge first, and until when it needs the memory, either way
        self.through: dict[int, list[tuple[tuple[View, ...], int, int]]] = {}
        # parameter value -> gradients of its readers: (edge, bytes beyond those of the reduced one, time of backward)
        self.uses: dict[fx.Node, list[tuple[int, np.ndarray, int]]] = {}

    @property
    def readers(self) -> tuple[Readers, ...]:
        """The edges of values that several ops read and keep in memory in turn."""
        each = (rows for _, rows in self.read.values() if len(rows) > 1)
        return tuple(Readers(*map(tuple, zip(*rows, strict=True))) for rows in each)

    def converted(self, arrives: Sequence[np.ndarray]) -> tuple[Converted, ...]:
        """Conversions of values at several readers; `arrives` has the numbers of arriving flows, by edge."""
        found = []
        for rows in (rows for rows in self.several.values() if len(rows) > 1):
            edges, made, begins, parts, ends = zip(*rows, strict=True)
            found.append(Converted(edges, made, tuple(arrives[k] for k in edges), begins, parts, ends))
        return tuple(found)

    @property
    def viewed(self) -> tuple[Viewed, ...]:
        """Results of conversions that may end before their pieces do."""
        made = ((k, row, tuple(self.through.get(k, ()))) for k, row in self.made.items())
        return tuple(Viewed(k, *row, readers) for k, row, readers in made if readers)

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

    def add(self, index: int) -> None:
        """Add the pieces of an edge.

        A conversion makes something, as long as it is needed; where there is none, a value stays longer for the views
        on it.
        """
        lifetimes, value, taker = self.lifetimes, self.wiring.values[index], self.wiring.takers[index]
        if value in lifetimes.inner:
            return
        edge, type_ = self.wiring.edges[index], type_of(value)
        bytes_ = self.bytes.by_flows(edge, type_)
        if value in lifetimes.turned and type_.requires_grad:
            bytes_ = self.bytes.copied(bytes_)
        now, back = self.clock.forward(taker), self.clock.back(taker)
        passage = _Passage(index, edge, value, taker, type_, bytes_, now, back)
        memory = lifetimes.memory[value]
        itself, reach = lifetimes.needs_itself(value, taker), self.reach[memory]
        # Beyond `reach` the memory of a conversion's result is counted for the values on it.
        needed = max(itself, min(lifetimes.needs(value, taker), reach))
        if value in self.owners:
            self._gathered(passage, needed)
        else:
            self._converted(passage, needed)
        behind = self.behind.get(value, ())
        way = (View(index, bytes_.kept, needed), *behind)
        for k, view in enumerate(behind):
            self.through.setdefault(view.edge, []).append((way[: k + 1], itself, now))
        for view in lifetimes.outputs.get(taker, ()):
            if lifetimes.memory[view] == memory:
                self.behind[view] = way
        # a part of a memory keeps all of it, a value that is broadcast no more than that
        kept = self.bytes.scaled(bytes_.kept, lifetimes.whole.get(memory, type_.nbytes) / max(1, type_.nbytes))
        before, rows = self.read.setdefault(memory, (reach, []))
        if itself > before and self.bytes.is_any(kept):
            rows.append((index, kept, reach + 1, itself, behind))
        if itself > reach:  # Without a conversion, the value's own memory stays as long as needed.
            kind = "saved activations" if itself >= self.clock.n else "transients"
            self._put(kind, passage, kept, reach + 1, itself)
            self.reach[memory] = itself
        if taker in self.clock.at and type_.requires_grad:
            if value in self.owners:
                self._gradient_of_parameter(passage)
            else:
                # through views it comes as it leaves their readers
                begins = max(map(lifetimes.last_use, lifetimes.hands_back(taker, value)), default=now)
                since = self.clock.mirrored(begins)
                # The site counts the converted gradient; where this one is the first to come, that is made later.
                comes = self.bytes.once("comes", (bytes_,), lambda: _before_conversion(bytes_))
                alone = back if lifetimes.gives_first(value, taker) else lifetimes.comes_alone(value, taker)
                if lifetimes.gives_more(value, taker):
                    comes, alone = self.bytes.once("more", (comes,), lambda: np.maximum(comes, 0.0)), back
                self._put("gradients of activations", passage, comes, since, alone)
                self._put("gradients of activations", passage, bytes_.unreduced, max(since, alone + 1), back)

    def _put(self, kind: str, passage: _Passage, bytes_: np.ndarray, first: int, last: int) -> None:
        if first <= last and self.bytes.is_any(bytes_):
            self.found.append(Piece(kind, passage.index, True, bytes_, first, last))

    def _converted(self, passage: _Passage, needed: int) -> None:
        """Add the result of a conversion, from where those that other readers share with it end."""
        made, rows = passage.bytes.made, self.several.setdefault(passage.value, [])
        begins = max([passage.now, *(end + 1 for *_, begin, end in rows if begin <= end)])
        if self.bytes.is_any(made):
            kind = "saved activations" if needed >= self.clock.n else "transients"
            self._put(kind, passage, made, begins, needed)
            rows.append((passage.index, made, passage.now, begins, needed))
            if begins == passage.now:
                self._may_end(passage, made, needed)

    def _may_end(self, passage: _Passage, made: np.ndarray, needed: int) -> None:
        """Note the result of a conversion that is read through views, and ends early if all are converted."""
        itself = self.lifetimes.needs_itself(passage.value, passage.taker)
        if itself < needed and self.bytes.is_any(made):
            before = self.made.get(passage.index)
            self.made[passage.index] = made if before is None else before[0] + made, itself, needed

    def _gathered(self, passage: _Passage, needed: int) -> None:
        """Add the gathered copy of a parameter, which exists ahead of its use, and its message."""
        schedule, parameter, now = self.schedule, self.owners[passage.value], passage.now
        made, sent = passage.bytes.made, passage.bytes.sent_last
        again = () if parameter in schedule.stays else self._regathered(passage, parameter)
        if info(passage.taker).chunks > 1:  # backward of a chunk follows its forward: the copy is there for all of them
            again = ()
        transit = schedule.gather(now, parameter)
        arrived, copied = self.bytes.once("arrived", (made, sent), lambda: _divided_by(sent > 0, made))
        self._copies(passage, arrived, transit.begins, needed, again, is_ahead=True)
        self._copies(passage, copied, now, needed, again, is_ahead=False)  # the copy in memory order
        if transit.is_shared:
            self._message(passage, sent, arrived, transit.begins, transit.ends)

    def _copies(
        self, passage: _Passage, made: np.ndarray, begins: int, needed: int, again: tuple[bool, ...], is_ahead: bool
    ) -> None:
        """Add the copies of a parameter, made ahead of its use or at it, and those that are gathered again."""
        if not any(again):
            self._put("gathered parameters", passage, made, begins, needed)
            self._may_end(passage, made, needed)
            return
        edge = passage.edge
        stays, dropped = self.bytes.once(("again", again), (made,), lambda: _divided(made, edge.marked(again)))
        self._put("gathered parameters", passage, stays, begins, needed)
        self._may_end(passage, stays, needed)
        self._put("gathered parameters", passage, dropped, begins, passage.now)
        self._gathered_again(passage, dropped, is_ahead)

    def _regathered(self, passage: _Passage, parameter: fx.Node) -> tuple[bool, ...]:
        """Whether the gathered copy is dropped after its use and gathered again, by the edge source's choice.

        The copy of a parameter that an op has handed on is dropped where that of the parameter always is.
        """
        source, owner = self.wiring.sites[passage.edge.source], self.wiring.site(parameter)
        is_handed_on = passage.value is not parameter and not source.regathered
        if is_handed_on and is_always(owner, owner.regathered):
            return (True,) * len(source.choices)
        return source.regathered

    def _gathered_again(self, passage: _Passage, dropped: np.ndarray, is_ahead: bool) -> None:
        """Add the copy that is gathered again for backward, if backward reads it; an embedding's does not."""
        transit = self.schedule.gather_again(passage.now, self.owners[passage.value])
        needs = self.lifetimes.needs(passage.value, passage.taker)
        if needs < self.clock.n:
            return
        last = min(passage.back, needs)
        begins = max(passage.now + 1, transit.begins) if is_ahead else last
        self._put("gathered parameters", passage, dropped, begins, last)
        if is_ahead and transit.is_shared:
            whole = passage.bytes.sent_last
            sent = self.bytes.once("sent", (dropped, whole), lambda: np.where(dropped > 0, whole, 0.0))
            self._message(passage, sent, dropped, begins, transit.ends)

    def _message(self, passage: _Passage, sent: np.ndarray, made: np.ndarray, begins: int, taken: int) -> None:
        """Add the buffers of a gather of several parameters in one message.

        The send buffer is there while the gather is under way; when it ends, what has arrived lies beside the
        parameters cut out of it. Casts that are sent at once are there as long.
        """
        is_cast = passage.value not in self.owners.values() and not self.lifetimes.is_view[passage.value]
        self._put("transients", passage, sent, begins, taken if is_cast and begins >= taken else taken - 1)
        self._put("transients", passage, made, taken, taken)

    def _gradient_of_parameter(self, passage: _Passage) -> None:
        """Add the gradient of a parameter until it lies as the parameter is stored.

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
        self._put("gradients", passage, cut, back, back)
        is_turned = self._is_turned(passage)
        cuts = np.zeros_like(stored)
        if not (is_turned or self._enters(passage)):
            cuts = self.bytes.once(("cuts", width), (tables,), lambda: _cut_parts(tables, stored))
        sums, others = self.bytes.once("apart", (whole, tables), lambda: _divided_by(tables.is_sum, whole))
        fresh = self.bytes.once("fresh", pair, lambda: np.where(tables.is_sum, stored, 0.0))
        came = self.lifetimes.parameters.reduced_in.get(passage.value, passage.type.itemsize)
        widens = max(1.0, type_of(owner).itemsize / came)
        nbytes = GradientBytes(tables.is_sum, sums, others, cuts, packed, scattered, tables.between, fresh, widens)
        times = GradientTimes(back, full, is_turned, reduced, goes_on, self.clock.settled)
        for span in self._on_the_way(owner, nbytes, times, in_each):
            self._put("gradients", passage, *span)

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

    def _is_turned(self, passage: _Passage) -> bool:
        """Whether an op such as a transpose stands between the parameter and this use; casts do not count.

        A gradient that is reduced before that op shares no message: its reduction is not the last of its steps.
        """
        value = passage.value
        while value is not self.owners[value]:
            if op_name(value) not in ("to", "identity"):
                return True
            value = next(a for a in value.all_input_nodes if a in self.owners)
        return False

    def _enters(self, passage: _Passage) -> bool:
        """Whether here, at a reader or where uses meet, a parameter's gradient enters ops that hand it on."""
        value = passage.value
        while value is not self.owners[value]:
            if self.lifetimes.has_several_uses(value):
                return False
            value = next(a for a in value.all_input_nodes if a in self.owners)
        return passage.taker not in self.owners or self.lifetimes.has_several_uses(passage.taker)


def _before_conversion(tables: EdgeBytes) -> np.ndarray:
    """Bytes of gradients that are converted, less those of the result."""
    return np.where(tables.unreduced > 0, tables.unreduced - tables.reduced, 0.0)


def _divided(made: np.ndarray, is_again: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of gathered copies that are kept, and bytes of those that are dropped and gathered again."""
    return np.where(is_again[:, None], 0.0, made), np.where(is_again[:, None], made, 0.0)


def _divided_by(is_sum: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes where the mask is set, and bytes where it is not."""
    return np.where(is_sum, whole, 0.0), np.where(is_sum, 0.0, whole)


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
