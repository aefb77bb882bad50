"""Plans of mixtures of experts on meta: what is chosen, beside what others would run.

python -m benchmarks.experts            # the table of benchmarks/experts.md
python -m benchmarks.experts published  # steps that others published
python -m benchmarks.experts deepseek [72GiB]  # DeepSeek-V3 as it is, on 256 devices: how long planning takes
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


# Kernels for norms, rotary embeddings and losses, as on a GPU where they were measured to be faster.
KERNELS = ("add_rms_norm", "rms_norm", "rotary_pair", "rotary", "cross_entropy", "cross_entropy_part")


def planned(
    model: Any, mesh: tuple[int, ...], rows: int, length: int, parallel: Any, kernels: tuple[str, ...] = ()
) -> Any:
    ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    n = math.prod(mesh)
    if isinstance(parallel, dict) and "data" in parallel:
        parallel = {**parallel, "data": {**parallel["data"], "size": n}}
    return autopar.plan(
        model, batch, mesh=mesh, cluster="h100-8x1" if n <= 8 else "h100-8x8", precision="bf16", memory_budget="inf",
        assume=autopar.Assume(no_padding=True), parallel=parallel, kernels=kernels,
    )  # fmt: skip


def table() -> None:
    print(
        "| model, devices | ideal ms | "
        + " | ".join([*RIVALS, "free", "with kernels", "GiB", "CPU s", "free plan"])
        + " |"
    )
    print("|" + " --- |" * (len(RIVALS) + 7))
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
            f"{1e3 * planned(model, mesh, rows, length, None, KERNELS).step_time_s:.0f}",
            f"{plan.peak_bytes / 2**30:.1f}",
            f"{seconds:.0f}",
            " ".join(said.split()),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


# Steps that were published, as they ran: model, GPU, mesh, micro-batch of a GPU, length, micro-batches, what is
# parallel, seconds. NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md, 26.02.01; pytorch/torchtitan#3816, a
# DeepSeek of 16B.
OSS = dict(zero=1, size=64)
RAN = [
    ("gpt-oss-120b", "gb300-72x1", (64,), 4, 4096, 5, {"experts": 64, "data": OSS}, 4.2301),
    ("gpt-oss-120b", "gb200-72x1", (64,), 4, 4096, 5, {"experts": 64, "data": OSS}, 5.1999),
    ("gpt-oss-120b", "b300-8x8", (8, 8), 4, 4096, 5, {"experts": 8, "data": OSS}, 5.4501),
    ("gpt-oss-120b", "b200-8x8", (8, 8), 4, 4096, 5, {"experts": 8, "data": OSS}, 5.97),
    ("DeepSeek 16B", "b200-8x1", (8,), 4, 4096, 1, "zero3", 0.9362),
    ("DeepSeek 16B", "mi355x-8x1", (4, 2), 4, 4096, 1, {"experts": 2, "data": dict(size=8, zero=3)}, 1.6067),
]

# Megatron-Bridge in stages on B300, 32 devices each: 256 sequences of 4,096 tokens a step, one or four a micro-batch,
# experts over the axes of data and of tensor parallelism together. For each way of sending rows the seconds of both.
# awslabs/awsome-distributed-ai 3.test_cases/megatron/megatron-bridge, dsv3 and kimi-k2, benchmarks/RESULTS.md.
FOLDED = {"data": dict(size=4, zero=1), "tensor": dict(size=8, sequence=True), "experts": 32}
IN_STAGES = [
    ("DeepSeek-V3", 8, {"NCCL": (12.538, 9.774), "DeepEP": (14.117, 6.263)}),
    ("Kimi K2", 4, {"NCCL": (23.76, 15.381), "UCCL": (26.59, 9.852), "UCCL, overlapped": (20.95, 6.42)}),
    ("Kimi K2", 8, {"NCCL": (12.88, 9.303), "UCCL": (14.98, 6.041), "NVSHMEM": (13.538, 6.632)}),
]


def of_others(name: str) -> Any:
    if name == "gpt-oss-120b":
        return transformers.GptOssForCausalLM(transformers.GptOssConfig(use_cache=False))
    sizes: dict[str, Any] = {
        "DeepSeek-V3": {},
        "Kimi K2": dict(
            first_k_dense_replace=1, num_attention_heads=64, num_key_value_heads=64, n_routed_experts=384,
            vocab_size=163840, n_group=1, topk_group=1,
        ),
        "DeepSeek 16B": dict(
            vocab_size=102400, hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408,
            num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64,
            num_experts_per_tok=6, n_shared_experts=2, q_lora_rank=None, kv_lora_rank=512, n_group=1, topk_group=1,
            first_k_dense_replace=1,
        ),
    }[name]  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes, use_cache=False))


def in_stages() -> None:
    """Predicted seconds of one and of four sequences a micro-batch, beside published ones."""
    print("| model, stages | sends by | predicted s | published s | predicted | published |\n|" + " --- |" * 6)
    for name, stages, ways in IN_STAGES:
        with torch.device("meta"):
            model = of_others(name)
        ids = torch.empty(256, 4096, dtype=torch.int64, device="meta")
        one, four = (
            autopar.plan(
                model, {"input_ids": ids, "labels": ids}, mesh=(stages, 4, 8), cluster=f"b300-8x{4 * stages}",
                precision="bf16", parallel=FOLDED, pipeline={"size": stages, "schedule": "1f1b"}, memory_budget="inf",
                microbatches=turns, assume=autopar.Assume(no_padding=True, imbalance=1.0),
            ).step_time_s
            for turns in (64, 16)
        )  # fmt: skip
        for way, (of_one, of_four) in ways.items():
            cells = [f"{name}, {stages}", way, f"{one:.2f}, {four:.2f}", f"{of_one:.2f}, {of_four:.2f}"]
            cells += [f"{math.log(four / one):+.3f}", f"{math.log(of_four / of_one):+.3f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


def published() -> None:
    """Predicted seconds beside published ones, and the ratios of neighbours."""
    print("| model | GPUs | predicted s | published s | ratio |\n| --- | --- | --- | --- | --- |")
    found = []
    for name, cluster, mesh, rows, length, turns, parallel, seconds in RAN:
        with torch.device("meta"):
            model = of_others(name)
        ids = torch.empty(rows * math.prod(mesh), length, dtype=torch.int64, device="meta")
        plan = autopar.plan(
            model, {"input_ids": ids, "labels": ids}, mesh=mesh, cluster=cluster, precision="bf16", parallel=parallel,
            accumulation=turns, memory_budget="inf", assume=autopar.Assume(no_padding=True, imbalance=1.0),
        )  # fmt: skip
        found.append((name, cluster, plan.step_time_s, seconds))
        cells = [name, cluster, f"{plan.step_time_s:.3f}", f"{seconds:.3f}", f"{plan.step_time_s / seconds:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    for one, other in ((1, 0), (3, 2), (3, 1), (2, 0)):
        predicted, said = (math.log(found[other][k] / found[one][k]) for k in (2, 3))
        print(f"{found[one][1]} -> {found[other][1]}: predicted {predicted:+.3f}, published {said:+.3f}")


def deepseek(budget: str = "inf") -> None:
    """The model as its configuration has it, 61 layers of 256 experts, on 256 devices."""
    config = transformers.DeepseekV3Config(use_cache=False)
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
    start = time.process_time()
    plan = autopar.plan(
        model,
        {name: torch.empty(256, 4096, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")},
        mesh=(32, 8), cluster="h100-8x32", precision="bf16", memory_budget=budget,
        assume=autopar.Assume(no_padding=True),
    )  # fmt: skip
    seconds = time.process_time() - start
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(plan)
    print(f"DeepSeek-V3, 256 H100: {seconds:.0f} CPU s, {most:.1f} GiB of the host, gap {plan.gap:.2%}")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    what, *more = sys.argv[1:] or ["table"]
    {"deepseek": deepseek, "published": published, "stages": in_stages, "table": table}[what](*more)
