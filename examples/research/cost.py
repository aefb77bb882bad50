"""What would the best plan be if links were slower? A cluster is data: change a figure, and plan again."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import autopar


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


if __name__ == "__main__":
    batch = {"x": torch.empty(512, 1024, device="meta")}
    cluster = autopar.Cluster.of("h100-8x1")
    steps = []
    for slower in (1, 4, 16, 64):
        links = tuple(replace(link, bytes_per_s=link.bytes_per_s / slower, reached=()) for link in cluster.links)
        plan = autopar.plan(Block(), batch, mesh=(8,), cluster=replace(cluster, links=links), memory_budget="inf")
        does = str(plan).split("\nplan ", 1)[1].splitlines()[0].strip()
        steps.append(plan.step_time_s)
        print(f"links {slower:>2} times slower: {plan.step_time_s * 1e6:8.1f} us  {does}")
    assert steps == sorted(steps)
