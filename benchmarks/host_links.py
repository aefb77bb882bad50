"""Seconds of a host's link and of AdamW on its CPUs, by the cluster files, beside published runs.

    python -m benchmarks.host_links [activations] [adamw]

No device is used, and nothing is fitted: rates are those of `autopar/sharding/clusters`, steps those of plans. Tables:

    activations   bytes that pass the link within a planned forward, and seconds of published bytes
    adamw         steps whose AdamW runs on the host during backward, beside those that keep it on the devices
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autopar.sharding.cluster import Cluster
from autopar.sharding.host import Host

GB = 1e9
GIB = 2**30


@dataclass(frozen=True)
class Moved:
    """A published size of activations that pass a link within forward."""

    model: str
    gib: float
    clusters: tuple[str, ...]


# pytorch/torchtitan#3881, whose command has steps of 4 sequences of 2,048 tokens. Which of the two Qwen3 models of 28
# layers it ran is not said.
ROWS, LENGTH = 4, 2048
MOVED = (
    Moved("LLaMA-3.2 1B", 1.8, ("h100-1x1", "h100w500-1x1")),
    Moved("Qwen3 0.6B", 3.3, ("h100-1x1",)),
    Moved("Qwen3 1.7B", 3.3, ("h100-1x1",)),
)


@dataclass(frozen=True)
class Offloaded:
    """A published step by tokens of a sequence: without and with AdamW on the host, least and most."""

    tokens: int
    plain: tuple[float, float]
    offloaded: tuple[float, float]

    @property
    def kept(self) -> tuple[float, float]:
        """Shares of the speed that are left, least and most."""
        return self.plain[0] / self.offloaded[1], self.plain[1] / self.offloaded[0]


# PrimeIntellect-ai/prime-rl#3234, Qwen3-30B-A3B on 8 H200; how many sequences a step has is not said.
OFFLOADED = (
    Offloaded(8192, (1.75, 1.75), (3.96, 3.96)),
    Offloaded(16384, (5.17, 5.17), (5.73, 5.73)),
    Offloaded(32768, (16.0, 21.0), (15.4, 16.7)),
    Offloaded(65536, (38.7, 38.7), (34.1, 34.1)),
)


@dataclass(frozen=True)
class Step:
    """Predicted seconds of a step: until forward ends, until backward ends, and all of it."""

    forward: float
    backward: float  # from the end of forward on
    optimizer: float

    @property
    def whole(self) -> float:
        return self.forward + self.backward + self.optimizer

    @staticmethod
    def of(plan: Any) -> Step:
        ends = dict[str, float]()
        for event in plan.timeline().events:
            part = "backward" if event.part == "recompute" else event.part
            ends[part] = max(ends.get(part, 0.0), float(event.begins_s + event.seconds))
        return Step(ends["forward"], ends["backward"] - ends["forward"], plan.step_time_s - ends["backward"])


@dataclass(frozen=True)
class OnHost:
    """Seconds of what a device's host does in a step: gradients come down, AdamW steps, parameters go up."""

    down: float
    adamw: float
    up: float

    @staticmethod
    def of(host: Host, parameters: float) -> OnHost:
        """Gradients and parameters pass the link in two bytes each."""
        return OnHost(host.down_s(2 * parameters), parameters / host.adamw_params_per_s, host.up_s(2 * parameters))

    def beside(self, step: Step) -> float:
        """Seconds of a step where all of it runs in pieces as gradients come: the longest of backward and of these."""
        return step.forward + max(step.backward, self.down, self.adamw, self.up)

    def behind(self, step: Step) -> float:
        """Seconds of a step where all of it begins behind backward, one after the other."""
        return step.forward + step.backward + self.down + self.adamw + self.up


