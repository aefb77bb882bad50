"""The mesh and the plan that are chosen for 8B and 70B models on 8 to 1,024 H100, with figures of links and without.

    python -m benchmarks.scale [8 64 512 1024]

Two sequences of 8,192 a device in bfloat16, the mesh a choice of the search, recompute in the same search under the
memory of the device. "without" is a cluster whose links reach one share of their line at any number of members, and
whose sums start as fast whatever they move (`Link.falls` and `Link.doubling` are left out).
"""

from __future__ import annotations

import logging
import re
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
import transformers

import autopar

LENGTH, ROWS = 8192, 2  # tokens of a sequence, sequences a device
SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


def cluster_of(devices: int, with_figures: bool) -> autopar.Cluster:
    cluster = autopar.Cluster.of(f"h100-8x{devices // 8}")
    if with_figures:
        return cluster
    return replace(cluster, links=tuple(replace(link, falls=(), doubling=()) for link in cluster.links))


def planned(shape: str, devices: int, with_figures: bool) -> autopar.Plan:
    """The plan of a model for so many devices; an Infeasible letter where nothing fits."""
    config = transformers.LlamaConfig(
        **SHAPES[shape], num_key_value_heads=8, vocab_size=128256, max_position_embeddings=LENGTH, use_cache=False
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
        ids = torch.zeros(ROWS * devices, LENGTH, dtype=torch.long)
    return autopar.plan(
        model,
        {"input_ids": ids, "labels": ids.clone()},
        mesh=devices,
        cluster=cluster_of(devices, with_figures),
        precision="bf16",
        assume=autopar.Assume(no_padding=True),
    )


def line(shape: str, devices: int, with_figures: bool) -> str:
    began = time.process_time()
    try:
        plan = planned(shape, devices, with_figures)
    except autopar.Infeasible:
        return "- | nothing fits | | |"
    rate = ROWS * LENGTH / plan.step_time_s
    said = " ".join(re.findall(r"^plan (.*(?:\n .*)*)", str(plan), re.MULTILINE)[0].split())
    took = time.process_time() - began
    return f"{plan.mesh} | {said} | {plan.step_time_s:.3f} | {rate:,.0f} | {took:.0f} |"


def main(counts: Sequence[int]) -> None:
    print("| model | devices | links | mesh | strategy | step, s | tokens/s a device | CPU s |")
    print("|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        for devices in counts:
            for words, with_figures in (("without", False), ("with", True)):
                print(f"| {shape} | {devices} | {words} | {line(shape, devices, with_figures)}", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    main([int(n) for n in sys.argv[1:]] or [8, 64, 512, 1024])
