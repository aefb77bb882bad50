"""A recompute policy of your own: a function from the line of a step to what backward makes again."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar


def dearest_bytes_first(line, budget):
    """Make again what frees most bytes for a second, until the step fits."""
    runs = [run for run in line.runs if run.name in set(line.names)]
    worth = {run.name: sum(line.bytes[v] for v in run.makes) / max(run.seconds, 1e-9) for run in runs}
    chosen = []
    for name in sorted(worth, key=worth.get, reverse=True):
        if line.peak(line.again(chosen)) <= budget:
            break
        chosen.append(name)
    return chosen


if __name__ == "__main__":
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=1024, n_positions=256)).train()
        ids = torch.zeros(8, 256, dtype=torch.int64)
    batch, assume = {"input_ids": ids, "labels": ids}, autopar.Assume(no_padding=True)
    asked = {"mesh": (1,), "cluster": "h100-8x1", "assume": assume, "chunks": 1, "microbatches": 1}
    free = autopar.plan(model, batch, memory_budget="inf", **asked)
    budget = int(0.7 * free.peak_bytes)
    for name, policy in (("auto", "auto"), ("full", "full"), ("mine", dearest_bytes_first)):
        plan = autopar.plan(model, batch, memory_budget=budget, recompute=policy, **asked)
        extra = 100 * (plan.step_time_s / free.step_time_s - 1)
        print(
            f"{name:<5} {extra:5.1f} % slower, {plan.peak_bytes / 2**20:.0f} MiB, {len(plan.recomputed)} values again"
        )
        assert plan.peak_bytes <= budget
