"""Small models of Hugging Face families, two layers each."""

from __future__ import annotations

from collections import Counter

import transformers as hf

import autopar
from autopar import Assume
from autopar.codegen.local import local_program
from autopar.codegen.local_passes import is_kernel
from autopar.kernels import NAMES
from autopar.tracer import ColoTracer

ASSUMED = Assume(no_padding=True)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
T5 = {"num_layers": 2, "d_model": 64, "d_ff": 96, "num_heads": 4, "d_kv": 16, "vocab_size": 128}
SITES = {  # of two layers each
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=64)),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED)),
    "llama, eager": (hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED, attn_implementation="eager")),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig(**GROUPED)),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**GROUPED)),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**GROUPED, head_dim=16)),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config(**GROUPED, head_dim=16)),
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config(**GROUPED, pad_token_id=0)),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config(**GROUPED)),
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**SIZES)),
    "bert": (hf.BertForMaskedLM, hf.BertConfig(**SIZES)),
    "t5 1.1": (
        hf.T5ForConditionalGeneration,
        hf.T5Config(**T5, feed_forward_proj="gated-gelu", decoder_start_token_id=0),
    ),
}


def program_of(model, batch, **how):
    """A model's program on one device, before kernels take their places."""
    plan = autopar.plan(model, batch, mesh=(1,), memory_budget="inf", kernels=NAMES, assume=ASSUMED, **how)
    graph = ColoTracer().trace(model, batch, assume=ASSUMED, precision=how.get("precision"))
    return local_program(graph, plan, (0,))


def counts(program):
    return dict(Counter(n.target.__name__ for n in program.fx.nodes if is_kernel(n)))
