"""Descriptions of masks as calls on ranges: each pair that sees each other is in one call, and no other pair is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autopar.runtime.sees import Places, Sees, all_pairs, ranges_of, seen_pairs

QUERIES, KEYS = 11, 14
REACHES = (None, 0, 1, 2, 5, 30, -1, -3)  # also windows of one place, past all keys, and that leave places near by out
DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def pairs_one_by_one(sees: Sees, queries: int, keys: int, documents, counts, row: int) -> torch.Tensor:
    """Which keys each query of a row of the batch sees, as the words of a description say it."""

    own = None if documents is None else documents[min(row, len(documents) - 1)].tolist()

    def is_seen(i: int, j: int) -> bool:
        if sees.left is not None and j < i - sees.left:
            return False
        if sees.right is not None and j > i + sees.right:
            return False
        if sees.chunk is not None and i // sees.chunk != j // sees.chunk:
            return False
        if own is not None and own[i] != own[j]:
            return False
        return counts is None or bool(counts[min(row, len(counts) - 1)][j])

    return torch.tensor([[is_seen(i, j) for j in range(keys)] for i in range(queries)])


def drawn(rng: np.random.Generator):
    """A description, and what it says of two rows of a batch; documents have as many queries as keys."""
    left, right = (REACHES[rng.integers(len(REACHES))] for _ in range(2))
    sees = Sees(left, right, [None, 1, 4][rng.integers(3)])
    has_documents = rng.random() < 0.6
    queries = KEYS if has_documents else QUERIES
    dtype = DTYPES[rng.integers(len(DTYPES))]
    most = min(100, torch.iinfo(dtype).max) if dtype != torch.bool else 1
    documents = rng.integers(0, [2, most][rng.integers(2)] + 1, (rng.integers(1, 3), KEYS))
    counts = rng.random((rng.integers(1, 3), KEYS)) < 0.6
    counts[0] &= rng.random() < 0.8  # a row of padding alone
    told = torch.from_numpy(documents).to(dtype) if has_documents else None
    return sees, queries, told, torch.from_numpy(counts) if rng.random() < 0.5 else None


def some_rows(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.flatnonzero(rng.random(n) < rng.choice([0.3, 0.8, 1.0]))


@pytest.mark.parametrize("seed", range(8))
def test_calls_cover_each_pair_once(seed):
    rng = np.random.default_rng(seed)
    for _ in range(40):
        sees, queries, documents, counts = drawn(rng)
        own, others = some_rows(rng, queries), some_rows(rng, KEYS)
        places = Places.of(sees, (queries, KEYS), documents, counts)
        found = torch.zeros(2, len(own), len(others), dtype=torch.int64)
        for tile in places.tiles(sees, ranges_of(own), ranges_of(others), int(rng.integers(1, 6))):
            seen = seen_pairs(tile, torch.device("cpu"))
            assert bool(seen.any(1).all()), "every query of a call sees a key: its log-sum-exp is finite"
            found[tile.batch, tile.queries, tile.keys] += seen
        wanted = torch.stack([pairs_one_by_one(sees, queries, KEYS, documents, counts, row) for row in range(2)])
        assert torch.equal(found, wanted[:, own][:, :, others].long()), (sees, documents, counts)
        whole = all_pairs(sees, queries, KEYS, documents, counts)
        assert torch.equal(whole.expand(2, 1, queries, KEYS)[:, 0], wanted)
        rows = len(places.queries)
        np.testing.assert_array_equal(places.seen(sees, queries), wanted[:rows].sum((0, 2)).numpy())


def test_documents_have_any_numbers():
    """Numbers of 64 bits, and of 32, whose products would be too large for their type."""
    places = torch.arange(6)
    for numbers in (places << 34, places.int() << 27, -(places << 40), torch.tensor([3, 3, -(2**63), 2**63 - 1, 0, 0])):
        for chunk in (None, 2):
            found = Places.of(Sees(chunk=chunk), (6, 6), numbers[None], None).seen(Sees(), 6)
            wanted = pairs_one_by_one(Sees(chunk=chunk), 6, 6, numbers[None], None, 0).sum(1)
            np.testing.assert_array_equal(found, wanted.numpy())


@pytest.mark.parametrize("rows", [(0, None), (None, 0), (0, 1), (1, 0)])
def test_a_part_of_a_batch_may_have_no_row(rows):
    documents, counts = (None if n is None else torch.ones(n, KEYS, dtype=torch.int64) for n in rows)
    places = Places.of(Sees(right=0), (KEYS, KEYS), documents, counts)
    everything = [(0, KEYS)]
    assert not list(places.tiles(Sees(right=0), everything, everything, 4))
