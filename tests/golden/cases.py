"""Twelve plans and the code that is emitted for them, as text.

    python -m tests.golden.cases            # write the text anew; what changed is then a diff to be reviewed

A case is a model family, a mesh, a budget and a precision. Its file holds the plan as users read it, at one look and in
full, a digest of the plan as data, and the forward and backward of one device as Python.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import autopar
from autopar.codegen import lower
from autopar.request import Request
from autopar.tracer import ColoTracer
from tests import language
from tests.models import LlamaBlock, eager_links

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """A plan that is asked for, and the device whose program is written down."""

    family: str
    mesh: autopar.DeviceMesh
    asked: dict[str, Any] = field(default_factory=dict)
    coordinate: tuple[int, ...] = ()

    def text(self) -> str:
        """The plan and its program."""
        model, batch = FAMILIES[self.family]()
        precision = self.asked.get("precision")
        graph = ColoTracer().trace(model, batch, precision=precision)
        plan = autopar.plan(model, batch, mesh=self.mesh, cluster=eager_links(), **self.asked)
        graph = Request.of(plan).as_planned(graph, plan)
        joint = lower(graph, plan, self.coordinate or (0,) * len(self.mesh.shape)).joint
        data = plan.to_dict()
        for decision in data["decisions"].values():
            del decision["source"]  # lines of the model's own file
        digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
        parts = {
            "first lines": str(plan),
            "plan": plan.table(),
            "plan as data": digest,
            "forward": _code(joint.forward),
            "backward": _code(joint.backward),
        }
        return "\n".join(f"===== {name}\n{text.strip()}\n" for name, text in parts.items())


def _code(graph: torch.fx.Graph) -> str:
    return graph.python_code("self").src


class Language(nn.Module):
    """Two layers like LLaMA's between an embedding and a head, with a loss over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(96, 32), nn.RMSNorm(32)
        self.layers = nn.ModuleList(LlamaBlock() for _ in range(2))
        self.head = nn.Linear(32, 96, bias=False)

    def forward(self, input_ids, labels):
        h = self.embed(input_ids)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), labels.flatten())


def llama():
    """Eight sequences of sixteen tokens."""
    return _made(Language), _tokens()


def gpt2():
    """A layer with fused queries, keys and values, a tied head and dropout."""
    how = dict(use_cache=False, bos_token_id=0, eos_token_id=0)
    return _made(lambda: language.gpt2(1, 32, 96, 16, **how)), _tokens()


def t5():
    """An encoder and a decoder that reads it."""
    config = T5Config(
        vocab_size=96,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    return _made(lambda: T5ForConditionalGeneration(config)), _tokens()


class Pictures(nn.Module):
    """Convolutions, batch statistics, a residual and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv, self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 12)

    def forward(self, x, y):
        h = F.relu(self.first(self.stem(x)))
        h = F.max_pool2d(F.relu(h + self.second(self.conv(h))), 2)
        return F.cross_entropy(self.head(h.mean((2, 3))), y)


def pictures():
    """A small residual network over eight pictures."""
    return _made(Pictures), {"x": torch.randn(8, 3, 8, 8), "y": torch.arange(8)}


def _made(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


def _tokens() -> dict[str, torch.Tensor]:
    ids = torch.arange(8 * 16).view(8, 16) % 96
    return {"input_ids": ids, "labels": ids}


FAMILIES = {"llama": llama, "gpt2": gpt2, "t5": t5, "pictures": pictures}

_LINE = autopar.DeviceMesh((4,), ("data",))
_GRID = autopar.DeviceMesh((2, 2), ("data", "model"))
_HALF = autopar.Precision("bfloat16", "float32")

CASES = {
    "llama-free": Case("llama", _GRID),
    "llama-zero3-bf16": Case("llama", _LINE, {"parallel": "zero3", "precision": _HALF}),
    "llama-zero3-2x2": Case("llama", _GRID, {"parallel": "zero3"}),  # windows whose messages move over two axes
    "llama-megatron-sequence": Case(
        "llama", _LINE, {"parallel": dict(tensor=dict(size=4, mode="megatron", sequence=True))}, (3,)
    ),
    "llama-tight": Case("llama", _GRID, {"memory_budget": "340KiB"}),
    "gpt2-free": Case("gpt2", _GRID, {}, (1, 1)),
    "gpt2-zero2-accumulated": Case("gpt2", _LINE, {"parallel": "zero2", "accumulation": 2}),
    "gpt2-megatron-bf16": Case("gpt2", _LINE, {"parallel": "megatron", "precision": _HALF}, (1,)),
    "t5-free": Case("t5", _GRID, {}, (0, 1)),
    "t5-2d": Case("t5", _GRID, {"parallel": "2d"}),
    "pictures-free": Case("pictures", _LINE, {}, (2,)),
    "pictures-dp": Case("pictures", _GRID, {"parallel": "dp"}),
    "pictures-zero1-bf16": Case("pictures", _LINE, {"parallel": "zero1", "precision": _HALF}),
}


if __name__ == "__main__":
    for name, case in CASES.items():
        (HERE / f"{name}.txt").write_text(case.text())
        print(name)
