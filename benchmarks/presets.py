"""The free plan beside the experts' under one model of cost: ratios of step times, a preset's to ours.

python -m benchmarks.presets        fails where a preset is faster than the free plan
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import torch
import transformers

import autopar
from autopar import DeviceMesh
from autopar.letters import BadPreset

PRESETS = ("dp", "zero1", "zero3", "megatron", "2d")
MESHES = [
    (DeviceMesh((8,)), "h100-8x1"),
    (DeviceMesh((4, 8), ("dp", "tp")), "h100-8x4"),
    (DeviceMesh((8, 8), ("dp", "tp")), "a100-8x8"),
    (DeviceMesh((2, 4), ("dp", "tp")), "l4-4x2"),
]


def models() -> dict[str, tuple[Any, Any, Any]]:
    def text(model: Any, batch: int, length: int, assume: Any = None) -> tuple[Any, Any, Any]:
        ids = torch.zeros(batch, length, dtype=torch.long)
        return model.train(), {"input_ids": ids, "labels": ids.clone()}, assume

    padded = autopar.Assume(no_padding=True)
    with torch.device("meta"):
        return {
            "GPT-2 medium, 12 layers": text(
                transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=12, n_embd=1024, n_head=16)), 64, 1024
            ),
            "LLaMA 1B shape, 16 layers": text(
                transformers.LlamaForCausalLM(
                    transformers.LlamaConfig(
                        num_hidden_layers=16,
                        hidden_size=2048,
                        intermediate_size=8192,
                        num_attention_heads=32,
                        num_key_value_heads=8,
                        vocab_size=128256,
                    )
                ),
                64,
                2048,
                padded,
            ),
            "BERT large, 24 layers": text(
                transformers.BertForMaskedLM(
                    transformers.BertConfig(
                        num_hidden_layers=24, hidden_size=1024, intermediate_size=4096, num_attention_heads=16
                    )
                ),
                128,
                512,
                padded,
            ),
            "LLaMA 8B shape, 4 layers": text(
                transformers.LlamaForCausalLM(
                    transformers.LlamaConfig(
                        num_hidden_layers=4,
                        hidden_size=4096,
                        intermediate_size=14336,
                        num_attention_heads=32,
                        num_key_value_heads=8,
                        vocab_size=128256,
                    )
                ),
                64,
                4096,
                padded,
            ),
            "ResNet-50, images of 224": (
                transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000)).train(),
                {"pixel_values": torch.zeros(256, 3, 224, 224), "labels": torch.zeros(256, dtype=torch.long)},
                None,
            ),
        }


def main() -> None:
    print(
        "seconds under the model, memory without limit; a ratio is the preset's to the free plan's; - where the "
        "mesh cannot carry it\n"
    )
    print(
        f"| model | mesh | cluster | free plan | gap | {' | '.join(PRESETS)} "
        f"|\n|---|---|---|---|---|{'---|' * len(PRESETS)}"
    )
    worse = []
    for name, (model, batch, assume) in models().items():
        for mesh, cluster in MESHES:
            how: dict[str, Any] = dict(mesh=mesh, cluster=cluster, assume=assume, memory_budget="inf")
            free = autopar.plan(model, batch, **how)
            cells = []
            for preset in PRESETS:
                try:
                    theirs = autopar.plan(model, batch, parallel=preset, **how)
                except BadPreset:
                    cells.append("-")
                    continue
                cells.append(f"{theirs.step_time_s / free.step_time_s:.3f}")
                worse += [(name, str(mesh), preset)] if theirs.step_time_s < free.step_time_s * (1 - 1e-9) else []
            print(
                f"| {name} | {mesh} | {cluster} | {free.step_time_s * 1e3:.1f} ms | {free.gap:.1e} | "
                f"{' | '.join(cells)} |",
                flush=True,
            )
    if worse:
        sys.exit(f"faster than the free plan: {worse}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    main()
