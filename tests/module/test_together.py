"""A job whose rank 0 traces, plans and lowers: others read, whatever order sets have in each of them."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
import autopar.api
from autopar.codegen import joint
from autopar.module.likeness import text_of
from autopar.tracer import ColoTracer

KINDS = ("tanh", "relu", "sigmoid", "sin", "cos")


class Kind(str):
    """A text of which sets have an order that differs between ranks, as under other hash seeds."""

    def __hash__(self):
        return (KINDS.index(str(self)) * (3 if dist.get_rank() % 2 else 1) + dist.get_rank()) % 8


class Net(nn.Module):
    """Its forward adds up over a set."""

    def __init__(self, width, without=""):
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)
        self.kinds = {Kind(kind) for kind in KINDS if kind != without}
        self.rank = dist.get_rank()

    def forward(self, x):
        y = self.up(x)
        for kind in self.kinds:
            y = y + getattr(torch, str(kind))(y)
        return (x - self.down(y)).square().mean()


def start(net, **how):
    """Losses of three steps and of a call of another kind."""
    joint.LOWERED.clear()
    x = torch.arange(64, dtype=torch.float64).view(8, 8) / 64
    model = autopar.autoparallelize(net.double(), (x,), mesh=(2, 2), **how)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, model(x[:4]).item()]


def starts(rank, folder):
    """Losses of several starts, and what this rank has done in each."""
    done = []
    homes = ((ColoTracer, "trace"), (autopar.api, "plan_of"), (autopar.api, "plan_again"), (joint, "_lower"))
    for home, name in homes:
        does = getattr(home, name)
        setattr(home, name, lambda *a, does=does, name=name, **k: done.append(name) or does(*a, **k))
    answers = []
    for width, how in ((12, {}), (12, {}), (9, {"constraints": {"up.weight": "S(0)@1"}})):
        done.clear()
        torch.manual_seed(0)
        answers.append((start(Net(width), cache=folder, **how), tuple(done)))
    done.clear()
    with pytest.raises(autopar.AutoparError, match="different models or meta_inputs"):
        start(Net(12, "sin" if rank else "cos"))
    return answers, [[*map(str, Net(12).kinds)], tuple(done)]


@pytest.mark.machines
def test_ranks_whose_sets_have_other_orders_run_what_rank_0_has_lowered(tmp_path, processes):
    """Bitwise alike; a rank with uneven parts lowers those, and a second start does nothing on any rank.

    Ranks whose models differ in what forward reads trace by themselves, and say so.
    """
    by_rank = processes(4, starts, str(tmp_path))
    assert len({tuple(others[0]) for _, others in by_rank}) > 1  # the orders
    assert all("trace" in others[1] for _, others in by_rank)
    whole, again, uneven = zip(*(answers for answers, _ in by_rank), strict=True)
    for answers in (whole, again, uneven):
        assert len({tuple(losses) for losses, _ in answers}) == 1
    assert {"trace", "plan_of", "_lower"} <= set(whole[0][1]) and not any(done for _, done in whole[1:])
    assert again[0][0] == whole[0][0] and not any(done for _, done in again)
    assert {name for _, done in uneven[1:] for name in done} == {"_lower"}


SCRIPT = """
import sys
import torch, torch.distributed as dist, transformers
import autopar

torch.set_num_threads(1)
dist.init_process_group("gloo")
sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64)
layers = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
decoder = dict(**sizes, **ends, **layers, num_key_value_heads=2, head_dim=16, use_cache=False)
FAMILIES = {
    "ModernBertForMaskedLM": ("ModernBertConfig", dict(**sizes, **ends, cls_token_id=1, sep_token_id=2)),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", decoder),
    "GptOssForCausalLM": ("GptOssConfig", dict(**decoder, num_local_experts=4, num_experts_per_tok=2)),
    "Qwen3ForCausalLM": ("Qwen3Config", dict(**decoder, use_sliding_window=True)),
    "Cohere2ForCausalLM": ("Cohere2Config", decoder),
}
ids = torch.randint(5, 128, (8, 16), generator=torch.Generator().manual_seed(1))
for name, (config, how) in FAMILIES.items():
    def steps(make):
        torch.manual_seed(0)
        model = make(getattr(transformers, name)(getattr(transformers, config)(**how)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    alone = steps(lambda model: model)
    batch = {"input_ids": ids, "labels": ids}
    found = steps(lambda model: autopar.autoparallelize(model, batch, mesh=(2, 2), parallel="megatron"))
    print(name, max(abs(a - b) for a, b in zip(alone, found)), flush=True)
dist.barrier()
"""


@pytest.mark.nightly
@pytest.mark.machines
@pytest.mark.timeout(600)
def test_families_train_on_ranks_with_other_hash_seeds(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(4):
        of_job = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {**os.environ, **of_job, "PYTHONHASHSEED": str(rank + 1)}
        ranks.append(subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True))
    try:
        said = [rank.communicate(timeout=500)[0].split("\n") for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for lines in said:
        errors = [float(line.split()[1]) for line in lines if line]
        assert len(errors) == 5 and max(errors) < 1e-4, lines


def test_what_is_deep_or_large_has_a_text_in_little_time():
    """Quotes in quotes once doubled at every level, and a module that a function closes over brought all of torch."""

    def nested(depth, of=torch):
        inner = nested(depth - 1, of) if depth else of
        return lambda: inner

    text = text_of(nested(60))
    assert len(text) < 100_000 and text == text_of(nested(60)) and text != text_of(nested(60, math))
    assert text_of([{"a, b"}, "c"]) != text_of([{"a", "b"}, "c"]) != text_of([{"a", "b", "c"}])
    long = None
    for _ in range(10_000):
        long = [long]
    many = [[i] for i in range(200_000)]
    assert all(" at 0x" in text_of(value) for value in (long, many))
