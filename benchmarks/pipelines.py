"""Orders of pipelines: simulated seconds beside formulas and torch's tables, and beside published runs.

    python -m benchmarks.pipelines
    python -m benchmarks.pipelines plans        LLaMA-8B on 64 H100 as autopar plans it, and the CPU seconds of planning
    python -m benchmarks.pipelines overlap      best cuts where communication runs beside compute, and where it does not
    python -m benchmarks.pipelines held         predicted peaks of ranks beside what they hold
    python -m benchmarks.pipelines steps        predicted steps beside those of the executor over gloo

First table: an order on p coordinates with n turns, where a coordinate's forward, gradients of inputs and gradients of
weights take a second each and transfers none; torch's own table of that order is simulated too.

Second table: published runs that differ in the order alone, as throughput over that of the first row. A stage's seconds
are its FLOPs: blocks cut evenly, the head on the last stage, with attention's part and what is recomputed. Nothing is
fitted but the number of turns, which the sources do not say: that of the nearest first row is marked, and first rows
are not judged.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from autopar.stages import Atoms, Block, Order, Prices, StagePrices, order_of, prove, simulated
from tests.stages.tables import torch_order

TORCH = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV"}
ORDERS = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("zero-bubble", 1),
    ("zero-bubble", 2),
    ("zb-v", 2),
    ("dualpipe-v", 2),
    ("v-half", 2),
    ("v-min", 2),
    ("greedy", 1),
    ("greedy", 2),
)
SIZES = ((4, 8), (4, 16), (8, 16), (8, 32))
BAR = 0.05


@dataclass(frozen=True)
class Model:
    """What a stage's seconds follow from: FLOPs of a token by block, of which attention, and of the head."""

    name: str
    blocks: int
    width: int
    parameters: float  # of a block that a token passes
    vocabulary: int
    length: int
    is_recomputed: bool = False

    def atoms(self) -> Atoms:
        """Blocks and head in GFLOP a token: a causal attention's backward takes 2.5 times its forward, and no W."""
        products = 2 * self.parameters / 1e9
        attention = 2 * self.length * self.width / 1e9
        again = products + attention if self.is_recomputed else 0.0
        block = Block(products + attention, products + 2.5 * attention + again, products)
        head = 2 * self.width * self.vocabulary / 1e9
        return Atoms.alike(self.blocks, block, Block(), Block(head, head, head))


@dataclass(frozen=True)
class Row:
    """A published run: its order, stages a coordinate, throughput, memory, and slots of a capped greedy order."""

    label: str
    order: str
    each: int
    rate: float
    memory: float
    caps: int | None = None


@dataclass(frozen=True)
class Published:
    source: str
    model: Model
    coordinates: int
    rows: tuple[Row, ...]


LLAMA_7B = Model("LLaMA-2-7B", 32, 4096, 202.4e6, 32000, 4096)
QWEN_235B = Model("Qwen3-235B", 94, 4096, 222e6, 151936, 4096)
LLAMA_405B = Model("LLaMA-3.1-405B", 126, 16384, 3.19e9, 128256, 8192, is_recomputed=True)
GPT_6B = Model("GPT-6.2B", 32, 4096, 201.3e6, 50304, 1024)
PRIMUS = "AMD-AGI/Primus docs/tech_blogs/primus_pipeline"
TABLES = (
    Published(
        f"{PRIMUS}, 8 MI300X",
        LLAMA_7B,
        8,
        (
            Row("1F1B", "1f1b", 1, 10057, 16.26),
            Row("interleaved, 2", "interleaved", 2, 10974, 21.40),
            Row("zero bubble", "zero-bubble", 1, 11411, 16.59),
            Row("ZB-V", "zb-v", 2, 11347, 18.11),
            Row("V-half", "v-half", 2, 10894, 14.06),
            Row("V-min", "v-min", 2, 8897.2, 11.90),
        ),
    ),
    Published(
        f"{PRIMUS}, 32 MI355X",
        QWEN_235B,
        4,
        (
            Row("1F1B", "1f1b", 1, 2742.4, 261.58),
            Row("interleaved, 4", "interleaved", 4, 3024.5, 278.82),
            Row("interleaved, 3", "interleaved", 3, 3012.1, 287.13),
            Row("zero bubble", "zero-bubble", 1, 2963.1, 272.13),
            Row("ZB-V", "zb-v", 2, 2952.7, 284.36),
            Row("V-half", "v-half", 2, 2912.9, 257.84),
            Row("V-min", "v-min", 2, 2200.6, 228.28),
        ),
    ),
    Published(
        "pytorch/torchtitan benchmarks/llama3_h100_202412, 512 H100",
        LLAMA_405B,
        8,
        (Row("1F1B", "1f1b", 1, 100, 82.5), Row("interleaved, 2", "interleaved", 2, 128, 72.7)),
    ),
    Published(
        "sail-sg/zero-bubble-pipeline-parallelism#21, 8 H800",
        GPT_6B,
        8,
        (
            Row("1F1B", "1f1b", 1, 55, 48),
            Row("interleaved, 4", "interleaved", 4, 66, 57),
            Row("ZB-2p", "greedy", 1, 67, 79, caps=15),
            Row("ZB-V", "zb-v", 2, 64, 53),
        ),
    ),
)


