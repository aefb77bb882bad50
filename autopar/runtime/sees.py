"""`Sees`: which keys a query of an attention sees, as a few numbers; no tensor of queries by keys is ever made.

`tiles` gives the calls of kernels that make up a part of an attention, from ranges of queries and of keys:

    keys          0 ..... a ......... z
    queries a-z   | all of | up to their
                  | these  | own place       right=0: a call without a mask, and a causal square
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Ranges = Sequence[tuple[int, int]]
FAR = 1 << 60  # farther than any place


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tuned sizes of the calls that make up an attention."""

    # Queries of a call at a window's edge where no kernel has windows: half a window is then computed in vain. Chosen.
    block: int = 512
    scores: int = 1 << 24  # scores that are in memory at once where attention is written out
    # Pieces of a device where queries are dealt by work. Documents of drawn lengths then differ by a few percent.
    pieces: int = 16
    # Devices of a ring as long as which any is counted: a first step, a second, a last, and others, all like a third.
    ring: int = 4


SIZES = Sizes()


@dataclass(frozen=True, slots=True)
class Sees:
    """What a query sees by places alone, and how scores become weights; as text it is an argument of the op."""

    left: int | None = None  # keys before a query that it sees; None: all of them
    right: int | None = None  # keys behind a query that it sees; 0: causal
    chunk: int | None = None  # a query sees keys of its own chunk of so many places
    softcap: float | None = None  # scores pass through softcap * tanh(. / softcap)
    scale: float | None = None  # None: by the width of queries
    length: int | None = None  # length of documents by which a call is priced; it changes no value

    def text(self) -> str:
        """Text such as `left=4095 right=0`."""
        said = ((f.name, getattr(self, f.name)) for f in fields(self))
        return " ".join(f"{name}={value!r}" for name, value in said if value is not None)

    @staticmethod
    @functools.cache
    def of(text: str) -> Sees:
        """Read what `text` says."""
        pairs = (pair.split("=") for pair in text.split())
        given: dict[str, Any] = {name: float(v) if name in ("softcap", "scale") else int(v) for name, v in pairs}
        return Sees(**given)

    @property
    def band(self) -> tuple[int, int]:
        """Keys before and behind a query that it sees, a large number for no end."""
        return FAR if self.left is None else self.left, FAR if self.right is None else self.right


class Tile(NamedTuple):
    """One call of a kernel: a range of queries, one of keys, and which of these see each other.

    A query i of the tile sees its keys from i + first to i + last; both None: all.
    """

    batch: slice
    queries: slice
    keys: slice
    first: int | None = None
    last: int | None = None

    @property
    def of_queries(self) -> tuple[slice, slice, slice]:
        """The place of its queries among [batch, heads, rows]."""
        return self.batch, slice(None), self.queries

    @property
    def of_keys(self) -> tuple[slice, slice, slice]:
        """The place of its keys among [batch, heads, rows]."""
        return self.batch, slice(None), self.keys

    @property
    def is_square(self) -> bool:
        """Whether it is causal, as every kernel can be."""
        n = self.queries.stop - self.queries.start
        return self.last == 0 and self.first is None and self.keys.stop - self.keys.start == n

    def part(self, first: int, stop: int) -> Tile:
        """The tile of some of its queries."""
        start = self.queries.start
        ends = (None if end is None else end + first for end in (self.first, self.last))
        return Tile(self.batch, slice(start + first, start + stop), self.keys, *ends)


