"""Plan an unmodified Hugging Face GPT-2 on a 2x2 mesh, and train it on four local processes beside the single-device
model.

    make demo            or: python examples/demo.py

The shape is GPT-2 small's (768 wide, 12 heads, 50257 tokens) with two layers. Dropout is off, so that both columns can
be compared: with dropout the parallel model draws by position, whatever the mesh, and eager from torch's generator.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
if __name__ == "__main__":  # the four processes load them too
    print("loading PyTorch ...", flush=True)

import torch

if __name__ == "__main__":
    print("loading transformers and autopar ...", flush=True)

from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.testing import on_processes

MESH = autopar.DeviceMesh((2, 2), ("dp", "tp"))
STEPS = 6


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def batches() -> list[dict[str, torch.Tensor]]:
    """Rows of 65 tokens; a part of each row is not asked for."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 50257, (4, 65), generator=generator) for _ in range(STEPS)]
    return [
        {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)}
        for ids in rows
    ]


def train(model: nn.Module) -> list[float]:
    """The user's own loop: it does not know whether the model is parallel."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_rank(rank: int, plan: autopar.Plan) -> list[float]:
    """What each of the four processes runs."""
    return train(autopar.autoparallelize(gpt2(), batches()[0], plan=plan))


@contextlib.contextmanager
def told(what: str, every: float = 4.0) -> Iterator[None]:
    """A line now and then, for as long as something runs that says nothing itself."""
    is_over, begun = threading.Event(), time.perf_counter()

    def tell() -> None:
        while not is_over.wait(every):
            print(f"  {what}, {time.perf_counter() - begun:.0f} s", flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()


def main() -> None:
    logging.disable(logging.WARNING)
    print("building GPT-2 ...")
    model, batch = gpt2(), batches()[0]

    parameters = sum(p.numel() for p in model.parameters())
    print(f"planning GPT-2 (2 layers, {parameters:,} parameters) on mesh {MESH} ...")
    start = time.perf_counter()
    with told("planning"):
        plan = autopar.plan(model, batch, mesh=MESH)
    print(f"planned in {time.perf_counter() - start:.1f} s\n")
    print(plan)
    plan.save("plan.json")

    print(f"\ntraining {STEPS} steps on one process ...")
    with told("training"):
        single = train(model)
    print("training the same on four gloo processes under the plan ...")
    start = time.perf_counter()
    with told("four processes start, lower and train"):
        parallel = on_processes(MESH.size, on_rank, plan, timeout_s=300)[0]
    print(f"four processes started, lowered and trained in {time.perf_counter() - start:.1f} s")

    print("\nstep   single-device loss   parallel loss   difference")
    for step, (a, b) in enumerate(zip(single, parallel, strict=True)):
        print(f"{step:>4}   {a:>18.6f}   {b:>13.6f}   {abs(a - b):>10.1e}")
    print(f"largest difference {max(abs(a - b) for a, b in zip(single, parallel, strict=True)):.1e}")
    print("\nThe plan is in plan.json. Where to look next:")
    print("  autopar report plan.json -o plan.html    the plan as a page")
    print("  autopar plan llama-3-8b --mesh 8x8 --cluster h100-8x8 --inputs batch=64,seq=8192 --precision bf16")
    print("      a large model, planned on this machine: without --inputs and --precision 8 rows in float32")
    print("  docs/index.md    the same three lines in your own training script")


if __name__ == "__main__":
    main()
