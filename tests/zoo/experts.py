"""Mixtures of experts of transformers, built small: classes that answer to its experts interface.

They are drawn from the modeling files with `@use_experts_implementation`, so that each way to lay out matrices is there
(turned, in pairs, with biases, without a gate, with a norm behind), and gates that models write themselves.

Not among them: Qwen3.5-MoE and Qwen3-VL-MoE (their rotary embedding writes to memory that it reads through another
view), MiMo-V2-Flash and models that share its attention where their small config does not run eagerly, Gemma 4 and
GLM-5-Next (a minute each), and Step 3.7, whose experts have a loop of their own.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 32
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=16,
    sliding_window=4,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    moe_num_experts=4,
    num_experts_per_tok=2,
    moe_topk=2,
    moe_k=2,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=12,
    moe_shared_expert_intermediate_size=12,
    n_shared_experts=1,
    moe_num_shared_experts=1,
    n_group=2,
    topk_group=1,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    # All layers have experts.
    first_k_dense_replace=0,
    num_dense_layers=0,
    moe_layer_start_index=0,
    mlp_only_layers=[],
    mlp_layer_types=["sparse"],
    attention_dropout=0.0,
)  # of whatever a config class has


@dataclass(frozen=True)
class Family:
    """A class of transformers, and what its config needs besides `SIZES`."""

    name: str  # of the config class
    how: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    rounded: str = ""  # what transformers computes in float32 there, in models of float64 too
    is_daily: bool = False

    def build(self, implementation: str = "eager", dtype: torch.dtype = torch.float64, **how: Any) -> nn.Module:
        """The model in training, with parameters far from where they begin.

        Parameters that a class declares in float32 keep it.
        """
        of_config = getattr(transformers, f"{self.name}Config")
        known = {name for cls in of_config.__mro__ for name in getattr(cls, "__annotations__", {})}
        known.update(inspect.signature(of_config.__init__).parameters)
        config = of_config(**{k: v for k, v in SIZES.items() if k in known} | self.how | how)
        config.use_cache = False
        config._experts_implementation = implementation
        modeling = importlib.import_module(of_config.__module__.replace("configuration_", "modeling_"))
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = getattr(modeling, self.model or f"{self.name}ForCausalLM")(config).train()
        finally:
            torch.set_default_dtype(before)
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.3, generator=generator)
        return model


FAMILIES = {
    family.name: family
    for family in (
        Family("Mixtral", is_daily=True),
        Family("Qwen3Moe"),
        Family("DeepseekV3"),
        Family("GptOss", is_daily=True),
        Family("Olmoe"),
        Family("Glm4Moe"),
        Family("AriaText", model="AriaTextForCausalLM"),
        Family(
            "OpenAIPrivacyFilter",
            model="OpenAIPrivacyFilterForTokenClassification",
            rounded="the sum of experts",
        ),
        Family(
            "NemotronH",
            dict(layers_block_type=["attention", "moe"], num_hidden_layers=2),
            rounded="the sum of experts",
            is_daily=True,
        ),
        Family(
            "MuseSparkText",
            dict(moe_hidden_size=16),
            model="MuseSparkTextModel",
            rounded="the norm behind experts, and the gradient of its scale expert by expert",
        ),
        Family("Beam", rounded="the gate, and the sum of experts"),
        Family("Inkling2Text", model="Inkling2ForCausalLM", rounded="the gate, and the sum of experts"),
        Family("DeepseekV4", dict(mlp_layer_types=["moe"]), rounded="the gradient of its sinks"),
        Family("MiniMaxM3VLText", model="MiniMaxM3VLForCausalLM"),
        Family("HYV4"),
        Family("Afmoe"),
        Family("AXK1"),
        Family("Cohere2Moe"),
        Family("DeepseekV2", dict(topk_method="greedy")),
        Family("Dots1"),
        Family("Ernie4_5_Moe"),
        Family("ExaoneMoe"),
        Family("FlexOlmo"),
        Family("Flint", rounded="scores, and the gradient of its sinks"),
        Family("Glm4MoeLite"),
        Family("GraniteMoe"),
        Family("HunYuanMoEV1"),
        Family("HYV3"),
        Family("Jamba", dict(num_hidden_layers=2)),
        Family("Laguna"),
        Family("LaraMini"),
        Family("Lfm2Moe", dict(layer_types=["full_attention"])),
        Family("Mellum"),
        Family("MiniMaxM2"),
        Family("Mistral4"),
        Family("Phimoe"),
        Family("Qwen2Moe"),
        Family("Qwen3Next", dict(layer_types=["full_attention"])),
        Family("SolarOpen"),
        Family("Zaya", dict(num_experts_per_tok=1)),
    )
}


def batch_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tokens, and labels where the model takes some."""
    ids = torch.randint(5, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(0))
    has_labels = "labels" in inspect.signature(model.forward).parameters
    return {"input_ids": ids} | ({"labels": ids} if has_labels else {})


def layers_of_experts(model: nn.Module) -> int:
    """How many modules answer to the experts interface."""
    return sum(hasattr(module, "_is_expert_parallel") for module in model.modules())
