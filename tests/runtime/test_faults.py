"""A rank that raises, ends, hangs, or is called otherwise: the others end within the time-out, and say who it was."""

from __future__ import annotations

import copy
import json
import multiprocessing as mp
import os
import pathlib
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import autopar
import autopar.api
from autopar.letters import Letter, Lost
from tests.models import batch_of, eager_links, mlp_case


def faulty(rank, model, batch, fault):
    """Rank 1 of three fails in its second step; what the others say, and after how long."""
    mine = autopar.autoparallelize(
        copy.deepcopy(model), batch, mesh=3, parallel="dp", cluster=eager_links(), timeout_s=4.0
    )
    mine(**batch).backward()
    mine(**batch).backward()
    start = time.monotonic()
    try:
        if rank == 1:
            if fault == "ends":
                os._exit(0)
            if fault == "is killed":
                os.kill(os.getpid(), 9)
            if fault == "hangs":
                time.sleep(30)
            if fault == "raises outside":
                raise ValueError("mine")
            if fault == "raises inside":
                mine(batch["x"], batch["y"], 3)
            if fault == "is called with a shape that cannot be":
                mine(x=batch["x"][:, :3], y=batch["y"])
            if fault == "is called with another shape":
                mine(**batch_of(9)).backward()
        for _ in range(3):
            mine(**batch).backward()
    except (Letter, ValueError) as e:
        time.sleep(0 if rank != 1 else 2)  # the test sees what the others say
        return type(e).__name__, str(e), time.monotonic() - start
    return "nothing", "", time.monotonic() - start


def rank_of_three(rank, folder, fault):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3, timeout=timedelta(seconds=60)
    )
    model, batch = mlp_case(batch=6)
    said = faulty(rank, model, batch, fault)
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(said))
    os._exit(0)


def outcome(fault, folder):
    """Errors of ranks 0 and 2; no process outlives the call."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["autopar.testing.preload"])
    ranks = [context.Process(target=rank_of_three, args=(rank, str(folder), fault), daemon=True) for rank in range(3)]
    for process in ranks:
        process.start()
    end = time.monotonic() + 60
    ranks[0].join(max(0.0, end - time.monotonic()))
    ranks[2].join(max(0.0, end - time.monotonic()))
    for process in ranks:
        process.kill()
        process.join()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 2) if (folder / f"{rank}.json").is_file()]


@pytest.mark.parametrize(
    "fault, match",
    [
        # by day test_what_was_caught_is_not_told_of_a_later_loss has a rank that ends
        pytest.param("ends", "rank 1 did not come", marks=pytest.mark.nightly),
        pytest.param("is killed", "rank 1 did not come", marks=pytest.mark.nightly),
        pytest.param("hangs", "rank 1 did not come", marks=pytest.mark.nightly),  # by day in test_ranks.py
        pytest.param("raises outside", "rank 1 did not come", marks=pytest.mark.nightly),
        ("raises inside", "rank 1 raised BadInput"),
        pytest.param("is called with a shape that cannot be", "rank 1 calls MLP with other", marks=pytest.mark.nightly),
        # by day test_agreement.py has other rows
        pytest.param("is called with another shape", "rank 1 calls MLP with other", marks=pytest.mark.nightly),
    ],
)
def test_the_others_end_in_time_and_say_who_it_was(fault, match, tmp_path):
    said = outcome(fault, tmp_path)
    assert said and all(
        kind == ("Disagreement" if "called" in fault else "Lost") and match in text and seconds < 20
        for kind, text, seconds in said
    ), said


@pytest.mark.parametrize("wrong", [0, -1, "10", True, float("nan")])
def test_a_time_out_that_is_none_is_a_letter(wrong):
    model, batch = mlp_case()
    for name in ("timeout_s", "start_timeout_s"):
        with pytest.raises(autopar.NotServed, match=f"^{name}="):
            autopar.autoparallelize(model, batch, mesh=1, **{name: wrong})


def test_on_one_rank_errors_stay_what_they_are():
    model, batch = mlp_case()
    mine = autopar.autoparallelize(model, batch, mesh=1)
    try:
        with pytest.raises(Letter) as letter:
            mine(batch["x"][:, :3], batch["y"])
        assert not isinstance(letter.value, Lost)
    finally:
        torch.distributed.destroy_process_group()


def caught_and_lost(rank, folder):
    """Rank 1 makes a wrong call, catches the letter, goes on, and ends later."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3, timeout=timedelta(seconds=60)
    )
    model, batch = mlp_case(batch=6)
    mine = autopar.autoparallelize(model, batch, mesh=3, parallel="dp", cluster=eager_links(), timeout_s=4.0)
    if rank == 1:
        with pytest.raises(Letter):
            mine(batch["x"], batch["y"], 3)
    mine(**batch).backward()
    mine(**batch).backward()
    if rank == 1:
        os._exit(0)
    with pytest.raises(Lost) as letter:
        for _ in range(3):
            mine(**batch).backward()
    pathlib.Path(folder, f"{rank}.txt").write_text(str(letter.value))
    os._exit(0)


