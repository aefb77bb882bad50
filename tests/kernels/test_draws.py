"""Bits by position from a kernel in the interpreter are those of torch's ops."""

from __future__ import annotations

import pytest
import torch

from autopar.kernels import draws
from autopar.runtime import random
from tests.kernels.drawn import KEY, PARTS


@pytest.mark.parametrize("name", PARTS)
def test_bits_and_masks_are_those_of_the_ops(name, interpret):
    shape, places = PARTS[name]
    places = [torch.tensor(list(at), dtype=torch.int64) for at in places]
    for op in (0, 7):
        right = random._bits_at(KEY, op, shape, places)
        assert torch.equal(draws.bits_at(KEY, op, shape, places), right)
        for p in (0.0, 0.1, 0.5, 0.999):
            found = draws.kept_at(KEY, op, p, shape, places)
            assert found.dtype == torch.bool and torch.equal(found, random._kept_at(KEY, op, p, shape, places))


def test_a_draw_on_a_gpu_is_the_kernel():
    """Both ops have it registered for CUDA, and keep torch's ops on a CPU."""
    for op in (torch.ops.autopar.bits_at, torch.ops.autopar.kept_at):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op.default.name(), "CUDA")
    places = [torch.arange(4), torch.arange(8)]
    assert torch.equal(random.bits_at(KEY, 1, [4, 8], places), random._bits_at(KEY, 1, [4, 8], places))
