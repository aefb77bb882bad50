"""A convolutional network with batch norm, cut by the batch.

Statistics are those of the whole batch, and running statistics are the same on every device.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.testing import Equality
from tests.training import whole


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deep, self.deep_norm = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x, y):
        h = self.norm(self.stem(x)).relu_()
        h = F.max_pool2d(h + self.deep_norm(self.deep(h)), 2)
        return F.cross_entropy(self.head(h.mean((2, 3))), y)


BY_BATCH = dict.fromkeys(("x", "stem", "norm", "deep", "deep_norm"), "S(0)@0, S(0)@1")
BY_CHANNEL = {"stem": "S(1)@0", "norm": "S(1)@0"}


@pytest.mark.parametrize(
    "constraints, code",
    [(BY_BATCH, "batch_norm_part"), (BY_CHANNEL, "batch_norm_updating"), (None, "")],
    ids=["batch", "channel", "free"],
)
def test_it_trains_as_on_one_device(constraints, code, threads):
    model = Net().double()
    batch = {"x": torch.randn(8, 3, 8, 8).double(), "y": torch.randint(0, 5, (8,))}

    def trained(mine):
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            mine(**batch).backward()
            optimizer.step()
        return {
            **{n: whole(p.detach()) for n, p in mine.named_parameters()},
            **{n: b.double() for n, b in mine.named_buffers()},
        }

    expected = trained(copy.deepcopy(model))
    plan = autopar.plan(model, batch, mesh=(2, 2), constraints=constraints)

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        return trained(mine), mine.code

    for result, text in threads(4, body):
        Equality.in_float64("parameters and buffers after three steps", result, expected, 1e-9).check()
        assert code in text
