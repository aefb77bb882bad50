"""Plan a model on a 2x2 mesh, and train it on four local processes beside the single-device model.

    make demo            or: python examples/demo.py
"""

from __future__ import annotations

import copy
import logging
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import autopar
from autopar.testing import on_processes

MESH = autopar.DeviceMesh((2, 2), ("dp", "tp"))
STEPS = 10


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MLP(nn.Module):
    """An ordinary single-device model that returns its own loss."""

    def __init__(self, width: int = 512, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y)


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(512, 512, generator=generator), "y": torch.randn(512, 512, generator=generator)} for _ in range(STEPS)]


def train(model: nn.Module) -> list[float]:
    """The user's own loop: it does not know whether the model is parallel."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_rank(rank: int, model: nn.Module, plan: autopar.Plan) -> list[float]:
    """What each of the four processes runs."""
    return train(autopar.autoparallelize(model, batches()[0], plan=plan))


def main() -> None:
    console = Console(width=160, soft_wrap=True)
    torch.manual_seed(0)
    logging.disable(logging.WARNING)
    model, batch = MLP(), batches()[0]

    console.print(f"planning an MLP of {sum(p.numel() for p in model.parameters()):,} parameters on mesh {MESH} ...")
    start = time.perf_counter()
    plan = autopar.plan(model, batch, mesh=MESH)
    console.print(f"planned in {time.perf_counter() - start:.1f} s\n")
    print(plan)
    plan.save("plan.json")

    console.print(f"\ntraining {STEPS} steps: one process, then four gloo processes under the plan ...")
    single = train(copy.deepcopy(model))
    start = time.perf_counter()
    parallel = on_processes(MESH.size, on_rank, model, plan)[0]
    console.print(f"four processes started, lowered and trained in {time.perf_counter() - start:.1f} s")

    table = Table("step", "single-device loss", "parallel loss", "difference")
    for step, (a, b) in enumerate(zip(single, parallel, strict=True)):
        table.add_row(str(step), f"{a:.8f}", f"{b:.8f}", f"{abs(a - b):.1e}")
    console.print(table)
    console.print(f"largest difference {max(abs(a - b) for a, b in zip(single, parallel, strict=True)):.1e}; the plan is in plan.json")


if __name__ == "__main__":
    main()
