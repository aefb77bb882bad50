"""LoRA with PEFT: the frozen model lies in parts, adapters are trained, and only they are saved.

pip install transformers peft
torchrun --nproc-per-node 2 examples/peft_lora.py
"""

from __future__ import annotations

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

WORDS, LENGTH, ROWS = 64, 16, 8
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=WORDS, max_position_embeddings=LENGTH))
    return get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")).train()


def batch(step: int) -> dict[str, torch.Tensor]:
    starts = torch.randint(0, WORDS, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    ids = (starts + torch.arange(LENGTH)) % WORDS
    return {"input_ids": ids, "labels": ids}


def train(net: torch.nn.Module, steps: int = 5) -> list[float]:
    """The losses of some steps."""
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    said = []
    for step in range(steps):
        loss = net(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(float(loss))
    return said


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "adapters"
    net = autopar.autoparallelize(model(), batch(0), parallel="fsdp")
    print(train(net))
    net.save_pretrained(folder)  # the adapters alone, written by all ranks together
    alone = autopar.gather(net, 0)  # on rank 0: to merge, to generate
    if alone is not None:
        print(type(alone.merge_and_unload()).__name__)
