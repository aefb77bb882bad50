"""Plans of long sequences on meta: what is chosen, what an attention takes beside its ideal, what is held.

python -m benchmarks.long_sequences            # the table of benchmarks/long_sequences.md
python -m benchmarks.long_sequences ways       # each way of cutting a sequence, in a node and between nodes
python -m benchmarks.long_sequences axes       # each pair of ways between nodes and inside them
python -m benchmarks.long_sequences published  # steps that torchtitan published
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers

import autopar
from autopar.sharding.attention_ways import ways_of

RATE = 328e12  # FLOP/s of a causal attention on an H100, as its cluster file has it for 16,384 places


class Case(NamedTuple):
    """A model, where it runs, and on how many rows of what length."""

    name: str
    family: str
    sizes: dict[str, Any]
    mesh: tuple[int, ...]
    rows: int
    length: int
    seen: float  # pairs of a query and a key, a row, in a layer
    parallel: Any = None
    more: Sequence[str] = ()  # inputs beside tokens and labels


def causal(length: int, window: int | None = None) -> float:
    left = length if window is None else min(window, length)
    return length * left - left * left / 2


LLAMA = dict(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=1 << 20, rope_theta=5e5,
)  # fmt: skip
SMALL = LLAMA | dict(vocab_size=32000)
K = 1024
CASES = [
    Case("LLaMA-8B's shape", "Llama", LLAMA, (8,), 1, 32 * K, causal(32 * K)),
    Case("LLaMA-8B's shape", "Llama", LLAMA, (8,), 1, 128 * K, causal(128 * K)),
    Case("LLaMA-8B's shape", "Llama", LLAMA, (8, 8), 8, 32 * K, causal(32 * K)),
    Case("LLaMA-8B's shape", "Llama", LLAMA, (8, 8), 1, 128 * K, causal(128 * K)),
    Case("LLaMA-8B's shape", "Llama", LLAMA, (8, 8), 4, 128 * K, causal(128 * K)),
    Case("LLaMA-8B's shape, ring", "Llama", LLAMA, (8,), 1, 128 * K, causal(128 * K), "ring"),
    Case("LLaMA-8B's shape, ring", "Llama", LLAMA, (8, 8), 1, 128 * K, causal(128 * K), "ring"),
    Case("Mistral, window 4096", "Mistral", SMALL | dict(sliding_window=4096), (8,), 1, 32 * K, causal(32 * K, 4096)),
    Case("packed documents of 2048", "Llama", SMALL, (8,), 1, 32 * K, 16 * causal(2 * K), None, ("position_ids",)),
    Case("gpt-oss-20b's shape, 4 layers", "GptOss", dict(num_hidden_layers=4, num_local_experts=32), (8,), 1, 32 * K,
         (causal(32 * K) + causal(32 * K, 128)) / 2),
    Case("gpt-oss-20b's shape", "GptOss", dict(num_hidden_layers=24, num_local_experts=32), (8,), 1, 32 * K,
         (causal(32 * K) + causal(32 * K, 128)) / 2),
]  # fmt: skip


def built(case: Case) -> Any:
    config = getattr(transformers, f"{case.family}Config")(**case.sizes, use_cache=False)
    with torch.device("meta"):
        return getattr(transformers, f"{case.family}ForCausalLM")(config)


def planned(case: Case) -> Any:
    ids = torch.empty(case.rows, case.length, dtype=torch.int64, device="meta")
    batch = dict.fromkeys(("input_ids", "labels", *case.more), ids)
    n = math.prod(case.mesh)
    return autopar.plan(
        built(case), batch, mesh=case.mesh, cluster="h100-8x1" if n <= 8 else "h100-8x8", precision="bf16",
        memory_budget="inf", parallel=case.parallel,
        assume=autopar.Assume(documents=2048) if case.more else autopar.Assume(no_padding=True),
    )  # fmt: skip


def attention_of(plan: Any) -> tuple[float, set[str]]:
    """Milliseconds of the attentions of a layer, in the mean, and how queries and keys lie."""
    found = [d for d in plan.decisions.values() if d.op in ("scaled_dot_product_attention", "attention")]
    ways = {" x ".join(str(s) for s in d.choice.strategies) for d in found}
    return 1e3 * sum(d.seconds for d in found) / len(found), ways


def table() -> None:
    print("| model, devices, batch | step ms | attention ms a layer | ideal | GiB | CPU s | plan |")
    print("|" + " --- |" * 7)
    for case in CASES:
        start = time.process_time()
        plan = planned(case)
        seconds = time.process_time() - start
        milliseconds, _ = attention_of(plan)
        config = built(case).config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = config.num_attention_heads
        ideal = 1e3 * 3.5 * case.rows * 4 * heads * width * case.seen / math.prod(case.mesh) / RATE
        said = " ".join(str(plan).partition("plan      ")[2].partition("\nspeed")[0].split())
        print(
            f"| {case.name}, {case.mesh}, {case.rows} x {case.length // K}k | {1e3 * plan.step_time_s:.0f} "
            f"| {milliseconds:.1f} | {ideal:.1f} | {plan.peak_bytes / 2**30:.1f} | {seconds:.0f} | {said} |",
            flush=True,
        )


# torchtitan's LLaMA-3 8B on 8 H100 of 500 W, fully recomputed and compiled, balanced context parallelism of torch
# (ring or gathered keys), float8 products: parts of the sequence, its length, tokens a second of a GPU.
# pytorch/torchtitan@b5bcd76c6 benchmarks/llama3_h100_202412_torchtitan.md
TITAN = [(1, 32 * K, 3890), (2, 64 * K, 2540), (4, 128 * K, 1071), (8, 256 * K, 548)]


def published() -> None:
    """Predicted tokens a second beside published ones, and how both change from row to row."""
    print("| parts of the sequence | length | predicted | published | change | published change |")
    print("|" + " --- |" * 6)
    config = transformers.LlamaConfig(**LLAMA | dict(num_hidden_layers=32), use_cache=False)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    before: tuple[float, float] | None = None
    for parts, length, tokens in TITAN:
        ids = torch.empty(8 // parts, length, dtype=torch.int64, device="meta")
        data = {"data": {"size": 8 // parts, "zero": 3}}
        plan = autopar.plan(
            model, {"input_ids": ids, "labels": ids}, mesh=(8 // parts, parts) if 1 < parts < 8 else 8,
            cluster="h100w500-8x1", precision="bf16", recompute="full", compile=True, memory_budget="inf",
            parallel="zero3" if parts == 1 else data | {"context": parts} if parts < 8 else {"context": 8},
            assume=autopar.Assume(no_padding=True),
        )  # fmt: skip
        predicted = length / parts / plan.step_time_s
        changes = [f"{now / then:.2f}" for now, then in zip((predicted, tokens), before or (), strict=False)]
        cells = (str(parts), f"{length // K}k", f"{predicted:.0f}", str(tokens), *(changes or ["", ""]))
        print(f"| {' | '.join(cells)} |", flush=True)
        before = predicted, tokens


def ways() -> None:
    """Steps of 1 x 128k of LLaMA-8B's shape on eight devices, by the way of its attentions."""
    print("| eight devices | ring | gather | ulysses |\n| --- | --- | --- | --- |")
    ids = torch.empty(1, 128 * K, dtype=torch.int64, device="meta")
    model = built(CASES[1])
    for name, cluster in (("of one node", "h100-8x1"), ("of eight nodes", "h100-1x8")):
        steps = []
        for way in ("ring", "gather", "ulysses"):
            plan = autopar.plan(
                model, {"input_ids": ids, "labels": ids}, mesh=8, cluster=cluster, precision="bf16",
                memory_budget="inf", assume=autopar.Assume(no_padding=True),
                parallel={"data": {"size": 1, "zero": 3}, "context": {"size": 8, "how": way}},
            )  # fmt: skip
            steps.append(f"{1e3 * plan.step_time_s:.0f}")
        print(f"| {name} | {' | '.join(steps)} |", flush=True)