class Run(NamedTuple):
    """Places that follow each other and belong to one document and one chunk."""

    start: int
    stop: int
    number: tuple[int, int]  # both its document and its chunk


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """What tells the places of queries and keys apart: for each row of a batch, or once for all, their runs."""

    queries: Sequence[Sequence[Run]]
    keys: Sequence[Sequence[Run]]

    @staticmethod
    def of(sees: Sees, sizes: tuple[int, int], documents: Tensor | None, counts: Tensor | None) -> Places:
        """The places of a call with so many queries and keys."""
        numbers = None if documents is None else _on_host(documents)
        there: np.ndarray | None = None if counts is None else _on_host(counts).astype(bool)
        for told, size in ((numbers, sizes[0]), (numbers, sizes[1]), (there, sizes[1])):
            if told is not None and told.shape[1:] != (size,):
                raise ValueError(f"documents or counts of shape {told.shape}, and an attention of {size} places")
        (rows,) = np.broadcast_shapes((1,), *((len(x),) for x in (numbers, there) if x is not None))
        found: list[list[list[Run]]] = []
        for is_key, size in enumerate(sizes):
            chunk: np.ndarray = np.arange(size) // (sees.chunk or FAR)
            of_rows = []
            for b in range(rows):
                document = np.zeros(size, np.int64) if numbers is None else numbers[min(b, len(numbers) - 1)]
                counted = there[min(b, len(there) - 1)] if there is not None and is_key else None
                of_rows.append(_runs(document, chunk, counted))
            found.append(of_rows)
        return Places(*found)

    def seen(self, sees: Sees, queries: int) -> np.ndarray:
        """The number of keys that each query sees, summed over the rows of the batch."""
        total = np.zeros(queries)
        left, right = sees.band
        for own, others in zip(self.queries, self.keys, strict=True):
            for run, over in _met(own, others):
                i = np.arange(run.start, run.stop)
                total[i] += np.maximum(0, np.minimum(over.stop, i + right + 1) - np.maximum(over.start, i - left))
        return total

    def tiles(self, sees: Sees, queries: Ranges, keys: Ranges, block: int) -> Iterator[Tile]:
        """The calls on ranges of queries and of keys that lie one after the other in their tensors.

        Where a window begins inside the keys of a query, queries are taken `block` at a time; `FAR` is for kernels that
        have windows, for which keys that all queries see are no call of their own.
        """
        is_for_all = len(self.queries) == 1
        for b, (own, others) in enumerate(zip(self.queries, self.keys, strict=True)):
            batch = slice(None) if is_for_all else slice(b, b + 1)
            for run, over in _met(own, others):
                for at, (a, z) in _laid(queries, run):
                    for where, (c, d) in _laid(keys, over):
                        yield from _tiles_of(sees, _Pair(batch, a, z, at, c, d, where), block)


class _Pair(NamedTuple):
    """A range of queries and one of keys, and where they lie in their tensors."""

    batch: slice
    a: int
    z: int
    at: int
    c: int
    d: int
    where: int

    def tile(self, is_banded: bool, sees: Sees) -> Tile:
        left, right = sees.band
        shift = self.a - self.c
        first = shift - left if self.z - 1 - self.c > left else None
        last = shift + right if self.d - 1 - self.a > right else None
        given = (first, last) if is_banded else (None, None)
        return Tile(
            self.batch,
            slice(self.at, self.at + self.z - self.a),
            slice(self.where, self.where + self.d - self.c),
            *given,
        )

    def of_queries(self, a: int, z: int) -> _Pair:
        return self._replace(a=a, z=z, at=self.at + a - self.a)

    def of_keys(self, c: int, d: int) -> _Pair:
        return self._replace(c=c, d=d, where=self.where + c - self.c)


def _tiles_of(sees: Sees, pair: _Pair, block: int) -> Iterator[Tile]:
    left, right = sees.band
    pair = pair.of_keys(max(pair.c, pair.a - left), min(pair.d, pair.z + right))
    pair = pair.of_queries(max(pair.a, pair.c - right), min(pair.z, pair.d + left))
    if pair.a >= pair.z or pair.c >= pair.d or left + right < 0:  # The window may end before it begins.
        return
    is_left_open = pair.z - 1 - pair.c <= left
    is_causal = is_left_open and right == 0
    everybody = pair.a + right + 1  # the end of the keys that all of these queries see, if no window begins later
    if is_left_open and pair.d <= everybody:
        yield pair.tile(False, sees)
    elif is_causal and pair.c == pair.a and pair.d == pair.z:
        yield pair.tile(True, sees)
    elif is_causal and pair.a < pair.d < pair.z:  # Queries behind the last key.
        yield from _tiles_of(sees, pair.of_queries(pair.a, pair.d), block)
        yield from _tiles_of(sees, pair.of_queries(pair.d, pair.z), block)
    elif not is_causal and pair.z - pair.a > block:
        for a in range(pair.a, pair.z, block):
            yield from _tiles_of(sees, pair.of_queries(a, min(pair.z, a + block)), block)
    elif is_left_open and pair.c < everybody and block < FAR:
        first = pair.a if is_causal else everybody
        yield pair.of_keys(pair.c, first).tile(False, sees)
        rest = pair.of_keys(first, pair.d)
        yield rest.of_queries(max(pair.a, first - right), pair.z).tile(True, sees)
    else:
        yield pair.tile(True, sees)


