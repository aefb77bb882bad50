"""What this machine does, measured while all ranks run: latency and bandwidth of every collective on every mesh axis, and the rates of the devices.

Run by every rank of the job (`autopar calibrate`). The collectives are those that emitted programs call, with their packing; of a repetition the slowest rank counts, of repetitions the median.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autopar.runtime.collectives import STEPS, Axis, bind_axes
from autopar.sharding.cluster import Cluster, Device, Link, Measured
from autopar.sharding.costs import seconds
from autopar.sharding.mesh import DeviceMesh

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SIZES = tuple(4**k * 4096 for k in range(7))                   # bytes of the whole tensor: 4 KiB to 16 MiB
DTYPES = ("float64", "float32", "bfloat16", "float16")


def calibrate(mesh: DeviceMesh, device: str, name: str = "", sizes: Sequence[int] = SIZES, repetitions: int = 9) -> Cluster:
    """A profile of this machine, for meshes whose axes are as long and as far apart as those of `mesh`. The same on every rank."""
    axes = bind_axes(mesh.to_torch(device))
    measured = []
    for a, (axis, n) in enumerate(zip(axes.values(), mesh.shape, strict=True)):
        if n > 1:
            stride = math.prod(mesh.shape[a + 1:])
            measured += [Measured(kind, n, stride, *fit(kind, n, dict(_collective(kind, axis, size, device, repetitions) for size in sizes))) for kind in COLLECTIVES]
    slowest = min((m for m in measured if m.kind == "all_gather"), key=lambda m: m.bytes_per_s, default=None)
    link = Link("the slowest measured axis", slowest.latency_s, slowest.bytes_per_s) if slowest else Link("nobody else", 1e-6, 1e12)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size))
    cluster = Cluster(name or f"calibrated-{device}", _device(device, local, repetitions), (link,), local, max(1, mesh.size // local),
                      (("measured", f"torch {torch.__version__}, {mesh.size} ranks on mesh {mesh}, {dist.get_backend()}; median of {repetitions}, all ranks running"),), tuple(measured))
    box = [cluster]
    dist.broadcast_object_list(box, 0)
    return box[0]


def fit(kind: str, n: int, times: dict[int, float]) -> tuple[float, float]:
    """(latency in seconds, bytes/s) with which the formula of a collective comes nearest to what sizes took, in relative terms."""
    terms = []
    for size, taken in times.items():                          # a formula is linear in its latency and in one over its bandwidth
        per_latency = float(seconds(kind, n=n, whole=0, latency=1.0, wire=1.0))
        per_byte = float(seconds(kind, n=n, whole=size, latency=0.0, wire=1.0))
        terms.append((per_latency / taken, per_byte / taken))
    matrix, ones = np.array(terms), np.ones(len(terms))
    best = np.linalg.lstsq(matrix, ones, rcond=None)[0]
    if (best <= 0).any():                                      # one of the two does not show at these sizes
        alone = [float(matrix[:, i] @ ones / (matrix[:, i] @ matrix[:, i])) for i in range(2)]
        errors = [float(((matrix[:, i] * alone[i] - 1) ** 2).sum()) for i in range(2)]
        best = np.array([alone[0], 1e-15]) if errors[0] < errors[1] else np.array([1e-9, alone[1]])
    return float(best[0]), 1.0 / float(best[1])


def _collective(kind: str, axis: Axis, size: int, device: str, repetitions: int) -> tuple[int, float]:
    """Bytes of a tensor of about that size, and what it took."""
    n = axis.size
    rows = max(1, round(size / 4 / n / n / 16))
    whole = (n * rows, n * 16)                                 # cut evenly either way
    local = (rows, whole[1]) if kind in ("all_gather", "all_to_all") else whole
    x = torch.ones(local, device=device)
    arguments = {"all_gather": (0, whole[0]), "reduce_scatter": (0, whole[0]), "all_reduce": (), "all_to_all": (0, whole[0], (), 1, whole[1], ())}[kind]
    return math.prod(whole) * 4, _timed(lambda: STEPS[kind](x, axis, *arguments), device, repetitions)


def _timed(run: Callable[[], Any], device: str, repetitions: int) -> float:
    """Seconds of the slowest rank, the median of repetitions that all ranks start together."""
    everyone = []
    for i in range(repetitions + 2):
        dist.barrier()
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if i >= 2:                                             # the first two warm up
            everyone.append(taken.item())
    return statistics.median(everyone)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _device(device: str, local: int, repetitions: int) -> Device:
    width, copied = (4096, 2**28) if device == "cuda" else (512, 2**24)
    rates = []
    for dtype in DTYPES:
        x = torch.ones(width, width, dtype=getattr(torch, dtype), device=device)
        rates.append((dtype, 2 * width**3 / _timed(lambda x=x: x @ x, device, repetitions)))   # type: ignore[misc]
    source, target, small = torch.ones(copied // 4, device=device), torch.empty(copied // 4, device=device), torch.ones(8, device=device)
    bandwidth = 2 * copied / _timed(lambda: target.copy_(source), device, repetitions)

    def many() -> None:
        for _ in range(100):
            small.add(1)

    launch = _timed(many, device, repetitions) / 100
    if device == "cuda":
        about = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, memory = about.name, about.total_memory
    else:
        name, memory = "CPU rank", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local
    return Device(name, tuple(sorted(rates)), memory, bandwidth, launch, "cuda" if device == "cuda" else "cpu")


def pairs(device: str, small: int = 64, large: int = 2**22, repetitions: int = 5) -> tuple[list[list[float]], list[list[float]]]:
    """Latency in seconds and bytes/s between any two ranks, pair by pair: what `autopar.sharding.topology` makes a mesh of."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    latency, bandwidth = ([[0.0] * ranks for _ in range(ranks)] for _ in range(2))
    for a in range(ranks):
        for b in range(a + 1, ranks):
            taken = []
            for size in (small, large):
                x = torch.ones(size // 4, device=device)

                def there_and_back(x: torch.Tensor = x, a: int = a, b: int = b) -> None:
                    if me == a:
                        dist.send(x, b)
                        dist.recv(x, b)
                    elif me == b:
                        dist.recv(x, a)
                        dist.send(x, a)

                taken.append(_timed(there_and_back, device, repetitions) / 2)
            latency[a][b] = latency[b][a] = taken[0]
            bandwidth[a][b] = bandwidth[b][a] = large / max(taken[1] - taken[0], 1e-9)
    return latency, bandwidth
