"""A key, and parts of tensors whose elements are drawn by it."""

from __future__ import annotations

import torch

from autopar.runtime import random

KEY = torch.tensor(random.key_of(1234567, 3))
PARTS = {  # the whole shape, and places of each dim
    "a matrix": ([5, 40], [range(5), range(40)]),
    "more columns than a block": ([3, 5000], [range(3), range(5000)]),
    "a part of each dim": ([4, 6, 2000], [range(2, 4), range(3, 6), range(1000, 2000)]),
    "three dims before the last": ([3, 4, 6, 70], [range(3), range(1, 4), range(2, 5), range(70)]),
    "five dims before the last": (
        [2, 3, 2, 3, 4, 9],
        [range(1, 2), range(3), range(2), range(1, 3), range(4), range(9)],
    ),
    "rows beyond 32 bits": ([2**20, 2**20, 8], [range(2**20 - 2, 2**20), range(2**20 - 3, 2**20), range(8)]),
    "one dim": ([70], [range(10, 70)]),
    "a number": ([], []),
    "nothing": ([4, 8], [range(0), range(8)]),
}
