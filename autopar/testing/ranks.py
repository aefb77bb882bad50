"""Ranks for tests, in one line each.

    on_threads(4, body, *args)         ranks are threads of this process: milliseconds, any collective but send and
                                       receive
    on_local_tensor(4, body, *args)    one process plays all ranks at once on LocalTensors: the program must be the same
                                       on every rank
    on_processes(4, body, *args)       real processes over gloo: seconds; `body` and what it returns are picklable
    fake_world(64)                     a group of that size in which nobody answers: shapes and programs only

`body(rank, *args)` runs on every rank; the results come back in rank order. A rank that fails ends all, and its error
is raised here. Nothing outlives the call.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from autopar.runtime.private import FakeStore, LocalTensor, LocalTensorMode, ThreadedRanks, forget_shardings

Body = Callable[..., Any]


def on_threads(ranks: int, body: Body, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Run `body(rank, *args)` on one thread per rank; returns the results in rank order."""
    results: list[Any] = [None] * ranks
    errors: list[tuple[int, BaseException]] = []
    with ThreadedRanks() as world:
        store = dist.HashStore()

        def run(rank: int) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
                results[rank] = body(rank, *args)
                dist.barrier()
            except BaseException as e:
                errors.append((rank, e))
                world.abort(e)
            finally:
                with contextlib.suppress(Exception):
                    dist.destroy_process_group()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if errors:
        raise errors[0][1]
    if hung:
        raise TimeoutError(f"ranks {hung} did not end within {timeout_s} s")
    return results


def on_local_tensor(ranks: int, body: Body, *args: Any) -> Any:
    """Run `body(None, *args)` once, with every tensor standing for an equal one on each rank.

    This includes parameters of models in `args`. Results are returned as plain tensors, which must be equal on every
    rank.
    """
    with fake_world(ranks), LocalTensorMode(ranks) as mode:
        result = body(None, *(_on_every_rank(mode, a) for a in args))
        return pytree.tree_map(lambda leaf: leaf.reconcile() if isinstance(leaf, LocalTensor) else leaf, result)


def _on_every_rank(mode: Any, value: Any) -> Any:
    def spread(tensor: torch.Tensor) -> torch.Tensor:
        local = mode.rank_map(lambda rank: tensor.detach().clone())
        return (
            torch.nn.Parameter(local, tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter)
            else local.requires_grad_(tensor.requires_grad)
        )

    if isinstance(value, torch.nn.Module):
        with mode.disable():
            value = copy.deepcopy(value)
        made = {t: spread(t) for t in (*value.parameters(), *value.buffers())}
        for module in value.modules():
            for held in (module._parameters, module._buffers):
                held.update({name: made[t] for name, t in held.items() if t is not None})
        return value
    return pytree.tree_map(lambda leaf: spread(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


@contextlib.contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[None]:
    """A process group of any size whose collectives give no meaningful values; this process is one rank."""
    forget_shardings()  # The mesh of another rank's world is equal to this one's, and would be taken for it.
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_processes(ranks: int, body: Body, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Run `body(rank, *args)` in one process per rank, over gloo, with one thread; returns the results."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["autopar.testing.preload"])
    task = pickle.dumps((body, args))  # torch's own pickling would share the tensors between ranks
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        workers = [
            context.Process(
                target=_work, args=(rank, ranks, os.path.join(folder, "store"), timeout_s, send, task), daemon=True
            )
            for rank, (_, send) in enumerate(pipes)
        ]
        try:
            for worker, (_, send) in zip(workers, pipes, strict=True):
                worker.start()
                send.close()
            return _collect([receive for receive, _ in pipes], timeout_s)
        finally:
            for worker in (w for w in workers if w.pid is not None):
                if worker.is_alive():
                    worker.terminate()
                worker.join(5)
                if worker.is_alive():
                    worker.kill()
                    worker.join()


def _collect(pipes: list[Any], timeout_s: float) -> list[Any]:
    """Results of all ranks in order; raises the first failure at once."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting)} did not end within {timeout_s} s")
        for pipe in ready:
            rank = next(r for r, p in waiting.items() if p is pipe)
            try:
                failed, value, text = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a word") from None
            if failed:
                value.add_note(f"on rank {rank}:\n{text}") if hasattr(value, "add_note") else None
                raise value
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _work(rank: int, ranks: int, store: str, timeout_s: float, send: Any, task: bytes) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s)
        )
        body, args = pickle.loads(task)
        answer: tuple[bool, Any, str] = (False, body(rank, *args), "")
    except BaseException as e:
        answer = (True, e, traceback.format_exc())
    try:
        data = pickle.dumps(answer)
    except Exception:  # an error or a result that does not travel: its text does
        data = pickle.dumps(
            (True, RuntimeError(answer[2] or f"rank {rank} returned something that cannot be pickled"), answer[2])
        )
    send.send_bytes(data)  # before the barrier, so that a rank that hangs is the one missing
    send.close()
    if not answer[0]:
        with contextlib.suppress(Exception):
            dist.barrier()
    os._exit(0)  # gloo's teardown at exit aborts now and then; everything is said already
