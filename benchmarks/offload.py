"""Values on the host: steps of plans by the rate of the link, and bytes of plans beside those that ranks hold.

    python -m benchmarks.offload [links] [states] [held] [parameters]

    links     LLaMA-8B under budgets, with links of several rates, and without
    states    the same under tighter budgets, with optimizer states on the host of 8 H200 as well
    held      small models on CPUs: what a rank and its host hold at their most, over what the plan says
    parameters    the same where all parameters lie on the host

No device is used: seconds are those of plans, and rates of links are said, not those of a machine.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.runtime.host import HOST
from autopar.sharding.costs import DURING_BACKWARD
from autopar.sharding.host import Host
from benchmarks import memory

GIB = 2**30
RATES = (0.0, 24e9, 52e9, 370e9)  # none, PCIe 4 and 5 with 16 lanes, C2C
SHARES = (0.75, 0.6, 0.5, 0.42, 0.36, 0.33)
TIGHT = (0.36, 0.3, 0.25, 0.22, 0.18, 0.16)


def planned(
    budget: float | str, cluster: autopar.Cluster, optimizer: str = "adamw"
) -> tuple[autopar.Plan | None, float]:
    """A plan under ZeRO-3 on 8 devices, and the CPU seconds that it took; None where nothing fits."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=128256, num_hidden_layers=32, use_cache=False, **sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        batch = {name: torch.empty(8, 8192, dtype=torch.long) for name in ("input_ids", "labels")}
    given: dict[str, Any] = {"mesh": (8,), "precision": "bf16", "parallel": "zero3", "chunks": 8}
    given |= {"optimizer": optimizer, "host_budget": "256GiB" if cluster.host is not None else 0}
    began = time.process_time()
    try:
        plan = autopar.plan(model, batch, cluster=cluster, memory_budget=budget, **given)
    except autopar.Infeasible:
        return None, time.process_time() - began
    return plan, time.process_time() - began


def linked(rate: float) -> autopar.Cluster:
    """8 H100 whose links to the host have a rate each way; without a host at rate 0."""
    host = Host("a link", rate, rate, 1e-5, 2**41) if rate else None
    return replace(autopar.Cluster.of("h100-8x1"), host=host)


MODELS = {
    "gpt2": (memory.gpt2, {"dropout": 0.0}),
    "llama": (memory.llama, {}),
    "bert": (memory.bert, {"dropout": 0.0}),
    "t5": (memory.t5, {"dropout": 0.0}),
    "vit": (memory.vit, {}),
    "convnext": (memory.convnext, {}),
}
WAYS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "dp": ((4,), {"parallel": "dp"}),
    "zero3": ((4,), {"parallel": "zero3"}),
    "megatron": ((4,), {"parallel": "megatron"}),
    "2 x 2": ((2, 2), {}),
}


@dataclass(frozen=True)
class Held:
    """A plan with values on the host, and its peaks over those of a rank."""

    plan: autopar.Plan
    device: float
    host: float  # 1 where nothing is there


def held(model: str, way: str, share: float = 0.75, rate: float = 2e10) -> Held:
    """What a plan says that a rank and its host hold, over what they do in the third step."""
    make, given = MODELS[model]
    mesh, how = WAYS[way]
    pair = memory.Pair(make, mesh, {**how, "microbatches": 1}, given=given)
    of, batch, _, asked = memory.asked(pair)
    free = autopar.plan(of, batch, **asked)
    cluster = replace(memory.cpu(), host=Host("a link", rate, rate, 0.0, 2**44))
    budget = int(free.peak_bytes * share)
    plan = autopar.plan(of, batch, **{**asked, "cluster": cluster, "memory_budget": budget, "host_budget": "1TiB"})
    HOST.restart()
    measured = memory.run_plan(plan, pair, 0)
    return Held(plan, plan.peak_bytes / measured.peaks[3], plan.host_bytes / HOST.peak if HOST.peak else 1.0)


def held_without_parameters(model: str, way: str, rows: int = 4) -> Held:
    """What a plan says that a rank and its host hold, where all parameters lie on the host."""
    make, given = MODELS[model]
    mesh, how = WAYS[way]
    of_model = {**given, "batch": rows, "layers": 8}
    pair = memory.Pair(make, mesh, {**how, "microbatches": 1, "optimizer": "autopar-adamw"}, given=of_model)
    of, batch, _, asked = memory.asked(pair)
    # So fast that no op is divided otherwise to have copies beside it.
    cluster = replace(memory.cpu(), host=Host("a link", 1e15, 1e15, 0.0, 2**44, adamw_params_per_s=1e15))
    asked = {**asked, "cluster": cluster, "host_budget": "1TiB"}
    pins = autopar.plan(of, batch, **asked).constraints()
    there = {name: f"{pin.rpartition('; ')[0]}; wholly" for name, pin in pins.items() if "; " in pin}
    plan = autopar.plan(of, batch, **{**asked, "parallel": None, "constraints": pins | there})
    measured = memory.run_plan(plan, pair, 0)
    return Held(plan, plan.peak_bytes / measured.peaks[3], plan.host_bytes / HOST.peak)


