"""Seconds that the host takes for a step of tensors so small that nothing else counts, beside eager torch.

    python -m benchmarks.host        four models on one device, steps of both in turn

On a GPU a step cannot be faster than its host: this is where a plan on one device could lose to the plain model.
"""

from __future__ import annotations

import copy
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

import autopar

WARM, STEPS = 10, 60
PARTS = ("forward", "backward", "AdamW, foreach")
Case = tuple[Any, dict[str, torch.Tensor]]


def text(config: Any, model: Any) -> Case:
    return model(config), {name: torch.randint(0, 64, (1, 8)) for name in ("input_ids", "labels")}


def pictures(config: Any, model: Any, batch: int) -> Case:
    return model(config), {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.randint(0, 10, (batch,))}


def gpt2() -> Case:
    config = hf.GPT2Config(
        n_layer=12, n_embd=32, n_head=4, n_positions=32, vocab_size=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return text(config, hf.GPT2LMHeadModel)


def llama() -> Case:
    config = hf.LlamaConfig(
        num_hidden_layers=16,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return text(config, hf.LlamaForCausalLM)


def vit() -> Case:
    config = hf.ViTConfig(
        num_labels=10, hidden_size=32, intermediate_size=64, num_attention_heads=4, image_size=32, patch_size=16
    )
    return pictures(config, hf.ViTForImageClassification, 1)


def resnet() -> Case:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8, 8], num_labels=10)
    return pictures(config, hf.ResNetForImageClassification, 2)


MODELS: dict[str, Callable[[], Case]] = {
    "GPT-2, 12 layers": gpt2,
    "LLaMA, 16 layers": llama,
    "ViT, 12 layers": vit,
    "ResNet-50": resnet,
}


def step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> list[float]:
    """Seconds of the parts of a step."""
    times = [time.perf_counter()]
    loss = model(**batch).loss
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    optimizer.step()
    times.append(time.perf_counter())
    optimizer.zero_grad()
    return [b - a for a, b in itertools.pairwise(times)]


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}; medians of {STEPS} steps in turn, milliseconds: eager, autopar\n")
    print(f"| model | {' | '.join(PARTS)} | forward and backward of eager's |\n|---|{'---|' * (len(PARTS) + 1)}")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        plain, batch = make()
        plain.train()
        mine = autopar.autoparallelize(
            copy.deepcopy(plain), batch, mesh=(1,), memory_budget="inf", assume=autopar.Assume(no_padding=True)
        )
        pairs = [(m, torch.optim.AdamW(m.parameters(), foreach=True)) for m in (plain, mine)]
        taken: list[list[list[float]]] = [[], []]
        for _ in range(WARM + STEPS):
            for (model, optimizer), of_one in zip(pairs, taken, strict=True):
                of_one.append(step(model, optimizer, batch))
        eager, parallel = ([1e3 * statistics.median(part) for part in zip(*t[WARM:], strict=True)] for t in taken)
        parts = [f"{a:.2f}, {b:.2f}" for a, b in zip(eager, parallel, strict=True)]
        print(f"| {name} | {' | '.join(parts)} | {sum(parallel[:2]) / sum(eager[:2]):.2f} |", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    main()
