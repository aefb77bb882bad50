"""Plans of mixtures of experts on meta: what is chosen, beside what others would run.

python -m benchmarks.experts            # the table of benchmarks/experts.md
python -m benchmarks.experts deepseek   # DeepSeek-V3 as it is, on 256 devices: how long planning takes
"""

from __future__ import annotations

import math
import resource
import sys
import time
from typing import Any

import torch
import transformers

import autopar

RATE = 620e12  # FLOP/s that the products of an ideal step reach on an H100

# name -> configuration, and its class
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "Mixtral 8x7B, 4 layers": (dict(num_hidden_layers=4), "Mixtral"),
    "Qwen3-30B-A3B, 4 layers": (
        dict(
            vocab_size=151936, hidden_size=2048, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=4,
            head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        ),
        "Qwen3Moe",
    ),
    "two narrow experts": (
        dict(
            vocab_size=32000, hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16,
            intermediate_size=256, num_local_experts=8, num_experts_per_tok=2,
        ),
        "Mixtral",
    ),
}  # fmt: skip
CASES = [
    ("Mixtral 8x7B, 4 layers", (8,), 8, 8192),
    ("Mixtral 8x7B, 4 layers", (8, 8), 64, 8192),
    ("Qwen3-30B-A3B, 4 layers", (8,), 16, 4096),
    ("Qwen3-30B-A3B, 4 layers", (8, 8), 128, 4096),
    ("two narrow experts", (8,), 32, 2048),
]
RIVALS: dict[str, Any] = {
    "zero3": "zero3",
    "experts apart": {"experts": 8},
    "experts apart, zero3": {"experts": 8, "data": {"zero": 3}},
}


def built(name: str) -> Any:
    sizes, family = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**sizes, output_router_logits=True, use_cache=False)
    with torch.device("meta"):
        return getattr(transformers, f"{family}ForCausalLM")(config)


def ideal(config: Any, tokens: int, length: int) -> float:
    """Seconds of the products of one step, forward and backward, on one device."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    attention = 2 * config.hidden_size * width * (2 * heads + 2 * groups) + 2 * length * heads * width
    experts = 2 * config.num_experts_per_tok * 3 * config.hidden_size * inner
    layers = config.num_hidden_layers * (attention + experts)
    return 3 * tokens * (layers + 2 * config.hidden_size * config.vocab_size) / RATE


def planned(model: Any, mesh: tuple[int, ...], rows: int, length: int, parallel: Any) -> Any:
    ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    n = math.prod(mesh)
    if isinstance(parallel, dict) and "data" in parallel:
        parallel = {**parallel, "data": {**parallel["data"], "size": n}}
    return autopar.plan(
        model, batch, mesh=mesh, cluster="h100-8x1" if n <= 8 else "h100-8x8", precision="bf16", memory_budget="inf",
        assume=autopar.Assume(no_padding=True), parallel=parallel,
    )  # fmt: skip


def table() -> None:
    print("| model, devices | ideal ms | " + " | ".join([*RIVALS, "free", "GiB", "CPU s", "free plan"]) + " |")
    print("|" + " --- |" * (len(RIVALS) + 6))
    for name, mesh, rows, length in CASES:
        model = built(name)
        cells = [f"{name}, {mesh}", f"{1e3 * ideal(model.config, rows * length, length) / math.prod(mesh):.0f}"]
        for parallel in RIVALS.values():
            cells.append(f"{1e3 * planned(model, mesh, rows, length, parallel).step_time_s:.0f}")
        start = time.process_time()
        plan = planned(model, mesh, rows, length, None)
        seconds = time.process_time() - start
        said = str(plan).partition("plan      ")[2].partition("\nspeed")[0]
        cells += [
            f"{1e3 * plan.step_time_s:.0f}",
            f"{plan.peak_bytes / 2**30:.1f}",
            f"{seconds:.0f}",
            " ".join(said.split()),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def deepseek() -> None:
    """The model as its configuration has it, 61 layers of 256 experts, on 256 devices."""
    config = transformers.DeepseekV3Config(use_cache=False)
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
    start = time.process_time()
    plan = autopar.plan(
        model,
        {name: torch.empty(256, 4096, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")},
        mesh=(32, 8), cluster="h100-8x32", precision="bf16", memory_budget="inf",
        assume=autopar.Assume(no_padding=True),
    )  # fmt: skip
    seconds = time.process_time() - start
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(plan)
    print(f"DeepSeek-V3, 256 H100: {seconds:.0f} CPU s, {most:.1f} GiB of the host, gap {plan.gap:.2%}")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    deepseek() if "deepseek" in sys.argv else table()
