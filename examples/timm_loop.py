"""timm's loop, with Mixup, an average of the weights and its scaler, on a model that runs in parallel.

    pip install timm
    torchrun --nproc-per-node 2 examples/timm_loop.py

What differs from a loop for one device is one line, and `foreach=False` of the average.
"""

from __future__ import annotations

import numpy
import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, NativeScaler
from torch.utils.data import DataLoader, TensorDataset

import autopar

ROWS, CLASSES, SIZE = 8, 10, 32


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("resnet10t", num_classes=CLASSES)


def train(net: torch.nn.Module, epochs: int = 2) -> tuple[list[float], torch.nn.Module]:
    """Losses and counts of what is right, and the average of the weights."""
    torch.manual_seed(1)
    numpy.random.seed(1)  # Mixup draws from it: the same on every rank, for all read the same batch
    data = TensorDataset(torch.randn(40, 3, SIZE, SIZE), torch.randint(0, CLASSES, (40,)))
    loader = DataLoader(data, ROWS)
    optimizer = create_optimizer_v2(net, opt="sgd", lr=0.05, weight_decay=1e-4, momentum=0.9)
    average = ModelEmaV3(net, decay=0.9, foreach=False)  # foreach mixes sharded parameters and plain buffers
    mixup, scaler = Mixup(mixup_alpha=0.2, label_smoothing=0.1, num_classes=CLASSES), NativeScaler(device="cpu")
    said = []
    for epoch in range(epochs):
        net.train()
        for i, (x, y) in enumerate(loader):
            x, y = mixup(x, y)
            loss = SoftTargetCrossEntropy()(net(x), y.to(x.dtype))
            scaler(loss, optimizer, clip_grad=1.0, parameters=net.parameters())
            optimizer.zero_grad()
            average.update(net, step=epoch * len(loader) + i)
            said.append(float(loss))
        with torch.no_grad():
            said.append(float(sum((average.module(x).argmax(-1) == y).sum() for x, y in loader)))
    return said, average.module


if __name__ == "__main__":
    net = autopar.autoparallelize(model(), (torch.empty(ROWS, 3, SIZE, SIZE),), parallel="fsdp", outputs="full")
    print(train(net)[0])
