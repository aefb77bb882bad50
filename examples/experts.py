"""Train a small Qwen3-MoE whose experts are divided among four processes, and compare it with one device.

python examples/experts.py
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import autopar
from autopar.testing import on_processes

STEPS = 5


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "output_router_logits": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=2, use_cache=False))


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (16, 32), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def train(of: torch.nn.Module) -> list[float]:
    """The losses of some steps."""
    optimizer = torch.optim.AdamW(of.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = of(**batch()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(of.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_a_rank(rank: int) -> tuple[list[float], str]:
    divided: Any = autopar.autoparallelize(model(), batch(), mesh=(2, 2), parallel={"experts": 2})
    return train(divided), str(divided.plan)


if __name__ == "__main__":
    alone = train(model())
    (together, plan), *_ = on_processes(4, on_a_rank)
    print(plan)
    print("step   one device   four processes")
    for step, (one, four) in enumerate(zip(alone, together, strict=True)):
        print(f"{step:4}   {one:.6f}     {four:.6f}")
    assert all(abs(one - four) < 1e-4 for one, four in zip(alone, together, strict=True))
