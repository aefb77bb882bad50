"""What turns give and cost: the loss head in chunks, and micro-batches inside a call.

    python -m benchmarks.turns [head recompute choice large lowering]      all, or some; fails where a bar is missed

Bytes and seconds are a plan's; `benchmarks/memory.py` holds such bytes against MemTracker. A share is of the peak of
the whole head less what no recompute changes: parameters, their gradients and the optimizer's states.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from typing import Any

import torch
import transformers

import autopar
from autopar import Plan, Precision
from autopar.codegen import joint, lower
from autopar.letters import Infeasible
from autopar.request import Request
from autopar.search import plan_of
from autopar.tracer import ColoTracer
from autopar.turns import in_chunks, in_micro_batches
from benchmarks.hard_plans import language_model, llama_8b

PEAK, OVERHEADS = 0.58, {0.5: 0.015, 0.3: 0.06, 0.15: 0.15}  # the bars of GPT-2 with its head in eight chunks
SHARES, REGRET = (0.9, 0.7, 0.5, 0.4, 0.3, 0.15), 1.03  # of the fastest number of chunks, at each share of the peak
LOWERING = 1.2  # of the seconds of lowering without turns
GIB = 2**30


def gpt2(layers: int = 12, width: int = 768, heads: int = 12, rows: int = 8, length: int = 1024) -> Any:
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return language_model("GPT2LMHeadModel", config, rows, length)


HOW: dict[str, Any] = dict(
    mesh=(1,),
    cluster="a100",
    memory_budget="inf",
    optimizer="sgd",
    precision=Precision("bfloat16", "float32"),
    assume=autopar.Assume(no_padding=True),
)


def standing(plan: Plan) -> int:
    """Bytes that no schedule changes: parameters, their gradients, the optimizer's states."""
    return sum(plan.parameter_bytes.values()) * 2 + plan.memory.get("optimizer states", 0)


def said(name: str, plan: Plan) -> str:
    recomputed = plan.recompute_s / (plan.step_time_s - plan.recompute_s)
    return (
        f"| {name} | {plan.chunks} | {plan.microbatches} | {plan.peak_bytes / GIB:.2f} | "
        f"{plan.step_time_s * 1e3:.1f} | {recomputed:.2%} | {plan.peak_at} |"
    )


HEAD = (
    "| plan | chunks | micro-batches | peak, GiB | step, ms | recomputed | the peak is at |\n"
    "|---|---|---|---|---|---|---|"
)


def head() -> list[str]:
    """GPT-2 of 12 layers, 8 x 1024: its peak with the head in chunks."""
    model, batch = gpt2()
    whole = autopar.plan(model, batch, **HOW)
    print(f"\nGPT-2, 12 layers, 8 x 1024, one A100, bfloat16\n\n{HEAD}\n{said('whole head', whole)}", flush=True)
    missed = []
    for chunks in (2, 4, 8, 16):
        plan = autopar.plan(model, batch, **{**HOW, "chunks": chunks})
        share = (plan.peak_bytes - standing(whole)) / (whole.peak_bytes - standing(whole))
        print(said(f"{share:.3f} of it", plan), flush=True)
        if chunks == 8 and share > PEAK:
            missed.append(f"the peak in eight chunks is {share:.3f} of that of the whole head, for {PEAK}")
    for turns in (2, 4, 8):
        print(said("micro-batches", autopar.plan(model, batch, **{**HOW, "microbatches": turns})), flush=True)
    return missed


def recompute() -> list[str]:
    """The same with the head in eight chunks, within shares of the peak of the whole head."""
    model, batch = gpt2()
    whole = autopar.plan(model, batch, **HOW)
    free = autopar.plan(model, batch, **{**HOW, "chunks": 8})
    print(f"\nGPT-2 within shares of its peak\n\n{HEAD}", flush=True)
    missed = []
    for share, bar in OVERHEADS.items():
        budget = int(standing(whole) + share * (whole.peak_bytes - standing(whole)))
        try:
            plan = autopar.plan(model, batch, **{**HOW, "chunks": 8, "memory_budget": budget})
        except Infeasible as e:
            print(f"| {share} | 8 | | | | none fits: {e.smallest} | |")
            missed.append(f"nothing fits in {share}")
            continue
        print(said(f"{share}", plan), flush=True)
        overhead = plan.step_time_s / free.step_time_s - 1
        if overhead > bar:
            missed.append(f"{overhead:.2%} at {share}, for {bar:.1%}")
    return missed


