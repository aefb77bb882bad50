"""Overhead of recompute as it is predicted and as it is executed, on one CPU device.

    python -m benchmarks.recompute_executed     calibrates one rank, plans under budgets, runs all plans in turn

Overhead is seconds of a step by those of the step without recompute, less one. Plans of a model run in a random order
in every round, each step by the process's own clock; the executed overhead is the median over rounds of the quotient
with the round's step without recompute. Fails where a pair is further apart than `APART`.
"""

from __future__ import annotations

import copy
import gc
import logging
import statistics
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch

import autopar
from autopar import Cluster, DeviceMesh
from autopar.calibrate.calibration import calibrate
from autopar.testing import on_processes
from benchmarks.times import ASSUME, made, stepper

MODELS = ("GPT-2", "LLaMA", "ViT", "T5")
SHARES = (0.9, 0.8, 0.7, 0.6)  # of the peak without recompute
ROUNDS = 15
APART = 0.03
MESH = DeviceMesh((1,))


def profile_of(rank: int) -> Cluster:
    return calibrate(MESH, "cpu", "here")


def plans(name: str, profile: Cluster) -> dict[str, autopar.Plan]:
    """The plan without a budget, and those under shares of its peak that were found."""
    model, batch = made(name)
    how: dict[str, Any] = dict(mesh=MESH, cluster=profile, assume=ASSUME.get(name))
    free = autopar.plan(model, batch, memory_budget="inf", **how)
    found = {"free": free}
    for share in SHARES:
        try:
            found[f"{share:.0%}"] = autopar.plan(model, batch, memory_budget=int(share * free.peak_bytes), **how)
        except autopar.Infeasible:
            continue
    return found


def measured(rank: int, name: str, given: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds of a step of each plan, by round."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    model, batch = made(name)
    steps = {
        what: stepper(
            autopar.autoparallelize(
                copy.deepcopy(model), batch, plan=autopar.Plan.from_dict(data), assume=ASSUME.get(name)
            ),
            batch,
        )
        for what, data in given.items()
    }
    for step in (*steps.values(), *steps.values()):
        step()
    gc.disable()
    taken: dict[str, list[float]] = {what: [] for what in steps}
    order = np.random.default_rng(0)
    for _ in range(ROUNDS):
        for k in order.permutation(len(steps)):
            what = list(steps)[k]
            start = time.process_time()
            steps[what]()
            taken[what].append(time.process_time() - start)
    return taken


def main() -> None:
    profile = on_processes(1, profile_of, timeout_s=600.0)[0]
    print("| model | peak of the free plan | budget | values recomputed | predicted | executed | middle half |")
    print("|---|---|---|---|---|---|---|")
    far = []
    for name in MODELS:
        found = plans(name, profile)
        taken = on_processes(1, measured, name, {what: p.to_dict() for what, p in found.items()}, timeout_s=900.0)[0]
        free = found.pop("free")
        for what, plan in found.items():
            predicted = plan.recompute_s / (plan.step_time_s - plan.recompute_s)
            quotients = [a / b - 1 for a, b in zip(taken[what], taken["free"], strict=True)]
            executed = statistics.median(quotients)
            low, high = np.quantile(quotients, [0.25, 0.75])
            print(
                f"| {name} | {free.peak_bytes / 2**20:.1f} MiB | {what} | {len(plan.recomputed)} | {predicted:.1%} | "
                f"{executed:.1%} | {low:.1%} to {high:.1%} |",
                flush=True,
            )
            if abs(predicted - executed) > APART:
                far.append(f"{name} at {what}")
    if far:
        sys.exit(f"more than {APART:.0%} apart: {far}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    main()
