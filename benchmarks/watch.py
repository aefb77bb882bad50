"""What `autopar.watch` costs: seconds of looks beside those of a step, on the demo's model and mesh.

    PYTHONPATH=. python -m benchmarks.watch            # writes benchmarks/watch.md

Of ten looks, one at every hundredth call, nine compare copies and one a gradient too.
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


def measured(rank: int, how: str) -> tuple[dict[str, list[float]], int]:
    """Seconds of steps, of looks at copies and of looks at a gradient too, in turn, and the bytes that are held."""
    torch.set_num_threads(1)
    batch = batches()[0]
    parallel = None if how == "free" else how
    model = autopar.autoparallelize(gpt2(), batch, mesh=MESH, parallel=parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    watch = autopar.watch(model, every=10**9, optimizer=optimizer)
    found: dict[str, list[float]] = {"step": [], "copies": [], "gradient": []}

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    for _ in range(STEPS):
        for name, run in (("step", step), ("copies", watch.look), ("gradient", lambda: watch.look(**batch))):
            dist.barrier()
            begun = time.perf_counter()
            run()
            dist.barrier()
            found[name].append(time.perf_counter() - begun)
    assert all(not compared.why_not for compared in watch.gradients), str(watch)
    held = sum(p.to_local().nbytes for p in model.parameters())
    return {name: seconds[2:] for name, seconds in found.items()}, held


def row(how: str) -> str:
    found, held = on_processes(MESH.size, measured, how, timeout_s=300)[0]
    step, copies, gradient = (statistics.median(found[name]) for name in ("step", "copies", "gradient"))
    share = (9 * copies + gradient) / (10 * EVERY * step)

    def told(name: str) -> str:
        low, middle, high = (1e3 * f(found[name]) for f in (min, statistics.median, max))
        return f"{middle:.0f} ({low:.0f} to {high:.0f})"

    return f"| {how} | {held / 2**20:.0f} | {told('step')} | {told('copies')} | {told('gradient')} | {share:.2%} |"


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
        "| plan | parameters held, MiB | a step, ms | a look at copies, ms | and at a gradient, ms | at every=100 |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
