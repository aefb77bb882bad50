"""Modules as users write them: recurrent, parametrized and wrapped ones, buffers of any kind, structures in and out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.graph.graph import info
from autopar.letters import BadInput
from autopar.tracer import ColoTracer
from tests.tracer.cases import Of, check, ops


def test_a_plain_tensor_attribute_is_a_buffer():
    graph = check(lambda m, x: (x @ m.weight * m.table).sum())
    assert [info(n).key for n in graph.nodes if info(n).kind == "buffer"] == ["table"]


def lists_of_tensors(m, x):
    return x @ m.weight * m.many[0] + m.named["a"]


def test_tensors_in_lists_and_dicts_are_named():
    model, x = Of(lists_of_tensors), torch.randn(4, 4)
    model.many, model.named = [torch.ones(4), torch.zeros(4)], {"a": torch.full((4,), 2.0)}
    graph = ColoTracer().trace(model, (x,))
    torch.testing.assert_close(graph.module(model)(x), model(x))
    assert {info(n).key for n in graph.nodes if info(n).kind == "buffer"} == {"many.0", "named.a"}


def test_recurrent_modules_are_one_op():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.gru = nn.LSTM(4, 6, num_layers=2, batch_first=True, bidirectional=True), nn.GRU(12, 3)

        def forward(self, x):
            return self.gru(self.lstm(x)[0])[0].sum()

    torch.manual_seed(0)
    model, x = Tagger(), torch.randn(2, 5, 4)
    graph = ColoTracer().trace(model, (x,))
    torch.testing.assert_close(graph.module(model)(x), model(x))
    assert {"lstm", "gru"} <= set(ops(graph)) and "lstm.weight_ih_l0" in graph.parameters


def test_attention_modules_are_opened():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    x = torch.randn(2, 5, 8)
    graph = ColoTracer().trace(layer, (x,))
    torch.testing.assert_close(graph.module(layer)(x), layer(x))
    assert "scaled_dot_product_attention" in ops(graph) and not any("multi_head" in op for op in ops(graph))


def test_parametrized_modules_keep_their_parameters():
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    )
    x = torch.randn(2, 4)
    graph = ColoTracer().trace(model, (x,))
    start = {n: b.clone() for n, b in model.named_buffers()}
    expected = model(x)
    for n, b in model.named_buffers():
        b.copy_(start[n])
    torch.testing.assert_close(graph.module(model)(x), expected)
    assert (
        "0.parametrizations.weight.original0" in graph.parameters
        and ("buffer", "1.parametrizations.weight.0._u") in graph.updates
    )


class Lora(nn.Module):
    """A frozen linear with a low-rank path."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base, self.down, self.up = (
            base.requires_grad_(False),
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x):
        return self.base(x) + self.up(self.down(F.dropout(x, 0.1, self.training)))


def test_lora_wrapped_modules():
    model = nn.Sequential(Lora(nn.Linear(8, 8)), nn.GELU(), Lora(nn.Linear(8, 8)))
    graph = ColoTracer().trace(model, (torch.randn(2, 8),))
    wanted = {n: info(node).outputs[0].requires_grad for n, node in graph.parameters.items()}
    assert wanted == {n: p.requires_grad for n, p in model.named_parameters()} and not wanted["0.base.weight"]


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    more: dict
    name: str = "b"


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    batch: Batch


def test_dataclasses_nest_in_and_out():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch, scale=1.0):
            y = self.linear(batch.x) * scale + batch.more["y"][0]
            return Result(y.sum(), Batch(y, {"z": (y, None)}, batch.name))

    model, batch = Model(), Batch(torch.randn(2, 4), {"y": [torch.randn(4)]})
    graph = ColoTracer().trace(model, {"batch": batch, "scale": 2.0})
    replayed, expected = graph.module(model)(batch=batch, scale=2.0), model(batch, 2.0)
    assert (
        type(replayed) is Result
        and type(replayed.batch) is Batch
        and replayed.batch.name == "b"
        and replayed.batch.more["z"][1] is None
    )
    torch.testing.assert_close(replayed.batch.more["z"][0], expected.batch.x)
    assert graph.output_names[0] == "loss" and len(graph.inputs) == 2


def test_a_model_partly_on_meta_gives_the_same_graph():
    def model():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    whole, partly = model(), model()
    partly[0].to("meta")
    assert ColoTracer().trace(whole, (torch.empty(3, 4),)) == ColoTracer().trace(
        partly, (torch.empty(3, 4, device="meta"),)
    )


def test_calls_are_checked_against_the_traced_one():
    class Scaled(nn.Module):
        def forward(self, a, b, c):
            return a * c + b

    x = torch.randn(2)
    replay = ColoTracer().trace(Scaled(), {"a": x, "b": x + 1, "c": 2.0}).module(Scaled())
    torch.testing.assert_close(replay(c=2.0, b=x + 1, a=x), x * 2 + x + 1)
    with pytest.raises(BadInput, match="constant argument"):
        replay(a=x, b=x, c=3.0)
    with pytest.raises(BadInput, match="structure"):
        replay(x, x, 2.0)
