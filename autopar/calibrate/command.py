"""`autopar calibrate`: measure this machine, write its profile, and say in a few lines what was found."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist

from autopar.calibrate.calibration import SIZES, calibrate, pairs
from autopar.calibrate.workloads import WORKLOADS
from autopar.letters import BadSharding
from autopar.runtime.world import start_world
from autopar.sharding.cluster import Cluster
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.topology import logical_mesh
from autopar.testing.ranks import on_processes

_LIMIT_S = 1800.0  # for processes of this command


@dataclass(frozen=True, slots=True)
class Measurement:
    """The arguments of the command."""

    shape: str | None  # of the mesh whose axes are measured, as "2,4"; None: the world on one axis
    largest: int  # bytes of the largest message
    with_pairs: bool
    with_ops: bool
    out: str


def run(asked: Measurement, ranks: int | None) -> str:
    """Measure on so many processes of this command, or as a rank of the job that it runs in."""
    if ranks is not None and "RANK" not in os.environ:
        return on_processes(ranks, measure, asked, timeout_s=_LIMIT_S)[0]
    start_world()
    return measure(int(os.environ.get("RANK", "0")), asked)


def measure(rank: int, asked: Measurement) -> str:
    """Calibrate as one rank, and return the text that rank 0 prints."""
    try:
        sizes = tuple(map(int, asked.shape.split(","))) if asked.shape else dist.get_world_size()
        mesh = DeviceMesh(sizes)
    except ValueError:
        raise BadSharding(f"--mesh {asked.shape} is not a shape", advice="--mesh 2,4") from None
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    name, _ = os.path.splitext(os.path.basename(asked.out))
    messages = [size for size in SIZES if size <= asked.largest] or SIZES[:2]
    cluster = calibrate(mesh, device, name, messages, workloads=WORKLOADS if asked.with_ops else ())
    tables = pairs(device) if asked.with_pairs and mesh.size > 1 else None
    if rank:
        return ""
    cluster.save(asked.out)
    lines = _lines(cluster)
    if tables:
        best = logical_mesh(*tables)
        lines.append(f"fastest links innermost: mesh {best.shape}, ranks {list(best.ranks) or 'in their order'}")
    return "\n".join([*lines, f'written to {asked.out}: cluster="{asked.out}"'])


def _lines(cluster: Cluster) -> list[str]:
    """The device, its collectives, and how much was measured beside them."""
    device = cluster.device
    rates = ", ".join(f"{dtype} {rate:.3g} FLOP/s" for dtype, rate in device.flops_per_s)
    lines = [f"{device.name}: {rates}; memory {device.memory_bytes_per_s:.3g} B/s; launch {device.launch_s:.2g} s"]
    for m in cluster.measured:
        seconds = f"{m.latency_s:.3g} s + bytes / {m.bytes_per_s:.3g} B/s"
        lines.append(f"{m.kind:<15} of {m.size} ranks, {m.stride} apart: {seconds}")
    hides = f"compute hides {cluster.hidden:.0%} of a collective beside it"
    return [*lines, f"{len(cluster.timed)} ops and optimizers measured by size; {hides}"]
