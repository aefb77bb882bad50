"""All shardings of a shape by what devices hold under them, and the cheapest ways between these states.

A state is the contents of all devices, as arrays of element numbers, and over which axes they are parts of sums. A move
acts on contents alone; where it leads is looked up among the contents of the shardings that numpy cuts.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np

from autopar import Cluster, P, R, S
from autopar.sharding.placement import Sharding

CLUSTER = Cluster.of("h100-2x8")


def edges_of(size, blocks):
    return list(itertools.pairwise(np.cumsum([0, *(blocks or (size,))])))


def chunk(array, dim, n, i, blocks=()):
    """The i-th of n parts of a dim, as torch.chunk cuts; with blocks, of each block by itself."""
    pieces = []
    for start, stop in edges_of(array.shape[dim], blocks):
        size = -(-(stop - start) // n)
        low, high = min(start + i * size, stop), min(start + (i + 1) * size, stop)
        pieces.append(np.take(array, range(low, high), axis=dim))
    return np.concatenate(pieces, axis=dim)


def kept(size, cuts, where):
    """The rows of a dim that a device keeps when axes cut it one after the other.

    Each cuts, of each of its blocks, the rows that are still there. None where parts of blocks would be unequal.
    """
    rows, blocked = np.arange(size), any(blocks for _, _, blocks in cuts)
    if any(len(set(blocks)) > 1 for _, _, blocks in cuts) and len({blocks for _, _, blocks in cuts}) > 1:
        return None  # blocks of several sizes go with no other cut: what is left of them is not alike on all devices
    for axis, n, blocks in cuts:
        pieces = [rows[(rows >= low) & (rows < high)] for low, high in edges_of(size, blocks)]
        pieces = [p for p in pieces if len(p)]
        if not pieces or (blocked and any(len(p) % n for p in pieces)):
            return None
        rows = np.concatenate([chunk(p, 0, n, where[axis]) for p in pieces])
    return rows


class World:
    """All shardings of one shape on one mesh, by what devices hold under them."""

    def __init__(self, mesh, shape, blocked=()):
        self.mesh, self.shape = mesh, shape
        self.devices = list(itertools.product(*map(range, mesh.shape)))
        self.cuts, self.blocked = [(d, ()) for d in range(len(shape))] + list(blocked), bool(blocked)
        self.states: dict[tuple, Sharding] = {}
        options = [R, P(), *(S(d, b) for d, b in self.cuts)]
        for placements in itertools.product(options, repeat=len(mesh.shape)):
            for order in itertools.permutations(range(len(mesh.shape))):
                held = self.held(placements, order)
                if held is not None:
                    self.states.setdefault(held, Sharding(placements, order))

    def key(self, contents, partial):
        return tuple((c.shape, c.tobytes()) for c in contents), frozenset(partial)

    def held(self, placements, order):
        whole, contents = np.arange(int(np.prod(self.shape))).reshape(self.shape), []
        for device in self.devices:
            mine = whole
            for dim, size in enumerate(self.shape):
                rows = kept(
                    size,
                    [
                        (a, self.mesh.shape[a], placements[a].blocks)
                        for a in order
                        if placements[a].is_shard and placements[a].dim == dim
                    ],
                    device,
                )
                if rows is None or not len(rows):
                    return None
                mine = np.take(mine, rows, axis=dim)
            contents.append(mine)
        if any(p.blocks for p in placements) and len({c.shape for c in contents}) > 1:
            return None
        return self.key(contents, [a for a, p in enumerate(placements) if p.is_partial])

    def moves(self, state):
        """Every move: what devices hold afterwards, and its seconds."""
        raw, partial = state
        contents = {d: np.frombuffer(b, dtype=np.int64).reshape(s) for d, (s, b) in zip(self.devices, raw, strict=True)}
        device, itemsize = CLUSTER.device, 4
        for axis, n in enumerate(self.mesh.shape):
            gather_s, exchange_s = self.prices(axis, n)

            def group(d, axis=axis, n=n):
                return [(*d[:axis], i, *d[axis + 1 :]) for i in range(n)]

            def turned_s(dim, whole, n):  # what is packed by another dim than the first is copied
                return device.launch_s + 2 * whole * (1 + 1 / n) / device.memory_bytes_per_s if dim else 0.0

            def result(made, new, seconds):
                return self.key([made[d] for d in self.devices], new), seconds

            whole = max(c.size for c in contents.values()) * itemsize
            if axis in partial:
                yield result(contents, partial - {axis}, 2 * gather_s(whole))
                for dim, blocks in self.runs(contents):
                    if (made := self.cut(contents, axis, n, dim, blocks)) is not None:
                        yield result(made, partial - {axis}, gather_s(whole) + turned_s(dim, whole, n))
                continue
            same = all(np.array_equal(contents[d], contents[group(d)[0]]) for d in self.devices)
            if same:
                yield result(contents, partial | {axis}, device.launch_s + 2 * whole / device.memory_bytes_per_s)
                for dim, blocks in self.runs(contents):
                    if (made := self.cut(contents, axis, n, dim, blocks)) is not None:
                        yield result(made, partial, device.launch_s + 2 * whole / n / device.memory_bytes_per_s)
                continue
            for dim, blocks in self.runs(contents, n):
                gathered = self.gather(contents, group, n, dim, blocks)
                if gathered is None:
                    continue
                total = max(c.size for c in gathered.values()) * itemsize
                yield result(gathered, partial, gather_s(total) + turned_s(dim, total, n))
                for to, to_blocks in self.runs(gathered):
                    if to != dim and (made := self.cut(gathered, axis, n, to, to_blocks)) is not None:
                        copies_s = 2 * (device.launch_s + 2 * total / n / device.memory_bytes_per_s)
                        yield result(made, partial, exchange_s(total / n) + copies_s)

    def prices(self, axis, n):
        """Seconds of a gather to so many bytes, and of an exchange of so many held.

        First between nodes, then inside; all between them where groups lie unlike in nodes.
        """
        stride = int(np.prod(self.mesh.shape[axis + 1 :]))
        counts = [
            np.unique([(first + i * stride) // CLUSTER.devices_per_node for i in range(n)], return_counts=True)[1]
            for first in range(self.mesh.size)
            if first // stride % n == 0
        ]
        alike = len({c for count in counts for c in count}) == 1
        here = int(counts[0][0]) if alike else 1
        levels = [(k, link) for k, link in ((here, CLUSTER.links[0]), (n // here, CLUSTER.links[1])) if k > 1]

        def gather_s(total):
            shares = [total, total / here] if here > 1 else [total]
            return sum(
                link.latency_s + (k - 1) / k * share / link.bytes_per_s
                for (k, link), share in zip(levels, shares, strict=False)
            )

        def exchange_s(held):
            return sum(
                link.latency_s
                + (k - 1) / k * (held / (n // here) if link is CLUSTER.links[0] else held) / link.bytes_per_s
                for k, link in levels
            )

        return gather_s, exchange_s

    def runs(self, contents, n=1):
        """Every dim, and the runs that a collective could put in order by itself on one device.

        Equal ones, and what is left of the blocks.
        """
        for dim in range(len(self.shape)):
            size = next(iter(contents.values())).shape[dim] * n
            mine = {
                tuple(b * size // self.shape[dim] for b in blocks)
                for d, blocks in self.cuts
                if d == dim and blocks and all(b * size % self.shape[dim] == 0 for b in blocks)
            }
            equal = {(size // k,) * k for k in (2, 3, 4, 6, 8) if size % k == 0} if self.blocked else set()
            for blocks in [(), *sorted(mine | equal)]:
                yield dim, blocks

    def cut(self, contents, axis, n, dim, blocks):
        if blocks and (any(b % n for b in blocks) or any(c.shape[dim] != sum(blocks) for c in contents.values())):
            return None
        made = {d: chunk(c, dim, n, d[axis], blocks) for d, c in contents.items()}
        return made if all(c.size for c in made.values()) else None

    def gather(self, contents, group, n, dim, blocks):
        made = {}
        for d in contents:
            parts = [contents[g] for g in group(d)]
            if any(
                p.shape[:dim] + p.shape[dim + 1 :] != parts[0].shape[:dim] + parts[0].shape[dim + 1 :] for p in parts
            ):
                return None
            if blocks:
                if any(p.shape[dim] * n != sum(blocks) for p in parts) or any(b % n for b in blocks):
                    return None
                pieces = [
                    np.take(p, range(a, b), axis=dim)
                    for a, b in edges_of(parts[0].shape[dim], [b // n for b in blocks])
                    for p in parts
                ]
                made[d] = np.concatenate(pieces, axis=dim)
            else:
                made[d] = np.concatenate(parts, axis=dim)
        return made

    def all_costs(self):
        """Seconds of the cheapest way between any two states."""
        edges = {s: [(t, c) for t, c in self.moves(s) if t in self.states and t != s] for s in self.states}
        found = {}
        for start in self.states:
            best, heap, tick = {start: 0.0}, [(0.0, 0, start)], itertools.count(1)
            while heap:
                cost, _, at = heapq.heappop(heap)
                if cost > best[at]:
                    continue
                for to, more in edges[at]:
                    if cost + more < best.get(to, np.inf) - 1e-15:
                        best[to] = cost + more
                        heapq.heappush(heap, (best[to], next(tick), to))
            found.update({(start, t): c for t, c in best.items()})
        return found
