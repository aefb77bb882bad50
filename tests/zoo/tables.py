"""What is captured, and what is refused with which letter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.graph.graph import Assume
from tests.models import Plain
from tests.zoo.families import (
    BART,
    DECODER,
    ENCODER,
    GPT,
    HEADS,
    LAYERS,
    SPEECH,
    T5,
    VISION,
    VOCABULARY,
    WHISPER,
    WIDTH,
    any_hf,
    any_inputs,
    classes,
    clip,
    detr,
    hf,
    image,
    language,
    pairs,
    picture,
    speech,
    text_and_picture,
    timm,
    tokens,
    tv,
    without,
)


@dataclass(frozen=True)
class Entry:
    build: Callable[[], torch.nn.Module]
    inputs: Callable[[], Any]
    assume: Assume | None = None  # declared, where the model asks about values
    refused: str = ""  # what the letter says, where it is no graph
    extras: bool = False  # needs torchvision or timm


def decoder(
    name: str,
    *,
    attention: str = "sdpa",
    experts: str | None = None,
    drop: tuple[str, ...] = (),
    table: dict = DECODER,
    inputs=language,
    refused: str = "",
    **how,
) -> Entry:
    return Entry(
        hf(f"{name}Config", how.pop("cls", f"{name}ForCausalLM"), attention, experts, **without(table, *drop, **how)),
        inputs,
        refused=refused,
    )


def masked(name: str, *, attention: str = "sdpa", inputs=language, cls: str = "", **how) -> Entry:
    return Entry(hf(f"{name}Config", cls or f"{name}ForMaskedLM", attention, **{**ENCODER, **how}), inputs)


def vision(name: str, *, attention: str | None = "sdpa", inputs=picture, cls: str = "", **how) -> Entry:
    return Entry(hf(f"{name}Config", cls or f"{name}ForImageClassification", attention, **how), inputs)


def mixture(name: str, **how) -> dict[str, Entry]:
    return {
        f"hf_{name.lower()}_{experts}": decoder(name, experts=experts, **how)
        for experts in ("batched_mm", "grouped_mm")
    }


QWEN_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)
DEEPSEEK = dict(
    n_routed_experts=8,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    n_shared_experts=1,
    num_key_value_heads=4,
)
SAM = dict(
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    image_size=64,
    patch_size=8,
    output_channels=32,
    window_size=4,
    global_attn_indexes=[1],
    mlp_dim=128,
)
SWIN = dict(image_size=64, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)


def large():
    return picture(64)


def unlabelled():
    return picture(64, labels=False)


def timm_entry(name: str, size: int = 64, **how) -> Entry:
    return Entry(timm(name, **how), lambda: image(size), extras=True)


def tv_entry(name: str, size: int = 64, **how) -> Entry:
    return Entry(tv(name, **how), lambda: image(size), extras=True)


ZOO: dict[str, Entry] = {
    "hf_gpt2": decoder("GPT2", table=GPT, cls="GPT2LMHeadModel"),
    "hf_gpt2_eager": decoder("GPT2", table=GPT, cls="GPT2LMHeadModel", attention="eager"),
    "hf_llama": decoder("Llama"),
    "hf_llama_eager": decoder("Llama", attention="eager"),
    "hf_mistral": decoder("Mistral", sliding_window=8),
    "hf_qwen2": decoder("Qwen2"),
    "hf_qwen3": decoder("Qwen3", head_dim=16),
    "hf_gemma2_eager": decoder("Gemma2", attention="eager", head_dim=16, sliding_window=8),
    "hf_gemma3": Entry(hf("Gemma3TextConfig", "Gemma3ForCausalLM", **DECODER, head_dim=16, sliding_window=8), language),
    "hf_phi3": decoder("Phi3"),
    "hf_gptneox": decoder("GPTNeoX", drop=("num_key_value_heads",)),
    "hf_gptj_eager": decoder("GPTJ", table=GPT, attention="eager", rotary_dim=8),
    "hf_falcon": decoder("Falcon", drop=("intermediate_size", "num_key_value_heads")),
    "hf_bloom_eager": decoder("Bloom", attention="eager", table=GPT, drop=("n_embd", "n_positions"), hidden_size=WIDTH),
    "hf_opt": decoder("OPT", drop=("intermediate_size", "num_key_value_heads"), ffn_dim=128, word_embed_proj_dim=WIDTH),
    "hf_olmo": decoder("Olmo"),
    "hf_olmo2": decoder("Olmo2"),
    "hf_mixtral_eager": decoder("Mixtral", experts="eager", num_local_experts=4, output_router_logits=True),
    **mixture("Mixtral", num_local_experts=4, output_router_logits=True),
    **mixture("Qwen3Moe", **QWEN_MOE),
    **mixture("DeepseekV3", **DEEPSEEK),
    "hf_bert": masked("Bert"),
    "hf_bert_eager": masked("Bert", attention="eager"),
    "hf_bert_cls": masked("Bert", cls="BertForSequenceClassification", inputs=classes),
    "hf_roberta": masked("Roberta"),
    "hf_albert": masked("Albert", embedding_size=32),
    "hf_distilbert": Entry(
        hf(
            "DistilBertConfig",
            "DistilBertForMaskedLM",
            vocab_size=VOCABULARY,
            dim=WIDTH,
            n_layers=LAYERS,
            n_heads=HEADS,
            hidden_dim=128,
            max_position_embeddings=64,
        ),
        language,
    ),
    "hf_electra": masked("Electra", embedding_size=32),
    "hf_t5": Entry(hf("T5Config", "T5ForConditionalGeneration", **T5), pairs),
    "hf_bart": Entry(hf("BartConfig", "BartForConditionalGeneration", **BART), pairs),
    "hf_bart_eager": Entry(hf("BartConfig", "BartForConditionalGeneration", "eager", **BART), pairs),
    "hf_vit": vision("ViT", **VISION),
    "hf_vit_eager": vision("ViT", attention="eager", **VISION),
    "hf_deit": vision("DeiT", **VISION),
    "hf_beit": vision("Beit", **VISION, use_relative_position_bias=True),
    "hf_swin": vision("Swin", inputs=large, **SWIN),
    "hf_convnext": vision("ConvNext", attention=None, inputs=large, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    "hf_resnet": vision(
        "ResNet", attention=None, inputs=large, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]
    ),
    "hf_clip": Entry(clip, text_and_picture),
    "hf_whisper": Entry(
        hf("WhisperConfig", "WhisperForConditionalGeneration", **WHISPER),
        lambda: {"input_features": torch.randn(2, 16, 64), "labels": tokens(2, 16)},
    ),
    "hf_wav2vec2": Entry(
        hf("Wav2Vec2Config", "Wav2Vec2ForCTC", **SPEECH, mask_time_prob=0.0, layerdrop=0.0),
        speech,
    ),
    "hf_wav2vec2_nolabel": Entry(
        hf("Wav2Vec2Config", "Wav2Vec2ForCTC", **SPEECH, mask_time_prob=0.0, layerdrop=0.0),
        lambda: speech(labels=False),
    ),
    "hf_wav2vec2_default": Entry(
        hf("Wav2Vec2Config", "Wav2Vec2ForCTC", **SPEECH, mask_time_prob=0.05, layerdrop=0.1),
        speech,
        refused="draws from numpy",
    ),
    "hf_samvision": Entry(hf("SamVisionConfig", "SamVisionModel", **SAM), unlabelled),
    "hf_detr": Entry(detr, unlabelled, assume=Assume(finite=True)),
    "hf_mamba_eager": decoder(
        "Mamba",
        attention="eager",
        drop=("num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings"),
        inputs=lambda: language(mask=False),
    ),
    "timm_resnet50": timm_entry("resnet50"),
    "timm_vit_base_patch16_224": timm_entry(
        "vit_base_patch16_224", 32, img_size=32, depth=2, embed_dim=64, num_heads=4
    ),
    "timm_mixer_s32_224": timm_entry("mixer_s32_224", img_size=64),
    "timm_convnext_atto": timm_entry("convnext_atto"),
    "timm_efficientnet_b0": timm_entry("efficientnet_b0", drop_path_rate=0.1, drop_rate=0.1),
    "timm_swin_tiny_patch4_window7_224": timm_entry(
        "swin_tiny_patch4_window7_224", 56, img_size=56, depths=(2, 2), num_heads=(2, 4), embed_dim=16
    ),
    "timm_deit_tiny_patch16_224": timm_entry(
        "deit_tiny_patch16_224", 32, img_size=32, depth=2, embed_dim=64, num_heads=4, drop_path_rate=0.1
    ),
    "tv_resnet18": tv_entry("resnet18"),
    "tv_resnet50": tv_entry("resnet50"),
    "tv_vgg11_bn": tv_entry("vgg11_bn", num_classes=10),
    "tv_densenet121": tv_entry("densenet121"),
    "tv_mobilenet_v3_small": tv_entry("mobilenet_v3_small"),
    "tv_vit": tv_entry(
        "VisionTransformer",
        32,
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        mlp_dim=128,
        dropout=0.1,
    ),
    "plain_user": Entry(Plain, lambda: {"x": tokens(2, 16), "y": tokens(2, 16)}),
}

# Colossal-Auto's own lists: its Hugging Face classes with those that it skips, its torchvision models, and the timm
# entries that timm still has
COLOSSAL: dict[str, Entry] = {
    **{
        name: Entry(any_hf(name), any_inputs(name))
        for name in (
            "AlbertModel",
            "AlbertForPreTraining",
            "AlbertForMaskedLM",
            "AlbertForSequenceClassification",
            "AlbertForTokenClassification",
            "AlbertForQuestionAnswering",
            "AlbertForMultipleChoice",
            "BertModel",
            "BertForPreTraining",
            "BertLMHeadModel",
            "BertForMaskedLM",
            "BertForSequenceClassification",
            "BertForTokenClassification",
            "BertForNextSentencePrediction",
            "BertForMultipleChoice",
            "BertForQuestionAnswering",
            "GPT2Model",
            "GPT2LMHeadModel",
            "GPT2ForTokenClassification",
            "GPT2ForSequenceClassification",
            "GPT2DoubleHeadsModel",
            "GPT2ForQuestionAnswering",
            "GPTJModel",
            "GPTJForCausalLM",
            "GPTJForSequenceClassification",
            "GPTJForQuestionAnswering",
            "OPTModel",
            "OPTForCausalLM",
            "OPTForQuestionAnswering",
            "T5Model",
            "T5ForConditionalGeneration",
            "T5EncoderModel",
            "T5ForTokenClassification",
        )
    },
    **{
        f"tv {name}": tv_entry(name, size)
        for name, size in (
            ("alexnet", 64),
            ("densenet121", 64),
            ("efficientnet_b0", 64),
            ("googlenet", 64),
            ("inception_v3", 299),
            ("mobilenet_v2", 64),
            ("mobilenet_v3_small", 64),
            ("mnasnet0_5", 64),
            ("resnet18", 64),
            ("regnet_x_16gf", 64),
            ("resnext50_32x4d", 64),
            ("shufflenet_v2_x0_5", 64),
            ("squeezenet1_0", 64),
            ("vgg11", 64),
            ("wide_resnet50_2", 64),
            ("vit_b_16", 224),
            ("convnext_base", 64),
            ("swin_s", 64),
            ("efficientnet_v2_s", 64),
        )
    },
    **{
        f"timm {name}": timm_entry(name, size)
        for name, size in (
            ("resnest50d", 64),
            ("beit_base_patch16_224", 224),
            ("cait_s24_224", 224),
            ("convmixer_768_32", 64),
            ("efficientnetv2_m", 64),
            ("resmlp_12_224", 224),
            ("vit_base_patch16_224", 224),
            ("deit_base_distilled_patch16_224", 224),
            ("beitv2_base_patch16_224", 224),
            ("coat_lite_mini", 224),
            ("deit3_base_patch16_224", 224),
            ("eca_nfnet_l0", 64),
            ("efficientformer_l1", 224),
            ("ese_vovnet19b_dw", 64),
            ("gmixer_12_224", 224),
            ("gmlp_b16_224", 224),
            ("hardcorenas_a", 64),
            ("hrnet_w18_small", 64),
            ("inception_v3", 96),
            ("mixer_b16_224", 224),
            ("nf_ecaresnet101", 64),
            ("nf_regnet_b0", 64),
            ("regnetv_040", 64),
            ("skresnet18", 64),
            ("tnt_b_patch16_224", 224),
            ("wide_resnet50_2", 64),
            ("convit_base", 224),
            ("dm_nfnet_f0", 64),
            ("convnext_base", 64),
            ("vgg11", 64),
            ("dpn68", 64),
            ("densenet121", 64),
            ("rexnet_100", 64),
            ("swin_base_patch4_window7_224", 224),
        )
    },
}

# `python -m tests.zoo.lot 2026 20` with transformers 5.23.0
DRAWN = (
    "FalconForTokenClassification",
    "MptModel",
    "GraniteSWAForCausalLM",
    "AltCLIPModel",
    "BlenderbotForConditionalGeneration",
    "ErnieForNextSentencePrediction",
    "BertLMHeadModel",
    "ElectraForQuestionAnswering",
    "Emu3ForCausalLM",
    "Gemma2ForSequenceClassification",
    "CLIPTextModel",
    "JetMoeForCausalLM",
    "Qwen3MoeForQuestionAnswering",
    "PersimmonForTokenClassification",
    "ExaoneMoeForCausalLM",
    "MiniMaxForTokenClassification",
    "VoxtralEncoder",
    "DogeForCausalLM",
    "Dinov2WithRegistersForImageClassification",
    "ZayaModel",
)
DRAWN_REFUSED = {"JetMoeForCausalLM": "value of a tensor.*item"}  # the number of tokens of each expert, as a list
