"""Programs that a witness looks at: small models whose draws are off, under plans that cut nothing unevenly."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from autopar import Assume, DeviceMesh
from autopar.codegen.lower import lower
from autopar.request import Request
from autopar.search import plan_of
from autopar.space import timeline

ROWS, LENGTH, WORDS = 16, 8, 64
BOTH = dict(tensor=2, data=dict(size=2, zero=3))
SEQUENCE = dict(tensor=dict(size=2, sequence=True), data=2)
PLANS = {
    "free": ((4,), None),
    "dp": ((4,), "dp"),
    "zero3": ((4,), "zero3"),
    "tensor": ((2, 2), dict(tensor=2, data=2)),
    "tensor and zero3": ((2, 2), BOTH),
    "tensor and sequence": ((2, 2), SEQUENCE),
    "hsdp": ((2, 2), "hsdp"),
}


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.down(torch.relu(self.up(x))), y)


def text():
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def gpt2():
    still = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, **still))


def llama():
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    )


def bert():
    return BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def vit():
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            num_labels=8,
        )
    )


def pictures():
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": torch.arange(ROWS) % 8}


MODELS = {
    "mlp": (MLP, lambda: {"x": torch.randn(16, 8), "y": torch.randn(16, 8)}),
    "gpt2": (gpt2, text),
    "llama": (llama, text),
    "bert": (bert, text),
    "vit": (vit, pictures),
}
# a cut vocabulary is looked up by the place of a rank, which nothing of the checker says
WHOLE = {
    "llama": {"model.embed_tokens.weight": "R", "lm_head.weight": "R"},
    "gpt2": {"transformer.wte.weight": "R"},
}


def lowered(name: str, plan: str, **how):
    """The program of the last rank."""
    return _lowered(name, plan, tuple(how.items()))


@functools.cache
def _lowered(name: str, plan: str, how):
    shape, parallel = PLANS[plan]
    build, batch = MODELS[name]
    pins = WHOLE.get(name) if "tensor" in plan else None
    request = Request(
        mesh=DeviceMesh(shape, ("dp", "tp")[: len(shape)]),
        memory_budget="inf",
        parallel=parallel,
        constraints=pins,
        assume=Assume(no_padding=True),
        **dict(how),
    )
    torch.manual_seed(0)
    graph = request.trace(build().train(), batch())
    with pytest.MonkeyPatch.context() as patch:
        if request.recompute == "full":
            patch.setattr(timeline, "SMALL", 0)  # what is small is recomputed too: these models are
        found = plan_of(graph, request)
        assert bool(found.recomputed) == (request.recompute == "full")
    return lower(request.as_planned(graph, found), found, tuple(n - 1 for n in shape))
