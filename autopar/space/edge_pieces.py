"""Memory of edges: results of conversions, gathered copies and their messages, and gradients on the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch.fx as fx

from autopar.graph.graph import info, type_of
from autopar.space.begun_bytes import BegunBytes
from autopar.space.edge_passage import EdgePassage
from autopar.space.gather_messages import GatherMessages
from autopar.space.gradient_buckets import GradientBuckets
from autopar.space.handed_on import regathered
from autopar.space.lifetimes import Clock, Lifetimes
from autopar.space.local_bytes import EdgeBytes, LocalBytes, divided_by
from autopar.space.memory import Converted, Piece, Readers, View, Viewed
from autopar.space.parameter_gradients import ParameterGradients
from autopar.space.parts_on_host import PartsOnHost
from autopar.space.schedule import Schedule, Transit
from autopar.space.wiring import Wiring


class EdgePieces:
    """The memory pieces of a space's edges, in the order in which edges are added."""

    def __init__(
        self, wiring: Wiring, schedule: Schedule, lifetimes: Lifetimes, buckets: GradientBuckets, bytes_: LocalBytes
    ) -> None:
        self.wiring = wiring
        self.schedule = schedule
        self.lifetimes = lifetimes
        self.owners = lifetimes.parameters.owners
        self.bytes = bytes_
        self.reach = lifetimes.reach()  # memory -> the last time at which it is counted so far
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
        self.begun = BegunBytes(wiring, lifetimes, schedule, bytes_)
        self.messages = GatherMessages()
        self.gradients = ParameterGradients(wiring, schedule, lifetimes, buckets, bytes_)

    @property
    def clock(self) -> Clock:
        return self.lifetimes.clock

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
        if value in lifetimes.memories.turned and type_.requires_grad:
            bytes_ = self.bytes.copied(bytes_)
        now, back = self.clock.forward(taker), self.clock.back(taker)
        passage = EdgePassage(index, edge, value, taker, type_, bytes_, now, back)
        memory = lifetimes.memories.memory[value]
        itself, reach = lifetimes.needs_itself(value, taker), self.reach[memory]
        # Beyond `reach` the memory of a conversion's result is counted for the values on it.
        needed = max(itself, min(lifetimes.needs(value, taker), reach))
        if self.begun.holds(value, taker):
            itself = self.begun.until
            needed = needed if value in self.owners else itself
        if value in self.owners:
            self._gathered(passage, needed)
        else:
            self._converted(passage, needed)
        behind = self.behind.get(value, ())
        way = (View(index, bytes_.kept, needed), *behind)
        for k, view in enumerate(behind):
            self.through.setdefault(view.edge, []).append((way[: k + 1], itself, now))
        for view in lifetimes.outputs.get(taker, ()):
            if lifetimes.memories.memory[view] == memory:
                self.behind[view] = way
        # a part of a memory keeps all of it, a value that is broadcast no more than that
        kept = self.bytes.scaled(bytes_.kept, lifetimes.memories.bytes_of(memory, type_.nbytes) / max(1, type_.nbytes))
        before, rows = self.read.setdefault(memory, (reach, []))
        if itself > before and self.bytes.is_any(kept):
            rows.append((index, kept, reach + 1, itself, behind))
        if itself > reach:  # Without a conversion, the value's own memory stays as long as needed.
            kind = "saved activations" if itself >= self.clock.n else "transients"
            self._put(kind, passage, kept, reach + 1, itself)
            self.reach[memory] = itself
        if taker in self.clock.at and type_.requires_grad:
            if value in self.owners:
                for span in self.gradients.spans(passage):
                    self._put("gradients", passage, *span)
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

    def _put(self, kind: str, passage: EdgePassage, bytes_: np.ndarray, first: int, last: int) -> None:
        if first <= last and self.bytes.is_any(bytes_):
            self.found.append(Piece(kind, passage.index, True, bytes_, first, last))

    def _converted(self, passage: EdgePassage, needed: int) -> None:
        """Add the result of a conversion, from where those that other readers share with it end."""
        made, rows = passage.bytes.made, self.several.setdefault(passage.value, [])
        begins = max([passage.now, *(end + 1 for *_, begin, end in rows if begin <= end)])
        if self.bytes.is_any(made):
            kind = "saved activations" if needed >= self.clock.n else "transients"
            self._put(kind, passage, made, begins, needed)
            rows.append((passage.index, made, passage.now, begins, needed))
            if begins == passage.now:
                self._may_end(passage, made, needed)

    def _may_end(self, passage: EdgePassage, made: np.ndarray, needed: int) -> None:
        """Note the result of a conversion that is read through views, and ends early if all are converted."""
        itself = self.lifetimes.needs_itself(passage.value, passage.taker)
        if itself < needed and self.bytes.is_any(made):
            before = self.made.get(passage.index)
            self.made[passage.index] = made if before is None else before[0] + made, itself, needed

    def _gathered(self, passage: EdgePassage, needed: int) -> None:
        """Add the gathered copy of a parameter, which exists ahead of its use, and its message."""
        schedule, parameter, now = self.schedule, self.owners[passage.value], passage.now
        made, sent = passage.bytes.made, passage.bytes.sent_last
        dropped = regathered(self.wiring, passage, parameter)
        # backward of a chunk follows its forward: the copy is there for all of them
        again = () if parameter in schedule.stays or info(passage.taker).chunks > 1 else dropped
        transit = schedule.gather(now, parameter)
        if self.begun.copies(passage.taker):
            made, sent = self.begun.left(passage, dropped)
            for piece in self.begun.pieces(passage, dropped):
                self._put(*piece)
        arrived, copied = self.bytes.once("arrived", (made, sent), lambda: divided_by(sent > 0, made))
        self._copies(passage, arrived, transit.begins, needed, again, is_ahead=True)
        self._copies(passage, copied, now, needed, again, is_ahead=False)  # the copy in memory order
        self._message(passage, sent, arrived, transit)
        for span in PartsOnHost(self.wiring, schedule, self.lifetimes, self.bytes).spans(passage):
            self._put("parameters", passage, *span)

    def _copies(
        self, passage: EdgePassage, made: np.ndarray, begins: int, needed: int, again: tuple[bool, ...], is_ahead: bool
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

    def _gathered_again(self, passage: EdgePassage, dropped: np.ndarray, is_ahead: bool) -> None:
        """Add the copy that is gathered again for backward, if backward reads it; an embedding's does not."""
        transit = self.schedule.gather_again(passage.now, self.owners[passage.value])
        needs = self.lifetimes.needs(passage.value, passage.taker)
        if needs < self.clock.n:
            return
        last = min(passage.back, needs)
        begins = max(passage.now + 1, transit.begins) if is_ahead else last
        self._put("gathered parameters", passage, dropped, begins, last)
        if is_ahead:
            whole = passage.bytes.sent_last
            sent = self.bytes.once("sent", (dropped, whole), lambda: np.where(dropped > 0, whole, 0.0))
            self._message(passage, sent, dropped, replace(transit, begins=begins))

    def _message(self, passage: EdgePassage, sent: np.ndarray, made: np.ndarray, transit: Transit) -> None:
        """Add the buffers of a gather, of several parameters in one message where it is shared.

        The send buffer is there while the gather is under way; when it ends, what has arrived lies beside the
        parameters cut out of it. Casts that are sent at once are there as long.
        """
        if not transit.is_shared:
            return
        is_made = self.owners.get(passage.value) is not passage.value
        is_cast = is_made and not self.lifetimes.memories.is_view[passage.value]
        begins = transit.begins
        taken = transit.ends
        self._put("transients", passage, sent, begins, taken if is_cast and begins >= taken else taken - 1)
        if transit.beside is None:
            self._put("transients", passage, made, taken, taken)
        else:
            self.messages.add(passage.index, made, sent, begins, taken)


def _before_conversion(tables: EdgeBytes) -> np.ndarray:
    """Bytes of gradients that are converted, less those of the result."""
    return np.where(tables.unreduced > 0, tables.unreduced - tables.reduced, 0.0)


def _divided(made: np.ndarray, is_again: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of gathered copies that are kept, and bytes of those that are dropped and gathered again."""
    return np.where(is_again[:, None], 0.0, made), np.where(is_again[:, None], made, 0.0)
