"""A rank of a pipeline that ends, calls another shape or leaves out a backward: the others say in time who it was."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import pathlib
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from autopar.letters import Letter
from tests.stages.models import case
from tests.stages.ranks import RANKS, made

pytestmark = pytest.mark.machines
WRONG = 2  # the first rank of the second stage


def _rank(rank, folder, fault):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    model, batch = case("twice")
    mine = made(model, batch, timeout_s=4.0)
    mine(**batch).backward()
    dist.barrier()
    start = time.monotonic()
    said = "nothing", "", 0.0
    try:
        for step in range(3):
            if rank == WRONG and fault == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == WRONG and fault == "calls another shape":
                mine(**{name: rows[:4] for name, rows in batch.items()})
            loss = mine(**batch)
            if not (rank == WRONG and fault == "skips a backward" and step == 0):
                loss.backward()
    except Letter as e:
        said = type(e).__name__, str(e), time.monotonic() - start
        time.sleep(4.0 if rank == WRONG else 0.0)
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(said))
    os._exit(0)


@pytest.mark.parametrize(
    "fault, match",
    [
        ("is killed", f"rank {WRONG} did not come"),
        pytest.param("calls another shape", f"rank {WRONG} calls Twice with other", marks=pytest.mark.nightly),
        pytest.param(
            "skips a backward",
            f"rank 0 waited in the gradient of shared, with rank 0, {WRONG}",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_others_end_in_time_and_say_who_it_was(fault, match, tmp_path):
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["autopar.testing.preload"])
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path), fault), daemon=True) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    end = time.monotonic() + 90
    for rank, process in enumerate(ranks):
        process.join(max(0.0, end - time.monotonic()) if rank != WRONG else 0.0)
    for process in ranks:
        process.kill()
        process.join()
    said = {r: json.loads(f.read_text()) for r in range(RANKS) if (f := tmp_path / f"{r}.json").is_file()}
    print(said)
    others = [r for r in range(RANKS) if r != WRONG]
    assert all(r in said and match in said[r][1] and said[r][2] < 10 for r in others), said