def orders() -> Iterator[str]:
    """Lines of the first table."""
    yield "| order | stages each | p | n | seconds | formula | torch's table | idle, % | in flight | receives ahead |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for (p, n), (name, each) in ((size, order) for size in SIZES for order in ORDERS):
        order = order_of(name, p, n, each)
        run = simulated(order, equal(order))
        formula = {
            "gpipe": 3 * (n + p - 1),
            "1f1b": 3 * (n + p - 1),
            "interleaved": 3 * n + 3 * (p - 1) / each,
            "zero-bubble": 3 * n + (p - 1) / each,
            "zb-v": 3 * n + (p - 1) / 2,
            "dualpipe-v": 3 * n + (p - 1) / 2,
        }.get(name)
        kind = "InterleavedZeroBubble" if (name, each) == ("zero-bubble", 2) else TORCH.get(name)
        theirs = torch_order(kind, p, n, each) if kind and name != "1f1b" else None
        cells = (
            f"{run.seconds:.1f}",
            "" if formula is None else f"{formula:.1f}",
            "" if theirs is None else f"{simulated(theirs, equal(theirs)).seconds:.1f}",
            f"{100 * run.idle:.1f}",
            f"{min(run.in_flight) * p / order.stages:g} to {max(run.in_flight) * p / order.stages:g}",
            str(prove(order).receives_ahead),
        )
        yield f"| {name} | {each} | {p} | {n} | {' | '.join(cells)} |"


def equal(order: Order) -> Prices:
    """A second for each part of a coordinate's work."""
    part = order.coordinates / order.stages
    return Prices((StagePrices(part, part, part),) * order.stages)