def language_model(name: str) -> Any:
    """A model of transformers on meta, of the published shape."""
    import torch
    import transformers as hf

    qwen = {"vocab_size": 151936, "head_dim": 128, "use_cache": False, "max_position_embeddings": 65536}
    made = {
        "LLaMA-3.2 1B": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(
                hidden_size=2048,
                intermediate_size=8192,
                num_hidden_layers=16,
                num_attention_heads=32,
                num_key_value_heads=8,
                vocab_size=128256,
                use_cache=False,
            )
        ),
        "Qwen3 0.6B": lambda: hf.Qwen3ForCausalLM(
            hf.Qwen3Config(
                hidden_size=1024,
                intermediate_size=3072,
                num_hidden_layers=28,
                num_attention_heads=16,
                num_key_value_heads=8,
                **qwen,
            )
        ),
        "Qwen3 1.7B": lambda: hf.Qwen3ForCausalLM(
            hf.Qwen3Config(
                hidden_size=2048,
                intermediate_size=6144,
                num_hidden_layers=28,
                num_attention_heads=16,
                num_key_value_heads=8,
                **qwen,
            )
        ),
        "Qwen3-30B-A3B": lambda: hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(
                hidden_size=2048,
                intermediate_size=6144,
                moe_intermediate_size=768,
                num_hidden_layers=48,
                num_attention_heads=32,
                num_key_value_heads=4,
                num_experts=128,
                num_experts_per_tok=8,
                norm_topk_prob=True,
                **qwen,
            )
        ),
    }
    with torch.device("meta"):
        return made[name]()


def planned(model: Any, rows: int, length: int, cluster: str, devices: int, **how: Any) -> Step:
    """The step of `rows` sequences of `length` tokens under FSDP, in bfloat16."""
    import torch

    import autopar

    ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
    plan = autopar.plan(
        model,
        {"input_ids": ids, "labels": ids},
        mesh=devices,
        cluster=cluster,
        parallel="fsdp",
        precision="bf16",
        memory_budget="inf",
        assume=autopar.Assume(no_padding=True),
        **how,
    )
    return Step.of(plan)


def activations() -> Iterator[str]:
    """Lines of the first table."""
    yield f"| {ROWS} x {LENGTH} tokens | cluster | forward, ms | passes in it, GiB | published, GiB | that takes, ms |"
    yield "|---|---|---|---|---|---|"
    for row in MOVED:
        model = language_model(row.model)
        for name in row.clusters:
            step = planned(model, ROWS, LENGTH, name, 1, recompute="none")
            host = Cluster.of(name).host
            assert host
            passes = (step.forward - host.latency_s) * host.down_bytes_per_s / GIB
            cells = (
                f"{1e3 * step.forward:.1f}",
                f"{passes:.2f}",
                f"{row.gib}",
                f"{1e3 * host.down_s(row.gib * GIB):.1f}",
            )
            yield f"| {row.model} | {name} | {' | '.join(cells)} |"
    host = Cluster.of("h200").host
    assert host
    yield "\n| DeepSpeed#8255, Qwen3-14B, 8 H200 | GB moved | down, s | up, s | published step, s |"
    yield "|---|---|---|---|---|"
    for label, moved, step_s in (("all", 22.0, 8.67), ("planned", 11.7, 7.38)):
        yield f"| {label} | {moved} | {host.down_s(moved * GB):.3f} | {host.up_s(moved * GB):.3f} | {step_s} |"


def adamw() -> Iterator[str]:
    """Lines of the second table."""
    model = language_model("Qwen3-30B-A3B")
    host = Cluster.of("h200").host
    assert host
    parameters = sum(p.numel() for p in model.parameters()) / 8
    on_host = OnHost.of(host, parameters)
    yield (
        f"{parameters / 1e9:.2f}e9 parameters a device: gradients down {on_host.down:.3f} s, AdamW "
        f"{on_host.adamw:.2f} s, parameters up {on_host.up:.3f} s.\n"
    )
    yield "| tokens | step, s | its backward | published | during backward | behind it | published | kept | published |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in OFFLOADED:
        step = planned(model, 8, row.tokens, "h200-8x1", 8, recompute="full")
        beside, behind = on_host.beside(step), on_host.behind(step)
        cells = (
            f"{row.tokens // 1024}k",
            f"{step.whole:.2f}",
            f"{step.backward:.2f}",
            between(row.plain),
            f"{beside:.2f}",
            f"{behind:.2f}",
            between(row.offloaded),
            between((100 * step.whole / behind, 100 * step.whole / beside), ".0f") + " %",
            between(tuple(100 * share for share in row.kept), ".0f") + " %",
        )
        yield f"| {' | '.join(cells)} |"


def between(pair: tuple[float, ...], form: str = ".4g") -> str:
    """A range as text, or one number where both ends are alike."""
    low, high = (format(value, form) for value in pair)
    return low if low == high else f"{low} to {high}"


TABLES = {"activations": activations, "adamw": adamw}


def main(asked: list[str]) -> int:
    print("\n\n".join("\n".join(TABLES[name]()) for name in asked or TABLES))
    return 0


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    sys.exit(main(sys.argv[1:]))
