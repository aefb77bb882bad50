"""The maximum flow of a network, by Dinic's algorithm, and the minimum cut that proves it.

    levels     the distance of every node to the sink, over arcs with room
    augment    paths along which that distance falls, depth first, until none is left; then levels anew

Arcs are numbers, `a` and `a ^ 1` the two ways of one, so that a network of thousands of arcs is a few flat lists.
"""

from __future__ import annotations

from collections.abc import Iterator


class Network:
    """A flow network: nodes are numbers, and arcs have room for flow."""

    def __init__(self, nodes: int) -> None:
        self.leaving: list[list[int]] = [[] for _ in range(nodes)]  # node -> its arcs, in both directions
        self.heads: list[int] = []
        self.room: list[float] = []

    def add(self, tail: int, head: int, capacity: float) -> int:
        """Add an arc, and return its number."""
        arc = len(self.heads)
        self.leaving[tail].append(arc)
        self.leaving[head].append(arc + 1)
        self.heads += (head, tail)
        self.room += (capacity, 0.0)
        return arc

    def flow(self, arc: int) -> float:
        """The flow along an arc."""
        return self.room[arc ^ 1]

    def fill(self, source: int, sink: int) -> None:
        """Send the maximum flow from source to sink; each path has an arc of finite capacity."""
        while True:
            levels = self._levels(source, sink)
            if levels[source] < 0:
                return
            for path in self._paths(source, sink, levels):
                amount = min(self.room[arc] for arc in path)
                for arc in path:
                    self.room[arc] -= amount
                    self.room[arc ^ 1] += amount

    def reached(self, source: int) -> list[int]:
        """The nodes that the source could send more to; after `fill`, its side of a minimum cut."""
        seen = [False] * len(self.leaving)
        seen[source] = True
        found = [source]
        for node in found:
            for arc in self.leaving[node]:
                head = self.heads[arc]
                if self.room[arc] > 0 and not seen[head]:
                    seen[head] = True
                    found.append(head)
        return found

    def _levels(self, source: int, sink: int) -> list[int]:
        """The distance of each node to the sink, up to that of the source; -1 of nodes farther away.

        Nodes without a way to the sink that has room are infinitely far.
        """
        heads = self.heads
        room = self.room
        levels = [-1] * len(self.leaving)
        levels[sink] = 0
        found = [sink]
        for node in found:
            above = levels[node] + 1
            for arc in self.leaving[node]:
                tail = heads[arc]
                if levels[tail] < 0 and room[arc ^ 1] > 0:
                    levels[tail] = above
                    found.append(tail)
            if levels[source] >= 0:
                break
        return levels

    def _paths(self, source: int, sink: int, levels: list[int]) -> Iterator[list[int]]:
        """Paths with room whose arcs each go down one level; the caller fills one before asking for the next."""
        heads = self.heads
        room = self.room
        leaving = self.leaving
        tried = [0] * len(leaving)  # node -> the number of its arcs that are known to lead nowhere
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                yield path
                full = next(k for k, arc in enumerate(path) if room[arc] <= 0)
                node = heads[path[full] ^ 1]
                del path[full:]
                continue
            arcs = leaving[node]
            at = tried[node]
            below = levels[node] - 1
            while at < len(arcs) and not (room[arcs[at]] > 0 and levels[heads[arcs[at]]] == below):
                at += 1
            tried[node] = at
            if at < len(arcs):
                path.append(arcs[at])
                node = heads[arcs[at]]
            elif path:
                node = heads[path.pop() ^ 1]
                tried[node] += 1
            else:
                return
