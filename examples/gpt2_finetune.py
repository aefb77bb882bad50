"""GPT-2 learns a text, byte by byte; the plan is searched under a budget.

torchrun --nproc-per-node 4 examples/gpt2_finetune.py README.md --steps 200
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

HERE = Path(__file__).parents[1]


def batches(text: bytes, rows: int, length: int, seed: int = 0):
    """Rows of a text from random places; the same on every rank."""
    data = torch.tensor(list(text))
    draws = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(data) - length, (rows,), generator=draws)
        ids = torch.stack([data[s : s + length] for s in starts.tolist()])
        yield {"input_ids": ids, "labels": ids}


def main() -> float:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", nargs="?", default=str(HERE / "README.md"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--budget", default="2GiB")
    asked = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"n_layer": asked.layers, "n_embd": asked.width, "n_head": 4, "n_positions": asked.length}
    model = GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=256, bos_token_id=0, eos_token_id=0)).train()
    source = batches(Path(asked.text).read_bytes(), asked.rows, asked.length)
    first = next(source)
    model = autopar.autoparallelize(model, first, memory_budget=asked.budget)
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if is_first:
        print(model.plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(asked.steps):
        loss = model(**next(source)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if is_first and step % 20 == 0:
            print(f"step {step}: {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    last = main()
