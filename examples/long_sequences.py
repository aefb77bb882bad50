"""Fine-tune a small LLaMA on packed documents by four processes, and compare it with padded ones on one device.

python examples/long_sequences.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.testing import on_processes

STEPS, ROWS, LENGTH, IGNORED = 5, 2, 128, -100
Documents = list[tuple[torch.Tensor, torch.Tensor]]  # tokens, and targets, of which a prompt has none
Batch = dict[str, torch.Tensor]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False))


def documents(step: int) -> Documents:
    """Documents of drawn lengths that fill rows; the last of a row ends with it."""
    draw = torch.Generator().manual_seed(step)
    found: Documents = []
    while (done := sum(len(ids) for ids, _ in found)) < ROWS * LENGTH:
        length = min(LENGTH - done % LENGTH, int(torch.randint(8, 60, (), generator=draw)))
        ids = torch.randint(0, 256, (length,), generator=draw)
        targets = ids.clone()
        targets[: 1 + length // 4] = IGNORED  # The first as well: no document has to foresee the next one.
        found.append((ids, targets))
    return found


def packed(step: int) -> Batch:
    """Documents end to end; positions that begin anew tell them apart."""
    ids, targets = zip(*documents(step), strict=True)
    flat = {"input_ids": ids, "labels": targets, "position_ids": [torch.arange(len(x)) for x in ids]}
    return {name: torch.cat(list(x)).view(ROWS, LENGTH) for name, x in flat.items()}


def padded(step: int) -> Batch:
    """A row for each document, filled up to the longest."""
    ids, targets = zip(*documents(step), strict=True)
    filled = {"input_ids": pad_sequence(ids, True), "labels": pad_sequence(targets, True, IGNORED)}
    return {**filled, "attention_mask": pad_sequence([torch.ones_like(x) for x in ids], True)}


def train(of: Any, batch: Callable[[int], Batch]) -> list[float]:
    """The losses of some steps, each on other documents."""
    optimizer = torch.optim.AdamW(of.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        losses.append(of(**batch(step)).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def on_a_rank(rank: int) -> tuple[list[float], str]:
    divided: Any = autopar.autoparallelize(model(), packed(0), mesh=4, parallel="context")
    return train(divided, packed), str(divided.plan)


if __name__ == "__main__":
    alone = train(model(), padded)
    (together, plan), *_ = on_processes(4, on_a_rank)
    apart = [abs(one - four) for one, four in zip(alone, together, strict=True)]
    print(plan, "step   one device, padded   four processes, packed   difference", sep="\n")
    for step in range(STEPS):
        print(f"{step:4}   {alone[step]:18.6f}   {together[step]:22.6f}   {apart[step]:10.0e}")
    assert max(apart) < 1e-5
