"""Measure this machine while all ranks run: collectives, its host, ops by size, optimizers, and overlap.

Every rank of the job runs it (`autopar calibrate`). The collectives are those that emitted programs call, with their
packing, the ops are ATen code as emitted programs hold it. Of a repetition the slowest rank counts, and of repetitions
the median. Within a repetition a call is repeated until it has run for some milliseconds, a collective for many more:
ranks that share cores take turns.
"""

from __future__ import annotations

import ctypes
import functools
import io
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from autopar.calibrate.collectives import SIZES, of_axes, timed
from autopar.calibrate.host import node_bytes, of_host
from autopar.calibrate.limits import LIMITS
from autopar.calibrate.stages import Stages
from autopar.calibrate.steps import beside_its_parts
from autopar.calibrate.workloads import WORKLOADS, Workload, traced
from autopar.optim import AdamW
from autopar.runtime.collectives import STEPS, Axis, begin_all_reduce, bind_axes, finish, pack_all_reduce
from autopar.sharding.cluster import Cluster, Link, Timed
from autopar.sharding.device import Device
from autopar.sharding.mesh import DeviceMesh

KEPT = 2**20  # bytes that the host's allocator keeps for reuse
DTYPES = ("float64", "float32", "bfloat16", "float16")


def calibrate(
    mesh: DeviceMesh,
    device: str,
    name: str = "",
    sizes: Sequence[int] = SIZES,
    repetitions: int = 9,
    workloads: Sequence[Workload] = WORKLOADS,
    stages: Stages | None = None,
) -> Cluster:
    """A profile of this machine for meshes whose axes have the sizes and distances of those of `mesh`.

    The profile is equal on every rank. `stages` reports progress, and keeps what was measured until all of it is.
    """
    stages = stages or Stages(out=io.StringIO())
    axes = bind_axes(mesh.to_torch(device))
    measured = of_axes(mesh, axes, device, sizes, repetitions, stages)
    slowest = min((m for m in measured if m.kind == "all_gather"), key=lambda m: m.bytes_per_s, default=None)
    link = (
        Link("the slowest measured axis", slowest.latency_s, slowest.bytes_per_s)
        if slowest
        else Link("nobody else", 1e-6, 1e12)
    )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size))
    host = of_host(device, local, repetitions, stages)
    ops, figures = _alone(mesh, device, min(5, repetitions), workloads, stages)
    hidden = 1.0
    if mesh.size > 1:
        axis = next(a for a in axes.values() if a.size > 1)
        product_s = figures[DTYPES.index("float32")]
        (hidden,) = stages.run(
            "compute beside a collective", 0, lambda _: [_hidden(axis, device, repetitions, product_s)]
        )
    how = (
        f"torch {torch.__version__}, {mesh.size} ranks on mesh {mesh}, {dist.get_backend()}; medians of "
        f"{repetitions}, of ops and optimizers of {min(5, repetitions)}, all ranks running"
    )
    cluster = Cluster(
        name or f"calibrated-{device}",
        _device(device, local, figures),
        (link,),
        local,
        max(1, mesh.size // local),
        (("host", f"measured: {how}"), ("measured", how)),
        measured,
        ops,
        hidden,
        host=host,
    )
    if ops and device == "cpu":
        slope, height = stages.run("whole steps", 0, lambda _: list(beside_its_parts(mesh, cluster, repetitions)))
        cluster = replace(cluster, together=slope, step_s=height)
    box = [cluster]
    dist.broadcast_object_list(box, 0)
    return box[0]


def merged(base: Cluster, found: Cluster) -> Cluster:
    """A cluster file updated by what was measured; measurements of the same things are replaced.

    The efficiency of its device class stays, for what nobody measured here.
    """
    collectives = {(m.kind, m.size, m.stride) for m in found.measured}
    ops = {(t.op, t.dtype) for t in found.timed}
    return replace(
        base,
        measured=(*(m for m in base.measured if (m.kind, m.size, m.stride) not in collectives), *found.measured),
        timed=(*(t for t in base.timed if (t.op, t.dtype) not in ops), *found.timed),
        hidden=found.hidden,
        together=found.together if found.timed else base.together,
        step_s=found.step_s if found.timed else base.step_s,
        host=found.host or base.host,
        sources=tuple(sorted({**dict(base.sources), **dict(found.sources)}.items())),
    )


class Alone:
    """Times what each rank does by itself, while all of them do it.

    No rank waits for another, so that ranks which share cores always compete. On a CPU the clock is the process's,
    which stops while another rank has the core, and `crowding` is the ratio of wall time to it. On a GPU it is the
    device's, with enough work queued in front that it never waits for the host.
    """

    def __init__(self, device: str, repetitions: int) -> None:
        self.device = device
        self.repetitions = repetitions
        self.own = self.wall = 0.0
        self._ahead = torch.rand(4096, 4096, device=device).bfloat16() if device == "cuda" else None

    def __call__(self, run: Callable[[], Any], is_last: bool = False) -> float:
        """Seconds of one call, the median of repetitions."""
        made = run()  # the first warms up
        if is_last and self.device == "cpu" and _nbytes(made) > KEPT:
            del made
            return statistics.median(self._once_in_new_memory(run) for _ in range(self.repetitions))
        del made
        once = self._once if self._ahead is None else self._once_on_gpu
        most = 1000.0 if self._ahead is None else LIMITS.ahead_s / 2 / _host_s(run)
        calls = max(1, round(min(most, LIMITS.repetition_s / max(once(run, 1), 1e-7))))
        return statistics.median(once(run, calls) for _ in range(self.repetitions))

    def _once_on_gpu(self, run: Callable[[], Any], calls: int) -> float:
        assert self._ahead is not None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(round(LIMITS.ahead_s / 2e-4)):
            self._ahead @ self._ahead
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls

    def _once(self, run: Callable[[], Any], calls: int) -> float:
        held = list[Any]()
        left = LIMITS.held
        start = time.process_time()
        wall = time.perf_counter()
        for _ in range(calls):  # results stay a while, as what is kept for backward does: their memory is fresh
            held.append(result := run())
            left -= _nbytes(result)
            if left < 0:
                held = []
                left = LIMITS.held
        own = time.process_time() - start
        self.own = self.own + own
        self.wall = self.wall + time.perf_counter() - wall
        return own / calls

    def _once_in_new_memory(self, run: Callable[[], Any]) -> float:
        give_back_memory()
        start = time.process_time()
        wall = time.perf_counter()
        made = run()
        own = time.process_time() - start
        self.own = self.own + own
        self.wall = self.wall + time.perf_counter() - wall
        del made
        return own

    @property
    def crowding(self) -> float:
        return self.wall / self.own if self.own else 1.0


def _host_s(run: Callable[[], Any]) -> float:
    """Seconds that the host takes to start a call's kernels."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def give_back_memory() -> None:
    """Let the host's allocator return its free memory to the system, where it can be asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _nbytes(made: Any) -> int:
    """Bytes of the tensors that a call returned."""
    given = made if isinstance(made, (list, tuple)) else (made,)
    return sum(t.nbytes for t in given if isinstance(t, torch.Tensor))


def _agreed(times: Sequence[float], crowding: float) -> list[float]:
    """Wall-clock seconds, averaged over all ranks."""
    together = torch.tensor([*times, crowding], dtype=torch.float64)
    if dist.get_backend() == "nccl":
        together = together.cuda()
    dist.all_reduce(together)
    *mean, crowded = (together / dist.get_world_size()).tolist()
    return [t * crowded for t in mean]


def _alone(
    mesh: DeviceMesh, device: str, repetitions: int, workloads: Sequence[Workload], stages: Stages
) -> tuple[tuple[Timed, ...], list[float]]:
    """Times of every op and optimizer by size, and the figures of the device.

    These are seconds of a product in each dtype, of a copy, and of a small op.
    """
    ops = [(w, size, dtype) for dtype in _trained_in(device) for w in workloads for size in w.sizes_on(device)]
    steps = list(_optimizer_steps(mesh, device)) if workloads else []

    def measure(tick: Callable[[], None]) -> list[float]:
        timer = Alone(device, repetitions)
        times = [timer(run) for run in _of_device(device)[0]]
        for w, size, dtype in ops:
            with torch.device(device):
                call = w.call(size)
            runs = (traced(call, gradients, device, getattr(torch, dtype)) for gradients in (False, True))
            times += [timer(run, w.is_last) for run in runs]
            tick()
        for _, _, count, optimizer in steps:
            times.append(timer(optimizer().step) / count)
            tick()
        return _agreed(times, timer.crowding)

    agreed = iter(stages.run("ops and optimizers", len(ops) + len(steps), measure))
    figures = [next(agreed) for _ in range(len(DTYPES) + 2)]
    found: dict[tuple[str, str, float], tuple[list[tuple[float, float]], list[tuple[float, float]]]] = {}
    for w, size, dtype in ops:
        alone, both = next(agreed), next(agreed)
        forward, backward = found.setdefault((w.name, dtype, w.at(size, device)), ([], []))
        forward.append((w.amount(size), alone))
        backward.append((w.amount(size), max(both - alone, 1e-9) / w.gradients(size)))
    for name, elements, _, _ in steps:
        found.setdefault((name, "float32", 0.0), ([], []))[0].append((float(elements), next(agreed)))
    return tuple(
        Timed(name, dtype, tuple(forward), tuple(backward), at)
        for (name, dtype, at), (forward, backward) in found.items()
    ), figures


def _trained_in(device: str) -> tuple[str, ...]:
    """The dtypes in which models are trained on such a device."""
    return ("float32", "bfloat16") if device == "cuda" else ("float32",)


def _optimizer_steps(mesh: DeviceMesh, device: str) -> Iterator[tuple[str, int, int, Callable[[], Any]]]:
    """Optimizers to time, as (name, elements of a parameter on a device, number of parameters, maker).

    Parameters are DTensors, as in a parallel model. Each optimizer is made when it is timed, as all together would fill
    a small GPU.
    """
    optimizers = {
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
        "autopar-adamw": AdamW,
    }
    torch_mesh = mesh.to_torch(device)
    count = 8

    def made(optimizer: Callable[..., Any], elements: int) -> Any:
        whole = [Replicate()] * torch_mesh.ndim
        locals_ = [torch.ones(elements, device=device) for _ in range(count)]
        parameters = [torch.nn.Parameter(DTensor.from_local(x, torch_mesh, whole, run_check=False)) for x in locals_]
        for p in parameters:
            p.grad = torch.ones_like(p)
        return optimizer(parameters)

    for name, optimizer in optimizers.items():
        for elements in (256, 2**13, 2**16, 2**18, 2**20, *((2**22, 2**24, 2**26) if device == "cuda" else ())):
            yield f"optimizer {name}", elements, count, functools.partial(made, optimizer, elements)


def _hidden(axis: Axis, device: str, repetitions: int, product_s: float) -> float:
    """The share of the shorter of a collective and compute that is hidden when both run at once.

    1 where they share nothing, 0 where they share their cores.
    """
    x = torch.ones(2**20, device=device)
    y = torch.ones(*[_width(device)] * 2, device=device)
    (move,) = timed([lambda: STEPS["all_reduce"](x, axis)], device, repetitions)
    count = max(1, round(move / product_s))

    def both() -> None:
        pending = begin_all_reduce(pack_all_reduce([x], axis), axis)
        for _ in range(count):
            y @ y
        finish(pending)

    run = count * product_s
    together = timed([both], device, repetitions)[0]
    return min(1.0, max(0.0, (run + move - together) / min(run, move)))


def _width(device: str) -> int:
    return 4096 if device == "cuda" else 512


def _of_device(device: str) -> tuple[list[Callable[[], Any]], int]:
    """Calls that time a product in each dtype, a copy and a small op; and the bytes of the copy."""
    width = _width(device)
    copied = 2**28 if device == "cuda" else 2**24
    squares = [torch.rand(width, width, device=device).to(getattr(torch, dtype)) for dtype in DTYPES]
    source = torch.ones(copied // 4, device=device)
    target = torch.empty(copied // 4, device=device)
    small = torch.ones(8, device=device)
    return [*(lambda x=x: x @ x for x in squares), lambda: target.copy_(source), lambda: small.add(1)], copied


def _device(device: str, local: int, figures: Sequence[float]) -> Device:
    *products, copy, launch = figures
    rates = [(dtype, 2 * _width(device) ** 3 / taken) for dtype, taken in zip(DTYPES, products, strict=True)]
    if device == "cuda":
        about = torch.cuda.get_device_properties(torch.cuda.current_device())
        name = about.name
        memory = about.total_memory
    else:
        name = "CPU rank"
        memory = node_bytes() // local
    return Device(
        name,
        tuple(sorted(rates)),
        memory,
        2 * _of_device(device)[1] / copy,
        launch,
        "cuda" if device == "cuda" else "cpu",
    )
