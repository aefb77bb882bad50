"""The logical mesh with the fastest links innermost, from tables of latency and bandwidth between pairs of devices.

    distance of two devices = latency + message / bandwidth

The innermost axis is the partition into groups of its size whose slowest pair is fastest: found exactly, by a search
for a partition into cliques under each threshold. Then groups are grouped in the same way; their members stand opposite
each other so that the slowest of the opposite pairs is fastest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import networkx as nx
import numpy as np

from autopar.letters import BadCluster
from autopar.sharding.mesh import DeviceMesh

MESSAGE = 2**24
_ALIKE = 1.3  # links whose distances differ by less are of one kind


def logical_mesh(
    latency: Sequence[Sequence[float]],
    bandwidth: Sequence[Sequence[float]],
    shape: Sequence[int] | None = None,
    axes: tuple[str, ...] | None = None,
    message: float = MESSAGE,
) -> DeviceMesh:
    """The mesh of a shape whose ranks stand so that fast links are innermost.

    `latency` (seconds) and `bandwidth` (bytes/s) are square tables by pair of devices. Without a `shape`, the mesh has
    an axis for each kind of link.
    """
    distance = _distances(np.asarray(latency, float), np.asarray(bandwidth, float), message)
    sizes = tuple(reversed(tuple(shape))) if shape is not None else _sizes(distance)
    if math.prod(sizes) != len(distance):
        raise BadCluster(
            f"a mesh of shape {tuple(shape or ())} has {math.prod(sizes)} devices, the table {len(distance)}"
        )
    groups: list[tuple[int, ...]] = [(i,) for i in range(len(distance))]
    for level, size in enumerate(sizes):
        apart = [_apart(a, b, distance, level) for a, b in itertools.product(groups, repeat=2)]
        between = np.array(apart).reshape(len(groups), len(groups))
        merged = []
        for clique in _cliques(between, size):
            first, *others = (groups[i] for i in clique)
            merged.append(sum((_opposite(first, other, distance, level) for other in others), first))
        groups = merged
    ranks = groups[0]
    return DeviceMesh(tuple(reversed(sizes)), axes, ranks)


def _apart(a: tuple[int, ...], b: tuple[int, ...], distance: np.ndarray, level: int) -> float:
    """The largest distance between members of two groups that stand opposite each other."""
    if a is b:
        return 0.0
    return max(float(distance[x, y]) for x, y in zip(a, _opposite(a, b, distance, level), strict=True))


def _distances(latency: np.ndarray, bandwidth: np.ndarray, message: float) -> np.ndarray:
    if (
        latency.shape != bandwidth.shape
        or latency.ndim != 2
        or latency.shape[0] != latency.shape[1]
        or not len(latency)
    ):
        raise BadCluster(
            "the tables of latency and bandwidth are not square and of one size",
            seen=f"{latency.shape} and {bandwidth.shape}",
        )
    off: np.ndarray = ~np.eye(len(latency), dtype=bool)
    if not (np.isfinite(latency[off]).all() and (bandwidth[off] > 0).all() and (latency[off] >= 0).all()):
        raise BadCluster("a latency is negative or not a number, or a bandwidth is not positive")
    distance = np.zeros(latency.shape)
    distance[off] = latency[off] + message / bandwidth[off]
    return np.maximum(distance, distance.T)


def _sizes(distance: np.ndarray) -> tuple[int, ...]:
    """The number of devices that each kind of link joins, innermost first.

    Groups are the components joined by links about as near as the nearest, then the components of these groups.
    """
    sizes = []
    parts: list[tuple[int, ...]] = [(i,) for i in range(len(distance))]
    while len(parts) > 1:
        between = np.full((len(parts), len(parts)), math.inf)
        for (i, a), (j, b) in itertools.permutations(enumerate(parts), 2):
            between[i, j] = distance[np.ix_(a, b)].max()
        joined = nx.Graph((i, j) for i, j in np.argwhere(between <= between.min() * _ALIKE))
        joined.add_nodes_from(range(len(parts)))
        found = [sorted(c) for c in nx.connected_components(joined)]
        if len({len(c) for c in found}) > 1:  # no regular grouping: what is left is one axis
            found = [list(range(len(parts)))]
        sizes.append(len(found[0]))
        parts = [_merged(parts, indices) for indices in found]
    return tuple(sizes) or (1,)


def _merged(parts: Sequence[tuple[int, ...]], indices: Iterable[int]) -> tuple[int, ...]:
    return tuple(device for i in indices for device in parts[i])


def _opposite(a: tuple[int, ...], b: tuple[int, ...], distance: np.ndarray, level: int) -> tuple[int, ...]:
    """The members of b, each opposite one of a, matched so that the slowest pair is as fast as possible.

    Only groups of single devices are matched: groups of groups keep their order.
    """
    if level != 1 or len(a) == 1:
        return b
    for most in np.unique(distance[np.ix_(a, b)]):
        near = nx.Graph()
        near.add_nodes_from([("a", x) for x in a] + [("b", y) for y in b])
        near.add_edges_from((("a", x), ("b", y)) for x in a for y in b if distance[x, y] <= most)
        matching = nx.bipartite.hopcroft_karp_matching(near, [("a", x) for x in a])
        if len(matching) == 2 * len(a):
            return tuple(matching["a", x][1] for x in a)
    return b


def _cliques(distance: np.ndarray, size: int) -> list[list[int]]:
    """The partition into groups of this size with the smallest largest distance inside a group."""
    thresholds = np.unique(distance[~np.eye(len(distance), dtype=bool)]) if size > 1 else np.zeros(1)
    low = 0
    high = len(thresholds) - 1
    best = [list(range(i, i + size)) for i in range(0, len(distance), size)]
    while low <= high:
        middle = (low + high) // 2
        found = _cover(distance <= thresholds[middle], size)
        low, high, best = (low, middle - 1, found) if found is not None else (middle + 1, high, best)
    return best


def _cover(near: np.ndarray, size: int) -> list[list[int]] | None:
    """A partition into cliques of this size, by backtracking from the least connected device, or None."""
    free = set(range(len(near)))
    chosen: list[list[int]] = []

    def grow(clique: list[int], candidates: list[int]) -> bool:
        if len(clique) == size:
            chosen.append(sorted(clique))
            free.difference_update(clique)
            if place():
                return True
            free.update(clique)
            chosen.pop()
            return False
        for k, x in enumerate(candidates):
            if len(clique) + len(candidates) - k < size:
                return False
            if grow([*clique, x], [y for y in candidates[k + 1 :] if near[x, y]]):
                return True
        return False

    def place() -> bool:
        if not free:
            return True

        def near_to(x: int) -> list[int]:
            return [y for y in sorted(free) if y != x and near[x, y]]

        options = {x: near_to(x) for x in free}
        first = min(free, key=lambda x: (len(options[x]), x))
        return len(options[first]) >= size - 1 and grow([first], options[first])

    return sorted(chosen) if place() else None
