"""Models of transformers, built small, by the masks that they make: windows, chunks, sinks, soft caps, both sides."""

from __future__ import annotations

import torch
import transformers
from torch import nn

LENGTH = 37  # of no other dim
SIZES = dict(
    vocab_size=32,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LAYERS = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
ROUTED = dict(num_local_experts=2, num_experts_per_tok=1, experts_implementation="eager")
ENCODER = {k: v for k, v in SIZES.items() if k not in ("head_dim", "num_key_value_heads")}
MODELS = {
    "LLaMA": ("LlamaForCausalLM", transformers.LlamaConfig, SIZES),
    "Mistral": ("MistralForCausalLM", transformers.MistralConfig, dict(SIZES, sliding_window=8)),
    "Qwen 3": ("Qwen3ForCausalLM", transformers.Qwen3Config, SIZES),
    "Gemma 3": ("Gemma3ForCausalLM", transformers.Gemma3TextConfig, {**SIZES, **LAYERS}),
    "Gemma 2": ("Gemma2ForCausalLM", transformers.Gemma2Config, {**SIZES, **LAYERS, "attn_logit_softcapping": 2.0}),
    "gpt-oss": ("GptOssForCausalLM", transformers.GptOssConfig, {**SIZES, **LAYERS, **ROUTED}),
    "ModernBERT": (
        "ModernBertForMaskedLM",
        transformers.ModernBertConfig,
        dict(ENCODER, local_attention=8, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2),
    ),
    "LLaMA 4": (
        "Llama4ForCausalLM",
        transformers.Llama4TextConfig,
        dict(
            SIZES, attention_chunk_size=8, interleave_moe_layer_step=3, intermediate_size_mlp=8, no_rope_layers=[1, 0]
        ),
    ),
}


def build(name, attention, **how):
    kind, config, sizes = MODELS[name]
    model = getattr(transformers, kind)(config(**sizes | how, attn_implementation=attention)).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


def positions(*rows):
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
