"""Unmodified models, dropout on, x every preset that the mesh carries and the free plan x meshes.

Three steps, in float64, against eager.

python -m tests.equality.matrix [model ...]        a row a model and mesh, a column a plan, a cell the largest error
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import autopar
from autopar import DeviceMesh
from autopar.letters import BadPreset
from autopar.testing import Equality, on_processes, on_threads
from tests.models import eager_links
from tests.oracle import ByPosition, InFloat64
from tests.training import whole
from tests.zoo.families import DECODER, ENCODER, T5, VISION, WHISPER, clip, extras, hf, timm, tokens

STEPS, ROWS, SEED = 3, 8, 1234567
BOTH = dict(tensor=2, data=dict(size=2, zero=3))
SEQUENCE = dict(tensor=dict(size=2, sequence=True), data=2)
MESHES = {
    DeviceMesh((4,), ("tp",)): (None, "dp", "zero1", "zero2", "zero3", "megatron"),
    DeviceMesh((2, 2), ("dp", "tp")): (None, "dp", "zero1", "zero2", "zero3", "megatron", "2d", BOTH, SEQUENCE),
    DeviceMesh((2, 1, 2), ("dp", "none", "tp")): (None, "zero3", "megatron", "2d", BOTH),
    DeviceMesh((2, 2, 2), ("a", "b", "c")): (
        None,
        "zero3",
        "2.5d",
        "3d",
        dict(tensor=dict(size=4, mode="2d"), data=dict(size=2, zero=2)),
    ),
}
_DROP = dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)


@dataclass(frozen=True)
class Model:
    """How a model is made, what it is called with, and its loss.

    Inside, or cross entropy outside where `classes` of its outputs are given.
    """

    build: Any
    inputs: Any
    classes: int = 0


def text(mask: bool = True, labels: bool = True):
    """Rows of unequal length, padded where there is a mask; targets are ignored in unequal numbers."""
    ids = tokens(ROWS, 16)
    seen = torch.arange(16) < torch.tensor([16, 9, 16, 3, 12, 16, 7, 14])[:, None]
    target = torch.where(seen, ids, -100)
    target[2, :13] = -100
    return {
        "input_ids": ids,
        **({"attention_mask": seen.long()} if mask else {}),
        **({"labels": target} if labels else {}),
    }


def picture(size: int = 32, labels: bool = True):
    return {
        "pixel_values": torch.randn(ROWS, 3, size, size).double(),
        **({"labels": torch.randint(0, 2, (ROWS,))} if labels else {}),
    }


def resnet(depths: list[int]):
    return Model(
        hf(
            "ResNetConfig",
            "ResNetForImageClassification",
            None,
            embedding_size=8,
            hidden_sizes=[16, 32, 32, 64],
            depths=depths,
        ),
        lambda: picture(64),
    )


def image(size: int):
    return {"x": torch.randn(ROWS, 3, size, size).double()}


MODELS = {
    "gpt2": Model(
        hf(
            "GPT2Config",
            "GPT2LMHeadModel",
            vocab_size=131,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            bos_token_id=0,
            eos_token_id=0,
        ),
        lambda: text(mask=False),
    ),
    "llama": Model(hf("LlamaConfig", "LlamaForCausalLM", **DECODER, attention_dropout=0.1), text),
    "qwen3": Model(hf("Qwen3Config", "Qwen3ForCausalLM", **DECODER, head_dim=16, attention_dropout=0.1), text),
    "bert": Model(hf("BertConfig", "BertForMaskedLM", **ENCODER), text),
    "t5": Model(
        hf("T5Config", "T5ForConditionalGeneration", **T5),
        lambda: {
            **text(labels=False),
            "labels": torch.where(
                torch.arange(12) < torch.tensor([12, 5, 12, 2, 9, 12, 1, 7])[:, None], tokens(ROWS, 12), -100
            ),
        },
    ),
    "vit": Model(hf("ViTConfig", "ViTForImageClassification", **VISION, **_DROP), picture),
    "whisper": Model(
        hf(
            "WhisperConfig",
            "WhisperForConditionalGeneration",
            **WHISPER,
            dropout=0.1,
            attention_dropout=0.1,
            activation_dropout=0.1,
        ),
        lambda: {"input_features": torch.randn(ROWS, 16, 64).double(), "labels": text()["labels"]},
    ),
    "swin": Model(
        hf(
            "SwinConfig",
            "SwinForImageClassification",
            image_size=64,
            patch_size=4,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            drop_path_rate=0.1,
            **_DROP,
        ),
        lambda: picture(64),
    ),
    "convnext": Model(
        hf(
            "ConvNextConfig",
            "ConvNextForImageClassification",
            None,
            hidden_sizes=[16, 32],
            depths=[2, 2],
            num_stages=2,
            drop_path_rate=0.1,
        ),
        lambda: picture(64),
    ),
    "resnet50": resnet([3, 4, 6, 3]),
    "clip": Model(
        lambda: clip(attention_dropout=0.1),
        lambda: {**text(labels=False), "pixel_values": torch.randn(ROWS, 3, 32, 32).double(), "return_loss": True},
    ),
    "timm vit": Model(
        timm(
            "vit_base_patch16_224",
            img_size=32,
            depth=2,
            embed_dim=64,
            num_heads=4,
            num_classes=10,
            drop_rate=0.1,
            attn_drop_rate=0.1,
            drop_path_rate=0.1,
        ),
        lambda: image(32),
        10,
    ),
    "timm mixer": Model(
        lambda: extras()[1].models.mlp_mixer.MlpMixer(
            img_size=32, patch_size=8, embed_dim=64, num_blocks=2, num_classes=10, drop_rate=0.1, drop_path_rate=0.1
        ),
        lambda: image(32),
        10,
    ),
}
SMALL = {"five blocks of resnet": resnet([2, 1, 1, 1])}  # beside the table, for the sample by day
CASES = [(name, mesh, preset) for name in MODELS for mesh, presets in MESHES.items() for preset in presets]


@functools.cache
def made(name: str):
    """A model far from symmetric points, and a batch."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        of = (MODELS | SMALL)[name]
        model = of.build().train()
        for p in model.parameters():
            p.data += 0.05 * torch.randn_like(p)
        batch = of.inputs()
        return model.double(), batch, torch.randint(0, of.classes, (ROWS,)) if of.classes else None


