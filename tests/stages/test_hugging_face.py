"""Models of transformers in stages: tied tables, an encoder, biases of positions, frozen blocks, experts, pictures."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import autopar
from autopar.testing import on_processes

AXES = ("pp", "dp", "tp")
SMALL = dict(num_hidden_layers=4, hidden_size=16, intermediate_size=32, num_attention_heads=2)
LLAMA = dict(num_key_value_heads=2, vocab_size=64, use_cache=False, **SMALL)
BUILT = {
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=64, n_positions=16, use_cache=False)
    ),
    "LLaMA": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "BERT": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=64, max_position_embeddings=16, attention_probs_dropout_prob=0.0, **SMALL)
    ),
    "T5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            num_layers=2,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_heads=2,
            vocab_size=64,
            use_cache=False,
            decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    ),
    "ViT": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **SMALL)
    ),
    "Mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **LLAMA)),
    "frozen first": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
}
SINGLE = {"Mixtral": 1e-5}  # its experts run in single precision
CASES = [  # a model, a mesh and what else to ask for; orders are those that the search takes, or named
    ("GPT-2", (2, 2), {}),
    ("LLaMA", (2, 2), {"parallel": "megatron"}),
    ("BERT", (2, 2), {"parallel": "zero3"}),
    ("T5", (2, 2), {}),
    ("T5", (4, 1), {"pipeline": {"schedule": "1f1b"}}),
    ("ViT", (2, 1, 2), {"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}}),
    ("Mixtral", (2, 2), {}),
    ("frozen first", (4, 1), {"pipeline": {"schedule": "zero-bubble"}}),
]


def case(name):
    torch.manual_seed(0)
    model = BUILT[name]()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if name == "frozen first":
        for key, p in model.named_parameters():
            p.requires_grad_("layers.2" in key or "layers.3" in key)
    if name == "ViT":
        return model.double(), {"pixel_values": torch.randn(8, 3, 16, 16).double(), "labels": torch.randint(5, (8,))}
    ids = torch.randint(3, 60, (8, 12))
    labels = ids.clone()
    for row in range(8):
        labels[row, :row] = -100
    return model if name in SINGLE else model.double(), {"input_ids": ids, "labels": labels}


def off(rank, cases):
    """For each case, how far loss and gradients are from eager torch's; gradients exist where eager has them."""
    found = []
    for name, shape, how in cases:
        model, batch = case(name)
        expected = copy.deepcopy(model)
        mesh = autopar.DeviceMesh(shape, AXES[: len(shape)])
        mine = autopar.autoparallelize(model, batch, mesh=mesh, microbatches=4, memory_budget="inf", **how)
        loss, right = mine(**batch).loss, expected(**batch).loss
        loss.backward()
        right.backward()
        gradients = {n: p.grad for n, p in mine.named_parameters()}
        theirs = {n: p.grad for n, p in expected.named_parameters()}
        assert {n for n, g in gradients.items() if g is None} == {n for n, g in theirs.items() if g is None}
        floor = 1e-6 * max(float(g.abs().max()) for g in theirs.values() if g is not None)
        worst = max(
            float((gradients[n].full_tensor() - g).abs().max()) / max(float(g.abs().max()), floor)
            for n, g in theirs.items()
            if g is not None
        )
        found.append((name, abs(loss.item() - right.item()) / right.item(), worst))
    return found


@pytest.mark.machines
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_stages_compute_what_one_device_computes():
    for found in on_processes(4, off, CASES):
        for name, loss, gradient in found:
            # transformers casts logits to single precision, whose sums differ where a vocabulary is cut
            assert loss <= 1e-6, (name, loss)
            assert gradient <= SINGLE.get(name, 1e-6), (name, gradient)
