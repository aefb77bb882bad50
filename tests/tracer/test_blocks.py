"""Blocks that repeat are found; blocks that differ in any way are not merged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from autopar.graph.graph import info
from autopar.tracer import ColoTracer
from tests.models import MLP
from tests.zoo.tables import ZOO


class Layer(nn.Module):
    def __init__(self, width=4, gate=False, p=0.0):
        super().__init__()
        self.norm, self.up, self.down, self.gate, self.p = (
            nn.LayerNorm(width),
            nn.Linear(width, 8),
            nn.Linear(8, width),
            gate,
            p,
        )

    def forward(self, x):
        h = self.up(self.norm(x))
        return x + F.dropout(self.down(torch.sigmoid(h) * h if self.gate else F.gelu(h)), self.p, self.training)


def paths(*layers):
    graph = ColoTracer().trace(nn.Sequential(*layers), (torch.randn(2, 4, requires_grad=True),))
    return [repeat.paths for repeat in graph.blocks]


def test_layers_that_are_alike_are_one_class():
    assert paths(*(Layer() for _ in range(4))) == [("0", "1", "2", "3")]


def test_layers_that_differ_are_not_merged():
    assert paths(Layer(), Layer(gate=True), Layer(), Layer(gate=True)) == [("0", "2"), ("1", "3")]
    assert paths(Layer(p=0.1), Layer(p=0.2)) == [] and paths(Layer(p=0.1), Layer(p=0.1)) == [("0", "1")]
    frozen = Layer()
    frozen.up.weight.requires_grad_(False)
    assert paths(Layer(), frozen) == []


def test_a_shared_parameter_is_not_an_own_one():
    a, b, c = Layer(), Layer(), Layer()
    b.up.weight = a.up.weight
    assert paths(a, b, c) == [("0", "2")]


def test_blocks_line_up_node_by_node():
    graph = ColoTracer().trace(MLP(depth=5), {"x": torch.empty(8, 16, requires_grad=True)})
    (repeat,) = graph.blocks
    assert repeat.paths == tuple(f"blocks.{i}" for i in range(5)) and str(repeat).startswith("5 x ")
    for column in zip(*repeat.nodes, strict=True):
        assert len({(n.target, info(n).outputs) for n in column}) == 1


def test_a_mixture_after_dense_layers_is_another_class():
    entry = ZOO["hf_deepseekv3_batched_mm"]
    config = entry.build().config
    config.num_hidden_layers, config.first_k_dense_replace = 5, 2
    with torch.device("meta"):
        model = type(entry.build())(config).train()
    graph = ColoTracer().trace(model, entry.inputs())
    assert [r.paths for r in graph.blocks] == [
        ("model.layers.0", "model.layers.1"),
        ("model.layers.2", "model.layers.3", "model.layers.4"),
    ]


def test_blocks_inside_blocks():
    class Stage(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.blocks = nn.ModuleList(Layer() for _ in range(depth))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    assert paths(Stage(2), Stage(3)) == [("0.blocks.0", "0.blocks.1"), ("1.blocks.0", "1.blocks.1", "1.blocks.2")]


def test_a_first_layer_whose_input_wants_no_gradient_is_another_one():
    graph = ColoTracer().trace(MLP(depth=4), {"x": torch.empty(8, 16)})  # its backward computes less
    assert [r.paths for r in graph.blocks] == [("blocks.1", "blocks.2", "blocks.3")]
