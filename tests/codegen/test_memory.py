"""What a plan says it holds is what torch's MemTracker counts of one rank, in the first step and in the third.

`benchmarks/memory.py` has the long table.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
import transformers
from torch.distributed._tools.mem_tracker import MemTracker

import autopar
from autopar import Cluster
from tests.models import MLP


def gpt2(batch=16):
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=512, n_positions=64)
    ids = torch.zeros(batch, 64, dtype=torch.long)
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids.clone()}


def llama(layers=2, batch=16):
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=64,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=64,
    )
    ids = torch.zeros(batch, 64, dtype=torch.long)
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()}


def peaks(model, batch, micro_batches):
    """Of steps 1 and 3, as MemTracker counts them; the outputs are held until backward has ended."""
    optimizer = torch.optim.AdamW(model.parameters())
    tracker, found = MemTracker(), []
    tracker.track_external(model, optimizer, *batch.values())
    with tracker:
        for _ in range(3):
            for k in range(micro_batches):
                tracker.reset_mod_stats()
                with model.no_sync() if k < micro_batches - 1 else contextlib.nullcontext():
                    outputs = model(**batch)
                    (outputs if isinstance(outputs, torch.Tensor) else outputs.loss).backward()
                    del outputs
            optimizer.step()
            optimizer.zero_grad()
            found.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    return found[0], found[2]


@pytest.mark.parametrize(
    "make, mesh, how",
    [
        pytest.param(gpt2, (4,), {"parallel": "dp", "accumulation": 2}, id="dropout, tied weights, two micro-batches"),
        pytest.param(llama, (4,), {"parallel": "zero3"}, id="regathered"),
        pytest.param(
            lambda: (MLP(256, 4), {"x": torch.zeros(8, 256), "y": torch.zeros(8, 256)}),
            (2,),
            {"parallel": "dp"},
            id="mostly parameters",
        ),
    ],
)
def test_the_peak_is_what_one_rank_holds(make, mesh, how, fake_world):
    torch.manual_seed(0)
    model, batch = make()
    generic = Cluster.of("generic")
    plan = autopar.plan(
        model,
        batch,
        mesh=mesh,
        cluster=replace(generic, device=replace(generic.device, kernels="cpu")),
        memory_budget="inf",
        **how,
    )
    with fake_world(plan.mesh.size):
        parallel = autopar.autoparallelize(model, batch, plan=plan)
        first, third = peaks(parallel, batch, plan.accumulation)
    assert 0.98 <= plan.first_peak_bytes / first <= 1.05
    assert 0.98 <= plan.peak_bytes / third <= 1.05
