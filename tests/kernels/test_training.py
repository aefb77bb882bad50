"""Steps with the kernels themselves: losses are those without, but for the order of sums."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar import Assume
from autopar.kernels import NAMES
from tests.language import llama

_ROWS, _LENGTH, _WORDS = 2, 4, 24


def losses(kernels, order, steps):
    """Of a tiny LLaMA that learns to count, its batches' rows in an order."""
    torch.manual_seed(0)
    model = llama(layers=1, width=16, inner=24, vocabulary=_WORDS, length=_LENGTH)
    dice = torch.Generator().manual_seed(1)
    starts = torch.randint(0, _WORDS, (steps, _ROWS, 1), generator=dice)
    batches = ((starts + torch.arange(_LENGTH)) % _WORDS)[:, order]
    asked = {"mesh": (1,), "memory_budget": "inf", "assume": Assume(no_padding=True), "kernels": kernels}
    ids = batches[0]
    parallel = autopar.autoparallelize(model, {"input_ids": ids, "labels": ids}, **asked)
    assert ("one kernel" in parallel.code) == bool(kernels)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    found = []
    for ids in batches:
        loss = parallel(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("steps", [12, pytest.param(200, marks=pytest.mark.nightly)])
def test_training_with_kernels_is_training(steps, interpret):
    plain, other = losses(False, [0, 1], steps), losses(False, [1, 0], steps)
    assert plain[-5:].mean() < (0.3 if steps == 200 else 0.9) * plain[:5].mean()
    noise = (other - plain).abs()
    assert 0 < noise.max() < 1e-3
    assert (losses(NAMES, [0, 1], steps) - plain).abs().max() <= 4 * noise.max()
