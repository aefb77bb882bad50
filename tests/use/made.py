"""Models that command lines of tests name: `tests/use/made.py:...`."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Stack(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(p) for _ in range(2)), nn.Linear(16, 4)

    def forward(self, x, labels):
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def build():
    """A model alone: its inputs are named beside it."""
    return Stack()


def with_inputs():
    """Inputs that are others each time, as those of torch.empty are."""
    x = torch.tensor(np.random.default_rng().normal(size=(8, 16)), dtype=torch.float32)
    return Stack(), {"x": x, "labels": torch.zeros(8, dtype=torch.int64)}


def of_no_numbers():
    return Stack(), {"x": torch.full((8, 16), torch.nan), "labels": torch.zeros(8, dtype=torch.int64)}


def dropping():
    return Stack(0.3), {"x": torch.randn(8, 16), "labels": torch.zeros(8, dtype=torch.int64)}


def no_model():
    return 3


def other():
    return nn.Linear(16, 16), (torch.randn(8, 16),)


def of_width(width):
    return nn.Linear(width, width)


def three():
    return Stack(), {}, 1


class Attends(nn.Module):
    """Draws inside of attention alone."""

    def __init__(self):
        super().__init__()
        self.query, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, labels):
        q = self.query(x).view(-1, 4, 2, 8).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.3 if self.training else 0.0)
        return nn.functional.cross_entropy(self.head(seen.transpose(1, 2).flatten(2).mean(1)), labels)


def attending():
    return Attends(), {"x": torch.randn(8, 4, 16), "labels": torch.zeros(8, dtype=torch.int64)}
