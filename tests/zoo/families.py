"""How models are built small, and called.

By family where a few words do, by their forward's signature where any class may come.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pathlib
import sys

import torch
import transformers

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 128, 64, 2, 4, 16
EXTRAS = (
    pathlib.Path(os.environ.get("AUTOPAR_EXTRAS", ".venv-extras")).absolute()
)  # torchvision and timm live apart: where torchvision is in sight and unusable, transformers will not import


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, shape)


# -- Hugging Face


def hf(config: str, model: str, attention: str | None = "sdpa", experts: str | None = None, **how):
    """A builder of one class from its config class."""

    def build():
        made = getattr(transformers, config)(**how, **({"attn_implementation": attention} if attention else {}))
        made.use_cache = False
        if experts:
            made._experts_implementation = experts
        return getattr(transformers, model)(made)

    return build


DECODER = dict(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    intermediate_size=128,
    max_position_embeddings=64,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
ENCODER = dict(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    intermediate_size=128,
    max_position_embeddings=64,
)
GPT = dict(
    vocab_size=VOCABULARY,
    n_embd=WIDTH,
    n_layer=LAYERS,
    n_head=HEADS,
    n_positions=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
VISION = dict(
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    intermediate_size=128,
    image_size=32,
    patch_size=8,
)
SPEECH = dict(
    vocab_size=32,
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    intermediate_size=128,
    conv_dim=(32, 32, 32),
    conv_stride=(5, 2, 2),
    conv_kernel=(10, 3, 2),
    num_feat_extract_layers=3,
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4,
    pad_token_id=0,
)
WHISPER = dict(
    vocab_size=VOCABULARY,
    d_model=WIDTH,
    encoder_layers=LAYERS,
    decoder_layers=LAYERS,
    encoder_attention_heads=HEADS,
    decoder_attention_heads=HEADS,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    max_source_positions=32,
    max_target_positions=64,
    num_mel_bins=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)
BART = dict(
    vocab_size=VOCABULARY,
    d_model=WIDTH,
    encoder_layers=LAYERS,
    decoder_layers=LAYERS,
    encoder_attention_heads=HEADS,
    decoder_attention_heads=HEADS,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    max_position_embeddings=64,
)
T5 = dict(
    vocab_size=VOCABULARY,
    d_model=WIDTH,
    d_kv=16,
    d_ff=128,
    num_layers=LAYERS,
    num_heads=HEADS,
    decoder_start_token_id=0,
    pad_token_id=0,
)


def without(table: dict, *names: str, **more) -> dict:
    return {**{k: v for k, v in table.items() if k not in names}, **more}


def without_dropout(build):
    """The model of a builder, in training, without any dropout."""
    model = build().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for config in {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values():
        for name in (
            "attention_dropout",
            "attention_probs_dropout_prob",
            "attn_pdrop",
            "dropout",
            "dropout_rate",
            "activation_dropout",
            "hidden_dropout_prob",
        ):
            if isinstance(getattr(config, name, None), float):
                setattr(config, name, 0.0)
    for module in model.modules():
        for name in ("dropout", "attention_dropout", "activation_dropout", "dropout_p", "dropout_prob", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def clip(**both):
    """CLIP; what is given goes to both of its halves."""
    text, vision = {**ENCODER, "eos_token_id": 2, **both}, {**VISION, **both}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))


def detr():
    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"]
    )
    return transformers.DetrForObjectDetection(
        transformers.DetrConfig(
            use_timm_backbone=False,
            backbone_config=backbone,
            backbone=None,
            use_pretrained_backbone=False,
            num_queries=8,
            num_labels=5,
            d_model=WIDTH,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
        )
    )


def language(mask: bool = True):
    ids = tokens(2, LENGTH)
    return {"input_ids": ids, "labels": ids.clone(), **({"attention_mask": torch.ones_like(ids)} if mask else {})}


def pairs():
    return {"input_ids": tokens(2, LENGTH), "labels": tokens(2, LENGTH)}


def classes():
    return {
        "input_ids": tokens(2, LENGTH),
        "attention_mask": torch.ones(2, LENGTH, dtype=torch.long),
        "labels": torch.zeros(2, dtype=torch.long),
    }


def picture(size: int = 32, labels: bool = True):
    return {
        "pixel_values": torch.randn(2, 3, size, size),
        **({"labels": torch.zeros(2, dtype=torch.long)} if labels else {}),
    }


def text_and_picture():
    return {
        "input_ids": tokens(2, LENGTH),
        "pixel_values": torch.randn(2, 3, 32, 32),
        "attention_mask": torch.ones(2, LENGTH, dtype=torch.long),
        "return_loss": True,
    }


def speech(labels: bool = True):
    said = torch.randint(1, 32, (2, 8))
    said[0, ::3] = -100  # left out, also between others
    return {"input_values": torch.randn(2, 1600), **({"labels": said} if labels else {})}


# -- torchvision and timm


def has_extras() -> bool:
    """`make test` installs them and says where: there they must be."""
    found = (EXTRAS / "torchvision").exists()
    assert found or "AUTOPAR_EXTRAS" not in os.environ, f"torchvision is not in {EXTRAS}"
    return found


@functools.cache
def extras():
    """Import torchvision and timm.

    Torchvision's wheel is built for CUDA and fails on a CPU torch for want of two operator schemas, which are declared
    here.
    """
    if torch.version.cuda is None:
        extras.library = torch.library.Library("torchvision", "FRAGMENT")
        extras.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        extras.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.path.append(str(EXTRAS))
    try:
        with contextlib.suppress(ValueError):
            import timm
            import torchvision
    finally:
        sys.path.remove(str(EXTRAS))  # or processes that are started later would see it
    return torchvision, timm


def tv(name: str, **how):
    def build():
        torchvision, _ = extras()
        make = getattr(torchvision.models, name)
        return make(**how) if isinstance(make, type) else make(weights=None, **how)

    return build


def timm(name: str, **how):
    return lambda: extras()[1].create_model(name, pretrained=False, **how)


def image(size: int):
    return (torch.randn(2, 3, size, size),)


# -- any class of transformers

SMALL = {
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "dim",
            "embed_dim",
            "embedding_size",
            "projection_dim",
            "word_embed_proj_dim",
            "encoder_hidden_size",
            "emb_dim",
            "d_embed",
            "hidden_dim",
        ),
        32,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "num_layers",
            "encoder_layers",
            "decoder_layers",
            "n_layers",
            "num_encoder_layers",
            "num_decoder_layers",
            "num_blocks",
            "depth",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "n_heads",
            "num_encoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "d_ff",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "d_inner",
            "n_inner",
            "mlp_dim",
            "moe_intermediate_size",
        ),
        64,
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "seq_length"), 64
    ),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "type_vocab_size": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
    "n_group": 1,
    "topk_group": 1,
    "window_size": 4,
    "rotary_dim": 8,
}


def small_config(cls):
    """The config class's defaults, with what is a size made small, in sub-configs too."""

    def shrink(config, most: dict):
        for name, value in most.items():
            if isinstance(getattr(config, name, None), int) or (name.endswith("_token_id") and hasattr(config, name)):
                with contextlib.suppress(Exception):
                    setattr(config, name, value)
        for name, held in list(vars(config).items()):
            if isinstance(held, transformers.PreTrainedConfig):
                shrink(held, most)
            if name == "layer_types" and isinstance(held, list):
                config.layer_types = held[:2]
        return config

    known = cls.config_class().to_dict()
    try:
        made = cls.config_class(
            **{
                k: v
                for k, v in SMALL.items()
                if (isinstance(known.get(k), int) and not isinstance(known[k], bool))
                or (k == "use_cache" and k in known)
            }
        )
    except Exception:
        made = cls.config_class()
    return shrink(made, SMALL)


