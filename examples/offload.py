"""Train a deep, narrow GPT-2 in a budget that recompute alone does not fit, and compare it with one device.

python examples/offload.py
"""

from __future__ import annotations

import copy

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.runtime.host import HOST

STEPS = 3
SHARE = 0.1  # of what a step holds that saves everything


def train(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    """The losses of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    others = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    config = GPT2Config(vocab_size=512, n_embd=64, n_layer=24, n_head=2, n_positions=2048, **others)
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, 512, (1, 2048))
    batch = {"input_ids": ids, "labels": ids}
    free = autopar.plan(model, batch, mesh=1, memory_budget="inf")
    budget = SHARE * free.peak_bytes
    print(
        f"all that backward needs is saved: {free.peak_bytes / 2**20:.0f} MiB, {1e3 * free.step_time_s:.2f} ms a step"
    )
    try:
        autopar.plan(model, batch, mesh=1, memory_budget=budget)
    except autopar.Infeasible as e:
        print(f"recompute alone: {e.what}")
    plan = autopar.plan(model, batch, mesh=1, memory_budget=budget, host_budget="1GiB")
    print(f"with the host: {plan.peak_bytes / 2**20:.0f} MiB, {1e3 * plan.step_time_s:.2f} ms a step")
    print(plan)
    reference = copy.deepcopy(model)
    ours = train(autopar.autoparallelize(model, batch, plan=plan), batch)
    theirs = train(reference, batch)
    print(f"{len(plan.offloaded)} values waited on the host, {HOST.peak / 2**20:.1f} MiB at most")
    for one, other in zip(ours, theirs, strict=True):
        print(f"    loss {one:.6f}, on one device {other:.6f}")
    assert all(abs(one - other) <= 1e-5 * abs(other) for one, other in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
