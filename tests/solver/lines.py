"""Lines that are drawn: small chains of runs with skips, and models of such chains."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from autopar.space.timeline import Momentary, Run, Timeline


def drawn(seed: int, most: int = 8) -> Timeline:
    """A chain with skips: each run reads one or two values that were made before, and keeps some of what it has."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, most + 1))
    runs = []
    for i in range(count):
        before = list(range(i))
        reads = tuple(sorted(set(rng.choice(before[-3:], size=min(len(before), 2)).tolist()))) if before else ()
        keeps = tuple(v for v in (*reads, i) if rng.random() < 0.6)
        runs.append(Run(f"run{i}", float(rng.integers(1, 9)), reads, (i,), keeps, (), i))
    size = rng.integers(1, 9, count) * 2.0**20
    leaves = np.zeros(count, bool)
    leaves[-1] = rng.random() < 0.5
    held = np.zeros(2 * count + 1)
    every, momentary = tuple(range(count)), Momentary.nothing(len(held))
    line = Timeline(tuple(runs), size, leaves, every, count, held, momentary, every, {})
    line.other = np.zeros(len(held))  # nothing but the values of runs
    return line


OPS = {
    "linear": lambda x, w: F.linear(x, w),
    "gelu": lambda x, w: F.gelu(x),
    "sigmoid": lambda x, w: torch.sigmoid(x),
    "softmax": lambda x, w: x.softmax(-1),
    "norm": lambda x, w: F.layer_norm(x, (16,)),
    "square": lambda x, w: x * x,
    "row": lambda x, w: x * x.mean(-1, keepdim=True),
}


class Skips(nn.Module):
    """Two to four drawn ops behind a product; some add, or multiply by, what was made before."""

    def __init__(self, rng) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.names = rng.choice(list(OPS)[:-1], size=int(rng.integers(2, 5))).tolist()
        self.skips = rng.integers(0, 3, len(self.names)).tolist()

    def forward(self, x):
        made = [F.linear(x, self.weight)]
        for name, skip in zip(self.names, self.skips, strict=True):
            y = OPS[name](made[-1], self.weight)
            if 0 < skip <= len(made):
                y = y + made[-1] if skip == 1 else y * made[-skip]
            made.append(y)
        return made[-1].square().mean()
