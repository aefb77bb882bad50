"""Steps of LLaMA-8B under budgets, with activations on the host by links of several rates, and without.

    python -m benchmarks.offload

No device is used: seconds and bytes are those of plans, and rates of links are said, not those of a machine.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.sharding.host import Host

GIB = 2**30
RATES = (0.0, 24e9, 52e9, 370e9)  # none, PCIe 4 and 5 with 16 lanes, C2C
SHARES = (0.75, 0.6, 0.5, 0.42, 0.36, 0.33)


def planned(budget: float | str, rate: float) -> tuple[autopar.Plan | None, float]:
    """A plan under ZeRO-3 on 8 H100, and the CPU seconds that it took; None where nothing fits."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=128256, num_hidden_layers=32, use_cache=False, **sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        batch = {name: torch.empty(8, 8192, dtype=torch.long) for name in ("input_ids", "labels")}
    host = Host("a link", rate, rate, 1e-5, 2**41) if rate else None
    cluster = replace(autopar.Cluster.of("h100-8x1"), host=host)
    given: dict[str, Any] = {"mesh": (8,), "precision": "bf16", "parallel": "zero3", "chunks": 8}
    began = time.process_time()
    try:
        plan = autopar.plan(
            model, batch, cluster=cluster, memory_budget=budget, host_budget="256GiB" if rate else 0, **given
        )
    except autopar.Infeasible:
        return None, time.process_time() - began
    return plan, time.process_time() - began


def main() -> None:
    free, _ = planned("inf", 0.0)
    assert free is not None
    print(f"saved whole: {free.step_time_s:.4f} s a step, {free.peak_bytes / GIB:.1f} GiB\n")
    print("| budget | link, GB/s | step | gap | on the host, GiB | values there | made again | CPU s |")
    print("|---|---|---|---|---|---|---|---|")
    for share in SHARES:
        for rate in RATES:
            plan, took = planned(share * free.peak_bytes, rate)
            link = f"{rate / 1e9:.0f}" if rate else "none"
            if plan is None:
                print(f"| {share:.2f} | {link} | nothing fits | | | | | {took:.1f} |", flush=True)
                continue
            adds = f"+{plan.step_time_s / free.step_time_s - 1:.2%}".replace("%", " %")
            there = f"{plan.host_bytes / GIB:.1f} | {len(plan.offloaded)} | {len(plan.recomputed)}"
            print(f"| {share:.2f} | {link} | {adds} | {plan.gap:.2%} | {there} | {took:.1f} |", flush=True)


if __name__ == "__main__":
    main()
