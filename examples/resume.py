"""A run that is stopped goes on under another plan, on another mesh, bit for bit where the mesh is the same.

torchrun --nproc-per-node 2 examples/resume.py --parallel tp --steps 4
torchrun --nproc-per-node 4 examples/resume.py --parallel fsdp --steps 8 --resume
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autopar


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(32, 128), nn.Dropout(0.1), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(self.drop(torch.relu(self.up(x))))).square().mean()


def batch(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(16, 32, generator=torch.Generator().manual_seed(step))}


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "random": model.random_state, "step": torch.zeros(1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="checkpoint")
    parser.add_argument("--parallel", default="fsdp")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    model = autopar.autoparallelize(Net(), batch(0), parallel=asked.parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if asked.resume:
        read = states(model, optimizer)
        dcp.load(read, checkpoint_id=asked.folder)
        set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
        first = int(read["step"])
    for step in range(first, asked.steps):
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: {loss.item():.6f}")
    saved = states(model, optimizer)
    saved["step"].fill_(asked.steps)
    dcp.save(saved, checkpoint_id=asked.folder)
