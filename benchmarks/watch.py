"""What `autopar.watch` costs: seconds of one look beside those of a step, on the demo's model and mesh.

    PYTHONPATH=. python -m benchmarks.watch            # writes benchmarks/watch.md

A look at every hundredth call takes a hundredth of its share of a step.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist

import autopar
from autopar.testing import on_processes
from examples.demo import MESH, batches, gpt2

STEPS, EVERY = 12, 100


def measured(rank: int, how: str) -> tuple[list[float], list[float], int]:
    """Seconds of steps and of looks, in turn, and the bytes that are looked at."""
    torch.set_num_threads(1)
    batch = batches()[0]
    parallel = None if how == "free" else how
    model = autopar.autoparallelize(gpt2(), batch, mesh=MESH, parallel=parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    watch = autopar.watch(model, every=10**9, optimizer=optimizer)
    steps, looks = [], []
    for _ in range(STEPS):
        dist.barrier()
        begun = time.perf_counter()
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        dist.barrier()
        between = time.perf_counter()
        watch.look()
        dist.barrier()
        steps.append(between - begun)
        looks.append(time.perf_counter() - between)
    held = sum(p.to_local().nbytes for p in model.parameters())
    return steps[2:], looks[2:], held


def row(how: str) -> str:
    steps, looks, held = on_processes(MESH.size, measured, how, timeout_s=300)[0]
    step, look = statistics.median(steps), statistics.median(looks)
    spread = f"{1e3 * min(looks):.0f} to {1e3 * max(looks):.0f}"
    share = look / (EVERY * step)
    held_mib = held / 2**20
    return f"| {how} | {held_mib:.0f} | {1e3 * step:.0f} | {1e3 * look:.0f} ({spread}) | {share:.2%} |"


def commit() -> str:
    """The commit that is measured."""
    return subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()


def main() -> None:
    rows = [row(how) for how in ("free", "dp", "zero3")]
    lines = [
        "# What a look of `autopar.watch` costs",
        "",
        f"GPT-2 of two layers on mesh {MESH}, four gloo processes on two shared cores, with the states of AdamW;",
        f"medians of {STEPS - 2}. `PYTHONPATH=. python -m benchmarks.watch`, at {commit()}",
        "",
        "| plan | parameters held, MiB | a step, ms | a look, ms | at every=100 |",
        "|---|---|---|---|---|",
        *rows,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
