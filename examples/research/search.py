"""A search of your own, beside the bound of autopar's: simulated annealing over the same space."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

import autopar
from autopar.solver.program import solve
from autopar.solver.searches import SEARCHES
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.tracer import ColoTracer


class Annealing:
    """Changes one site at a time, and takes what is slower less and less often."""

    def __init__(self, moves: int, seed: int = 0) -> None:
        self.moves, self.rng = moves, np.random.default_rng(seed)

    def accepts(self, task, found) -> bool:
        return found.best is None

    def look(self, task, found):
        sites = task.space.sites
        here = best = task.counted.point([0] * len(sites))  # choices that stand first go together: nothing is cut
        for k in range(self.moves):
            picked = list(here.picked)
            i = int(self.rng.integers(len(sites)))
            picked[i] = int(self.rng.integers(len(sites[i].choices)))
            other = task.counted.point(picked)
            warm = 0.1 * (1 - k / self.moves) * best.seconds
            if np.isfinite(other.seconds) and other.seconds < here.seconds - warm * np.log(self.rng.uniform(1e-9, 1)):
                here = other
                best = min(best, here, key=lambda point: point.seconds)
        return replace(found, best=best, bound=max(found.bound, 0.0))


if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    graph = ColoTracer().trace(model, (torch.randn(2048, 1024),), loss=lambda out, inputs: out.square().mean())
    space = shardings(graph, Setting(autopar.DeviceMesh((4,)), autopar.Cluster.of("h100-8x1")))
    mine, best = solve(space, searches=(Annealing(2000),)), solve(space, searches=SEARCHES)
    print(f"annealing {mine.step_time_s * 1e6:.2f} us; proven best {best.step_time_s * 1e6:.2f} us")
    assert best.step_time_s <= mine.step_time_s