def any_hf(name: str):
    return lambda: getattr(transformers, name)(small_config(getattr(transformers, name)))


def any_inputs(name: str):
    """Inputs that the forward's signature and the class's name ask for."""

    def inputs():
        cls = getattr(transformers, name)
        config, wanted, main = small_config(cls), inspect.signature(cls.forward).parameters, cls.main_input_name
        found = {}
        shape = (2, 2, LENGTH) if "MultipleChoice" in name else (2, LENGTH)
        if "input_ids" in wanted:
            found["input_ids"] = tokens(*shape)
            if "attention_mask" in wanted:
                found["attention_mask"] = torch.ones(*shape, dtype=torch.long)
        if "pixel_values" in wanted:
            vision = getattr(config, "vision_config", config)
            size = getattr(vision, "image_size", 32)
            size = size if isinstance(size, int) else 32
            found["pixel_values"] = torch.randn(2, getattr(vision, "num_channels", 3), size, size)
        if main in ("input_values", "input_features") and main in wanted:
            found[main] = (
                torch.randn(2, 1600)
                if main == "input_values"
                else torch.randn(2, getattr(config, "num_mel_bins", 16), 128)
            )
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in wanted:
            found["decoder_input_ids"] = tokens(2, LENGTH)
        if "return_loss" in wanted:
            found["return_loss"] = True
        if "start_positions" in wanted:
            found |= {"start_positions": torch.tensor([1, 3]), "end_positions": torch.tensor([4, 5])}
        if "labels" in wanted:
            per_row = any(
                kind in name
                for kind in (
                    "SequenceClassification",
                    "MultipleChoice",
                    "ImageClassification",
                    "NextSentence",
                    "AudioClassification",
                    "VideoClassification",
                )
            )
            if per_row:
                found["labels"] = torch.tensor([0, 1])
            elif "TokenClassification" in name:
                found["labels"] = torch.randint(0, 2, (2, LENGTH))
            elif any(kind in name for kind in ("LM", "ConditionalGeneration", "PreTraining")) and "input_ids" in found:
                found["labels"] = tokens(2, LENGTH)
        for extra in ("next_sentence_label", "sentence_order_label"):
            if extra in wanted:
                found[extra] = torch.tensor([0, 1])
        if "mc_token_ids" in wanted:
            found |= {
                "input_ids": tokens(2, 2, LENGTH),
                "labels": tokens(2, 2, LENGTH),
                "mc_token_ids": torch.tensor([[3, 4], [5, 6]]),
                "mc_labels": torch.tensor([0, 1]),
            }
            found.pop("attention_mask", None)
        return found

    return inputs
