"""Time copies between a device and its host by size, down, up and both at once, and AdamW on the host's CPUs.

All ranks of the job copy and step at once, as they do in training; of a repetition the slowest rank counts, and of
repetitions the median. Where the device is a GPU the host's memory is pinned, and the two ways have a stream each.
Where it is a CPU a copy is one of memory to memory, and both ways take turns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch

from autopar.calibrate.collectives import Run, fit, timed
from autopar.calibrate.limits import LIMITS
from autopar.calibrate.stages import Stages
from autopar.sharding.host import Host

# Bytes of a copy: a start shows in small ones. What a step moves was made a while ago, so that on a CPU, whose caches
# would flatter a rate, it is measured by copies that no cache holds.
SIZES = {"cpu": (64, 2**24, 2**25), "cuda": (2**14, 2**18, 2**22, 2**26)}


def of_host(device: str, local: int, repetitions: int, stages: Stages) -> Host:
    """The host of this node, and the rates of each of its `local` ranks while all of them copy and step."""
    sizes = SIZES[device]
    repetitions = min(LIMITS.host_repetitions, repetitions)

    def measure(tick: Callable[[], None]) -> list[float]:
        copies = [way(size, device) for way in WAYS.values() for size in sizes]
        taken = timed(copies, device, repetitions, tick, LIMITS.host_s)
        with _threads(max(1, _cores() // local)):
            return taken + timed([_adamw()], device, repetitions, tick, LIMITS.host_s)

    *taken, adamw_s = stages.run("host", 2 * repetitions, measure)
    found = iter(taken)
    fits = dict[str, tuple[float, float]]()
    for name in WAYS:
        fits[name] = fit("send", 2, dict(zip(sizes, islice(found, len(sizes)), strict=True)))
    return Host(
        name="pinned memory" if device == "cuda" else "memory",
        down_bytes_per_s=fits["down"][1],
        up_bytes_per_s=fits["up"][1],
        latency_s=max(fits["down"][0], fits["up"][0]),
        bytes=node_bytes(),
        both_bytes_per_s=2 * fits["both"][1],
        adamw_params_per_s=LIMITS.host_parameters / adamw_s,
    )


def node_bytes() -> int:
    """Bytes of the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _pair(size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of a device and of its host."""
    there = torch.ones(size, dtype=torch.uint8, device=device)
    return there, torch.ones(size, dtype=torch.uint8, pin_memory=device == "cuda")


def _down(size: int, device: str) -> Run:
    there, here = _pair(size, device)
    return lambda: here.copy_(there, non_blocking=True)


def _up(size: int, device: str) -> Run:
    there, here = _pair(size, device)
    return lambda: there.copy_(here, non_blocking=True)


def _both(size: int, device: str) -> Run:
    down = _down(size, device)
    up = _up(size, device)
    beside = torch.cuda.Stream() if device == "cuda" else None

    def both() -> None:
        with torch.cuda.stream(beside):  # None changes nothing: a CPU has no streams.
            up()
        down()

    return both


WAYS: dict[str, Callable[[int, str], Run]] = {"down": _down, "up": _up, "both": _both}


def _adamw() -> Callable[[], Any]:
    """A step of torch's fused AdamW on the CPU, in float32."""
    parameter = torch.nn.Parameter(torch.ones(LIMITS.host_parameters))
    parameter.grad = torch.ones_like(parameter)
    return torch.optim.AdamW([parameter], fused=True).step


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads for torch's CPU ops, as launchers leave a rank one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
