"""Segments: tiles of an attention that one call of a kernel computes, which takes sequences of any lengths.

Documents, pieces that were dealt and rows of a batch are calls of their own elsewhere. Such a kernel has them all end
to end, under one window, whose ends are counted from the last query and the last key of each segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from autopar.runtime.private import Lengths
from autopar.runtime.sees import Tile


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of some tiles among those of a tensor [batch, heads, rows, width], one tile after the other."""

    batch: Tensor
    places: Tensor
    is_all: bool  # whether they are all rows in their order

    def packed(self, x: Tensor) -> Tensor:
        """The rows of a tensor, as [rows, heads, ...]."""
        by_row = x.transpose(1, 2)
        return by_row.flatten(0, 1) if self.is_all else by_row[self.batch, self.places]


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Tiles of one call, of which no two have a query in common."""

    tiles: Sequence[Tile]
    window: tuple[int, int]

    def rows(self, like: Tensor, of_keys: bool) -> Rows:
        """The rows of queries, or of keys, of a tensor that has them."""
        batches = []
        places = []
        for tile in self.tiles:
            run = tile.keys if of_keys else tile.queries
            for b in range(*tile.batch.indices(like.shape[0])):
                places.append(np.arange(run.start, run.stop))
                batches.append(np.full(run.stop - run.start, b))
        found = np.stack([np.concatenate(batches), np.concatenate(places)])
        is_all = np.array_equal(found[0] * like.shape[2] + found[1], np.arange(like.shape[0] * like.shape[2]))
        batch, place = torch.from_numpy(found).to(like.device)
        return Rows(batch, place, is_all)

    def lengths(self, like: Tensor) -> Lengths:
        """The ends of all segments, for a tensor with queries."""
        ends = []
        for of_keys in (False, True):
            sizes = []
            for tile in self.tiles:
                run = tile.keys if of_keys else tile.queries
                sizes += [run.stop - run.start] * len(range(*tile.batch.indices(like.shape[0])))
            ends.append(np.cumsum([0, *sizes], dtype=np.int32))
        most = (int(np.diff(of).max()) for of in ends)
        return Lengths(*(torch.from_numpy(of).to(like.device) for of in ends), *most)


def window_of(tile: Tile) -> tuple[int, int]:
    """The window of a tile, counted from its last query and key; -1 stands for none."""
    ends = tile.queries.stop - tile.queries.start - (tile.keys.stop - tile.keys.start)
    left = -1 if tile.first is None else -tile.first - ends
    right = -1 if tile.last is None else tile.last + ends
    return left, right


def segments_of(tiles: Iterable[Tile], batch: int, rows: int) -> list[Segments]:
    """The calls that compute tiles of so many queries, with as many tiles in each as can be."""
    found: list[tuple[tuple[int, int], list[Tile], np.ndarray]] = []
    for tile in sorted(tiles, key=lambda tile: (tile.first is None, tile.last is None)):
        fitting = (i for i, (window, _, has) in enumerate(found) if _fits(tile, window) and not _has(has, tile))
        if (i := next(fitting, None)) is None:
            i = len(found)
            found.append((window_of(tile), [], np.zeros((batch, rows), bool)))
        found[i][1].append(tile)
        found[i][2][tile.batch, tile.queries] = True
    return [Segments(own, window) for window, own, _ in found]


def _has(queries: np.ndarray, tile: Tile) -> bool:
    return bool(queries[tile.batch, tile.queries].any())


def _fits(tile: Tile, window: tuple[int, int]) -> bool:
    """Whether a tile sees under a window what it sees under its own."""
    left, right = window_of(tile)
    keys, queries = (run.stop - run.start for run in (tile.keys, tile.queries))
    fits_left = left == window[0] or (left < 0 and window[0] >= keys - 1)
    fits_right = right == window[1] or (right < 0 and window[1] >= queries - 1)
    return fits_left and fits_right
