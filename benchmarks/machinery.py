"""What a parallel program costs beside one that experts wrote on torch's own tools.

CPU seconds, collectives, bytes on the wire, peak bytes.

    python -m benchmarks.machinery                         all sections; ends with an error where a bar does not hold
    python -m benchmarks.machinery one gpt --rounds 15     some of: one, dropout, mlp, gpt
    python -m benchmarks.machinery calibrate               measures the machine again: benchmarks/machinery.json

    one, dropout     one device, GPT-2 of 12 layers in float32, beside eager; with dropout the generator's share is told
    mlp, gpt         four ranks over gloo: each preset beside its twin, and the free plan beside the fastest of the
    twins that fit the budget

Every contestant of a section lives in the same processes and steps once a round, in an order that turns. A ratio is
that of the CPU seconds of all ranks in one round, barriers included; what is printed is the median over rounds and its
95% interval by order statistics. Collectives are counted where torch.ops.c10d and torch.ops._c10d_functional are
dispatched, wire bytes are those of rings, peak bytes are what tensors hold before a step and the most that the CPU
allocator hands out in it, the least of six steps: for both sides the same instrument. Gradients of every contestant are
compared with eager's on one device first.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import gc
import itertools
import logging
import math
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import Cluster, DeviceMesh
from autopar.calibrate.calibration import calibrate
from autopar.sharding.cluster import Measured
from autopar.testing import on_processes

PROFILE = Path(__file__).with_suffix(".json")
HIDDEN, LAYERS, HEADS, LENGTH, BATCH, VOCABULARY = 512, 4, 8, 256, 8, 8192
WIDTH, ROWS = 2048, 256
BUDGETS = {"mlp": 160, "gpt": 320}  # MiB a rank, in which not every twin fits


# -- the two models, the loss inside


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, HIDDEN // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1, self.at, self.l2, self.ml = nn.LayerNorm(HIDDEN), Attention(), nn.LayerNorm(HIDDEN), Feed()

    def forward(self, x):
        x = x + self.at(self.l1(x))
        return x + self.ml(self.l2(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.te, self.pe = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.ln, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x, target):
        x = self.te(x) + self.pe(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln(x)).flatten(0, 1), target.flatten())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x, target):
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, target)


def model_and_batch(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    if kind == "gpt":
        return Gpt(), {
            "x": torch.randint(0, VOCABULARY, (BATCH, LENGTH)),
            "target": torch.randint(0, VOCABULARY, (BATCH, LENGTH)),
        }
    return Mlp(), {"x": torch.randn(ROWS, WIDTH), "target": torch.randn(ROWS, WIDTH)}


# -- contestants


@dataclass
class Contestant:
    """A model that trains: its parameters and the batch of this rank."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    around: Callable[[], Any] = contextlib.nullcontext  # a context in which forward and backward run
    read: Callable[[Any], torch.Tensor] = lambda output: output
    # the group over which the batch is cut, where the model itself does not make the loss that of the whole batch
    rows: Any = None

    def __post_init__(self) -> None:
        kinds = [
            [p for p in self.model.parameters() if isinstance(p, DTensor) is k] for k in (True, False)
        ]  # fused AdamW takes them apart
        self.optimizers = [torch.optim.AdamW(ps, lr=1e-4, fused=True) for ps in kinds if ps]

    def gradients(self) -> torch.Tensor:
        """The loss of the whole batch, on every rank; gradients are in the parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with self.around():
            loss = self.read(self.model(**self.batch))
            loss.backward()
        loss = loss.detach()
        loss = loss.to_local() if isinstance(loss, DTensor) else loss
        if self.rows is not None:
            dist.all_reduce(loss, group=self.rows)
            loss /= self.rows.size()
        return loss

    def step(self) -> None:
        self.gradients()
        for optimizer in self.optimizers:
            optimizer.step()

    def forget(self) -> None:
        """Gradients that the next step would drop as it begins are dropped now, so that many contestants fit in one
        process.
        """
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def part(batch: dict[str, torch.Tensor], i: int, n: int) -> dict[str, torch.Tensor]:
    return {name: t.chunk(n)[i].contiguous() for name, t in batch.items()}


def tensor_parallel(kind: str, model: nn.Module, mesh: Any, embedding: bool = True) -> nn.Module:
    """As `parallelize_module` wants it said: columns, then rows.

    Of gpt the head, and with `embedding` the embedding too, by vocabulary.
    """
    column, row = ColwiseParallel, RowwiseParallel
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {"a": column(), "b": row()}
            if kind == "mlp"
            else {"at.q": column(), "at.k": column(), "at.v": column(), "at.o": row(), "ml.a": column(), "ml.b": row()},
        )
    if kind == "gpt":
        parallelize_module(
            model,
            mesh,
            {
                "head": column(output_layouts=Shard(-1), use_local_output=False),
                **({"te": row(input_layouts=Replicate())} if embedding else {}),
            },
        )
    return model


def stated() -> Cluster:
    """What presets are planned on: as measured, but a reduce-scatter takes half of an all-reduce, as in rings. gloo
    makes one out of an all-reduce; at its price ZeRO would be written with all-reduces, of which rings send twice as
    much. The free plan is planned on what was measured.
    """
    measured = Cluster.of(str(PROFILE))
    whole = {(m.size, m.stride): m for m in measured.measured if m.kind == "all_reduce"}

    def half(m: Measured) -> Measured:
        like = whole[m.size, m.stride]
        return replace(like, kind=m.kind, times=tuple((nbytes, taken / 2) for nbytes, taken in like.times))

    return replace(
        measured, name="stated", measured=tuple(half(m) if m.kind == "reduce_scatter" else m for m in measured.measured)
    )


TWINS = {"dp": "DDP", "zero3": "FSDP2", "megatron": "TP", "zero3 x megatron": "FSDP2 x TP"}
PRESETS: dict[str, dict[str, Any]] = {
    "dp": dict(parallel="dp", mesh=(4,)),
    "zero3": dict(parallel="zero3", mesh=(4,)),
    "megatron": dict(parallel="megatron", mesh=(4,)),
    "zero3 x megatron": dict(parallel=dict(tensor=2, data=dict(size=2, zero=3)), mesh=(2, 2)),
}


def contestants(kind: str, rank: int, ranks: int) -> dict[str, Callable[[], Contestant]]:
    """Of each name what builds it; on every rank in the same order."""
    base, batch = model_and_batch(kind)
    world = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    parallel_loss = loss_parallel if kind == "gpt" else contextlib.nullcontext

    def fsdp(model: nn.Module, mesh: Any) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def by_autopar(**how: Any) -> Callable[[], Contestant]:
        return lambda: Contestant(
            autopar.autoparallelize(copy.deepcopy(base), batch, **{"memory_budget": "inf", **how}), batch
        )

    here = square["dp"].get_local_rank()
    made: dict[str, Callable[[], Contestant]] = {
        "DDP": lambda: Contestant(
            DistributedDataParallel(copy.deepcopy(base)), part(batch, rank, ranks), rows=world.get_group()
        ),
        "FSDP2": lambda: Contestant(fsdp(copy.deepcopy(base), world), part(batch, rank, ranks), rows=world.get_group()),
        "TP": lambda: Contestant(tensor_parallel(kind, copy.deepcopy(base), world), batch, around=parallel_loss),
        "FSDP2 x TP": lambda: Contestant(
            fsdp(tensor_parallel(kind, copy.deepcopy(base), square["tp"]), square["dp"]),
            part(batch, here, 2),
            around=parallel_loss,
            rows=square["dp"].get_group(),
        ),
        **{name: by_autopar(cluster=stated(), **how) for name, how in PRESETS.items()},
        "free": by_autopar(cluster=str(PROFILE), mesh=ranks),
        f"free in {BUDGETS[kind]} MiB": by_autopar(
            cluster=str(PROFILE), mesh=ranks, memory_budget=f"{BUDGETS[kind]}MiB"
        ),
    }
    if kind == "gpt":
        made["TP, embedding whole"] = lambda: Contestant(
            tensor_parallel(kind, copy.deepcopy(base), world, embedding=False), batch, around=parallel_loss
        )
    return made


# -- the instruments


class Counted(TorchDispatchMode):
    """Collectives, the bytes that rings of them send, and calls of ATen, as they are dispatched on this thread.

    What DTensors and DDP call, too.
    """

    WAITS = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")
    SHARE = {"all_reduce": 2, "allreduce": 2}  # times (n - 1) / n of the largest tensor there is: the whole one

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[str] = []
        self.wire_bytes = 0.0
        self.aten = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its own calls come here again
        result = function(*args, **kwargs)
        if function.namespace in ("c10d", "_c10d_functional", "_dtensor") and function._opname not in self.WAITS:
            self._collective(function, args, result)
        elif function.namespace == "aten":
            self.aten += 1
        return result

    def _collective(self, function: Any, args: Any, result: Any) -> None:
        n, sizes = None, []
        for a in torch.utils._pytree.tree_leaves((args, result)):
            if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()):
                n = dist.ProcessGroup.unbox(a).size()
            elif isinstance(a, str):
                try:
                    n = dist.distributed_c10d._resolve_process_group(a).size()
                except (RuntimeError, ValueError, LookupError):
                    pass  # a reduction's name
            elif isinstance(a, torch.Tensor):
                sizes.append(a.numel() * a.element_size())
        assert n is not None, (function, args)
        lists = [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], torch.Tensor)]
        whole = max([*sizes, *(sum(t.numel() * t.element_size() for t in x) for x in lists)])
        times = next((k for name, k in self.SHARE.items() if function._opname.startswith(name)), 1)
        self.collectives.append(function._opname)
        self.wire_bytes += times * (n - 1) / n * whole


def live_bytes() -> dict[int, int]:
    """Of every storage that a tensor of this process shows, its bytes."""
    found = {}
    for thing in gc.get_objects():
        if (
            issubclass(type(thing), torch.Tensor) and type(thing).__name__ != "FakeTensor"
        ):  # a proxy lies about its class, not about its type
            local = thing._local_tensor if isinstance(thing, DTensor) else thing
            if local.device.type == "cpu" and type(local) in (torch.Tensor, nn.Parameter):
                found[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return found


def peak_bytes(made: Contestant, before: dict[int, int], steps: int = 6) -> float:
    """What is there before a step, and the most that the CPU allocator hands out in it.

    The least of several steps, as a thread of gloo's may hold a message a while after the program has let go of it.
    """
    found = []
    for _ in range(steps):
        made.forget()
        gc.collect()
        held = sum(n for where, n in live_bytes().items() if where not in before)
        if isinstance(made.model, DistributedDataParallel):  # its buckets are no tensors that Python sees
            held += sum(map(int, made.model._get_ddp_logging_data()["bucket_sizes"].split(",")))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            made.step()
        handed_out = itertools.accumulate(
            e.nbytes()
            for e in sorted(seen.profiler.kineto_results.events(), key=lambda e: e.start_ns())
            if e.name() == "[memory]"
        )
        found.append(float(held + max(handed_out)))
    return min(found)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The median, and the order statistics that hold it with at least 95%."""
    ordered, n = sorted(ratios), len(ratios)
    k = 0
    while k + 1 < n / 2 and 1 - 2 * sum(math.comb(n, i) for i in range(k + 2)) / 2**n >= 0.95:
        k += 1
    if 1 - 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n < 0.95:
        return statistics.median(ordered), -math.inf, math.inf  # too few rounds to say
    return statistics.median(ordered), ordered[k], ordered[-1 - k]


