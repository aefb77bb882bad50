"""A whole step of a small model, measured and predicted.

Kernels and collectives are measured one at a time, in loops whose operands are at hand. In a step they meet cold
caches, ranks that are not quite as far, and the code around them. What all of that takes is seen on a step alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import autoparallelize
from autopar.sharding.cluster import Cluster
from autopar.sharding.mesh import DeviceMesh
from autopar.tracer.precision import Precision

WARM = 2
LEAST = 0.5  # of the seconds of ops alone: less than that is an error of the collectives


class Reference(nn.Module):
    """Tokens through blocks of two linear layers, to classes and their loss."""

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


def beside_its_parts(mesh: DeviceMesh, device: str, cluster: Cluster, repetitions: int) -> float:
    """What the ops of a step of the reference take, by what is predicted of them; the batch is cut over all devices.

    Its communication takes what was measured of it: collectives are measured with all ranks running, in rows.
    """
    torch.manual_seed(0)
    # on a GPU long enough that it does not wait for the host
    width, rows, length = (4096, 8, 2048) if device == "cuda" else (256, 2, 64)
    tokens = torch.randint(0, 1024, (rows * mesh.size, length), device=device)
    batch = {"tokens": tokens, "targets": tokens.clone()}
    precision = Precision("bfloat16", "float32") if device == "cuda" else None
    model = autoparallelize(
        Reference(width).to(device),
        batch,
        mesh=mesh,
        cluster=cluster,
        parallel="dp",
        memory_budget="inf",
        precision=precision,
        kernels=False,
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()

    computed = sum(decision.seconds for decision in model.plan.decisions.values())
    communicated = model.plan.step_time_s - computed
    return max(LEAST * computed, _slowest(step, device, repetitions) - communicated) / computed


def _slowest(step: Callable[[], None], device: str, repetitions: int) -> float:
    """Seconds of the slowest rank, the median of repetitions."""
    taken = list[float]()
    for _ in range(WARM + repetitions):
        dist.barrier()
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        taken.append(seconds.item())
    return statistics.median(taken[WARM:])
