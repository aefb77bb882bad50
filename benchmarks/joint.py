"""Sharding and recompute searched together, at shares of the free plan's peak: seconds, gaps, and CPU seconds.

    python -m benchmarks.joint [case ...]     each call in a process of its own; fails above a bar

Beside each plan stands the one of two stages: the fastest sharding first, then the states of its values. A policy that
is a function is given the lines of shardings, the fastest first, until what it names fits.
"""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import Any

CPU = "CPU s"


@dataclass(frozen=True)
class Case:
    """A LLaMA, its batch and mesh, and the bars of its budgets."""

    what: str
    config: dict[str, int]
    batch: tuple[int, int]
    mesh: tuple[int, ...]
    cluster: str
    shares: dict[float, tuple[float | None, float | None]]  # of the free peak: the most of the free step, the most gap
    cpu: tuple[float, float, float] | None = None  # the most CPU seconds of: free, half the peak, a curve of 20 budgets
    budget: str = ""  # one more budget, for which there must be a plan


TWELVE = Case(
    "LLaMA, 12 layers, width 4096, 8 x 8192, (4, 2)",
    dict(num_hidden_layers=12, intermediate_size=11008, num_key_value_heads=32, vocab_size=32000),
    (8, 8192),
    (4, 2),
    "h100-8x1",
    {0.9: (1.012, 0.005), 0.8: (1.024, 0.005), 0.7: (1.04, 0.01), 0.6: (1.065, 0.015), 0.5: (1.13, 0.03)},
)
EIGHT_BILLION = Case(
    "LLaMA-8B, 16 x 8192, (8, 8)",
    dict(num_hidden_layers=32, intermediate_size=14336, num_key_value_heads=8, vocab_size=128256),
    (16, 8192),
    (8, 8),
    "h100-8x8",
    {0.9: (None, 0.02), 0.7: (None, 0.02), 0.5: (None, 0.02)},
    (5.0, 12.0, 30.0),
)
LARGE_BATCH = Case(
    "LLaMA-8B, 64 x 4096, (8, 8)",
    EIGHT_BILLION.config,
    (64, 4096),
    (8, 8),
    "h100-8x8",
    {},
    budget="10GiB",
)
CASES = {"twelve": TWELVE, "eight": EIGHT_BILLION, "large": LARGE_BATCH}


# -- one call, in a process of its own


def cpu_s() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def in_two_stages(line: Any, budget: float) -> Any:
    """The policy of the second of two stages: the best states of one sharding."""
    from autopar.solver.policies import Repeated, repeated
    from autopar.solver.refine import refined
    from autopar.solver.states import StateSearch

    states = refined(StateSearch(line), budget)
    return Repeated(frozenset()) if states is None else repeated(line, states)


def call(name: str, budget: float | str, how: str) -> None:
    """One plan, or a curve, as JSON."""
    import torch
    import transformers

    import autopar

    case = CASES[name]
    config = transformers.LlamaConfig(
        hidden_size=4096, num_attention_heads=32, max_position_embeddings=8192, **case.config
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.zeros(case.batch, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids.clone()}
    planning = autopar.plan  # it is imported by its first use
    before = cpu_s()
    try:
        plan = planning(
            model,
            batch,
            mesh=case.mesh,
            cluster=case.cluster,
            assume=autopar.Assume(no_padding=True),
            memory_budget=budget,
            recompute=in_two_stages if how == "two stages" else "auto",
        )
    except autopar.Infeasible as e:
        print(json.dumps({"said": e.seen.split(";")[0], CPU: cpu_s() - before}))
        return
    curve = [point.step_time_s for point in plan.curve(20)] if how == "curve" else []
    print(
        json.dumps(
            {
                "step": plan.step_time_s,
                "gap": plan.gap,
                "peak": plan.peak_bytes,
                "values": len(plan.recomputed),
                "is_monotone": curve == sorted(curve),
                CPU: cpu_s() - before,
            }
        )
    )


def apart(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.joint", "--here", json.dumps(arguments)]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]))


# -- the tables


def row(what: str, found: dict[str, Any], free: dict[str, Any], two: dict[str, Any] | None) -> str:
    if "said" in found:
        return f"| {what} | - | | | | | {found[CPU]:.1f} | nothing fits: {found['said']} |"
    beside = "-" if two is None or "said" in two else f"{two['step']:.4f}"
    return (
        f"| {what} | {found['step']:.4f} | {found['step'] / free['step']:.3f} | {found['gap']:.2%} | {beside} | "
        f"{found['values']} | {found[CPU]:.1f} | {found['peak'] / 2**30:.2f} GiB |"
    )


def tabled(name: str) -> list[str]:
    """Print the table of a case; the bars that it misses."""
    case, missed = CASES[name], []
    free = apart(name, "inf", "joint")
    print(f"\n{case.what}\n\n| budget | step s | of free | gap | two stages s | values recomputed | {CPU} | peak |")
    print("|---" * 8 + "|\n" + row("none", free, free, None), flush=True)
    for share, (most, gap) in case.shares.items():
        budget = int(share * free["peak"])
        found, two = apart(name, budget, "joint"), apart(name, budget, "two stages")
        print(row(f"{share:.0%} of the free peak", found, free, two), flush=True)
        if most is not None and found["step"] > most * free["step"]:
            missed.append(f"{name} at {share:.0%}: {found['step'] / free['step']:.3f} of free")
        if gap is not None and found["gap"] > gap:
            missed.append(f"{name} at {share:.0%}: gap {found['gap']:.2%}")
        if share == 0.5 and case.cpu and found[CPU] > case.cpu[1]:
            missed.append(f"{name} at {share:.0%}: {found[CPU]:.1f} {CPU}")
    if case.budget:
        found = apart(name, case.budget, "joint")
        print(row(case.budget, found, free, None), flush=True)
        missed += [f"{name}: no plan of {case.budget}"] if "said" in found else []
    if case.cpu:
        curve = apart(name, "inf", "curve")
        print(f"\nA curve of 20 budgets, with the plan that it is of: {curve[CPU]:.1f} {CPU}.")
        missed += [f"{name}, free: {free[CPU]:.1f} {CPU}"] if free[CPU] > case.cpu[0] else []
        missed += [f"{name}, curve: {curve[CPU]:.1f} {CPU}"] if curve[CPU] > case.cpu[2] else []
        missed += [] if curve["is_monotone"] else [f"{name}: a smaller budget of the curve is faster"]
    return missed


def main(names: list[str]) -> None:
    import torch

    print(f"torch {torch.__version__}; bfloat16, no padding assumed, weights on meta; one process a call")
    missed = [bar for name in names for bar in tabled(name)]
    if missed:
        sys.exit(f"over the bar: {missed}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    if sys.argv[1:2] == ["--here"]:
        call(*json.loads(sys.argv[2]))
    else:
        main(sys.argv[1:] or list(CASES))
