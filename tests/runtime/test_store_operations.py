"""What agreements and lost ranks cost the job's store: few operations a rank, however many ranks and however late one.

Ranks are threads of one process, each with a standing of its own, and share a store that counts.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from autopar.letters import Disagreement, Letter, Lost
from autopar.runtime import agreement, failure_log, faults, job_store
from tests.shares import one_in

MOST = 8  # operations a rank


class Counted:
    """A store that counts its operations."""

    def __init__(self) -> None:
        self.store, self.count, self.lock = dist.HashStore(), 0, threading.Lock()

    def clone(self):
        return self

    def __getattr__(self, name):
        operation = getattr(self.store, name)

        def counted(*args):
            with self.lock:
                self.count += 1
            return operation(*args)

        return counted


class ForEachThread:
    """Stands for a value of which every thread has its own."""

    def __init__(self, make) -> None:
        vars(self).update(make=make, held=threading.local())

    def own(self):
        if not hasattr(self.held, "value"):
            self.held.value = self.make()
        return self.held.value

    def __getattr__(self, name):
        return getattr(self.own(), name)

    def __setattr__(self, name, value):
        setattr(self.own(), name, value)


@pytest.fixture
def on_ranks(monkeypatch):
    """Runs a body on every rank at once; returns the store, and for each rank its result, or the letter it got."""
    store, ranks = Counted(), threading.local()
    monkeypatch.setattr(job_store, "job_store", lambda: store)
    monkeypatch.setattr(job_store, "_CONNECTED", job_store._Connected())
    monkeypatch.setattr(agreement, "_HERE", ForEachThread(agreement.Standing))
    monkeypatch.setattr(failure_log, "_MINE", ForEachThread(failure_log._Mine))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "get_rank", lambda: ranks.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    job_store.connection()

    def run(count, body):
        monkeypatch.setattr(dist, "get_world_size", lambda: count)
        found = [None] * count

        def one(rank):
            ranks.rank = rank
            try:
                found[rank] = body(rank)
            except Letter as letter:
                found[rank] = letter

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return store, found

    return run


@pytest.mark.parametrize("count", one_in(4, [2, 16, 64, 256], first=2))
def test_a_late_rank_costs_the_others_nothing(count, on_ranks):
    def body(rank):
        time.sleep(3.0 * (rank == count - 1))
        agreement.agree("x", "lowers")

    store, found = on_ranks(count, body)
    assert found == [None] * count and store.count <= MOST * count


def test_a_rank_that_asks_again_and_again_is_noticed(on_ranks, monkeypatch):
    def asks(store, name, seconds):
        while not store.check([name]):
            time.sleep(0.05)
        return True

    monkeypatch.setattr(agreement, "await_key", asks)

    def body(rank):
        time.sleep(1.5 * (rank == 15))
        agreement.agree("x", "lowers")

    store, _ = on_ranks(16, body)
    assert store.count > MOST * 16


def test_who_does_something_else_is_told_by_every_rank(on_ranks):
    def body(rank):
        agreement.agree("y" if rank in (40, 63) else "x", "evaluates" if rank in (40, 63) else "trains")

    store, found = on_ranks(64, body)
    assert all(isinstance(letter, Disagreement) for letter in found) and store.count <= MOST * 64
    assert "rank 40, 63 evaluates" in str(found[5]) and "rank 0, 1, 2, 3" in str(found[63])


def test_the_store_does_not_grow_over_a_job(on_ranks):
    keys = []

    def body(rank):
        for k in range(40):
            try:
                agreement.agree(("x", rank if k % 3 == 2 else 0), "lowers")
            except Disagreement:
                pass
            keys.append(job_store.connection().num_keys())

    on_ranks(4, body)
    assert max(keys) < 25


@pytest.mark.parametrize("first_ends", [False, True])
def test_a_lost_rank_is_named_by_all_that_came(first_ends, on_ranks, monkeypatch):
    monkeypatch.setattr(agreement, "_GRACE_S", 1.0)

    def body(rank):
        agreement.wait_at_most(1.0)
        if rank == 0 and first_ends:  # who asked first would tell the others
            monkeypatch.setattr(agreement, "_listened", lambda here: agreement.Verdict(""))
        time.sleep(0.2 * (rank > 0))
        if rank != 47:
            agreement.agree("x", "lowers")

    store, found = on_ranks(64, body)
    told = [letter for letter in found if letter is not None]
    assert len(told) == 63 - first_ends and all(isinstance(letter, Lost) for letter in told)
    assert all("rank 47 did not come to an agreement" in str(letter) for letter in told)
    assert store.count <= MOST * 64


@pytest.mark.parametrize("raises", ["before", "meanwhile", "everywhere", "and goes on"])
def test_an_error_of_one_rank_ends_the_wait_of_the_others(raises, on_ranks):
    """Unless all ranks have raised it, or the rank goes on."""

    def body(rank):
        agreement.wait_at_most(20.0)
        failure_log.begin()
        if rank == 7 or raises == "everywhere":
            time.sleep(0.3 * (raises == "meanwhile"))
            failure_log.say(f"{failure_log.RAISED} ValueError in its call: mine")
            agreement.tell_error()
            if rank == 7 and raises in ("before", "meanwhile"):
                return
        time.sleep(0.1 + 0.4 * (rank == 7))
        failure_log.begin()
        agreement.agree("x", "lowers")

    start = time.monotonic()
    store, found = on_ranks(64, body)
    assert time.monotonic() - start < 10
    told = [letter for letter in found if letter is not None]
    assert len(told) == (63 if raises in ("before", "meanwhile") else 0)
    assert all("rank 7 raised ValueError" in str(letter) for letter in told)
    assert store.count <= (MOST + 5 * (raises == "everywhere")) * 64  # five to write an error and to go on


@pytest.mark.parametrize(
    "lost, count",
    one_in(2, [(lost, count) for lost in ("hangs", "raises", "none") for count in (16, 64, 256)], first=1),
)
def test_finding_who_is_lost_costs_little(count, lost, on_ranks, monkeypatch):
    # 256 threads take seconds to come on two busy cores
    monkeypatch.setattr(faults, "_GRACE_S", 20.0 if lost != "hangs" else 3.0 if count < 256 else 8.0)

    def body(rank):
        if rank == 3 and lost == "raises":
            failure_log.say(f"{failure_log.RAISED} ValueError in forward: mine")
        elif rank != 3 or lost == "none":
            return str(faults._lost("forward", RuntimeError("timed out")))
        return ""

    words = {"hangs": "rank 3 did not come", "raises": "rank 3 raised ValueError", "none": "wait for one another"}
    store, found = on_ranks(count, body)
    told = [text for text in found if text]
    assert len(told) >= count - 1 and all(words[lost] in text for text in told), told[0]
    assert store.count <= MOST * count


def test_a_group_made_again_on_the_same_store_has_entries_of_its_own(monkeypatch):
    store, names = dist.HashStore(), []
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for _ in range(2):
        for _ in range(2):  # ranks of a job
            monkeypatch.setattr(job_store, "_CONNECTED", job_store._Connected())
            monkeypatch.setattr(job_store, "job_store", lambda: store)
            job_store.connection()
            names.append(job_store.key("x"))
    assert names[0] == names[1] != names[2] == names[3]


def test_a_rank_that_waits_hears_signals():
    """Ctrl-C ends a job of which a rank is late, and not only when the wait does."""

    def interrupt(*_):
        raise KeyboardInterrupt

    def send():
        while not heard.wait(0.3):  # one that comes while garbage is collected is lost
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    store, heard = dist.HashStore(), threading.Event()
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            job_store.await_key(store, "never", 60)
    finally:
        heard.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)
        store.set("never", "")  # ends the wait that is left