def test_what_was_caught_is_not_told_of_a_later_loss(tmp_path):
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["autopar.testing.preload"])
    ranks = [context.Process(target=caught_and_lost, args=(rank, str(tmp_path)), daemon=True) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
        process.join()
    said = [p.read_text() for p in tmp_path.glob("*.txt")]
    assert said and all("rank 1 did not come" in text and "raised" not in text for text in said), said


def caught_by_all_and_late(rank, folder):
    """All ranks catch the same letter; then rank 1 comes late to what all agree on."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    model, batch = mlp_case(batch=6)
    mine = autopar.autoparallelize(model, batch, mesh=2, parallel="dp", cluster=eager_links(), timeout_s=20.0)
    mine(**batch).backward()
    with pytest.raises(Letter):
        mine(batch["x"][:, :3], batch["y"])
    if rank == 1:
        time.sleep(3.0)  # longer than a wait lasts before it looks into the store
    other = mlp_case(batch=4)[1]
    mine(**other).backward()
    pathlib.Path(folder, f"{rank}.txt").write_text("goes on")
    os._exit(0)


def test_an_error_that_all_ranks_caught_ends_no_job(tmp_path):
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["autopar.testing.preload"])
    ranks = [context.Process(target=caught_by_all_and_late, args=(r, str(tmp_path)), daemon=True) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
        process.join()
    assert sorted(p.name for p in tmp_path.glob("*.txt")) == ["0.txt", "1.txt"]


def starts_late(rank, folder, port):
    """Rank 1 comes late and lowers slowly, rank 0 plans slowly, twice: each takes longer than a collective may."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    model, batch = mlp_case(batch=6)
    for name in ("plan_of", "plan_again"):
        search = getattr(autopar.api, name)
        setattr(autopar.api, name, lambda *given, search=search: time.sleep(3.0) or search(*given))
    if rank == 1:
        lower = autopar.api.lower
        autopar.api.lower = lambda *given, **how: time.sleep(3.0) or lower(*given, **how)
        time.sleep(3.0)
    how = {"parallel": "dp", "cluster": eager_links(), "timeout_s": 2.0, "start_timeout_s": 60.0}
    mine = autopar.autoparallelize(model, batch, mesh=2, **how)
    mine(**batch).backward()
    mine(**mlp_case(batch=4)[1]).backward()
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
            dist.all_reduce(torch.ones(1))  # among all ranks, of which one does not come
        pathlib.Path(folder, "waited").write_text(str(time.monotonic() - start))
    else:
        time.sleep(20.0)
    os._exit(0)


@pytest.mark.nightly
def test_a_start_may_take_longer_than_a_collective(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["autopar.testing.preload"])
    ranks = [context.Process(target=starts_late, args=(rank, str(tmp_path), port), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    ranks[0].join(100)
    for process in ranks:
        process.kill()
        process.join()
    assert 1 < float((tmp_path / "waited").read_text()) < 15
