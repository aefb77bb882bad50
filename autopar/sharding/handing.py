"""`route`: messages that bring a tensor to another mesh or sharding: which cell goes from which rank to which.

The cuts of both shardings divide a tensor into cells. A rank receives the cells that it lacks, and no others. What no
rank of a node holds comes to that node once, shared out among the ranks there that want it, in a first wave between
nodes; in a second wave the ranks of a node give it to each other. Where several hold a cell they take turns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.sharding.cluster import Cluster
from autopar.sharding.placement import Sharding, part, runs


@dataclass(frozen=True, slots=True)
class Holding:
    """How a tensor is held: by a sharding, on ranks that stand row-major on a mesh of this shape."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    sharding: Sharding

    def runs(self, size: Sequence[int]) -> dict[int, list[list[tuple[int, int]]]]:
        """For each rank the (start, length) ranges of each dim that it holds, in order."""
        places = itertools.product(*map(range, self.shape))
        return {rank: runs(size, self.sharding, self.shape, at) for rank, at in zip(self.ranks, places, strict=True)}


class Messages(NamedTuple):
    """Messages of one wave: for each its cell, and the ranks that send and receive it."""

    cells: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray

    def of(self, chosen: np.ndarray) -> Messages:
        """Some of the messages."""
        return Messages(self.cells[chosen], self.senders[chosen], self.receivers[chosen])


class Cells:
    """The cells into which the cuts of two holdings divide a tensor, at least as many as a node has devices."""

    def __init__(self, size: Sequence[int], source: Holding, target: Holding, node: int) -> None:
        self.source = source.runs(size)
        self.target = target.runs(size)
        cuts: list[set[int]] = [{0, n} for n in size]
        for held in (*self.source.values(), *self.target.values()):
            for cut, ranges in zip(cuts, held, strict=True):
                cut.update(end for start, length in ranges for end in (start, start + length))
        if size and math.prod(len(cut) - 1 for cut in cuts) < node:  # so that all devices of a node take part
            longest = max(range(len(size)), key=size.__getitem__)
            cuts[longest].update(part(size[longest], node, i)[0] for i in range(node))
        self.edges = [np.array(sorted(cut)) for cut in cuts]
        self.lengths = [np.diff(edges) for edges in self.edges]
        self.elements: np.ndarray = np.ones(1, int)
        for lengths in self.lengths:
            self.elements = np.outer(self.elements, lengths).ravel()

    def held(self, runs_of: dict[int, list[list[tuple[int, int]]]], world: int) -> np.ndarray:
        """A row of cells for each rank of a world: whether it holds them."""
        found: np.ndarray = np.zeros((world, len(self.elements)), bool)
        for rank, held in runs_of.items():
            cells: np.ndarray = np.ones(1, bool)
            for dim, ranges in enumerate(held):
                cells = np.outer(cells, self._within(dim, ranges)).ravel()
            found[rank] = cells
        return found

    def shape(self, held: list[list[tuple[int, int]]]) -> list[int]:
        """The shape of what a rank holds."""
        return [int(self.lengths[dim][self._within(dim, ranges)].sum()) for dim, ranges in enumerate(held)]

    def places(self, held: list[list[tuple[int, int]]], cells: np.ndarray) -> list[tuple[slice, ...]]:
        """The place of each of some cells in what a rank holds."""
        at = np.unravel_index(cells, tuple(map(len, self.lengths))) if held else ()
        dims = []
        for dim, (ranges, index) in enumerate(zip(held, at, strict=True)):
            lengths = self.lengths[dim]
            starts = np.cumsum(np.where(self._within(dim, ranges), lengths, 0))[index] - lengths[index]
            dims.append([slice(int(s), int(s + n)) for s, n in zip(starts, lengths[index], strict=True)])
        return list(zip(*dims, strict=True)) if dims else [() for _ in cells]

    def _within(self, dim: int, ranges: list[tuple[int, int]]) -> np.ndarray:
        """For each interval of a dim, whether it lies in some ranges."""
        starts = self.edges[dim][:-1]
        found: np.ndarray = np.zeros(len(starts), bool)
        for start, length in ranges:
            found |= (start <= starts) & (starts < start + length)
        return found


class _Holders:
    """The ranks that hold each cell."""

    def __init__(self, held: np.ndarray) -> None:
        self.counts = held.sum(0)
        self._firsts = np.cumsum(self.counts) - self.counts
        self._ranks = np.nonzero(held.T)[1]

    def of(self, cells: np.ndarray, turns: np.ndarray) -> np.ndarray:
        """One of the ranks that hold each of some cells: they take turns."""
        return self._ranks[self._firsts[cells] + turns % self.counts[cells]]


def route(cells: Cells, world: int, node: int) -> tuple[Messages, Messages]:
    """The messages between nodes, and those inside nodes that follow them; `node` is a number of devices."""
    has = cells.held(cells.source, world) & (cells.elements > 0)
    lacks = cells.held(cells.target, world) & (cells.elements > 0) & ~has
    everyone = _Holders(has)
    between: list[Messages] = []
    inside: list[Messages] = []
    for first in range(0, world, node):
        here = slice(first, min(first + node, world))
        known = has[here].copy()
        wanted = lacks[here]
        abroad = np.flatnonzero(wanted.any(0) & ~known.any(0))
        receivers = _Holders(wanted).of(abroad, abroad)
        between.append(Messages(abroad, everyone.of(abroad, abroad + first // node), first + receivers))
        known[receivers, abroad] = True
        inside += _within_node(known, wanted & ~known, first)
    return _joined(between), _joined(inside)


def _within_node(known: np.ndarray, lacks: np.ndarray, first: int) -> Iterator[Messages]:
    """The messages to each rank of a node, whose first rank this is, from those that hold what it lacks."""
    holders = _Holders(known)
    for place, row in enumerate(lacks):
        cells = np.flatnonzero(row)
        yield Messages(cells, first + holders.of(cells, cells + place), np.full(len(cells), first + place))


def _joined(messages: Sequence[Messages]) -> Messages:
    return Messages(*map(np.concatenate, zip(*messages, strict=True)))


def loads(waves: Sequence[Messages], sizes: np.ndarray, world: int) -> np.ndarray:
    """Amounts that each rank sends and receives, where cells have these sizes: waves x 2 x ranks."""
    found = np.zeros((len(waves), 2, world))
    for of_wave, wave in zip(found, waves, strict=True):
        of_wave[0] = np.bincount(wave.senders, sizes[wave.cells], minlength=world)
        of_wave[1] = np.bincount(wave.receivers, sizes[wave.cells], minlength=world)
    return found


def seconds(nbytes: np.ndarray, cluster: Cluster) -> float:
    """Seconds of two waves with the `loads` of ranks in bytes: the fullest link of each decides."""
    world = nbytes.shape[-1]
    within = min(world, cluster.devices_per_node)
    ends = (cluster.links[-1], -(-world // within)), (cluster.links[0], within)
    took = 0.0
    for (link, members), wave in zip(ends, nbytes, strict=True):
        if wave.any():
            took += link.latency_s + float(wave.max()) / link.wire("all_to_all", members)
    return took