def train(model, batch, target, next_step=lambda: None):
    """Losses, gradients of the first step, parameters and buffers after the last."""
    parameters, losses, gradients = dict(model.named_parameters()), {}, {}
    stepper = torch.optim.SGD(parameters.values(), lr=0.02, momentum=0.9)
    for step in range(STEPS):
        stepper.zero_grad()
        next_step()
        loss = model(**batch)["loss"] if target is None else F.cross_entropy(model(**batch), target)
        loss.backward()
        losses[f"loss.{step}"] = loss.detach()
        if step == 0:
            gradients = {n: whole(p.grad).detach().clone() for n, p in parameters.items() if p.grad is not None}
        stepper.step()
    after = {
        **{n: whole(p) for n, p in parameters.items()},
        **{n: b for n, b in model.named_buffers() if b.is_floating_point()},
    }
    return losses, gradients, {n: t.detach().clone() for n, t in after.items()}


@functools.cache
def expected(name: str):
    model, batch, target = made(name)
    with InFloat64(), ByPosition(SEED) as random:
        return train(copy.deepcopy(model), batch, target, random.next_step)


def train_parallel(rank, name, plan):
    model, batch, target = made(name)
    with InFloat64():
        parallel = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        parallel.random_state.seed = SEED
        return train(parallel, batch, target)


def worst(name: str, mesh: DeviceMesh, preset: Any, processes: bool = False) -> float | None:
    """The largest error of any rank; None where the mesh cannot carry the preset.

    Raises where it is over what the contract allows.
    """
    model, batch, _ = made(name)
    with InFloat64():
        try:
            plan = autopar.plan(model, batch, mesh=mesh, cluster=eager_links(), parallel=preset)
        except BadPreset:
            return None
    largest = 0.0
    for rank, result in enumerate(
        (on_processes if processes else on_threads)(mesh.size, train_parallel, name, plan, timeout_s=300)
    ):
        for part, tolerance, mine, eager in zip(
            ("losses", "gradients", "parameters"), (1e-9, 1e-9, 1e-8), result, expected(name), strict=True
        ):
            largest = max(
                largest,
                Equality.in_float64(
                    f"{name}, {preset or 'free'} on {mesh}, rank {rank}: {part}", mine, eager, tolerance
                )
                .check()
                .worst,
            )
    return largest


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    columns = list(dict.fromkeys(str(p or "free") for presets in MESHES.values() for p in presets))
    print(f"| model | mesh | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}")
    failed = []
    for name in names or MODELS:
        for mesh, presets in MESHES.items():
            cells = dict.fromkeys(columns, "")
            for preset in presets:
                try:
                    error = worst(name, mesh, preset)
                    cells[str(preset or "free")] = "-" if error is None else f"{error:.0e}"
                except Exception as e:
                    failed.append(f"{name}, {preset or 'free'} on {mesh}: {type(e).__name__}: {e}")
                    cells[str(preset or "free")] = "FAILED"
            print(f"| {name} | {mesh} | {' | '.join(cells.values())} |", flush=True)
    if failed:
        sys.exit("\n\n".join(failed))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