@dataclass
class Sheet:
    """What one rank has measured of a contestant."""

    error: float = 0.0  # worst relative error of a gradient
    collectives: int = 0
    wire_bytes: float = 0.0
    aten: int = 0
    peak_bytes: float = 0.0
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    note: str = ""


def worst_error(model: nn.Module, wanted: dict[str, torch.Tensor]) -> float:
    """Of all gradients the worst, relative to its norm or to a thousandth of the whole gradient's, shared among
    tensors.
    """
    floor = 1e-3 * math.sqrt(sum(float(g.double().square().sum()) for g in wanted.values()) / len(wanted))
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    assert found.keys() == wanted.keys()
    errors = []
    for name, gradient in found.items():
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        errors.append(float((whole - wanted[name]).double().norm()) / max(float(wanted[name].double().norm()), floor))
    return max(errors)


def by_eager(
    model: nn.Module, batch: dict[str, torch.Tensor], read: Callable[[Any], torch.Tensor] = lambda output: output
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one process."""
    loss = read(model(**batch))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def measure(
    rank: int,
    built: dict[str, Callable[[], Contestant]],
    wanted: tuple[torch.Tensor, dict[str, torch.Tensor]],
    rounds: int,
) -> dict[str, Sheet]:
    """Of each contestant its counts, then so many interleaved rounds."""
    sheets, running = {name: Sheet() for name in built}, dict[str, Contestant]()
    for name, build in built.items():
        sheet = sheets[name]

        before = live_bytes()
        running[name] = build()
        loss = running[name].gradients()
        sheet.error = max(
            worst_error(running[name].model, wanted[1]), abs(float(loss - wanted[0])) / abs(float(wanted[0]))
        )
        running[name].step()  # DDP makes its buckets anew, optimizers make their states
        running[name].step()
        sheet.peak_bytes = peak_bytes(running[name], before)
        with Counted() as counted:
            running[name].step()
        sheet.collectives, sheet.wire_bytes, sheet.aten = len(counted.collectives), counted.wire_bytes, counted.aten
        if isinstance(running[name].model, autopar.module.ParallelModule):
            plan = running[name].model.plan
            sheet.note = f"mesh {plan.mesh}, {plan.step_time_s * 1e3:.0f} ms by its figures"
        running[name].forget()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    gc.freeze()
    names = list(running)
    for r in range(rounds):
        turn = names[r % len(names) :] + names[: r % len(names)]
        for name in turn if r // len(names) % 2 == 0 else reversed(turn):
            dist.barrier()
            start, used = time.perf_counter(), cpu_s()
            running[name].step()
            dist.barrier()
            sheets[name].cpu_s.append(cpu_s() - used)
            sheets[name].wall_s.append(time.perf_counter() - start)
            running[name].forget()
    return sheets


# -- four ranks


def on_four(rank: int, kind: str, rounds: int, only: list[str]) -> dict[str, Sheet]:
    quiet()
    base, batch = model_and_batch(kind)
    wanted = by_eager(base, batch)
    built = contestants(kind, rank, dist.get_world_size())
    return measure(rank, {name: b for name, b in built.items() if not only or name in only}, wanted, rounds)


def together(ranks: list[dict[str, Sheet]]) -> dict[str, Sheet]:
    """Sums over ranks of CPU seconds and wire bytes, the largest of the rest."""
    return {
        name: Sheet(
            max(s[name].error for s in ranks),
            max(s[name].collectives for s in ranks),
            sum(s[name].wire_bytes for s in ranks),
            max(s[name].aten for s in ranks),
            max(s[name].peak_bytes for s in ranks),
            [sum(x) for x in zip(*(s[name].cpu_s for s in ranks), strict=True)],
            [max(x) for x in zip(*(s[name].wall_s for s in ranks), strict=True)],
            ranks[0][name].note,
        )
        for name in ranks[0]
    }


def show(sheets: dict[str, Sheet], pairs: list[tuple[str, str]], bar: float) -> list[str]:
    """Print the table and the ratios; what does not hold."""
    print(
        "| contestant | CPU s a step, all ranks | wall s | collectives | wire MiB, all ranks | peak MiB, fullest "
        "rank | ATen calls | worst gradient |\n|---|---|---|---|---|---|---|---|"
    )
    for name, s in sheets.items():
        print(
            f"| {name}{f' ({s.note})' if s.note else ''} | {statistics.median(s.cpu_s):.3f} | "
            f"{statistics.median(s.wall_s):.3f} | {s.collectives} | {s.wire_bytes / 2**20:.2f} | "
            f"{s.peak_bytes / 2**20:.1f} | {s.aten} | {s.error:.1e} |"
        )
    print(
        f"\n| ours | beside | CPU, median and 95% interval | bar {bar} | collectives | wire | peak | ATen calls "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    broken = [f"{name}: a gradient is off by {s.error:.1e}" for name, s in sheets.items() if not s.error < 1e-4]
    for ours, theirs in pairs:
        a, b = sheets[ours], sheets[theirs]
        median, low, high = interval([x / y for x, y in zip(a.cpu_s, b.cpu_s, strict=True)])
        print(
            f"| {ours} | {theirs} | {median:.3f} [{low:.3f}, {high:.3f}] | "
            f"{'holds' if high <= bar else 'does not hold'} | {a.collectives} : {b.collectives} | "
            f"{a.wire_bytes / 2**20:.2f} : {b.wire_bytes / 2**20:.2f} | "
            f"{a.peak_bytes / 2**20:.1f} : {b.peak_bytes / 2**20:.1f} | {a.aten} : {b.aten} |"
        )
        broken += [f"{ours}: {high:.3f} of {theirs}"] if not high <= bar else []
        if not ours.startswith("free"):
            broken += [
                f"{ours}: more {what} than {theirs}"
                for what, x, y in (
                    ("collectives", a.collectives, b.collectives),
                    ("wire bytes", a.wire_bytes, b.wire_bytes * (1 + 1e-3)),
                    ("peak bytes", a.peak_bytes, b.peak_bytes * (1 + 1e-6)),
                )
                if x > y
            ]  # the count of targets is a number that eager does not keep
    print(flush=True)
    return broken


def four_ranks(kind: str, rounds: int, only: list[str]) -> list[str]:
    sheets = together(on_processes(4, on_four, kind, rounds, only, timeout_s=1500.0))
    print(f"## Four ranks, {kind}\n")
    twins = [t for t in ("DDP", "FSDP2", "TP", "FSDP2 x TP", "TP, embedding whole") if t in sheets]
    pairs, broken = (
        [(ours, theirs) for ours, theirs in TWINS.items() if ours in sheets and theirs in sheets],
        list[str](),
    )
    for name, budget in (("free", math.inf), (f"free in {BUDGETS[kind]} MiB", BUDGETS[kind] * 2**20)):
        if name in sheets and (fit := [t for t in twins if sheets[t].peak_bytes <= budget]):
            pairs.append((name, min(fit, key=lambda t: statistics.median(sheets[t].cpu_s))))
            if sheets[name].peak_bytes > budget:
                broken.append(f"{name}: holds {sheets[name].peak_bytes / 2**20:.0f} MiB")
    return [f"{kind}: {b}" for b in (*broken, *show(sheets, pairs, 1.10))]


# -- one device


def gpt2(dropout: float) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False)
    ids = torch.randint(0, config.vocab_size, (2, 128))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids.clone()}


def on_one(rank: int, dropout: float, rounds: int) -> tuple[dict[str, Sheet], float]:
    quiet()
    base, batch = gpt2(dropout)
    read: dict[str, Any] = dict(read=lambda output: output["loss"])
    built = {
        "eager": lambda: Contestant(copy.deepcopy(base), batch, **read),
        "autopar": lambda: Contestant(
            autopar.autoparallelize(copy.deepcopy(base), batch, mesh=1, cluster=str(PROFILE), memory_budget="inf"),
            batch,
            **read,
        ),
    }
    return measure(rank, built, by_eager(gpt2(0.0)[0], batch, **read), rounds), generator_share(
        built["autopar"]()
    ) if dropout else 0.0


def one_device(dropout: float, rounds: int) -> list[str]:
    ((sheets, share),) = on_processes(1, on_one, dropout, rounds, timeout_s=1500.0)
    print(f"## One device, GPT-2 of 12 layers, float32, dropout {dropout}, batch 2 x 128\n")
    broken = show(sheets, [("autopar", "eager")], 1.05 if not dropout else math.inf)
    if dropout:
        print(f"the generator takes {share:.1%} of autopar's CPU seconds\n")
    return [f"one device: {b}" for b in broken if not dropout or "gradient" not in b]


class Timed(torch.fx.Interpreter):
    """Seconds of CPU of the ops that make random bits.

    What descends from the key, as long as it is no floating-point number.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.bits, self.bits_s, self.all_s = set(self.module.graph.find_nodes(op="placeholder")[-1:]), 0.0, 0.0

    def run_node(self, node: torch.fx.Node) -> Any:
        start = time.process_time()
        result = super().run_node(node)
        taken = time.process_time() - start
        self.all_s += taken
        if node in self.bits or (
            isinstance(result, torch.Tensor)
            and not result.is_floating_point()
            and self.bits & set(node.all_input_nodes)
        ):
            self.bits.add(node)
            self.bits_s += taken
        return result


def generator_share(made: Contestant) -> float:
    """Which part of a step's CPU seconds the program spends on random bits; they are made in forward alone."""
    made.step()
    runner = made.model._own.programs[-1].runner
    timed = Timed(runner.modules["forward"])
    runner.forward = timed.run
    start = time.process_time()
    made.step()
    return timed.bits_s / (time.process_time() - start)


# -- the machine


def profile_of(rank: int) -> None:
    on = [calibrate(DeviceMesh(shape), "cpu") for shape in (4, (2, 2))]
    if rank == 0:
        replace(on[0], name=PROFILE.stem, measured=(*on[0].measured, *on[1].measured)).save(PROFILE)


def quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sections",
        nargs="*",
        default=["one", "dropout", "mlp", "gpt"],
        choices=["one", "dropout", "mlp", "gpt", "calibrate"],
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="some contestants, separated by semicolons")
    asked = parser.parse_args()
    only, broken = [name for name in asked.only.split(";") if name], []
    for section in asked.sections:
        if section == "calibrate":
            on_processes(4, profile_of, timeout_s=600.0)
        elif section in ("one", "dropout"):
            broken += one_device(0.1 if section == "dropout" else 0.0, asked.rounds)
        else:
            broken += four_ranks(section, asked.rounds, only)
    if broken:
        sys.exit("does not hold: " + "; ".join(broken))


if __name__ == "__main__":
    quiet()
    main()
