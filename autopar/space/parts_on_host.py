"""Bytes of parameters that lie on the host, while their parts are on the device: until they are read, or are sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopar.space.edge_passage import EdgePassage
from autopar.space.lifetimes import Lifetimes
from autopar.space.local_bytes import LocalBytes
from autopar.space.schedule import Schedule, Span
from autopar.space.wiring import Wiring

Held = tuple[np.ndarray, int, int]  # bytes by [given, taken], with their first and last time


@dataclass(frozen=True, slots=True, eq=False)
class PartsOnHost:
    """When the parts of parameters that lie on the host are on the device.

    A message has a buffer of its own, so that a part that is gathered goes as its gather begins, before what arrives
    has memory.
    """

    wiring: Wiring
    schedule: Schedule
    lifetimes: Lifetimes
    bytes: LocalBytes

    def spans(self, passage: EdgePassage) -> Iterator[Held]:
        """The bytes of a parameter's part on its way to an op, in forward and where backward reads it as well."""
        source = self.wiring.sites[passage.edge.source]
        parameter = passage.value
        reading = self.schedule.reading(parameter)
        if not source.parts_on_host or parameter not in self.lifetimes.parameters.owners.values() or reading is None:
            return
        first, last = reading
        is_cast = passage.taker in self.lifetimes.parameters.casts
        again = self.wiring.site(passage.taker).regathered if is_cast else source.regathered
        is_read_again = self.lifetimes.needs(parameter, passage.taker) >= self.lifetimes.clock.n
        for table, is_gathered in ((passage.bytes.sent, True), (passage.bytes.kept, is_cast)):
            up = self._marked(passage, table, source.parts_on_host)
            ends = self._ends(passage, reading, is_gathered)
            yield up, self.schedule.comes_up(first, is_gathered), ends[0]
            comes_again = not is_gathered or (any(again) and parameter not in self.schedule.stays)
            if is_read_again and comes_again:
                yield up, max(ends[0] + 1, self.schedule.comes_up_again(last, is_gathered)), ends[1]

    def _ends(self, passage: EdgePassage, reading: Span, is_gathered: bool) -> tuple[int, int]:
        """The last times of a part on the device, in forward and in backward."""
        parameter = passage.value
        first, last = reading
        if is_gathered:
            ahead, again = self.schedule.gather(first, parameter), self.schedule.gather_again(last, parameter)
            return ahead.begins - (ahead.begins < ahead.ends), again.begins - (again.begins < again.ends)
        needed = self.lifetimes.needs(parameter, passage.taker)
        return max(last, self.lifetimes.last_use(parameter)), needed

    def _marked(self, passage: EdgePassage, table: np.ndarray, marks: tuple[bool, ...]) -> np.ndarray:
        """A table with zeros wherever the edge's source takes none of the marked choices."""
        edge = passage.edge
        return self.bytes.once(("marked", marks), (table,), lambda: np.where(edge.marked(marks)[:, None], table, 0.0))
