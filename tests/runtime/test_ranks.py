"""The harnesses themselves: results in rank order, a failing rank ends all, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from autopar.letters import BadPlan
from autopar.runtime.world import from_rank_0
from autopar.testing import Equality, Unequal


def total(rank, x):
    y = x * (1 if rank is None else rank + 1)
    dist.all_reduce(y)
    return y


def fail(rank):
    if rank == 1:
        raise BadPlan("mine", seen="this")
    dist.barrier()


def hang(rank):
    if rank == 1:
        time.sleep(60)


def die(rank):
    if rank == 1:
        os._exit(3)
    time.sleep(60)


def test_ranks_of_every_kind_talk(threads, local_tensor, processes):
    x = torch.ones(3)
    assert [r.tolist() for r in threads(3, total, x)] == [[6.0] * 3] * 3
    assert local_tensor(3, total, x).tolist() == [3.0] * 3
    assert [r.tolist() for r in processes(2, total, x)] == [[3.0] * 3] * 2


def test_a_failing_rank_ends_all(threads, processes):
    for kind in (threads, processes):
        with pytest.raises(BadPlan, match="mine") as letter:
            kind(2, fail)
        assert letter.value.seen == "this"


def refuse_in_a_class_of_its_own():
    class Mine(Exception):
        """It lies in a function: pickle finds it nowhere."""

    raise Mine("not this one")


def caught(rank):
    try:
        from_rank_0(refuse_in_a_class_of_its_own)
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def test_an_error_that_cannot_be_sent_reaches_all_ranks_in_words(processes):
    assert processes(2, caught, timeout_s=60) == ["Mine: not this one", "RuntimeError: Mine on rank 0: not this one"]


@pytest.mark.machines
def test_a_rank_that_hangs_or_dies_is_named_and_nothing_stays(processes):
    with pytest.raises(TimeoutError, match=r"\[1\]"):
        processes(2, hang, timeout_s=8)
    with pytest.raises(RuntimeError, match="rank 1 died"):
        processes(2, die)
    assert not [p for p in multiprocessing.active_children() if p.is_alive()]


def test_equality_says_what_failed_and_by_how_much():
    a, b = (
        {"w": torch.ones(4).double(), "v": torch.zeros(2).double()},
        {"w": torch.ones(4).double(), "v": torch.zeros(2).double()},
    )
    assert Equality.in_float64("same", a, b, 0.0).check().worst == 0.0
    a["w"] = a["w"] * (1 + 1e-6)
    with pytest.raises(Unequal, match=r"w .*error 1.00e-06"):
        Equality.in_float64("w", a, b, 1e-9).check()
    with pytest.raises(Unequal, match="missing"):
        Equality.in_float64("gone", {"w": b["w"]}, b, 1e-9).check()
    with pytest.raises(Unequal):
        Equality.in_float64("nan", {"w": b["w"] * float("nan"), "v": b["v"]}, b, 1e-9).check()


def test_float32_is_held_against_eagers_own_error():
    exact = {"w": torch.ones(4).double()}
    eager, close, far = ({"w": torch.full((4,), 1 + e)} for e in (1e-5, 1.5e-5, 4e-5))
    Equality.in_float32("close", close, eager, exact).check()
    with pytest.raises(Unequal):
        Equality.in_float32("far", far, eager, exact).check()
    Equality.in_float32("far, and so are permuted runs", far, eager, exact, [{"w": torch.full((4,), 1 - 2e-5)}]).check()
