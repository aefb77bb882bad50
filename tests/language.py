"""Language models of transformers, made small, and tokens for them."""

from __future__ import annotations

import torch
import transformers

from autopar import Assume
from tests.models import mlp_case

NO_PADDING = Assume(no_padding=True)


def gpt2(layers: int = 2, width: int = 64, vocabulary: int = 512, length: int = 64, dropout: float = 0.1, **how):
    """GPT-2 with four heads: fused queries, keys and values, and a tied head."""
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=4,
        vocab_size=vocabulary,
        n_positions=length,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        **how,
    )
    return transformers.GPT2LMHeadModel(config).train()


def llama(layers: int = 2, width: int = 64, inner: int = 128, vocabulary: int = 256, length: int = 64, **how):
    """LLaMA with four heads on two of keys and values."""
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        **how,
    )
    return transformers.LlamaForCausalLM(config).train()


def bert(
    layers: int = 2,
    width: int = 64,
    inner: int = 128,
    vocabulary: int = 256,
    length: int = 64,
    dropout: float = 0.1,
    **how,
):
    """BERT with four heads, to fill in masked words."""
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=4,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **how,
    )
    return transformers.BertForMaskedLM(config).train()


def zeros(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Tokens to plan with: their values do not matter."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def drawn(rows: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Random tokens, each the label of its own place."""
    ids = torch.randint(0, vocabulary, (rows, length))
    return {"input_ids": ids, "labels": ids}


def meta_gpt2(layers: int = 2, rows: int = 16, length: int = 128, **how):
    """GPT-2 on meta, as large as it is but for what is said, and tokens."""
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers, **how)).train(), zeros(rows, length)


def meta_llama_8b(layers: int, rows: int, dtype: torch.dtype = torch.float32):
    """Layers of LLaMA-8B on meta, and rows of 8192 tokens."""
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).to(dtype).train(), zeros(rows, 8192)


# models and batches by name, small enough to be planned in seconds
CASES = {
    "gpt2": lambda layers=2: (gpt2(layers), zeros(8, 64)),
    "llama": lambda layers=2: (llama(layers), zeros(8, 32)),
    "bert": lambda layers=2: (bert(layers), zeros(8, 32)),
    "mlp": mlp_case,
}
