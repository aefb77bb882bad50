"""A job that is stopped and started again goes on from where it saved last, on other ranks and under another plan, too.

torchrun --nproc-per-node 2 --max-restarts 3 examples/resume.py --parallel tp --steps 4
torchrun --nproc-per-node 4 --max-restarts 3 examples/resume.py --parallel fsdp --steps 8
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import autopar


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(32, 128), nn.Dropout(0.1), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(self.drop(torch.relu(self.up(x))))).square().mean()


def batch(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(16, 32, generator=torch.Generator().manual_seed(step))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="checkpoints")
    parser.add_argument("--parallel", default="fsdp")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--every", type=int, default=2)
    asked = parser.parse_args()
    torch.manual_seed(0)
    model = autopar.autoparallelize(Net(), batch(0), parallel=asked.parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    start = autopar.load(asked.folder, model, optimizer, scheduler)  # at step 0 where nothing was saved yet
    for step in range(start.step, asked.steps):
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step}: {loss.item():.6f}")
        done = step + 1
        if done % asked.every == 0 or done == asked.steps:  # the last one waits until it is written
            autopar.save(asked.folder, model, optimizer, scheduler, step=done, keep=3, wait=done == asked.steps)
