"""Seconds of a certificate, beside those of the lowering that it checks.

python -m benchmarks.certificate        a row a model, mesh and preset; writes nothing
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar import Assume, DeviceMesh
from autopar.certificate import VARIABLE
from autopar.codegen.lower import lower
from autopar.request import Request
from autopar.search import plan_of

ROUNDS = 5
CASES = (  # layers, mesh, preset
    (8, (8, 8), "fsdp"),
    (32, (8, 8), "fsdp"),
    (32, (8, 8), {"data": {"size": 8, "zero": 3}, "tensor": 8}),
    (96, (128, 8), {"data": {"size": 128, "zero": 3}, "tensor": 8}),
)


def model(layers: int, rows: int) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=16,
        vocab_size=128256,
    )
    with torch.device("meta"):
        ids = torch.zeros(rows, 2048, dtype=torch.int64)
        return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def main() -> None:
    print("| layers | mesh | preset | nodes | lowering, CPU s | certificate, CPU s | spread | typed |")
    print("|---|---|---|---|---|---|---|---|")
    for layers, shape, preset in CASES:
        made, batch = model(layers, 2 * shape[0] * shape[1])
        request = Request(
            mesh=DeviceMesh(shape, ("dp", "tp")),
            cluster=f"h100-8x{shape[0] * shape[1] // 8}",
            memory_budget="inf",
            parallel=preset,
            assume=Assume(no_padding=True),
        )
        graph = request.trace(made, batch)
        plan = plan_of(graph, request)
        os.environ[VARIABLE] = "off"  # apart from the lowering
        started = time.process_time()
        program = lower(request.as_planned(graph, plan), plan, (0, 0))
        lowering, seconds = time.process_time() - started, []
        for _ in range(ROUNDS):
            started = time.process_time()
            found = program.certified()
            seconds.append(time.process_time() - started)
        del os.environ[VARIABLE]
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        median = f"{statistics.median(seconds):.2f}"
        print(f"| {layers} | {shape} | {preset} | {found.values} | {lowering:.1f} | {median} | {spread} | {found} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
