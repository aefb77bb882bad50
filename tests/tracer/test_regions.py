"""What is more than a call: functions with their own backward, checkpoints, autocast, TorchScript, transforms, draws,
questions about values.
"""

from __future__ import annotations

import dataclasses
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.graph.graph import Assume, info, op_name
from autopar.letters import NotCaptured
from autopar.tracer import ColoTracer
from tests.tracer.cases import Of, check, traced


def ops(graph):
    return [op_name(n) for n in graph.nodes if info(n).kind == "op"]


# -- autograd.Function


class Scale(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x, k):
        ctx.k = k
        return x * k, x.cos()

    @staticmethod
    def backward(ctx, g, h):
        return g * ctx.k * 3 + h, None


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * Reads.model.weight

    @staticmethod
    def backward(ctx, g):
        return g


def test_an_autograd_function_keeps_its_backward():
    graph = check(lambda m, x: sum(t.sum() for t in Scale.apply(x @ m.weight, 3.0)))
    assert ops(graph).count(f"function {Scale.__module__}.Scale") == 1 and "cos" not in ops(graph)


def test_an_autograd_function_that_reads_what_it_was_not_given_is_a_letter():
    Reads.model = model = Of(lambda m, x: Reads.apply(x @ m.weight).sum())
    with pytest.raises(NotCaptured, match="was not given"):
        ColoTracer().trace(model, (torch.randn(4, 4),))


# -- checkpoints


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_opened_and_tagged(reentrant):
    def twice(m, x):
        h = checkpoint(lambda y: m.linear(y).tanh(), x @ m.weight, use_reentrant=reentrant)
        return checkpoint(
            lambda y: checkpoint(m.linear, y, use_reentrant=False).sin(), h, use_reentrant=reentrant
        ).sum()

    graph = check(twice)
    tags = {op_name(n): info(n).checkpoint for n in graph.nodes if info(n).kind == "op"}
    assert (
        tags["tanh"] == (0,)
        and tags["sin"] == (1,)
        and tags["linear"] == (1, 2)
        and tags["matmul"] == ()
        and tags["sum"] == ()
    )
    assert "  checkpoint 2" in str(graph)


def test_a_reentrant_checkpoint_of_inputs_without_gradients_gives_none():
    check(lambda m, x: checkpoint(m.linear, x, use_reentrant=True).sum() + m.weight.sum())


# -- autocast


def mixed(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = m.linear(x @ m.weight)
        h = F.softmax(h, -1) + F.layer_norm(h, (4,))
        e = torch.einsum("ab,bc->ac", h, x)
        with torch.autocast("cpu", enabled=False):
            f = x @ m.weight
        return (
            F.mse_loss(h.float(), x)
            + torch.cat([h, x]).sum()
            + m.linear(h).sum()
            + e.sum()
            + f.sum()
            + F.scaled_dot_product_attention(h[None], h[None], x[None]).sum()
        )


def test_the_casts_of_autocast_are_in_the_graph():
    graph = check(mixed)
    products = [n for n in graph.nodes if op_name(n) in ("matmul", "linear", "einsum", "scaled_dot_product_attention")]
    assert [info(n).outputs[0].dtype for n in products] == [
        "bfloat16",
        "bfloat16",
        "bfloat16",
        "float32",
        "bfloat16",
        "bfloat16",
    ]
    casts = [
        n
        for n in graph.nodes
        if (op_name(n) == "to" and info(n.kwargs["input"]).kind == "parameter")
        or info(n).key.startswith("linear.weight")
    ]
    assert (
        len([n for n in casts if op_name(n) == "to" and info(n.kwargs["input"]).key == "linear.weight"]) == 1
    )  # once a region


# -- below the function level


@torch.jit.script
def scripted(x):
    y = x.relu() * 2
    y.add_(1.0)
    return y + x.transpose(0, 1) * x


def test_torchscript_is_recorded_op_by_op():
    graph = check(lambda m, x: scripted(x @ m.weight).sum())
    assert {"relu", "transpose", "add"} <= set(ops(graph))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.vmap(lambda r: r.sin().view(2, 2).sum() * r.detach())(x @ m.weight).sum(),
        lambda m, x: torch.vmap(lambda r, s: r * s, in_dims=(0, None))(x @ m.weight, x[0]).sum(),
        lambda m, x: torch.func.grad(lambda r: (r @ m.weight).sin().sum())(x).pow(2).sum(),
        lambda m, x: torch.func.jvp(lambda r: (r @ m.weight).sin(), (x,), (x * 2,))[1].pow(2).sum(),
        lambda m, x: torch.compile(lambda y: y * 2 + 1)(x @ m.weight).sum(),
    ],
    ids=["vmap", "vmap of one", "func.grad", "func.jvp", "compile"],
)
def test_transforms_are_recorded_as_what_they_run(function):
    check(function)


