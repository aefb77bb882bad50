"""Unmodified models under random legal plans: loss and every gradient as eager's.

Costs that mean nothing make plans that nobody would choose, and those must be right too.
"""

from __future__ import annotations

import copy

import pytest
import torch

import autopar
from autopar.testing import Equality
from tests.random_plans import random_plan
from tests.training import whole
from tests.zoo.families import without_dropout
from tests.zoo.replay import as_call
from tests.zoo.tables import ZOO

SAMPLE = ("hf_resnet", "plain_user")
NIGHTLY = (
    "hf_bert_cls",
    "hf_t5",
    "hf_bloom_eager",
    "hf_vit",
    "hf_phi3",
    "hf_llama",
    "hf_qwen3",
    "hf_convnext",
    "hf_bart",
    "hf_whisper",
    "hf_clip",
    "hf_gptneox",
    "hf_falcon",
    "hf_opt",
    "hf_mistral",
    "hf_gemma3",
    "hf_deit",
    "hf_albert",
    "hf_gptj_eager",
    "hf_deepseekv3_batched_mm",
    "hf_mixtral_batched_mm",
    "hf_mamba_eager",
    "hf_electra",
    "hf_gpt2_eager",
    "hf_olmo2",
    "hf_roberta",
)


@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(n, marks=pytest.mark.nightly) for n in NIGHTLY)])
def test_it_computes_the_same_under_random_plans(name, threads):
    torch.manual_seed(0)
    model = without_dropout(ZOO[name].build)
    _, batch = as_call(ZOO[name].inputs())
    reference = copy.deepcopy(model)
    loss = loss_of(reference(**batch))
    loss.backward()
    expected = {"loss": loss.detach(), **{n: p.grad for n, p in reference.named_parameters() if p.grad is not None}}

    def body(rank, plan):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        loss = loss_of(mine(**batch))
        loss.backward()
        return {"loss": loss.detach(), **{n: whole(p.grad) for n, p in mine.named_parameters() if p.grad is not None}}

    for seed, mesh in enumerate(
        (autopar.DeviceMesh((2,)), autopar.DeviceMesh((2, 2), ("dp", "tp")))[: 1 if name in SAMPLE else 2]
    ):
        for result in threads(mesh.size, body, random_plan(model, batch, mesh, seed)):
            Equality.in_float64(f"{name} on {mesh}", result, expected, 1e-4).check()  # float32: summed in another order


def loss_of(outputs):
    return outputs["loss"] if isinstance(outputs, dict) else outputs.loss
