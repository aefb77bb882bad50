"""`Arrivals`: when messages of gradients have arrived, by a clock of bytes of parameters."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Arrivals:
    """The links of a device while backward goes on, with a clock that counts bytes of gradients.

    Ops compute about in proportion to the bytes of their parameters, and all ranks know these. A message is taken to
    need as long as its own gradients took to be made: were it slower, communication would be what a step waits for, and
    were it faster, it would still have arrived. Messages over one axis run one after the other.
    """

    now: float = 0.0
    free: dict[Hashable, float] = field(default_factory=dict)  # axis -> when its last message has arrived

    def send(self, axis: Hashable, nbytes: float) -> float:
        """The time at which a message that begins now has arrived."""
        arrives = max(self.now, self.free.get(axis, 0.0)) + nbytes
        self.free[axis] = arrives
        return arrives
