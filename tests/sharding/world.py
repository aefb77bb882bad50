"""All shardings of a shape by what devices hold under them, and the cheapest ways between these states.

A state is the contents of all devices, as arrays of element numbers, and over which axes they are parts of sums. A move
acts on contents alone; where it leads is looked up among the contents of the shardings that numpy cuts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import replace

import numpy as np

from autopar import Cluster, P, R, S
from autopar.sharding.cost_model import Kernel, Matrices
from autopar.sharding.placement import Sharding

CLUSTER = replace(Cluster.of("h100-2x8"), variation=0.0)


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
            price = self.prices(axis, n)

            def group(d, axis=axis, n=n):
                return [(*d[:axis], i, *d[axis + 1 :]) for i in range(n)]

            def turned_s(dim, whole, n):  # what is packed by another dim than the first is copied
                return device.launch_s + 2 * whole * (1 + 1 / n) / device.bandwidth if dim else 0.0

            def result(made, new, seconds):
                return self.key([made[d] for d in self.devices], new), seconds

            whole = max(c.size for c in contents.values()) * itemsize
            if axis in partial:
                yield result(contents, partial - {axis}, price("all_reduce", whole))
                for dim, blocks in self.runs(contents):
                    if (made := self.cut(contents, axis, n, dim, blocks)) is not None:
                        yield result(made, partial - {axis}, price("reduce_scatter", whole) + turned_s(dim, whole, n))
                continue
            same = all(np.array_equal(contents[d], contents[group(d)[0]]) for d in self.devices)
            if same:
                yield result(contents, partial | {axis}, device.launch_s + 2 * whole / device.bandwidth)
                for dim, blocks in self.runs(contents):
                    if (made := self.cut(contents, axis, n, dim, blocks)) is not None:
                        yield result(made, partial, device.launch_s + 2 * whole / n / device.bandwidth)
                continue
            for dim, blocks in self.runs(contents, n):
                gathered = self.gather(contents, group, n, dim, blocks)
                if gathered is None:
                    continue
                total = max(c.size for c in gathered.values()) * itemsize
                yield result(gathered, partial, price("all_gather", total) + turned_s(dim, total, n))
                for to, to_blocks in self.runs(gathered):
                    if to != dim and (made := self.cut(gathered, axis, n, to, to_blocks)) is not None:
                        copies_s = 2 * (device.launch_s + 2 * total / n / device.bandwidth)
                        yield result(made, partial, price("all_to_all", total) + copies_s)

    def prices(self, axis, n):
        """Seconds of a collective on so many whole bytes: its start, the hops of one piece, and the slower level.

        All is between nodes where groups lie unlike in nodes.
        """
        stride = int(np.prod(self.mesh.shape[axis + 1 :]))
        node_of = [
            [(first + i * stride) // CLUSTER.devices_per_node for i in range(n)]
            for first in range(self.mesh.size)
            if first // stride % n == 0
        ]
        sizes = {nodes.count(node) for nodes in node_of for node in nodes}
        nodes = node_of[0] if len(sizes) == 1 else list(range(n))
        inner, outer = CLUSTER.links
        count, here = len(set(nodes)), nodes.count(nodes[0])

        def wire(link, kind, members):
            counts, shares = zip(*dict(link.falls).get(kind, ((1, 1.0),)), strict=True)
            share = np.interp(math.log2(members), np.log2(counts), shares)
            return share * dict(link.reached).get(kind, link.bytes_per_s)

        def doubling(link, nbytes):  # of the members: two hops of a small message
            sizes, took = zip(*link.doubling, strict=True)
            is_large = nbytes > sizes[0]
            return max(2 * link.hop_s, np.interp(math.log(nbytes), np.log(sizes), took) if is_large else 0.0)

        def price(kind, total):
            leaves = total / n  # of each device, to each other one: by an exchange a share of what it holds
            crossing = sum(a != b for a, b in itertools.pairwise(nodes))
            hops = (n - 1 - crossing) * inner.hop_s + crossing * outer.hop_s
            share = (n - 1) / n  # of the bytes pass each link of a ring
            inside, between = share * total, share * total / here
            used = [link for link, k in ((inner, here), (outer, count)) if k > 1]
            start = max(link.latency_s for link in used)
            if kind == "all_reduce":
                tree = [0.5 if k == 2 else share for k in (here, count)]  # two of a level exchange halves
                inside, between = 2 * tree[0] * total, 2 * tree[1] * total / here
                sent = ((inner, here, total), (outer, count, total / here))
                hops = sum(math.ceil(math.log2(k)) * doubling(link, nbytes) for link, k, nbytes in sent)
            if kind == "all_to_all":
                hops = sum(link.hop_s for link in used)
                inside, between = (here - 1) / here * leaves / count, (count - 1) / count * leaves
            inside, between = inside * (here > 1), between * (count > 1)
            return start + hops + max(inside / wire(inner, kind, here), between / wire(outer, kind, count))

        return price

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


def product(m, n, k, dtype="bfloat16"):
    """The kernel of one product of two matrices."""
    one, moved = np.ones(1), np.array([2.0 * (m * k + n * k + m * n)])
    sizes = Matrices(one, m * one, n * one, k * one)
    return Kernel(("mm",), dtype, np.array([2.0 * m * n * k]), moved, moved, is_product=True, matrices=sizes)
