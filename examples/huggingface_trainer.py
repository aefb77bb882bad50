"""A tiny GPT-2 learns to count with transformers' Trainer, in parallel.

    torchrun --nproc-per-node 2 examples/huggingface_trainer.py      or on one process: python examples/...

Only the import of the Trainer and `planning` differ from a script for one device.
"""

from __future__ import annotations

import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from autopar.integrations.huggingface import Trainer

WORDS, LENGTH = 32, 16


class Counting(Dataset):
    """Rows of numbers, each one more than the one before; some of them are not asked for."""

    def __init__(self, rows: int) -> None:
        self.starts = torch.randint(0, WORDS, (rows,), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (self.starts[i] + torch.arange(LENGTH)) % WORDS
        labels = ids.masked_fill(torch.arange(LENGTH) < i % 4, -100)
        return {"input_ids": ids, "labels": labels}


def model() -> GPT2LMHeadModel:
    set_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=WORDS, n_positions=LENGTH, **drops))


def arguments(folder: str, **how) -> TrainingArguments:
    given = {"per_device_train_batch_size": 8, "max_steps": 12, "learning_rate": 3e-3, "logging_steps": 1}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": not torch.cuda.is_available(), "data_seed": 1}
    return TrainingArguments(output_dir=folder, **{**given, **quiet, **how})


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "counting"
    trainer = Trainer(
        model=model(),
        args=arguments(folder, save_steps=6),
        train_dataset=Counting(256),
        eval_dataset=Counting(40),
        planning={"parallel": "fsdp"},
    )
    trainer.train()
    print(trainer.evaluate()["eval_loss"])
    trainer.save_model()
