"""Predicted steps beside published ones: rows of training runs, planned as they were run.

    python -m benchmarks.published [--without SOURCE] [part of an id ...]

A row of `published_rows.json` names a model's shape, devices and mesh, the strategy, sequences of a device in a
micro-batch, micro-batches of a step, what was recomputed, and the tokens that a device passed in a second; rows that
cannot be planned say what they need. The same strategy is planned as a preset, no device is used, and nothing is fitted
to a row. Two ways, each with its table:

    named      the cluster file that the row names
    as run     that of the part that it ran on, where it is another, with the attention kernel of its time (`RAN`)

SOURCE (products, attention, passes, memory, links, falls, hidden, variation) is switched off, on what ran: peaks take
its place, or nothing.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

WORKERS = 2
ROWS = Path(__file__).with_name("published_rows.json")


@dataclass(frozen=True)
class Predicted:
    """A row, and its step as it was predicted."""

    row: dict[str, Any]
    step_s: float
    peak_bytes: int
    took_s: float

    @property
    def published_s(self) -> float:
        return _tokens(self.row) / self.row["tps"]

    @property
    def seconds_a_token(self) -> float:
        """Predicted seconds of a device for one token."""
        return self.step_s / _tokens(self.row)

    @property
    def ratio(self) -> float:
        """Predicted by published seconds."""
        return self.step_s / self.published_s

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)

    @property
    def groups(self) -> tuple[str, ...]:
        row = self.row
        device = row["cluster"].partition("-")[0]
        recompute = {"": "saved", "op": "by op", "full": "recomputed"}[row["ac"]]
        kind = "compiled" if row["compile"] else "eager"
        length = "long" if row["seq"] > 8192 else "short" if row["seq"] < 2048 else "middle"
        return "all", device, recompute, kind, f"{length} sequences", "tensor" if _is_tensor(row) else "fsdp"


def _is_tensor(row: dict[str, Any]) -> bool:
    return isinstance(row["parallel"], dict) and "tensor" in row["parallel"]


def _data_ranks(row: dict[str, Any]) -> int:
    return row["parallel"]["data"]["size"] if isinstance(row["parallel"], dict) else row["gpus"]


def _tokens(row: dict[str, Any]) -> float:
    """Tokens of a device in a step."""
    return float(row["mb"] * row["seq"] * row["acc"] * _data_ranks(row) / row["gpus"])


def flops(row: dict[str, Any]) -> float:
    """FLOPs of the model for a token, causal attention counted as half of the square."""
    import torch

    with torch.device("meta"):
        model = _model(row)
    embedding = model.get_input_embeddings().weight
    weights = sum(p.numel() for p in model.parameters()) - embedding.numel() * (not row["model"].get("tied", True))
    shape = row["model"]
    width, layers = shape.get("hidden_size") or shape["n_embd"], shape.get("num_hidden_layers") or shape["n_layer"]
    return 6.0 * weights + 6.0 * layers * width * row["seq"]


def _model(row: dict[str, Any]) -> Any:
    import transformers

    shape = {name: value for name, value in row["model"].items() if name != "kind"}
    if row["model"]["kind"] == "llama":
        config: Any = transformers.LlamaConfig(**shape, use_cache=False)
        return transformers.LlamaForCausalLM(config).train()
    config = transformers.GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    return transformers.GPT2LMHeadModel(config).train()


def by_op(line: Any, budget: float) -> list[str]:
    """torchtitan's selective recompute by op: attention, what is reduced, and every second product are saved."""
    from autopar.ops.entry import facts_of

    products, found = 0, []
    for run in line.runs:
        op = run.name.rpartition("/")[2].partition(":")[0].partition(".")[0]
        if not run.is_op or "layers." not in run.name:
            continue
        if facts_of(op).flops is None:
            found.append(run.name)
        elif op != "scaled_dot_product_attention":
            products += 1
            if products % 2 == 0:
                found.append(run.name)
    return found


RECOMPUTED = {"": "none", "full": "full", "op": by_op}

# Of what was published, and the device class that a row names: the file of the part, and how much slower its kernel of
# attention was. torchtitan's page names the 96 GB part; llm-foundry's benchmarks took attn_impl "triton" by default,
# the first FlashAttention, which the paper of the second finds 1.3 to 2.5 times slower: the geometric mean.
RAN = {("titan", "h100"): ("h100w500", 1.0), ("mosaic", "a100"): ("a100", math.sqrt(1.3 * 2.5))}


def cluster_of(row: dict[str, Any], as_run: bool, without: str) -> Any:
    """The cluster on which a row is planned."""
    import autopar

    name, slower = row["cluster"], 1.0
    device, _, shape = name.partition("-")
    if as_run and (row["src"], device) in RAN:
        device, slower = RAN[row["src"], device]
        name = f"{device}-{shape}"
    cluster = autopar.Cluster.of(name)
    if "fabric" in row:
        cluster = cluster.with_fabric(row["fabric"])
    about = cluster.device
    attention = [
        replace(a, **{way: tuple((n, rate / slower) for n, rate in getattr(a, way)) for way in ("forward", "backward")})
        for a in about.attention
    ]
    about = replace(about, attention=tuple(attention))
    none: dict[str, Any] = {"products": None, "attention": (), "passes": (), "reached_bytes_per_s": 0.0}
    field = {"memory": "reached_bytes_per_s"}.get(without, without)
    if field in none:
        about = replace(about, **{field: none[field]})
    off: dict[str, Any] = {"links": {"hop_s": 0.0, "reached": ()}, "falls": {}}.get(without)
    if off is not None:
        links = tuple(replace(link, falls=(), doubling=(), **off) for link in cluster.links)
        cluster = replace(cluster, links=links)
    return replace(
        cluster,
        device=about,
        hidden=1.0 if without == "hidden" else cluster.hidden,
        variation=0.0 if without == "variation" else cluster.variation,
    )


