"""A mixture of experts of Hugging Face under whatever else a plan may do, on four ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import autopar
from autopar.letters import NotServed
from autopar.testing import Equality
from tests.shares import by_day
from tests.training import whole

IDS = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}
TRAVELS = dict(experts=4)
WITH_ZERO = dict(experts=2, data=dict(size=4, zero=3))
FOLDED = dict(experts=4, data=dict(size=2, zero=1), tensor=dict(size=2, mode="megatron", sequence=True))


def mixtral(**how):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=24, max_position_embeddings=16, head_dim=8, num_local_experts=4, use_cache=False, **how,
    )  # fmt: skip
    config._experts_implementation = "eager"  # its others have no kernel in double precision
    return transformers.MixtralForCausalLM(config).double()


def with_adapters(model):
    """Experts with low-rank parts of their own, in place of the weights."""
    peft = pytest.importorskip("peft")
    names = dict(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **names))


CASES = {
    "travelling": ((4,), TRAVELS, {}),
    "travelling, zero3": ((2, 2), WITH_ZERO, {}),
    "behind the mask and hidden rows": ((2, 2), "megatron", {}),
    "over data and tensor": ((2, 2), FOLDED, {}),
    "over data and tensor, whole sums": ((2, 2), FOLDED | dict(tensor=2), {}),
    "recomputed": ((4,), TRAVELS, dict(recompute="full")),
    "half the peak": ((2, 2), WITH_ZERO, dict(memory_budget="260KiB")),
    "micro-batches": ((4,), TRAVELS, dict(microbatches=2)),
    "loss in chunks": ((4,), TRAVELS, dict(chunks=2)),
    "aux": ((4,), TRAVELS, {}),
    "adapters": ((4,), TRAVELS, {}),
    "adapters, zero3": ((2, 2), "zero3", {}),
    "compiled": ((4,), TRAVELS, dict(compile=True)),
}
BY_DAY = ("behind the mask and hidden rows", "over data and tensor")


def gradients(model):
    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", by_day(CASES, *BY_DAY))
def test_it_is_the_model(name, threads):
    mesh, parallel, how = CASES[name]
    model = mixtral(output_router_logits=name == "aux")
    model = with_adapters(model) if name.startswith("adapters") else model
    reference = copy.deepcopy(model)
    reference(**BATCH).loss.backward()

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), BATCH, mesh=mesh, parallel=parallel, **how)
        mine(**BATCH).loss.backward()
        return gradients(mine), mine.plan

    # Transformers computes norms, routers and some losses in single precision, which cut sums round otherwise.
    rough = name in ("aux", "loss in chunks", "compiled") or "tensor" in name or "hidden rows" in name
    for found, plan in threads(4, body):
        Equality.in_float64(name, found, gradients(reference), 1e-6 if rough else 1e-12).check()
        assert not [value for value in plan.recomputed if "topk" in value]  # A route is never chosen again.
        if name in ("recomputed", "half the peak"):
            assert [value for value in plan.recomputed if value.endswith("experts/experts")]


@pytest.mark.nightly
def test_gradients_add_up_over_calls(threads):
    """As a loop that accumulates does, half a batch at a time."""
    model = mixtral()
    reference = copy.deepcopy(model)
    halves = [{k: v[rows] for k, v in BATCH.items()} for rows in (slice(0, 4), slice(4, 8))]
    for half in halves:
        reference(**half).loss.backward()

    def body(rank):
        mine = autopar.autoparallelize(
            copy.deepcopy(model), halves[0], mesh=(4,), parallel=TRAVELS, accumulation=len(halves)
        )
        for half in halves:
            mine(**half).loss.backward()
        return gradients(mine)

    for found in threads(4, body):
        Equality.in_float64("accumulated", found, gradients(reference), 1e-12).check()


def test_a_balance_over_all_rows_is_told_in_micro_batches():
    with pytest.raises(NotServed, match="load_balancing_loss_func"):
        autopar.plan(mixtral(output_router_logits=True), BATCH, mesh=(4,), parallel=TRAVELS, microbatches=2)
