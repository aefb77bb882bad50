"""A loop on Lightning Fabric whose model runs in parallel.

pip install lightning
torchrun --nproc-per-node 2 examples/fabric_loop.py
"""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autopar.integrations.fabric import AutoparStrategy

ROWS = 16  # of a batch, on all ranks together


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.0), nn.BatchNorm1d(64), nn.Linear(64, 10))


def train(fabric: Fabric, epochs: int = 2, folder: str = "", resume: str = "") -> tuple[list[float], nn.Module]:
    """Losses, norms and accuracies, and the model."""
    fabric.seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(88, 16), torch.randint(0, 10, (88,)))
    plain = model()
    net, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    loader, valid = fabric.setup_dataloaders(DataLoader(data, ROWS), DataLoader(data, ROWS))
    state = {"model": net, "optimizer": optimizer, "epoch": 0}
    if resume:
        fabric.load(resume, state)
    said = []
    for epoch in range(int(state["epoch"]), epochs):
        net.train()
        for i, (x, y) in enumerate(loader):
            waits = i % 2 == 0
            with fabric.no_backward_sync(net, enabled=waits):  # a step is of two batches
                loss = nn.functional.cross_entropy(net(x), y) / 2
                fabric.backward(loss)
            said.append(float(fabric.all_reduce(loss.detach())))
            if not waits:
                said.append(float(fabric.clip_gradients(net, optimizer, max_norm=0.5)))
                optimizer.step()
                optimizer.zero_grad()
        net.eval()
        with torch.inference_mode():
            right = sum((net(x).argmax(-1) == y).sum() for x, y in valid)
        said.append(float(fabric.all_reduce(right, reduce_op="sum")) / len(data))
        state["epoch"] = epoch + 1
        if folder:
            fabric.save(f"{folder}/{epoch + 1}", state)
    return said, net.module


if __name__ == "__main__":
    fabric = Fabric(strategy=AutoparStrategy((torch.empty(ROWS, 16),), parallel="fsdp"), devices=2)
    fabric.launch()
    fabric.print(train(fabric)[0])
