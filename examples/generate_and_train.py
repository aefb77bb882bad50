"""Reinforcement learning: a policy generates rows and is trained on them, in turn with a judge that scores them.

Rows are drawn with torch's own seed, by a cache that stays sharded. The numbers are those of one process.

torchrun --nproc-per-node 2 examples/generate_and_train.py
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import autopar

WORDS, PROMPT, LENGTH, ROWS = 32, 2, 10, 8
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def networks() -> tuple[torch.nn.Module, torch.nn.Module]:
    """A policy, and a judge that gives a row a number."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, vocab_size=WORDS, pad_token_id=0, eos_token_id=None, bos_token_id=None)
    policy = LlamaForCausalLM(config)
    config.num_labels = 1
    return policy, LlamaForSequenceClassification(config)


def rows_of(policy: torch.nn.Module, seed: int) -> Tensor:
    """Rows that the policy draws."""
    torch.manual_seed(seed)
    prompts = torch.randint(1, WORDS, (ROWS, PROMPT))
    return policy.eval().generate(prompts, max_new_tokens=LENGTH - PROMPT, do_sample=True, suppress_tokens=[0])


def steps(policy: torch.nn.Module, judge: torch.nn.Module, count: int) -> list[tuple[float, float]]:
    """The judge's loss, and the mean of its scores, in each step."""
    of_policy, of_judge = (torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (policy, judge))
    said = []
    for step in range(count):
        ids = rows_of(policy, step)
        good = (ids[:, PROMPT:] < WORDS // 4).float().mean(-1, keepdim=True)  # what a person would say of them
        loss = judge.train()(input_ids=ids, labels=good).loss
        loss.backward()
        of_judge.step()
        of_judge.zero_grad()
        with torch.no_grad():
            scores = judge.eval()(input_ids=ids).logits[:, 0]
        logits = policy.train()(input_ids=ids).logits
        found = torch.log_softmax(logits[:, PROMPT - 1 : -1], -1).gather(-1, ids[:, PROMPT:, None])[..., 0].sum(-1)
        (-(found * (scores - scores.mean())).mean()).backward()
        of_policy.step()
        of_policy.zero_grad()
        said.append((float(loss.detach()), float(scores.mean())))
    return said


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    policy, judge = networks()
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long)
    policy = autopar.autoparallelize(policy, {"input_ids": ids})
    judge = autopar.autoparallelize(judge, {"input_ids": ids, "labels": torch.ones(ROWS, 1)})
    for loss, score in steps(policy, judge, count):
        print(f"judge {loss:.5f}, mean score {score:.5f}")
