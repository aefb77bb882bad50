"""`GatherMessages`: bytes of gathers' messages while parameters are cut out of them, beyond the counted pieces.

What has arrived for a window is cut into its parameters before the gather of the next window begins, so that of a
message and of what that gather makes the larger one counts. Pieces count the latter.
"""

from __future__ import annotations

import numpy as np

from autopar.space.lookup import Tables, Taken


class GatherMessages:
    """The messages of a space's gathers, and what other gathers make from the places on at which they arrive."""

    def __init__(self) -> None:
        self.arrived = _Amounts()
        self.begun = _Amounts()

    def add(self, edge: int, made: np.ndarray, sent: np.ndarray, begins: int, arrives: int) -> None:
        """Add a parameter in a message: bytes that arrive and that are sent, and the times of both ends."""
        self.arrived.add(edge, made, arrives)
        for bytes_ in (made, sent):
            self.begun.add(edge, bytes_, begins)

    def over(self, taken: Taken, times: int) -> np.ndarray:
        """Bytes beyond the counted pieces, at every time."""
        found: np.ndarray = np.maximum(self.arrived.by_time(taken, times) - self.begun.by_time(taken, times), 0.0)
        return found


class _Amounts:
    """Bytes of edges, by [given, taken], each at a time."""

    def __init__(self) -> None:
        self.of_edges: list[tuple[int, np.ndarray]] = []
        self.times: list[int] = []
        self._tables: Tables | None = None  # until a plan asks

    def add(self, edge: int, bytes_: np.ndarray, time: int) -> None:
        if bytes_.any():
            self.of_edges.append((edge, bytes_))
            self.times.append(time)

    def by_time(self, taken: Taken, times: int) -> np.ndarray:
        """The sum at every time under a plan."""
        if self._tables is None:
            self._tables = Tables(of_edges=self.of_edges)
        found: np.ndarray = np.bincount(np.array(self.times, int), self._tables.of_edges(taken), times)
        return found
