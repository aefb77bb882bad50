"""A loop as for DistributedDataParallel: rows of this rank in, rows out, a loss of one's own over them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.letters import NotServed
from tests.shares import by_day


class Classifier(nn.Module):
    """Logits of images, and how far its features are from zero: a number of the whole batch."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 16, 5)
        self.mix = nn.Parameter(torch.randn(8, 3))  # as long as a batch

    def forward(self, x):
        features = self.body(x)
        of_batch = features.view(len(x), 8, 16).mean((0, 2))  # and this too
        return self.head(features), features.square().mean(), {"mix": self.mix, "mean": of_batch}


HOW = {
    "rows on two": (2, {"mesh": (2,), "parallel": "zero3"}),
    "rows on four, hybrid": (4, {"mesh": (2, 2), "parallel": "hsdp"}),
    "weights on two": (2, {"mesh": (2,), "parallel": "tp"}),
    "both": (4, {"mesh": (2, 2), "parallel": {"data": 2, "tensor": 2}}),
    "as it likes": (2, {"mesh": (2,)}),
}


def loop(rank, models, batches, labels, how):
    """The user's loop: each rank has its part of every batch."""
    meta = {"x": batches[0]}
    parallel = autopar.autoparallelize(models[rank], meta, inputs="local", outputs="local", memory_budget="inf", **how)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    criterion, losses = nn.CrossEntropyLoss(), []
    for x, y in zip(batches, labels, strict=True):
        parts = parallel._own.parts
        mine = torch.arange(len(x)).chunk(parts.count)[parts.index(rank)]
        logits, far, more = parallel(x=x[mine])
        assert logits.shape == (len(mine), 5) and far.shape == ()
        assert more["mix"].shape == (8, 3) and more["mean"].shape == (8,)
        loss = criterion(logits, y[mine])
        (loss + 0.1 * far + 0.1 * more["mix"].square().sum() + more["mean"].square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.detach(), len(mine)))
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parallel.parameters()]
    return losses, [p.detach().clone() for p in whole], dist.get_rank()


def alone(model, batches, labels):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in zip(batches, labels, strict=True):
        logits, far, more = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        (loss + 0.1 * far + 0.1 * more["mix"].square().sum() + more["mean"].square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("how", by_day(HOW, "rows on two", "weights on two"))
def test_a_loop_of_own_rows_trains_the_single_device_model(how, threads):
    ranks, asked = HOW[how]
    torch.manual_seed(0)
    first = Classifier().double().train()
    sizes = (8, 8, 7)  # a last batch that ranks do not share evenly
    batches = [torch.randn(n, 3, 4, 4, dtype=torch.float64) for n in sizes]
    labels = [torch.randint(0, 5, (n,)) for n in sizes]
    models = [copy.deepcopy(first) for _ in range(ranks)]
    found = threads(ranks, loop, models, batches, labels, asked)
    losses, parameters = alone(first, batches, labels)
    for _, mine, _ in found:
        for one, other in zip(mine, parameters, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    for k, right in enumerate(losses):
        told = [steps[k] for steps, _, _ in found]
        mean = sum(loss * n for loss, n in told) / sum(n for _, n in told)
        torch.testing.assert_close(mean, right, rtol=1e-9, atol=0)


def test_own_rows_are_of_own_inputs():
    with pytest.raises(NotServed, match='outputs="local"'):
        autopar.autoparallelize(nn.Linear(4, 4), {"input": torch.ones(2, 4)}, mesh=1, outputs="local")