def choice() -> list[str]:
    """The number of chunks that a budget takes by itself beside each that it might take."""
    model, batch = gpt2()
    whole = autopar.plan(model, batch, **HOW)
    print("\nGPT-2, step in ms by the number of chunks; * with micro-batches\n")
    print(
        "| share of its peak | auto takes | auto | 1 | 2 | 4 | 8 | 16 |\n|---|---|---|---|---|---|---|---|", flush=True
    )
    missed = []
    for share in SHARES:
        budget = int(standing(whole) + share * (whole.peak_bytes - standing(whole)))
        found: dict[Any, Plan | None] = {}
        for chunks in ("auto", 1, 2, 4, 8, 16):
            try:
                found[chunks] = autopar.plan(model, batch, **{**HOW, "chunks": chunks, "memory_budget": budget})
            except Infeasible:
                found[chunks] = None
        cells = " | ".join(
            "-" if p is None else f"{p.step_time_s * 1e3:.1f}{'*' * (p.microbatches > 1)}" for p in found.values()
        )
        auto = found["auto"]
        print(f"| {share} | {auto and auto.chunks} | {cells} |", flush=True)
        best = min(p.step_time_s for p in found.values() if p is not None)
        if auto is None or auto.step_time_s > REGRET * best:
            missed.append(f"at {share} another number of chunks is faster")
    return missed


def large() -> list[str]:
    """LLaMA-8B's shape on (8, 8), and GPT-2 of 760 million parameters at 24 x 2048, with and without."""
    model, batch, how = llama_8b()
    print(f"\nLLaMA-8B's shape on (8, 8), and 760 million parameters at 24 x 2048 on 8 devices\n\n{HEAD}", flush=True)
    precise: dict[str, Any] = {**how, "memory_budget": "inf", "precision": HOW["precision"]}
    for name, more in (("8B", {}), ("8B", {"chunks": 2}), ("8B", {"chunks": 8}), ("8B", {"microbatches": 2})):
        print(said(name, autopar.plan(model, batch, **{**precise, **more})), flush=True)
    model, batch = gpt2(24, 1536, 16, 24, 2048)
    for name, more in (("760M", {}), ("760M", {"chunks": 8}), ("760M", {"microbatches": 3})):
        how = {**HOW, "mesh": (8,), "optimizer": "adamw", **more}
        print(said(name, autopar.plan(model, batch, **how)), flush=True)
    return []


def lowering() -> list[str]:
    """CPU seconds of lowering with turns beside those without: the least of five, one after the other."""
    model, batch = gpt2(rows=16, length=256)
    how = {**HOW, "mesh": (8,)}
    print("\n| GPT-2, 12 layers | lowering, CPU s | of that without |\n|---|---|---|", flush=True)
    graph = ColoTracer().trace(model, batch, assume=how["assume"], precision=how["precision"])
    cases = {
        "whole": graph,
        "head in 8 chunks": in_chunks(graph, 8, False),
        "2 micro-batches": in_micro_batches(graph, 2, False),
    }
    plans = {name: plan_of(graph, Request(**how, chunks=g.chunks, microbatches=g.turns)) for name, g in cases.items()}
    least: dict[str, float] = {}
    for _ in range(5):
        for name, g in cases.items():
            joint.LOWERED.clear()
            start = time.process_time()
            lower(g, plans[name], (0,))
            least[name] = min(least.get(name, 1e9), time.process_time() - start)
    missed = []
    for name, seconds in least.items():
        print(f"| {name} | {seconds:.2f} | {seconds / least['whole']:.2f} |")
        if seconds > LOWERING * least["whole"]:
            missed.append(f"lowering {name}: {seconds / least['whole']:.2f}")
    return missed


PARTS = {f.__name__: f for f in (head, recompute, choice, large, lowering)}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    print(f"torch {torch.__version__}")
    bad = [line for name in sys.argv[1:] or PARTS for line in PARTS[name]()]
    if bad:
        sys.exit("; ".join(bad))