def planned(row: dict[str, Any], as_run: bool, without: str) -> tuple[float, int]:
    """Seconds of a row's step and bytes of a device, as they are predicted."""
    import torch

    import autopar

    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = _model(row)
        ids = torch.zeros(row["mb"] * _data_ranks(row), row["seq"], dtype=torch.long)
    plan = autopar.plan(
        model,
        {"input_ids": ids, "labels": ids.clone()},
        mesh=tuple(row["mesh"]),
        cluster=cluster_of(row, as_run, without),
        precision=autopar.Precision(*row["prec"]),
        parallel=row["parallel"],
        constraints=row.get("constraints"),
        accumulation=row["acc"],
        assume=autopar.Assume(no_padding=True),
        memory_budget=math.inf,
        recompute=RECOMPUTED[row["ac"]],
        compile=row["compile"],
    )
    return float(plan.step_time_s), plan.peak_bytes


def predicted(row: dict[str, Any], as_run: bool = False, without: str = "") -> Predicted:
    began = time.process_time()
    step_s, peak_bytes = planned(row, as_run, without)
    return Predicted(row, step_s, peak_bytes, time.process_time() - began)


# -- the tables


def kendall(found: Sequence[tuple[float, float]]) -> float:
    """The rank correlation of pairs."""
    agree = [
        math.copysign(1, (a - c) * (b - d)) for i, (a, b) in enumerate(found) for c, d in found[:i] if a != c and b != d
    ]
    return sum(agree) / len(agree) if agree else math.nan


def table(results: Iterable[Predicted]) -> None:
    """Errors by group, and by device class the ranks of efficiency."""
    rows = list(results)
    print("\n| rows | count | median error | within 10 % | within 20 % | median predicted / published |")
    print("|---|---|---|---|---|---|")
    for group in dict.fromkeys(g for r in rows for g in r.groups):
        of = [r for r in rows if group in r.groups]
        errors = [r.error for r in of]
        within = [sum(e <= bar for e in errors) / len(errors) for bar in (0.1, 0.2)]
        print(
            f"| {group} | {len(of)} | {statistics.median(errors):.1%} | {within[0]:.0%} | {within[1]:.0%} | "
            f"{statistics.median(r.ratio for r in of):.3f} |"
        )
    print("\nRanks of efficiency within a device class (Kendall):")
    for device in dict.fromkeys(r.groups[1] for r in rows):
        of = [r for r in rows if r.groups[1] == device]
        work = [flops(r.row) * _tokens(r.row) for r in of]
        pairs = [(w / r.step_s, w / r.published_s) for w, r in zip(work, of, strict=True)]
        if len(pairs) > 1:
            print(f"  {device}: {kendall(pairs):.2f} over {len(pairs)} rows")


def rows_of(parts: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rows that can be planned whose ids have one of these parts; all of them without any."""
    rows = json.loads(ROWS.read_text(encoding="utf-8"))["rows"]
    return [r for r in rows if "needs" not in r and (not parts or any(part in r["id"] for part in parts))]


def main(without: str, parts: Sequence[str]) -> None:
    rows = rows_of(parts)
    if not rows:
        sys.exit(f"no row of {ROWS.name} that can be planned has {' or '.join(parts)} in its id")
    ways = {"as run": True} if without else {"named": False, "as run": True}
    print(f"| row | published ms | {' | '.join(ways)} | CPU s |\n|---{'|---' * (len(ways) + 2)}|")
    found: dict[str, list[Predicted]] = {way: [] for way in ways}
    with ProcessPoolExecutor(WORKERS) as pool:
        pending = [[pool.submit(predicted, row, as_run, without) for as_run in ways.values()] for row in rows]
        for of_row in pending:
            results = [future.result() for future in of_row]
            for way, result in zip(ways, results, strict=True):
                found[way].append(result)
            cells = " | ".join(f"{r.ratio:.3f}" for r in results)
            one = results[0]
            print(f"| {one.row['id']} | {one.published_s * 1e3:,.0f} | {cells} | {one.took_s:.1f} |", flush=True)
    for way, results in found.items():
        print(f"\n{way}{', without ' + without if without else ''}:")
        table(results)
    told = [r for r in results if r.row["mem"]]
    if told:
        print("\n| row | published GiB | predicted |\n|---|---|---|")
    for r in told:
        print(f"| {r.row['id']} | {r.row['mem']} | {r.peak_bytes / 2**30:.1f} |")


if __name__ == "__main__":
    left_out, arguments = "", sys.argv[1:]
    if "--without" in arguments:
        k = arguments.index("--without")
        left_out = arguments[k + 1]
        del arguments[k : k + 2]
    main(left_out, arguments)
