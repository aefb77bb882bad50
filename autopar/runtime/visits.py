"""Visits: rows that go along an axis to the devices of their experts, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.runtime.wires import Wire


class Hop(NamedTuple):
    """An axis that cuts experts: rows travel to the device of their experts, or those of others are left out."""

    axis: str
    parts: int
    experts: int  # experts before the axis cuts them
    rows: int  # visits from a device to another in a round; 0: rows stay, and a device has its own experts alone
    place: int = -1  # this device's on the axis, where rows stay

    @property
    def step(self) -> int:
        return -(-self.experts // self.parts)

    @property
    def travels(self) -> bool:
        return self.rows > 0


class Way:
    """Which rows visit which device of an axis, round by round."""

    def __init__(self, ids: Tensor, hop: Hop, wire: Wire, inner: Sequence[Wire]) -> None:
        self.hop = hop
        self.wire = wire
        self.ids = ids
        tokens = ids.shape[0]
        owner = torch.where((ids >= 0) & (ids < hop.experts), ids // hop.step, -1)
        places = torch.arange(hop.parts, device=ids.device)
        visits = (owner[None] == places[:, None, None]).any(-1)
        self.counts = wire.gathered(visits.sum(1))  # counts by device, to each device
        rounds = max(1, -(-max(map(max, self.counts)) // hop.rows))
        for other in inner:  # Devices that meet inside take part in as many rounds.
            rounds = other.most(rounds, ids.device)
        self.rounds = rounds
        order = visits.flatten().logical_not().to(torch.uint8).argsort(stable=True)
        own = self.counts[wire.index]
        self.rows = (order[: sum(own)] % max(1, tokens)).split(own)

    def round(self, i: int) -> Round:
        return Round(self, i)


class Round:
    """The visits of one round."""

    def __init__(self, way: Way, i: int) -> None:
        hop = way.hop
        me = way.wire.index
        first = i * hop.rows
        self.wire = way.wire
        self.sends = [max(0, min(hop.rows, n - first)) for n in way.counts[me]]
        self.comes = [max(0, min(hop.rows, counts[me] - first)) for counts in way.counts]
        self.rows = [rows[first : first + hop.rows] for rows in way.rows]
        sent = torch.cat(self.rows)
        to = torch.arange(hop.parts, device=sent.device).repeat_interleave(
            torch.tensor(self.sends, device=sent.device), output_size=sum(self.sends)
        )
        local = way.ids[sent] - to[:, None] * hop.step
        self.is_there = (local >= 0) & (local < hop.step)
        self.ids = torch.where(self.is_there, local, -1)
        self.sent = sent

    def there(self, x: Tensor) -> Tensor:
        """Send something of each visit's row to where it goes."""
        return self.wire.rows(x[self.sent], self.sends, self.comes)

    def routes(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Send where each visit goes there, and with what weights, in one message."""
        given = torch.where(self.is_there, weights[self.sent], 0)
        packed = torch.cat([_bytes(self.ids), _bytes(given)], 1)
        comes = self.wire.rows(packed, self.sends, self.comes)
        ids, arrived = comes.split([self.ids.shape[1] * 8, given.shape[1] * given.element_size()], 1)
        slots = self.ids.shape[1]
        # A single row keeps the stride of what it was cut from, of which no wider number may be viewed.
        return ids.flatten().view(self.ids.dtype).view(-1, slots), arrived.flatten().view(given.dtype).view(-1, slots)

    def back(self, y: Tensor, to: Tensor) -> None:
        """Return something of each visit, and add it to its row; one device after the other, in a fixed order."""
        returned = self.wire.rows(y, self.comes, self.sends).split(self.sends)
        for rows, made in zip(self.rows, returned, strict=True):
            to.index_add_(0, rows, made.to(to.dtype))


def _bytes(x: Tensor) -> Tensor:
    """The bytes of each row.

    Of a copy, as rows of one slot count as contiguous whatever their last stride is.
    """
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)
