"""A job that may be stopped at any time, and goes on from its last complete checkpoint on as many ranks as there are.

autopar run --ranks 2 --max-restarts 3 --log-dir logs examples/ops/train.py --folder run --steps 8

The launchers beside this file start it. After SIGTERM, by which they announce an end, it leaves behind the next save.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
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


def loop(folder: Path, steps: int, stops: Sequence[int] = ()) -> None:
    """Train up to a step, from the last checkpoint on; ranks leave once `stops` of one of them is no longer empty."""
    torch.manual_seed(0)
    model = autopar.autoparallelize(Net(), batch(0), parallel="fsdp", cache=folder / "plans", timeout_s=60)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = autopar.load(folder, model, optimizer)
    for step in range(start.step, steps):
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: {loss.item():.6f}", flush=True)
        autopar.save(folder, model, optimizer, step=step + 1, keep=2)  # every so many steps, in earnest
        told = torch.tensor(len(stops), device=loss.device)
        dist.all_reduce(told)  # ranks are told at different moments, and leave after the same step
        if told:
            raise SystemExit(f"stopped after step {step}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("run"))
    parser.add_argument("--steps", type=int, default=8)
    asked = parser.parse_args()
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    loop(asked.folder, asked.steps, stops)
