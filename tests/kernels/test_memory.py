"""A plan with kernels holds what its program holds: what lies inside a group of ops is in no memory."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import transformers as hf

import autopar
from autopar import Assume
from autopar.codegen import joint, schedule
from autopar.codegen.buffer_reuse import write_over
from autopar.kernels import NAMES, families
from benchmarks.memory import Live, cpu, gpt2, llama
from tests.shares import by_day, one_in

ASSUMED = Assume(no_padding=True)
CASES = {"llama": llama, "gpt2": lambda: gpt2(0.0)}


@pytest.fixture
def of_no_temporaries(as_ops, monkeypatch):
    """Custom ops make their results and nothing beside, as kernels do; of which numbers is all the same."""
    joint.LOWERED.clear()
    for family in families(NAMES):
        module = importlib.import_module(f"autopar.kernels.{family.name}")
        for helper, count in (("through", 2), ("through_sum", 3)):  # these stand before the operands
            if hasattr(module, helper):
                monkeypatch.setattr(module, helper, lambda *given, n=count: tuple(map(torch.zeros_like, given[n:])))
        if not family.name.startswith("cross"):
            count = len(family.patterns[0].results)
            monkeypatch.setattr(module, "reference", lambda *given, n=count: _several(given[:n]))
    yield
    joint.LOWERED.clear()


def _several(like):
    made = tuple(x.new_zeros(x.shape) for x in like)
    return made if len(made) > 1 else made[0]


def held(model, batch, plan, how):
    """Bytes that are alive as forward ends, and the most of a first step."""
    parallel = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan, **how)
    live = Live([*parameters(parallel), *batch.values()])
    with live:
        out = parallel(**batch)
        after = live.now
        out.loss.backward()
    return after, live.peak


def parameters(module):
    return [*module.parameters(), *module.buffers()]


@pytest.mark.parametrize(("name", "share"), one_in(4, [("llama", 0.7), ("llama", 1.0), ("gpt2", 0.6), ("gpt2", 1.0)]))
def test_a_program_with_kernels_holds_what_its_plan_says(name, share, of_no_temporaries):
    model, batch, how = CASES[name]()
    model = model.to(torch.bfloat16)
    asked = dict(mesh=(1,), cluster=cpu(), chunks=1, microbatches=1, **how)
    free = autopar.plan(model, batch, kernels=NAMES, memory_budget="inf", **asked)
    plan = autopar.plan(model, batch, kernels=NAMES, memory_budget=int(share * free.peak_bytes), **asked)
    assert bool(plan.recomputed) == (share < 1)
    after, peak = held(model, batch, plan, how)
    assert 0.99 <= plan.first_peak_bytes / peak <= 1.02
    if share == 1:  # ops one by one keep what lies between them
        plain = autopar.plan(model, batch, kernels=False, memory_budget="inf", **asked)
        assert after <= 0.75 * held(model, batch, plain, how)[0]
        assert plan.peak_bytes < plain.peak_bytes


@pytest.mark.parametrize("chunks", by_day([2, 4], 4))
def test_gradients_of_a_chunk_lie_where_its_logits_did(chunks, of_no_temporaries, monkeypatch):
    """A head of many classes in chunks holds one matrix of logits or their gradients, never two."""
    vocabulary = 16384
    shape = dict(hidden_size=256, intermediate_size=256, num_attention_heads=4, num_hidden_layers=1)
    config = hf.LlamaConfig(**shape, vocab_size=vocabulary, max_position_embeddings=128)
    model = hf.LlamaForCausalLM(config).train().to(torch.bfloat16)
    batch = {name: torch.randint(0, vocabulary, (16, 128)) for name in ("input_ids", "labels")}
    asked = dict(mesh=(1,), cluster=cpu(), chunks=chunks, optimizer="sgd", memory_budget="inf")
    plan = autopar.plan(model, batch, kernels=NAMES, assume=ASSUMED, **asked)
    _, peak = held(model, batch, plan, {"assume": ASSUMED})
    assert 0.99 <= plan.peak_bytes / peak <= 1.02
    monkeypatch.setattr(schedule, "PASSES", tuple(p for p in schedule.PASSES if p is not write_over))
    joint.LOWERED.clear()
    logits = 16 * 128 // chunks * vocabulary * 2
    assert held(model, batch, plan, {"assume": ASSUMED})[1] > peak + 0.4 * logits


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = hf.models.llama.modeling_llama.LlamaRMSNorm(4096)

    def forward(self, x):
        return self.norm(x)


def test_a_group_that_a_conversion_divides_is_counted_as_its_ops():
    model, batch = Norm(), {"x": torch.empty(8192, 4096, device="meta", requires_grad=True)}
    pins = {"x": "S(1)@0", "norm": "S(1)@0"}
    asked = {"mesh": (2,), "memory_budget": "inf", "cluster": "h100-1x8", "assume": ASSUMED}
    plan = autopar.plan(model, batch, constraints=pins, kernels="rms_norm", **asked)
    assert "norm/mul.1" in dict(plan.defaults)["one by one"]
    assert plan.peak_bytes == autopar.plan(model, batch, constraints=pins, kernels=False, **asked).peak_bytes
    whole = autopar.plan(model, batch, kernels="rms_norm", **asked)
    assert "one by one" not in dict(whole.defaults)
    assert whole.peak_bytes < autopar.plan(model, batch, kernels=False, **asked).peak_bytes
