"""Sums of slots from a kernel in the interpreter are those of torch's ops, slot by slot."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.kernels import slot_sums
from autopar.runtime import slots


def _given(dtype, rows=5, count=3, pairs=11, columns=70):
    """What was made of some pairs, some of which no row takes; the places of slots, weights, and earlier sums."""
    dice = torch.Generator().manual_seed(3)
    made = torch.randn(pairs, columns, generator=dice).to(dtype)
    made[-1] = torch.nan  # a pair of no expert is arbitrary
    places = torch.randint(-1, pairs - 1, (rows, count), generator=dice)
    places[0] = -1
    weights = torch.rand(rows, count, generator=dice).to(dtype)
    return made, places, weights, torch.randn(rows, columns, generator=dice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_is_that_of_the_ops(dtype, interpret):
    made, places, weights, before = _given(dtype)
    for shares, begun, to in itertools.product((weights, None), (before, None), (torch.float32, dtype)):
        given = made, places, shares
        right = slots.sums_in_steps(*given, begun if begun is None else begun.clone(), to)
        found = slot_sums.sums(*given, begun, to)
        assert found.dtype == to and torch.isfinite(found).all()
        torch.testing.assert_close(found, right, rtol=2e-7 if to == torch.float32 else 8e-3, atol=1e-6)


def test_slots_are_added_in_their_order(interpret):
    """Of 1, 1e8 and -1e8 the sum is 0 in this order, and 1 in others."""
    made = torch.tensor([[1e8], [-1e8], [1.0]])
    assert slot_sums.sums(made, torch.tensor([[2, 0, 1], [0, 1, 2]]), None, None, torch.float32).tolist() == [[0], [1]]


def test_what_the_kernel_does_not_serve_runs_as_ops(interpret):
    made, places, weights, _ = _given(torch.float64)
    found = slot_sums.sums(made, places, weights, None, torch.float64)
    assert torch.equal(found, slots.sums_in_steps(made, places, weights, None, torch.float64))
    assert slots.KERNELS["cuda"] is slot_sums.sums
