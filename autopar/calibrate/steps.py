"""Measure whole steps of a small model and compare them with their prediction.

On CPUs, kernels and collectives are measured one at a time, in loops with warm caches. A step meets cold caches, ranks
that share cores and are not quite as far, and the code around them. What all of that costs shows on whole steps alone;
there are two of them, as some of it grows with the work and some does not. A GPU runs one kernel after the other by its
own clock, and needs no such step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import autoparallelize
from autopar.calibrate.limits import LIMITS
from autopar.sharding.cluster import Cluster
from autopar.sharding.mesh import DeviceMesh

_LIMITS = LIMITS.steps


class Reference(nn.Module):
    """A small model: an embedding, blocks of two linear layers, a head, and the loss."""

    def __init__(self, width: int, blocks: int = 4, classes: int = 1024) -> None:
        super().__init__()
        self.table = nn.Embedding(classes, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(blocks))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.table(tokens)
        for norm, wide, narrow in zip(self.norms, self.wide, self.narrow, strict=True):
            x = x + narrow(F.gelu(wide(norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def beside_its_parts(mesh: DeviceMesh, cluster: Cluster, repetitions: int) -> tuple[float, float]:
    """The ratio of measured to predicted seconds of ops, and a step's seconds that do not grow with them.

    They are slope and height of the line through two steps of the reference, whose batch is cut over all devices. Its
    communication counts as measured: collectives are measured with all ranks running, in rows.
    """
    made = [_step(mesh, cluster, rows) for rows in _LIMITS.rows]
    taken = _slowest([step for step, *_ in made], _LIMITS.rounds * repetitions)
    few, many = (computed for _, computed, _ in made)
    least, most = (
        max(_LIMITS.least * computed, seconds - communicated)
        for seconds, (_, computed, communicated) in zip(taken, made, strict=True)
    )
    return line(few, least, many, most)


def line(few: float, least: float, many: float, most: float) -> tuple[float, float]:
    """Slope (at least `_LIMITS.least`) and height of the line through (few, least) and (many, most).

    The height is not negative: where the line would be below zero, it goes through zero and the large step instead.
    """
    slope = max(_LIMITS.least, (most - least) / (many - few))
    height = most - slope * many
    return (slope, height) if height > 0 else (most / many, 0.0)


def _step(mesh: DeviceMesh, cluster: Cluster, rows: int) -> tuple[Callable[[], None], float, float]:
    """A step of the reference with `rows` per device, and predicted seconds of its ops and communication."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 1024, (rows * mesh.size, _LIMITS.length))
    batch = {"tokens": tokens, "targets": tokens.clone()}
    model = autoparallelize(
        Reference(_LIMITS.width),
        batch,
        mesh=mesh,
        cluster=cluster,
        parallel="dp",
        memory_budget="inf",
        kernels=False,
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()

    computed = sum(decision.seconds for decision in model.plan.decisions.values())
    return step, computed, model.plan.step_time_s - computed


def _slowest(steps: Sequence[Callable[[], None]], repetitions: int) -> list[float]:
    """Median seconds over repetitions of each step, on the slowest rank.

    The steps take turns, so that noise meets all of them.
    """
    taken: list[list[float]] = [[] for _ in steps]
    for _ in range(_LIMITS.warm + repetitions):
        for step, seconds in zip(steps, taken, strict=True):
            step()  # warms caches and memory, as the step before does in training
            dist.barrier()
            start = time.perf_counter()
            step()
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds.append(slowest.item())
    return [statistics.median(seconds[_LIMITS.warm :]) for seconds in taken]
