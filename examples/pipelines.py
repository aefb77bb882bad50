"""Train a small GPT-2 and a small ViT in two stages of two devices each, and compare them with one device.

python examples/pipelines.py
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

import autopar
from autopar.testing import on_processes

STEPS = 5
# Colossal-AI's tutorial of ViT says pipeline=2 and tensor=dict(size=2, mode="1d"); a dictionary says the order, too.
HOW: dict[str, dict[str, Any]] = {
    "gpt2": {"mesh": {"pp": 2, "dp": 2}, "microbatches": 4, "pipeline": {"schedule": "1f1b"}},
    "vit": {
        "mesh": 4,
        "microbatches": 4,
        "parallel": {"pipeline": {"size": 2, "schedule": "1f1b"}, "tensor": {"size": 2, "mode": "1d"}},
    },
}


def model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name == "gpt2":
        others = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=32, n_layer=4, n_head=2, n_positions=16, **others))
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=10, **sizes))


def batch(name: str) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    if name == "gpt2":
        ids = torch.randint(0, 256, (8, 16), generator=draws)
        return {"input_ids": ids, "labels": ids}
    return {
        "pixel_values": torch.randn(8, 3, 16, 16, generator=draws),
        "labels": torch.randint(0, 10, (8,), generator=draws),
    }


def train(of: torch.nn.Module, name: str) -> list[float]:
    """The losses of some steps."""
    optimizer = torch.optim.AdamW(of.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = of(**batch(name)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_a_rank(rank: int, name: str) -> tuple[list[float], str]:
    staged: Any = autopar.autoparallelize(model(name), batch(name), **HOW[name])
    return train(staged, name), f"{staged.plan}\n\n{staged.plan.explain('pipeline')}"


if __name__ == "__main__":
    for name in HOW:
        alone = train(model(name), name)
        (together, plan), *others = on_processes(4, on_a_rank, name)
        print(f"{plan}\n\nstep   one device   two stages of two")
        for step, (one, four) in enumerate(zip(alone, together, strict=True)):
            print(f"{step:4}   {one:.6f}     {four:.6f}")
        assert all(abs(one - four) < 1e-4 for one, four in zip(alone, together, strict=True))
        assert all(losses == together for losses, _ in others)
