"""The tracer: one node per canonical op, replay equal to eager, and a letter for what a graph cannot hold."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.graph.graph import info, op_name
from autopar.letters import BadInput, NotCaptured
from autopar.tracer import ColoTracer
from tests.models import MLP, mlp_case
from tests.tracer.cases import check


def trace(model, inputs, **how):
    return ColoTracer().trace(model, inputs, **how)


class Of(nn.Module):
    """A function as a model with one parameter."""

    def __init__(self, function, *shape):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(*(shape or (4, 4))))

    def forward(self, x):
        return self.function(self, x)


def test_the_graph_reads_as_text():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    assert (
        str(trace(model, (torch.empty(2, 4),)))
        == """\
input_1: f32[2, 4] = input input
_0_weight: f32[8, 4] = parameter 0.weight  requires_grad
_0_bias: f32[8] = parameter 0.bias  requires_grad
identity: f32[2, 4] = identity(input=input_1)
_0_linear: f32[2, 8] = linear(input=identity, weight=_0_weight, bias=_0_bias)    # 0
_1_relu: f32[2, 8] = relu(input=_0_linear)    # 1
return _1_relu"""
    )


def test_replay_equals_eager():
    model, batch = mlp_case()
    for inputs in (batch, {"x": batch["x"]}):
        graph = trace(model, {k: v.to("meta") for k, v in inputs.items()})
        torch.testing.assert_close(graph.module(model)(**inputs), model(**inputs), rtol=1e-12, atol=1e-12)


def test_a_meta_model_gives_the_same_graph():
    with torch.device("meta"):
        model = MLP()
    batch = {"x": torch.empty(8, 16)}
    assert trace(model, batch) == trace(MLP(), batch)
    assert trace(model, batch) != trace(model, {"x": torch.empty(4, 16)})


def test_structures_of_inputs_and_outputs_are_kept():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, pair, *, scale, unused=None):
            a, b = pair["a"], pair["b"]
            return {"sum": self.inner(a) + b[0] * scale, "kept": 3, "more": (a, None)}

    model, x = Model(), torch.randn(2, 4)
    inputs = {"pair": {"a": x, "b": [x]}, "scale": 2.0}
    graph = trace(model, inputs)
    assert set(graph.inputs) == {"pair.a", "pair.b.0"} and graph.output_names == ("sum", "more.0")
    replayed, expected = graph.module(model)(**inputs), model(**inputs)
    assert replayed["kept"] == 3 and replayed["more"][1] is None
    torch.testing.assert_close(replayed["sum"], expected["sum"])


def test_one_tensor_given_twice_is_two_inputs():
    model, x = MLP(), torch.empty(8, 16)
    assert set(trace(model, {"x": x, "y": x}).inputs) == {"x", "y"}


def test_a_mean_is_a_sum_over_the_global_count():
    graph = trace(Of(lambda m, x: F.mse_loss(x + m.weight, x)), (torch.empty(4, 4),))
    assert [op_name(n) for n in graph.nodes if info(n).kind == "op"] == ["identity", "add", "mse_loss", "sum", "div"]
    division = next(n for n in graph.nodes if op_name(n) == "div")
    assert division.kwargs["other"] == 16


def test_a_replay_takes_constants_as_they_were_traced():
    class Labelled(Of):
        def forward(self, x, labels=None, scale=1):
            y = x @ self.weight * scale
            return y if labels is None else y + labels

    model, x = Labelled(None), torch.randn(4, 4)
    replay = ColoTracer().trace(model, (x, None, 1)).module(model)
    assert torch.equal(replay(x, None, 1), model(x))
    for other in ((x, x, 1), (x, None, 1.0), (x, None, True)):
        with pytest.raises(BadInput, match="a constant argument differs"):
            replay(*other)


def test_dropout_alone_is_turned_off():
    graph = trace(Of(lambda m, x: F.dropout(torch.bernoulli(x, p=0.5) + m.weight, 0.3)), (torch.empty(4, 4),))
    left = {op_name(n): n.kwargs["p"] for n in graph.without_dropout().nodes if "p" in n.kwargs}
    assert left == {"bernoulli": 0.5, "dropout": 0.0}


def test_a_mean_of_one_number_is_that_number():
    check(lambda m, x: m.weight.mean(dim=0).sum().mean(0) + (x @ m.weight).sum())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_means_sum_in_float32(dtype):
    model = Of(lambda m, x: (x + m.weight).mean()).to(dtype)
    x = torch.full((4, 4), 3e4, dtype=dtype)  # a sum of these is no float16
    graph = trace(model, (x,))
    torch.testing.assert_close(graph.module(model)(x), model(x))


def test_tied_parameters_stay_one():
    model = MLP()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    node = trace(model, {"x": torch.empty(8, 16)}).parameters["blocks.0.up.weight"]
    assert info(node).names == ("blocks.0.up.weight", "blocks.1.up.weight") and [op_name(u) for u in node.users] == [
        "identity"
    ]


def test_frozen_and_unused_parameters():
    model = MLP()
    model.head.weight.requires_grad_(False)
    model.spare = nn.Parameter(torch.ones(3))
    graph = trace(model, {"x": torch.empty(8, 16)})
    assert not info(graph.parameters["head.weight"]).outputs[0].requires_grad and "spare" not in graph.parameters


def test_an_unknown_function_is_an_op_of_its_own_name():
    model, x = Of(lambda m, x: torch.cumsum(x, dim=1) + m.weight), torch.randn(4, 4)
    graph = trace(model, (x,))
    assert "cumsum" in {op_name(n) for n in graph.nodes}
    torch.testing.assert_close(graph.module(model)(x), model(x))


def test_every_node_knows_its_module_and_line():
    graph = trace(MLP(), {"x": torch.empty(8, 16)})
    node = next(n for n in graph.nodes if info(n).key == "blocks.1/gelu")
    assert (
        info(node).source.startswith("models.py:")
        and "forward" in info(node).source
        and info(node).module == "blocks.1"
    )


def test_the_loss_is_found():
    assert trace(MLP(), {"x": torch.empty(8, 16), "y": torch.empty(8, 16)}).loss == 0
    assert trace(MLP(), {"x": torch.empty(8, 16)}).loss is None
    graph = trace(MLP(), {"x": torch.empty(8, 16)}, loss=lambda out, inputs: (out - inputs["x"]).pow(2).sum())
    assert graph.loss == 0 and graph.output_names[0] == "loss"
    with pytest.raises(NotCaptured, match=r"shape \(8, 16\), not one number"):
        trace(MLP(), {"x": torch.empty(8, 16)}, loss=lambda out, inputs: out - inputs["x"])


@pytest.mark.parametrize(
    "function, match",
    [
        (lambda m, x: x * x.sum().item(), "value of a tensor"),
        (lambda m, x: x if x.sum() > 0 else -x, "value of a tensor"),
        (lambda m, x: x[x > 0], "values of a tensor"),
        (lambda m, x: x + torch.ones(4), None),
        (lambda m, x: x + OUTSIDE, "constant"),
    ],
)
def test_what_a_graph_cannot_hold_is_a_letter(function, match):
    model = Of(function)
    before = {n: id(p) for n, p in model.named_parameters()}
    if match is None:
        trace(model, (torch.randn(4, 4),))
    else:
        with pytest.raises(NotCaptured, match=match) as letter:
            trace(model, (torch.randn(4, 4),))
        assert "test_capture.py" in letter.value.at
    assert {n: id(p) for n, p in model.named_parameters()} == before


OUTSIDE = torch.ones(4, 4)


def test_the_model_is_itself_again_after_a_failure():
    class Fails(nn.Linear):
        def forward(self, x):
            raise ValueError("mine")

    model = Fails(4, 4)
    with pytest.raises(NotCaptured, match="raises ValueError on these inputs: mine"):
        trace(model, (torch.randn(2, 4),))
    assert (
        type(model.weight) is nn.Parameter
        and model.weight.device.type == "cpu"
        and model.weight.sum().item() == model.weight.sum().item()
    )


@pytest.mark.parametrize(
    "inputs", [{"y": torch.ones(2, 3)}, (), (torch.ones(2, 3),) * 2], ids=["another name", "none", "too many"]
)
def test_inputs_that_the_model_does_not_take_are_a_letter(inputs):
    with pytest.raises(NotCaptured, match="does not take these inputs"):
        ColoTracer().trace(torch.nn.Linear(3, 4), inputs)


def test_what_an_op_raises_is_told_once(caplog):
    with pytest.raises(NotCaptured, match="raises RuntimeError"):
        trace(nn.Linear(3, 4), (torch.ones(2, 5),))
    assert not caplog.records