def print_parameters() -> None:
    print("| model | way | device | host | at the peak, MiB | on the host, MiB |")
    print("|---|---|---|---|---|---|")
    for model in ("gpt2", "llama", "bert"):
        for way in WAYS:
            one = held_without_parameters(model, way)
            sizes = f"{one.plan.peak_bytes / 2**20:.1f} | {one.plan.host_bytes / 2**20:.1f}"
            print(f"| {model} | {way} | {one.device:.3f} | {one.host:.3f} | {sizes} |", flush=True)


def print_held() -> None:
    print("| model | way | device | host | on the host, MiB | values there | made again |")
    print("|---|---|---|---|---|---|---|")
    for model in MODELS:
        for way in WAYS:
            try:
                one = held(model, way)
            except autopar.Infeasible:
                print(f"| {model} | {way} | nothing fits | | | | |", flush=True)
                continue
            plan = one.plan
            there = f"{plan.host_bytes / 2**20:.1f} | {len(plan.offloaded)} | {len(plan.recomputed)}"
            print(f"| {model} | {way} | {one.device:.3f} | {one.host:.3f} | {there} |", flush=True)


def print_links() -> None:
    free, _ = planned("inf", linked(0.0))
    assert free is not None
    print(f"saved whole: {free.step_time_s:.4f} s a step, {free.peak_bytes / GIB:.1f} GiB\n")
    print("| budget | link, GB/s | step | gap | on the host, GiB | values there | made again | CPU s |")
    print("|---|---|---|---|---|---|---|---|")
    for share in SHARES:
        for rate in RATES:
            plan, took = planned(share * free.peak_bytes, linked(rate))
            link = f"{rate / 1e9:.0f}" if rate else "none"
            if plan is None:
                print(f"| {share:.2f} | {link} | nothing fits | | | | | {took:.1f} |", flush=True)
                continue
            adds = f"+{plan.step_time_s / free.step_time_s - 1:.2%}".replace("%", " %")
            there = f"{plan.host_bytes / GIB:.1f} | {len(plan.offloaded)} | {len(plan.recomputed)}"
            print(f"| {share:.2f} | {link} | {adds} | {plan.gap:.2%} | {there} | {took:.1f} |", flush=True)


def print_states() -> None:
    cluster = autopar.Cluster.of("h200-8x1")
    alone = replace(cluster, host=None)
    free, _ = planned("inf", alone, "autopar-adamw")
    assert free is not None
    print(f"saved whole: {free.step_time_s:.4f} s a step, {free.peak_bytes / GIB:.1f} GiB\n")
    there = "on the host, GiB | states there of | parameters there | values there"
    print(f"| budget | step without a host | step | gap | {there} | CPU s | steps during backward | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for share in TIGHT:
        without, _ = planned(share * free.peak_bytes, alone, "autopar-adamw")
        plan, took = planned(share * free.peak_bytes, cluster, "autopar-adamw")
        beside = "nothing fits" if without is None else f"{without.step_time_s:.3f} s"
        if plan is None:
            print(f"| {share:.2f} | {beside} | nothing fits | | | | | | {took:.1f} | | |", flush=True)
            continue
        during, longer = planned(share * free.peak_bytes, cluster, DURING_BACKWARD)
        hidden = "nothing fits" if during is None else f"{during.step_time_s:.3f} s"
        step = f"{plan.step_time_s:.3f} s | {plan.gap:.1%} | {plan.host_bytes / GIB:.1f}"
        of = f"{len(plan.hosted)} of {len(plan.parameters)} | {len(plan.wholly_hosted)} | {len(plan.offloaded)}"
        print(f"| {share:.2f} | {beside} | {step} | {of} | {took:.1f} | {hidden} | {longer:.1f} |", flush=True)


PRINTED = {"links": print_links, "states": print_states, "held": print_held, "parameters": print_parameters}


if __name__ == "__main__":
    for _name in sys.argv[1:] or PRINTED:
        PRINTED[_name]()
