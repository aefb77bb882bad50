"""`BegunBytes`: bytes of what is made before the first of several micro-batches, and held until the last has ended."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch.fx as fx

from autopar.graph.graph import type_of
from autopar.space.edge_passage import EdgePassage
from autopar.space.lifetimes import Lifetimes
from autopar.space.local_bytes import LocalBytes, divided_by
from autopar.space.schedule import Schedule
from autopar.space.wiring import Wiring

# By choice of a parameter: whether every micro-batch makes a copy, and drops it.
Policies = tuple[bool, ...]


class BegunBytes:
    """What edges bring to every micro-batch of a call, in the one copy that is made before the first."""

    def __init__(self, wiring: Wiring, lifetimes: Lifetimes, schedule: Schedule, bytes_: LocalBytes) -> None:
        self.wiring = wiring
        self.clock = lifetimes.clock
        self.owners = lifetimes.parameters.owners
        self.computed = lifetimes.parameters.computed
        self.bytes = bytes_
        # The last time of backward is that of reductions, after the last turn: until then copies are held.
        self.until = self.clock.settled - 1
        self.largest = _largest_bucket(schedule)

    def holds(self, value: fx.Node, taker: fx.Node) -> bool:
        """Whether every micro-batch reads a value as it was made before the first."""
        is_copy = self.clock.in_turns and value in self.owners and self.owners[value] is not value
        return (is_copy or value in self.computed) and taker not in self.computed and taker not in self.owners

    def copies(self, taker: fx.Node) -> bool:
        """Whether copies of parameters that an op reads are made before the first micro-batch, and held."""
        return self.clock.in_turns and taker not in self.computed

    def left(self, passage: EdgePassage, dropped: Policies) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of the copies that every micro-batch makes, and of those that it is sent in a message."""
        _, made = self._apart(passage.bytes.made, passage, dropped)
        _, sent = self._apart(passage.bytes.sent_last, passage, dropped)
        return made, sent

    def pieces(
        self, passage: EdgePassage, dropped: Policies
    ) -> Iterator[tuple[str, EdgePassage, np.ndarray, int, int]]:
        """Pieces of the copies that are made once: kind, passage, bytes, first and last time.

        They are gathered one message after the other: the largest of these counts, where it is cut into copies. It is
        gone before turns add up gradients, whose sums count from the first time on: one that is as large is enough.
        """
        kept, _ = self._apart(passage.bytes.made, passage, dropped)
        sent, _ = self._apart(passage.bytes.sent_last, passage, dropped)
        yield "gathered parameters", passage, kept, 0, self.until
        if self.owners[passage.value] in self.largest:
            arrived, _ = self.bytes.once("arrived", (kept, sent), lambda: divided_by(sent > 0, kept))
            if passage.type.requires_grad:
                in_each = passage.edge.marked(self.wiring.sites[passage.edge.source].scattered)[:, None]
                arrived = np.where(in_each, arrived, 0.0)
            yield "transients", passage, arrived, 0, 0

    def _apart(self, table: np.ndarray, passage: EdgePassage, dropped: Policies) -> tuple[np.ndarray, np.ndarray]:
        """A table of bytes of copies that are held, and of copies that are dropped."""
        mask = passage.edge.marked(dropped)[:, None]
        return self.bytes.once(("begun", mask.tobytes()), (table,), lambda: divided_by(~mask, table))


def _largest_bucket(schedule: Schedule) -> frozenset[fx.Node]:
    """The parameters of the largest message in which several are gathered in line."""
    found: dict[int, list[fx.Node]] = {}
    for parameter, (number, _) in schedule.members.items():
        found.setdefault(number, []).append(parameter)
    several = [parameters for parameters in found.values() if len(parameters) > 1]
    return frozenset(max(several, key=lambda ps: sum(type_of(p).nbytes for p in ps), default=()))
