"""A LLaMA from its config under one memory budget after the other: how much slower is less memory? No GPU is needed.

python examples/llama_budgets.py --layers 32 --width 4096 --mesh 8x8 --cluster h100-8x8
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--mesh", default="4x2")
    parser.add_argument("--cluster", default="h100-8x1")
    parser.add_argument("--budgets", type=int, default=8)
    parser.add_argument("--page", default="budgets.html")
    asked = parser.parse_args()
    width = asked.width
    sizes = {"hidden_size": width, "intermediate_size": 7 * width // 2, "num_attention_heads": max(1, width // 128)}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=asked.layers, vocab_size=32000)).train()
        ids = torch.zeros(asked.rows, asked.length, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    assume = autopar.Assume(no_padding=True)
    how = {"mesh": asked.mesh, "cluster": asked.cluster, "precision": "bf16", "memory_budget": "inf", "assume": assume}
    plan = autopar.plan(model, batch, **how)
    print(plan.curve(asked.budgets))  # budget, step, bound, recompute: all from one search
    print(f"{plan.report(asked.page, budgets=asked.budgets)} has the curve as a chart")