def even(blocks: int, stages: int) -> tuple[int, ...]:
    return tuple((s + 1) * blocks // stages - s * blocks // stages for s in range(stages))


def rate(table: Published, row: Row, turns: int) -> tuple[float, float]:
    """Turns a second of the slowest coordinate, and the most stages' worth in flight."""
    stages = table.coordinates * row.each
    prices, _ = table.model.atoms().prices(even(table.model.blocks, stages))
    caps = None if row.caps is None else (row.caps,) * table.coordinates
    order = order_of(row.order, table.coordinates, turns, row.each, prices, caps)
    run = simulated(order, prices)
    return turns / run.seconds, max(run.in_flight) / row.each


def ratios(table: Published, turns: int) -> list[float]:
    first, *others = (rate(table, row, turns)[0] for row in table.rows)
    return [other / first for other in others]


def published() -> Iterator[str]:
    """Lines of the second table, and what is judged."""
    errors = []
    for table in TABLES:
        tried = {k * table.coordinates: ratios(table, k * table.coordinates) for k in (1, 2, 4, 8, 16)}
        wanted = [row.rate / table.rows[0].rate for row in table.rows[1:]]
        nearest = min(tried, key=lambda n: abs(math.log(tried[n][0] / wanted[0])))
        names = [f"**{n}**" if n == nearest else str(n) for n in tried]
        yield f"\n{table.model.name}, p = {table.coordinates}: {table.source}\n"
        yield f"| order | published | {' | '.join(names)} | error | memory | in flight |"
        yield "|---|---|" + "---|" * (len(tried) + 3)
        for k, row in enumerate(table.rows[1:]):
            error = tried[nearest][k] / wanted[k] - 1
            if k:
                errors.append(error)
            held = rate(table, row, nearest)[1] / rate(table, table.rows[0], nearest)[1]
            cells = " | ".join(f"{tried[n][k]:.3f}" for n in tried)
            memory = row.memory / table.rows[0].memory
            yield f"| {row.label} | {wanted[k]:.3f} | {cells} | {100 * error:+.1f} % | {memory:.2f} | {held:.2f} |"
    over = sum(abs(error) > BAR for error in errors)
    median = statistics.median(map(abs, errors))
    yield f"\nMedian error {100 * median:.1f} % of {len(errors)} rows that were judged, {over} of them over 5 %."


def llama() -> tuple[Any, dict[str, Any]]:
    """LLaMA-8B in bf16, and 64 rows of 8,192 tokens."""
    import torch
    import transformers

    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(num_hidden_layers=32, vocab_size=128256, use_cache=False, **shape)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.empty(64, 8192, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def overlap() -> Iterator[str]:
    """The best cuts of 1F1B with ZeRO-3 in four stages, with and without overlap, each under both."""
    import autopar

    model, batch = llama()
    shown = autopar.Cluster.of("h100-8x8")
    clusters = {"with": shown, "without": replace(shown, hidden=0.0)}
    mesh = autopar.DeviceMesh((4, 16), ("pp", "dp"))
    how = {"mesh": mesh, "microbatches": 4, "memory_budget": "inf", "parallel": "zero3"}
    yield "| best | blocks | seconds a step with overlap | without |"
    yield "|---|---|---|---|"
    for name, cluster in clusters.items():
        plan = autopar.plan(model, batch, cluster=cluster, pipeline={"schedule": "1f1b"}, **how)
        asked = {"schedule": "1f1b", "cuts": list(plan.pipeline.firsts)}
        each = [autopar.plan(model, batch, cluster=c, pipeline=asked, **how).step_time_s for c in clusters.values()]
        cut = ", ".join(str(len(stage.blocks)) for stage in plan.pipeline.stages)
        yield f"| {name} overlap | {cut} | {each[0]:.4f} | {each[1]:.4f} |"


def plans() -> Iterator[str]:
    """Lines of the third table: cuts, steps and CPU seconds of planning, of 64 rows of 8,192 tokens in bf16."""
    import autopar

    model, batch = llama()
    in_eight = {"mesh": autopar.DeviceMesh((8, 8), ("pp", "dp")), "microbatches": 16}
    equal = {"schedule": "1f1b", "cuts": [f"model.layers.{k}" for k in range(4, 32, 4)]}
    asked = {
        "p = 8, 1F1B, equal blocks": {**in_eight, "pipeline": equal},
        "p = 8, 1F1B": {**in_eight, "pipeline": {"schedule": "1f1b"}},
        "p = 8, any order": in_eight,
        "p = 4 x (4, 4), any order": {"mesh": autopar.DeviceMesh((4, 4, 4), ("pp", "dp", "tp")), "microbatches": 16},
        'pipeline="auto"': {"mesh": 64, "pipeline": "auto"},
        'pipeline="auto", 54 GiB': {"mesh": 64, "pipeline": "auto", "memory_budget": "54GiB"},
    }
    yield "| asked | order | blocks | seconds a step | over its bound | idle | most GiB | CPU seconds |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, how in asked.items():
        began = time.process_time()
        how = {"cluster": "h100-8x8", "memory_budget": "inf", **how}
        plan = autopar.plan(model, batch, **how)
        took = time.process_time() - began
        stages = plan.pipeline
        cut = ", ".join(str(len(stage.blocks)) for stage in stages.stages) if stages else "all"
        cells = (
            stages.schedule if stages else "no stages",
            cut,
            f"{plan.step_time_s:.3f}",
            f"{100 * plan.gap:.1f} %",
            f"{100 * stages.idle:.1f} %" if stages else "",
            f"{plan.peak_bytes / 2**30:.1f}",
            f"{took:.1f}",
        )
        yield f"| {name} | {' | '.join(cells)} |"


def held() -> Iterator[str]:
    """The pairs of a model and an order in which `tests/stages/test_staging.py` measures what ranks hold."""
    from tests.stages.holding import PAIRS, peaks

    yield "| model | p x tp | order | asked | fullest rank, KiB | predicted / measured, by coordinate |"
    yield "|---|---|---|---|---|---|"
    for pair in PAIRS:
        found = peaks(pair)
        asked = ", ".join(f"{name}={value}" for name, value in pair.how)
        shares = " ".join(f"{said / peak:.3f}" for said, peak in found)
        fullest = max(peak for _, peak in found) / 2**10
        mesh = " x ".join(map(str, pair.shape))
        yield f"| {pair.model} | {mesh} | {pair.schedule} | {asked} | {fullest:,.0f} | {shares} |"


def steps() -> Iterator[str]:
    """The pipelines of `tests/stages/test_step_time.py`, each in as many processes as it has coordinates."""
    from autopar.testing import on_processes
    from tests.stages import slept

    yield "| p | order | micro-batches | predicted, ms | median step, ms | fastest, ms | median / predicted |"
    yield "|---|---|---|---|---|---|---|"
    for cases in slept.BY_NIGHT:
        ranks = on_processes(cases[0][0], slept.steps, cases, 5)
        for (p, order, turns, _), (said, each) in zip(cases, slept.seconds_of(ranks), strict=True):
            median = statistics.median(each)
            row = (p, order, turns, *(f"{1e3 * s:.0f}" for s in (said, median, min(each))), f"{median / said:.3f}")
            yield f"| {' | '.join(map(str, row))} |"


PARTS = {"plans": plans, "overlap": overlap, "held": held, "steps": steps}


def main() -> int:
    for line in PARTS[sys.argv[1]]() if sys.argv[1:] else (*orders(), *published()):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