# -- draws


def test_every_draw_is_explicit_with_its_probability():
    def draws(m, x):
        h = x @ m.weight
        noise = (
            torch.rand_like(h)
            + torch.rand(4, 4)
            + torch.randn(4)
            + torch.empty(4).uniform_(-1, 1)
            + torch.empty(4, 4).bernoulli_(0.3)
            + torch.bernoulli(torch.full((4, 4), 0.5))
        )
        return (
            (h * noise).view(1, 4, 2, 2)
            + F.dropout2d(h.view(1, 4, 2, 2), 0.4)
            + F.alpha_dropout(h, 0.3, True).view(1, 4, 2, 2)
            + F.gumbel_softmax(h).view(1, 4, 2, 2)
        ).sum()

    graph = check(draws)
    drawn = [n for n in graph.nodes if info(n).random >= 0]
    assert [info(n).random for n in drawn] == list(range(len(drawn))) and len(drawn) == 9
    assert [n.kwargs["p"] for n in drawn if "p" in n.kwargs] == [0.3, 0.4, 0.3]


@pytest.mark.parametrize(
    "function, name",
    [
        (lambda m, x: (x @ m.weight) * np.random.rand(), "numpy.random.rand"),
        (lambda m, x: (x @ m.weight) * random.random(), "random.random"),
        (lambda m, x: (x @ m.weight) * by_name(), "numpy's or Python's"),
        (lambda m, x: x @ m.weight + torch.rand(4, 4, generator=torch.Generator()), "generator of the model"),
    ],
)
def test_draws_that_torch_does_not_make_are_letters(function, name, monkeypatch):
    monkeypatch.setattr(
        threading, "enumerate", lambda: [threading.current_thread()]
    )  # threads of other tests may be about
    with pytest.raises(NotCaptured, match=name):
        traced(function)


def test_with_other_threads_about_the_graph_says_that_something_drew(monkeypatch):
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread(), threading.Thread()])
    assert any(
        "another thread or by the model" in a for a in traced(lambda m, x: (x @ m.weight) * by_name()).assumptions
    )


by_name = random.random  # imported by name, it is found by the generator's state


# -- questions about values


def test_what_depends_on_no_input_is_computed():
    graph = check(
        lambda m, x: (
            (x @ m.weight).sum()
            * (2 if (torch.arange(4).cumsum(0) >= 0).all() else 3)
            * torch.linspace(0, 1, 3).tolist()[1]
        )
    )
    assert {a.split(", at")[0] for a in graph.assumptions} == {
        "a condition is True: it depends on no input",
        *(f"a value is {v}: it depends on no input" for v in (0.0, 0.5, 1.0)),
    }
    assert all("test_regions.py:" in a for a in graph.assumptions)


def test_a_uniform_draw_against_a_bound_it_cannot_cross_is_proved():
    graph = check(lambda m, x: (x @ m.weight).sum() if torch.rand([]) < 0.0 else (x * m.weight).sum())
    assert "whatever is drawn" in graph.assumptions[0]
    with pytest.raises(NotCaptured, match="random numbers"):
        traced(lambda m, x: (x @ m.weight).sum() if torch.rand([]) < 0.5 else x.sum())


def asks(m, x):
    return (x @ m.weight).sum() if x.sum() > -1e9 else -x


def test_the_caller_may_answer_a_branch_by_its_line():
    line = f"test_regions.py:{asks.__code__.co_firstlineno + 1}"
    with pytest.raises(NotCaptured, match=r"value of a tensor.*input 0") as letter:
        traced(asks)
    assert f'Assume(branches={{"{line}": True}})' in letter.value.advice
    graph = check(asks, Assume(branches={line: True}))
    assert graph.assumptions == (f"a condition is True, as declared, at {line}, in asks",)


