"""Time collectives on every axis of a mesh by size, and transfers between any two ranks.

The collectives are those that emitted programs call, with their packing. Of a repetition the slowest rank counts, and
of repetitions the median.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autopar.calibrate.limits import LIMITS
from autopar.calibrate.stages import Stages
from autopar.runtime.collectives import STEPS, Axis
from autopar.runtime.wires import Wire
from autopar.sharding.cluster import Measured
from autopar.sharding.costs import seconds
from autopar.sharding.mesh import DeviceMesh

UNEVEN = "uneven_all_to_all"  # Local forms of ops send parts of unlike lengths, as visits of experts are.
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", UNEVEN)
# bytes of the whole tensor: those of a number and of 16, between which gloo's sums need more and more messages, then
# 4 KiB to 16 MiB
SIZES = (4, 64, *(4**k * 4096 for k in range(7)))

Run = Callable[[], Any]


def of_axes(
    mesh: DeviceMesh, axes: Mapping[str, Axis], device: str, sizes: Sequence[int], repetitions: int, stages: Stages
) -> tuple[Measured, ...]:
    """Measured times of every kind of collective on every axis that has several devices."""
    places = [(a, axis) for a, axis in enumerate(axes.values()) if axis.size > 1]
    asked = dict[tuple[str, tuple[int, ...]], list[Run]]()  # runs on each axis, by kind and bytes
    for kind in KINDS if places else ():
        for size in sizes:
            made = [_collective(kind, axis, size, device) for _, axis in places]
            asked[kind, tuple(nbytes for nbytes, _ in made)] = [run for _, run in made]
    runs = list(asked.values())
    in_step = _in_a_step if _share_cores(device) else _in_rows
    taken = stages.run("collectives", repetitions, lambda tick: in_step(runs, device, repetitions, tick))
    keys = [(a, kind, nbytes) for kind, of in asked for (a, _), nbytes in zip(places, of, strict=True)]
    times = dict[tuple[int, str], dict[int, float]]()
    for (a, kind, nbytes), each in zip(keys, taken, strict=True):
        times.setdefault((a, kind), {})[nbytes] = each
    return tuple(_measured(mesh, a, kind, times[a, kind]) for a, _ in places for kind in KINDS)


def _measured(mesh: DeviceMesh, axis: int, kind: str, times: dict[int, float]) -> Measured:
    """A collective on one axis, from its seconds by bytes."""
    size = mesh.shape[axis]
    stride = math.prod(mesh.shape[axis + 1 :])
    return Measured(kind, size, stride, *fit(kind, size, times), tuple(sorted(times.items())))


def fit(kind: str, n: int, times: dict[int, float]) -> tuple[float, float]:
    """Latency in seconds and bytes/s of a collective, fitted to measured times by relative differences."""
    terms = []
    for size, taken in times.items():  # a formula is linear in its latency and in one over its bandwidth
        per_latency = float(seconds(kind, n=n, whole=0, latency=1.0, wire=1.0))
        per_byte = float(seconds(kind, n=n, whole=size, latency=0.0, wire=1.0))
        terms.append((per_latency / taken, per_byte / taken))
    matrix = np.array(terms)
    ones = np.ones(len(terms))
    best = np.linalg.lstsq(matrix, ones, rcond=None)[0]
    if (best <= 0).any():  # one of the two does not show at these sizes
        alone = [float(matrix[:, i] @ ones / (matrix[:, i] @ matrix[:, i])) for i in range(2)]
        errors = [float(((matrix[:, i] * alone[i] - 1) ** 2).sum()) for i in range(2)]
        best = np.array([alone[0], 1e-15]) if errors[0] < errors[1] else np.array([1e-9, alone[1]])
    return float(best[0]), 1.0 / float(best[1])


def _collective(kind: str, axis: Axis, size: int, device: str) -> tuple[int, Callable[[], Any]]:
    """Bytes of a tensor of about `size`, and a collective of it."""
    n = axis.size
    rows = max(1, round(size / 4 / n / n / 16))
    whole = (n * rows, n * 16)  # cut evenly either way
    if kind == UNEVEN:
        x = torch.ones(rows * n, 16, device=device)
        lengths = unlike_lengths(axis.index, n, len(x))
        return n * x.numel() * 4, lambda: Wire(axis).rows(x, lengths, lengths)
    if kind == "all_reduce" and size < math.prod(whole) * 4:
        whole = (1, max(1, size // 4))
    local = (rows, whole[1]) if kind in ("all_gather", "all_to_all") else whole
    x = torch.ones(local, device=device)
    arguments = {
        "all_gather": (0, whole[0]),
        "reduce_scatter": (0, whole[0]),
        "all_reduce": (),
        "all_to_all": (0, whole[0], (), 1, whole[1], ()),
    }[kind]
    return math.prod(whole) * 4, lambda: STEPS[kind](x, axis, *arguments)


def unlike_lengths(rank: int, n: int, rows: int) -> list[int]:
    """Numbers of rows that a rank sends to each other one; as many come back."""
    shares = [1 + (rank + other) % n for other in range(n)]
    found = [rows * share // sum(shares) for share in shares]
    found[shares.index(n)] += rows - sum(found)
    return found


def _share_cores(device: str) -> bool:
    """Whether any machine of the job has fewer cores than threads that compute."""
    if device != "cpu":
        return False
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    is_crowded = torch.tensor(float(ranks * torch.get_num_threads() > (os.cpu_count() or 1)))
    dist.all_reduce(is_crowded, dist.ReduceOp.MAX)
    return bool(is_crowded)


def _in_rows(asked: Sequence[Sequence[Run]], device: str, repetitions: int, tick: Callable[[], None]) -> list[float]:
    """Seconds of collectives, given by axis, each from a row of calls."""
    return timed([run for by_axis in asked for run in by_axis], device, repetitions, tick)


def _in_a_step(asked: Sequence[Sequence[Run]], device: str, repetitions: int, tick: Callable[[], None]) -> list[float]:
    """Seconds of collectives as a step meets them, on ranks that share cores.

    Ranks finish their compute one after the other, so the first waits; a rank that waits on one axis is late on the
    next. So there is compute before each collective, and those of several axes are timed in turn too: the time by which
    a turn exceeds its parts is shared out among them.
    """
    runs = [run for by_axis in asked for run in by_axis]
    square = torch.ones(LIMITS.square, LIMITS.square)

    def behind_work(*runs: Run) -> Callable[[], None]:
        def in_turn() -> None:
            for run in runs:
                for _ in range(LIMITS.products):
                    square @ square
                run()

        return in_turn

    turns = [by_axis for by_axis in asked if len(by_axis) > 1]
    rows = [behind_work(lambda: None), *map(behind_work, runs), *(behind_work(*turn) for turn in turns)]
    work, *rest = timed(rows, device, repetitions, tick)
    alone, in_turns = iter(rest[: len(runs)]), iter(rest[len(runs) :])
    found = list[float]()
    for by_axis in asked:
        each = [max(next(alone) - work, LIMITS.collective_s) for _ in by_axis]
        slower = (next(in_turns) - len(each) * work) / sum(each) if len(each) > 1 else 1.0
        found += [max(slower * seconds, LIMITS.collective_s) for seconds in each]
    return found


def timed(
    runs: Sequence[Run],
    device: str,
    repetitions: int,
    tick: Callable[[], None] = lambda: None,
    lasts: float = LIMITS.shared_s,
) -> list[float]:
    """Median seconds over rounds of one call of each of `runs`, on the slowest rank.

    All ranks make these calls together. Rounds go through all runs, so that other load on the machine meets all of them
    alike. In a round all ranks start together, and each makes so many calls that they outlast the turns of ranks which
    share cores: a single call takes a quarter to twice the time of one in a row, depending on the turns.
    """

    def once(run: Callable[[], Any], calls: int) -> float:
        dist.barrier()
        wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        wait(device)
        taken = torch.tensor([(time.perf_counter() - start) / calls], dtype=torch.float64, device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken.item())

    for run in runs:  # the first warms up
        once(run, 1)
    calls = [max(1, min(1000, round(lasts / once(run, 1)))) for run in runs]
    rounds = list[list[float]]()
    for _ in range(repetitions):
        rounds.append([once(run, n) for run, n in zip(runs, calls, strict=True)])
        tick()
    return [statistics.median(taken) for taken in zip(*rounds, strict=True)]


def wait(device: str) -> None:
    """Wait until a GPU has finished its queue; returns at once on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def pairs(
    device: str, small: int = 64, large: int = 2**22, repetitions: int = 5
) -> tuple[list[list[float]], list[list[float]]]:
    """Latency in seconds and bytes/s between any two ranks, as two matrices by rank.

    `autopar.sharding.topology` makes a mesh of them.
    """
    ranks = dist.get_world_size()
    me = dist.get_rank()
    latency = [[0.0] * ranks for _ in range(ranks)]
    bandwidth = [[0.0] * ranks for _ in range(ranks)]
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

                taken.append(timed([there_and_back], device, repetitions, lasts=LIMITS.pair_s)[0] / 2)
            latency[a][b] = latency[b][a] = taken[0]
            bandwidth[a][b] = bandwidth[b][a] = large / max(taken[1] - taken[0], 1e-9)
    return latency, bandwidth
