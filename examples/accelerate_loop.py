"""A loop on Accelerate whose model runs in parallel.

pip install transformers accelerate
torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autopar.integrations.accelerate import Accelerator

ROWS = 16  # of a batch, on all ranks together


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 10))


def train(accelerator: Any, epochs: int = 2, folder: str = "", resume: str = "") -> tuple[list[float], nn.Module]:
    """Losses, norms and accuracies, and the model."""
    set_seed(1)
    data = TensorDataset(torch.randn(88, 16), torch.randint(0, 10, (88,)))
    rows = ROWS // accelerator.num_processes
    net = model()
    parts = net, torch.optim.AdamW(net.parameters(), lr=1e-2), DataLoader(data, rows, shuffle=True)
    net, optimizer, loader, valid = accelerator.prepare(*parts, DataLoader(data, rows))
    first = 0
    if resume:
        accelerator.load_state(resume)
        first = 1
    said = []
    for epoch in range(first, epochs):
        net.train()
        for x, y in loader:
            with accelerator.accumulate(net):
                loss = nn.functional.cross_entropy(net(x), y)
                accelerator.backward(loss)
                said.append(float(accelerator.gather(loss.detach()).mean()))
                if accelerator.sync_gradients:
                    said.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            outs = [accelerator.gather_for_metrics((net(x), y)) for x, y in valid]
        said.append(sum(float((out.argmax(-1) == y).sum()) for out, y in outs) / sum(len(y) for _, y in outs))
        if folder and epoch == 0:
            accelerator.save_state(folder)
    return said, accelerator.unwrap_model(net)


if __name__ == "__main__":
    planning = {"parallel": "fsdp"}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, planning=planning, inputs=lambda b: (b[0],))
    accelerator.print(train(accelerator)[0])