def test_values_are_finite_where_declared():
    def guarded(m, x):
        h = x @ m.weight
        return h.sum() if torch.isfinite(h).all() and not torch.isnan(h).any() else h.clamp(-1, 1).sum()

    with pytest.raises(NotCaptured, match="value of a tensor"):
        traced(guarded)
    assert all("values are finite (declared)" in a for a in check(guarded, Assume(finite=True)).assumptions)


@pytest.mark.parametrize(
    "function, match",
    [
        (lambda m, x: x * x.sum().item(), "value of a tensor"),
        (lambda m, x: x[x > 0], "values of a tensor"),
        (lambda m, x: torch.nonzero(x), "shape of nonzero"),
        (lambda m, x: torch.masked_select(x, x > 0), "shape of masked_select"),
        (lambda m, x: x * len(x.unique()), "shape of unique"),
        (lambda m, x: x.numpy(), "memory"),
        (lambda m, x: torch.from_numpy(np.ones((4, 4), np.float32)) * x, "outside the model"),
        (lambda m, x: torch.autograd.grad((x @ m.weight).sum(), m.weight)[0], "derivative"),
        (lambda m, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x @ m.weight,)), "higher-order"),
        (lambda m, x: x.to("meta"), "between devices"),
        (lambda m, x: m.weight.requires_grad_(False).sum(), "requires_grad"),
        (
            lambda m, x: torch.nn.utils.rnn.pack_padded_sequence(x[:, :, None], torch.tensor([4, 3, 2, 1]), True),
            "value|memory|outside",
        ),
    ],
)
def test_what_a_graph_cannot_hold_is_a_letter(function, match):
    with pytest.raises(NotCaptured, match=match) as letter:
        traced(function)
    assert "test_regions.py:" in letter.value.at or "rnn.py" in letter.value.at


def test_a_model_that_communicates_is_a_letter(fake_world):
    def reduces(m, x):
        y = x @ m.weight
        torch.distributed.all_reduce(y.detach().clone())
        return y

    with fake_world(2), pytest.raises(NotCaptured, match="communicates itself"):
        traced(reduces)


def test_layer_drop_is_a_letter():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                if torch.rand([]) > 0.1:
                    x = layer(x)
            return x

    with pytest.raises(NotCaptured, match="random numbers"):
        ColoTracer().trace(Drops(), (torch.randn(2, 4),))


# -- the module itself


def test_what_forward_sets_is_put_back_and_said():
    def sets(m, x):
        m.last = x @ m.weight
        m.calls = getattr(m, "calls", 0) + 1
        return m.last.sum()

    model = Of(sets)
    before = dict(vars(model))
    graph = ColoTracer().trace(model, (torch.randn(4, 4),))
    assert vars(model) == before
    assert graph.assumptions == (
        "the attribute last that forward sets on the model is not kept",
        "the attribute calls that forward sets on the model is not kept",
    )


def test_hooks_that_forward_installs_do_not_stay():
    def hooks(m, x):
        m.linear.register_forward_hook(lambda *_: None)
        return m.linear(x @ m.weight).sum()

    model = Of(hooks)
    ColoTracer().trace(model, (torch.randn(4, 4),))
    assert not model.linear._forward_hooks


def test_a_plain_tensor_attribute_is_a_buffer():
    graph = check(lambda m, x: (x @ m.weight * m.table).sum())
    assert [info(n).key for n in graph.nodes if info(n).kind == "buffer"] == ["table"]


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


def test_parameters_on_one_memory_are_a_letter():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(NotCaptured, match=r"0.weight and 1.weight are two on the same memory"):
        ColoTracer().trace(model, (torch.randn(2, 4),))


# -- structures


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


def test_an_output_that_hides_tensors_is_a_letter():
    class Box:
        def __init__(self, x):
            self.x = x

    with pytest.raises(NotCaptured, match="Box holds tensors"):
        traced(lambda m, x: Box(x @ m.weight))


def test_a_model_partly_on_meta_gives_the_same_graph():
    def model():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    whole, partly = model(), model()
    partly[0].to("meta")
    assert ColoTracer().trace(whole, (torch.empty(3, 4),)) == ColoTracer().trace(
        partly, (torch.empty(3, 4, device="meta"),)
    )


def test_nothing_of_a_model_is_kept_alive():
    import gc
    import weakref

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    graph = ColoTracer().trace(model, (torch.randn(2, 4),))
    gone = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert gone() is None and len(list(graph.nodes)) == 7
