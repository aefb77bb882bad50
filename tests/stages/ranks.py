"""Four processes that are the ranks of one job and go through checks in turn, each against eager on one device."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import pathlib
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

import autopar
import autopar.api

RANKS = 4


def made(model, batch, shape=(2, 2), **how):
    """The model in stages along the first axis of a mesh."""
    mesh = autopar.DeviceMesh(shape, ("pp", "tp")[: len(shape)])
    how = {"microbatches": 4, "memory_budget": "inf", "parallel": "megatron", **how}
    return autopar.autoparallelize(model, batch, mesh=mesh, **{"timeout_s": 60.0, **how})


def apart(mine, right):
    """The largest difference, as a share of the largest of what is right."""
    mine, right = ((each.full_tensor() if hasattr(each, "full_tensor") else each).detach() for each in (mine, right))
    assert mine.shape == right.shape, (mine.shape, right.shape)
    return float((mine - right).abs().max() / right.abs().max().clamp(min=1e-30))


def _rank(rank, folder, run):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    said = pathlib.Path(folder, f"{rank}.json")
    failed = []
    try:
        for name, check in run(pathlib.Path(folder)):
            start = time.process_time()
            try:
                check()
            except AssertionError:
                failed.append(f"{name}: {traceback.format_exc(limit=-3).rstrip()}")
            if "TOLD" in os.environ and rank in (0, 3):
                print(rank, name, f"{time.process_time() - start:.2f} CPU s", failed[-1:], flush=True)
    except BaseException:
        failed.append(f"{name}: {traceback.format_exc().rstrip()}")
        said.write_text(json.dumps(failed))
        raise
    said.write_text(json.dumps(failed))
    if "TOLD" in os.environ:
        print(rank, f"{time.process_time():.1f} CPU s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def outcome(run, folder, limit_s=240):
    """What the ranks have found wrong in a run of checks, by rank; no process outlives the call."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["autopar.testing.preload"])
    ranks = [context.Process(target=_rank, args=(rank, str(folder), run), daemon=True) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    end = time.monotonic() + limit_s
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
    for process in ranks:
        process.kill()
        process.join()
    assert all(process.exitcode is not None for process in ranks)
    said = {rank: pathlib.Path(folder, f"{rank}.json") for rank in range(RANKS)}
    found = {r: json.loads(f.read_text()) if f.is_file() else ["did not end"] for r, f in said.items()}
    for rank, failed in found.items():
        print(*(f"rank {rank}: {each}" for each in failed), sep="\n")
    return {r: [each.splitlines()[-1][:200] for each in failed] for r, failed in found.items()}


NONE = {rank: [] for rank in range(RANKS)}