LONGEST = next(case for case in CASES if case.mesh == (8, 8) and case.rows == 4)


def axes() -> None:
    """Steps of 4 x 128k of LLaMA-8B's shape on eight nodes of eight, by heads with keys and ways of both axes."""
    print("| heads with keys | between nodes | inside | step ms | attention ms a layer | GiB |\n|" + " --- |" * 6)
    for heads in (2, 8):
        case = LONGEST._replace(sizes=LLAMA | dict(num_key_value_heads=heads))
        for pair in [None, *itertools.product(("ring", "gather", "ulysses"), repeat=2)]:
            context = {"size": 64, "how": pair}
            parallel = {"data": {"size": 1, "zero": 3}, "context": context} if pair else None
            try:
                plan = planned(case._replace(parallel=parallel))
            except autopar.AutoparError as e:  # Heads do not suffice.
                print(f"| {heads} | {' | '.join(pair or ())} | - | - | {str(e).splitlines()[0]} |", flush=True)
                continue
            found = [d for d in plan.decisions.values() if d.op == "scaled_dot_product_attention"]
            said = " | ".join(ways_of(found[0].choice.strategies, 4)) + (" (free plan)" if pair is None else "")
            milliseconds, _ = attention_of(plan)
            print(f"| {heads} | {said} | {1e3 * plan.step_time_s:.0f} | {milliseconds:.1f} "
                  f"| {plan.peak_bytes / 2**30:.1f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    {"published": published, "ways": ways, "axes": axes}.get(" ".join(sys.argv[1:]), table)()
