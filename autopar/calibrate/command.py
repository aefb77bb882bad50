"""The work of `autopar calibrate` on each rank: measure, write the profile, and report it."""

from __future__ import annotations

import os
from importlib.metadata import version

import torch.distributed as dist

from autopar.calibrate.calibration import calibrate, merged
from autopar.calibrate.collectives import SIZES, pairs
from autopar.calibrate.stages import Stages
from autopar.calibrate.workloads import WORKLOADS
from autopar.letters import BadSharding, NotServed
from autopar.sharding.cluster import Cluster
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.topology import logical_mesh

_FEWEST = 2  # sizes of messages, whose seconds give a start and a rate


def measure(
    rank: int, shape: str | None, largest: int, with_pairs: bool, out: str, with_ops: bool = True, into: str = ""
) -> str:
    """Calibrate as one rank, and return the text that rank 0 prints.

    With `into`, a cluster by name or path, the measurements are merged into it.
    """
    base = Cluster.of(into) if into else None
    try:
        mesh = DeviceMesh.of(shape or dist.get_world_size())
    except BadSharding:
        raise BadSharding(f"--mesh {shape} is not a shape", advice="--mesh 2x4") from None
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    sizes = [s for s in SIZES if s <= largest]
    if len(sizes) < _FEWEST:
        raise NotServed(
            f"--largest {largest}: two sizes of messages are measured at least",
            advice=f"--largest {SIZES[_FEWEST - 1]}",
        )
    about = f"torch {version('torch')}, {dist.get_world_size()} ranks, mesh {mesh}, {device}, {sizes}, ops {with_ops}"
    stages = Stages(f"{out}.part", about)
    cluster = calibrate(
        mesh,
        device,
        os.path.splitext(os.path.basename(out))[0],
        sizes,
        workloads=WORKLOADS if with_ops else (),
        stages=stages,
    )
    tables = pairs(device) if with_pairs and mesh.size > 1 else None
    if rank:
        return ""
    (cluster if base is None else merged(base, cluster)).save(out)
    stages.end()
    lines = [
        f"{cluster.device.name}: "
        + ", ".join(f"{dtype} {rate:.3g} FLOP/s" for dtype, rate in cluster.device.flops_per_s)
        + f"; memory {cluster.device.memory_bytes_per_s:.3g} B/s; launch {cluster.device.launch_s:.2g} s"
    ]
    lines += [
        f"{m.kind:<15} of {m.size} ranks, {m.stride} apart: {m.latency_s:.3g} s + bytes / {m.bytes_per_s:.3g} B/s"
        for m in cluster.measured
    ]
    if cluster.host:
        lines.append(
            f"host {cluster.host}; both ways at once {cluster.host.both_bytes_per_s:.3g} B/s, a copy's start "
            f"{cluster.host.latency_s:.2g} s, AdamW {cluster.host.adamw_params_per_s:.3g} parameters/s a rank"
        )
    lines += [
        f"{len(cluster.timed)} ops and optimizers measured by size; compute hides {cluster.hidden:.0%} of a "
        "collective beside it"
    ]
    if tables:
        best = logical_mesh(*tables)
        lines.append(f"fastest links innermost: mesh {best.shape}, ranks {list(best.ranks) or 'in their order'}")
    return "\n".join([*lines, f'written to {out}: cluster="{out}"'])