def _met(queries: Sequence[Run], keys: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    """The runs of queries with each run of keys of the same number."""
    by_number: dict[tuple[int, int], list[Run]] = {}
    for run in keys:
        by_number.setdefault(run.number, []).append(run)
    for run in queries:
        for over in by_number.get(run.number, ()):
            yield run, over


def _laid(ranges: Ranges, run: Run) -> Iterator[tuple[int, tuple[int, int]]]:
    """The parts of ranges that are in a run, and where each lies among the ranges."""
    at = 0
    for first, last in ranges:
        a = max(first, run.start)
        if a < (z := min(last, run.stop)):
            yield at + a - first, (a, z)
        at += last - first


def _runs(documents: np.ndarray, chunks: np.ndarray, counted: np.ndarray | None) -> list[Run]:
    if not len(chunks):
        return []
    told = (x for x in (documents, chunks, counted) if x is not None)
    changes = np.logical_or.reduce([x[1:] != x[:-1] for x in told])
    starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
    # Documents may have any numbers: they and chunks stay apart, as no one number has room for both.
    numbers = zip(documents[starts].tolist(), chunks[starts].tolist(), strict=True)
    found = (Run(a, z, of) for a, z, of in zip(starts, [*starts[1:], len(chunks)], numbers, strict=True))
    return [run for run in found if counted is None or counted[run.start]]


_SEEN_ON_HOST: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _on_host(x: Tensor) -> np.ndarray:
    """A tensor's numbers; of a tensor that many calls read, the host asks once."""
    known = _SEEN_ON_HOST.get(x)
    version = -1 if x.is_inference() else x._version
    if known is None or known[0] != version or version < 0:
        known = version, x.detach().cpu().numpy()
        _SEEN_ON_HOST[x] = known
    return known[1]


def ranges_of(rows: np.ndarray) -> list[tuple[int, int]]:
    """The ranges that rows in ascending order make up."""
    if not len(rows):
        return []
    ends = [*(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    starts = [0, *ends[:-1]]
    return [(int(rows[a]), int(rows[z - 1]) + 1) for a, z in zip(starts, ends, strict=True)]


def seen_pairs(tile: Tile, device: torch.device) -> Tensor:
    """The pairs of a tile that see each other, as a tensor of its queries by its keys."""
    i = torch.arange(tile.queries.stop - tile.queries.start, device=device)[:, None]
    j = torch.arange(tile.keys.stop - tile.keys.start, device=device)
    seen = torch.ones(i.shape[0], j.shape[0], dtype=torch.bool, device=device)
    if tile.first is not None:
        seen &= j >= i + tile.first
    if tile.last is not None:
        seen &= j <= i + tile.last
    return seen


def all_pairs(
    sees: Sees, queries: int, keys: int, documents: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """The pairs of a whole call that see each other, as a tensor of queries by keys."""
    like = documents if documents is not None else counts
    device = torch.device("cpu") if like is None else like.device
    left, right = sees.band
    whole = Tile(slice(None), slice(0, queries), slice(0, keys), -left, right)
    seen = seen_pairs(whole, device)
    if sees.chunk:
        seen &= torch.arange(queries, device=device)[:, None] // sees.chunk == (
            torch.arange(keys, device=device) // sees.chunk
        )
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None])
    if counts is not None:
        seen = seen & counts[:, None].bool()
    return seen if seen.dim() == 2 else seen[:, None]
