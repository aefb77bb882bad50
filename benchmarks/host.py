"""The CPU milliseconds that a step asks of the host: of models too small to compute, beside the plain model.

    python -m benchmarks.host        prints the table of host.md

A program on a mesh of one device beside the plain model; medians of rounds in which all take turns.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import autopar

LAYERS, WIDTH, ROUNDS, STEPS = 12, 32, 7, 10


def vit() -> tuple[Any, dict[str, torch.Tensor]]:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 2, "num_labels": 10}
    config = transformers.ViTConfig(num_hidden_layers=LAYERS, image_size=32, patch_size=16, **sizes)
    pictures = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 10, (2,))}
    return transformers.ViTForImageClassification(config), pictures


def gpt2() -> tuple[Any, dict[str, torch.Tensor]]:
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=2, vocab_size=64, n_positions=16, **still)
    ids = torch.randint(0, 64, (2, 16))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def cpu_ms(runs: list[Callable[[], Any]]) -> list[float]:
    """CPU milliseconds of each, the median of rounds."""
    rounds = []
    for _ in range(1 + ROUNDS):  # the first warms up
        taken = []
        for run in runs:
            start = time.process_time()
            for _ in range(STEPS):
                run()
            taken.append((time.process_time() - start) / STEPS * 1e3)
        rounds.append(taken)
    return [statistics.median(column) for column in zip(*rounds[1:], strict=True)]


def main() -> None:
    torch.set_num_threads(1)
    print("| model | parameters | what | plain model | parallel model, torch's AdamW | autopar.optim.AdamW |")
    print("|---|---|---|---|---|---|")
    for name, made in (("ViT", vit), ("GPT-2", gpt2)):
        torch.manual_seed(0)
        plain, batch = made()
        parallel = autopar.autoparallelize(copy.deepcopy(plain), batch, mesh=(1,), memory_budget="inf")

        def both(model: Any, batch: dict[str, torch.Tensor] = batch) -> Callable[[], None]:
            return lambda: model(**batch).loss.backward()

        both(plain)(), both(parallel)()
        steps = [
            torch.optim.AdamW(plain.parameters()).step,
            torch.optim.AdamW(parallel.parameters()).step,
            autopar.optim.AdamW(parallel.parameters()).step,
        ]
        eager, ours, *optimizers = cpu_ms([both(plain), both(parallel), *steps])
        count = len(list(plain.parameters()))
        print(f"| {name} | {count} | forward and backward | {eager:.1f} | {ours:.1f} | |")
        print(f"| {name} | {count} | a step of AdamW | {' | '.join(f'{ms:.1f}' for ms in optimizers)} |", flush=True)


if __name__ == "__main__":
    main()
