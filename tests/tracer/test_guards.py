"""Each guard of the tracer, switched off once: the wrong value that then comes out is why it is there."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from autopar.graph import archive
from autopar.graph.graph import Graph, info
from autopar.letters import BadGraph, NotCaptured
from autopar.ops import entry, lookup
from autopar.runtime.private import FakeTensor, clean_room
from autopar.testing import Unequal
from autopar.tracer import (
    ColoTracer,
    below,
    branches,
    capture,
    casts,
    changes,
    fakes,
    functions,
    recorder,
    refused_calls,
    regions,
    values,
)
from tests.tracer.cases import Of, Scale, check, mixed, traced


def wrong(function, match="gradients|outputs|buffers"):
    """It is captured, and replay is not what eager is."""
    with pytest.raises(Unequal, match=match):
        check(function)


@pytest.fixture
def off(monkeypatch):
    return monkeypatch.setattr


@pytest.fixture
def outsiders_are_constants(monkeypatch):
    """A tracer without the guard: a tensor that it does not know is copied into the graph."""
    call = functions.FunctionMode.__torch_function__

    def permissive(self, function, types, args=(), kwargs=None):
        def known(value):
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                with clean_room(), torch._C.DisableTorchFunction():
                    data = value.tolist()
                with self.recorder.below, torch._C.DisableTorchFunction():
                    fake = torch.empty(value.shape, dtype=value.dtype)
                node = self.recorder.emit(entry.OPS["tensor"], {"data": data, "dtype": value.dtype}, (fake,))
                self.recorder.values.bind(fake, node)
                return fake
            return value

        args, kwargs = pytree.tree_map(known, (args, kwargs or {}))
        return call(self, function, types, args, kwargs)

    monkeypatch.setattr(functions.FunctionMode, "__torch_function__", permissive)


# 1


def test_1_a_custom_backward_is_lost_where_functions_are_inlined(off):
    off(regions, "_apply", lambda _, original: original)

    def inlined(m, x):
        return sum(t.sum() for t in Scale.apply(x @ m.weight, 3.0))

    with pytest.raises(NotCaptured, match="a gradient in the model and none in the graph"):
        traced(inlined)
    off(values, "_is_trained", lambda *_: False)
    wrong(inlined, "gradients")


# 2, 7

OUTSIDE = torch.ones(4, 4)


def test_2_a_tensor_from_outside_goes_stale(outsiders_are_constants):
    model, x = Of(lambda m, x: (x @ m.weight * OUTSIDE).sum()), torch.randn(4, 4)
    replay = ColoTracer().trace(model, (x,)).module(model)
    torch.testing.assert_close(replay(x), model(x))
    OUTSIDE.mul_(2)
    torch.testing.assert_close(replay(x) * 2, model(x))


def test_7_a_buffer_that_is_no_attribute_of_the_graph_goes_stale(off, outsiders_are_constants):
    model, x = Of(lambda m, x: (x @ m.weight * m.table).sum()), torch.randn(4, 4)
    followed = ColoTracer().trace(model, (x,)).module(model)
    off(fakes.Fakes, "_faked", lambda self, value: self(value) if isinstance(value, nn.Parameter) else value)
    frozen = ColoTracer().trace(model, (x,)).module(model)
    model.table.mul_(2)
    torch.testing.assert_close(followed(x), model(x))
    torch.testing.assert_close(frozen(x) * 2, model(x))


# 3


@torch.jit.script
def adds_in_place(x):
    return x.add_(1.0)


@torch.jit.script
def branches_off(x):
    return x.relu() * 2.0 + x.sin() * x


def test_3_a_write_inside_torchscript_is_lost_without_the_watch_below(off):
    off(below.DispatchMode, "record", lambda *_: None)

    def writes(m, x):
        h = x @ m.weight
        adds_in_place(h)
        return h.sum()

    wrong(writes, "outputs")


def test_3_the_autodiff_of_torchscript_detaches_what_it_runs(off):
    def often(m, x):
        return sum(branches_off(x @ m.weight).sum() for _ in range(4))

    check(often)
    off(torch.jit, "optimized_execution", lambda _: contextlib.nullcontext())
    with pytest.raises(NotCaptured, match="TorchScript detaches"):  # also where it has run before the trace
        traced(often)
    off(capture, "refuse_detached", lambda _: None)
    wrong(often, "gradients")


# 4


def test_4_the_region_of_a_checkpoint_is_lost_without_its_tag(off):
    def region(m, x):
        return checkpoint(m.linear, x @ m.weight, use_reentrant=False).sum()

    assert {info(n).checkpoint for n in traced(region).nodes} == {(), (0,)}
    off(regions, "_region", lambda _, original: original)
    off(regions, "_refusing", lambda _, name, original, *__: original)
    assert {info(n).checkpoint for n in traced(region).nodes} == {()}


def test_4_the_casts_of_autocast_are_lost_without_a_look_at_it(off):
    off(casts.Casts, "on", lambda _: False)
    with pytest.raises(NotCaptured, match="bfloat16 and float32"):  # one product is left in what was another's dtype
        wrong(mixed, "outputs")


# 5


def test_5_a_value_that_is_guessed_is_wrong(off):
    off(branches, "answer", lambda recorder, function, tensor: False if function is Tensor.__bool__ else 0.0)
    wrong(lambda m, x: (x @ m.weight).sum() * x.sum().item(), "outputs")
    wrong(lambda m, x: (x @ m.weight).sum() if x.abs().sum() > 0 else m.weight.sum(), "outputs")


# 6


def test_6_ties_are_lost_where_tensors_are_not_swapped_by_identity(off):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert info(ColoTracer().trace(model, (torch.randn(2, 4),)).parameters["0.weight"]).names == (
        "0.weight",
        "1.weight",
    )

    def each(self, tensor, made=fakes.Fakes.__call__):
        self.seen = getattr(self, "seen", [])
        fake = made(self, tensor)
        self.seen.append(self._made.pop(id(tensor)))
        self._made[len(self._made) - 10**6] = self.seen[-1]
        return fake

    off(fakes.Fakes, "__call__", each)
    assert {"0.weight", "1.weight"} <= set(ColoTracer().trace(model, (torch.randn(2, 4),)).parameters)


# 8


def test_8_a_factory_that_keeps_its_device_is_on_another_than_the_model(off):
    model = Of(lambda m, x: x @ m.weight + torch.arange(4, device=x.device))
    graph = ColoTracer().trace(model, (torch.randn(4, 4),))
    assert graph.module(model.to("meta"))(torch.randn(4, 4, device="meta")).device.type == "meta"
    assert not any("device" in n.kwargs for n in graph.nodes)
    made = [n for n in graph.nodes if info(n).kind == "op" and n.target.name == "arange"]
    assert made[0].target.run(made[0].kwargs).device.type == "cpu"  # where it is made without the replay's word


# 9


@pytest.mark.parametrize("draw", [lambda: float(np.random.rand()), random.random], ids=["numpy", "random"])
def test_9_draws_from_elsewhere_freeze(off, draw):
    model, x = Of(lambda m, x: (x @ m.weight).sum() * draw()), torch.randn(4, 4)
    with pytest.raises(NotCaptured, match="draws from"):
        ColoTracer().trace(model, (x,))
    off(regions, "_no_outside_randomness", lambda _: contextlib.nullcontext())
    replay = ColoTracer().trace(model, (x,)).module(model)
    assert len({float(replay(x)) for _ in range(4)}) == 1 and len({float(model(x)) for _ in range(4)}) == 4


@pytest.mark.parametrize(
    "generator, draws",
    [
        (np.random.default_rng(0), lambda own: own.random()),
        (np.random.RandomState(0), lambda own: own.rand()),
        (random.Random(0), lambda own: own.random()),
    ],
    ids=["numpy", "numpy's older one", "Python"],
)
def test_9_draws_from_a_generator_of_the_model_freeze(generator, draws):
    model = Of(lambda m, x: (x @ m.weight).sum() * float(draws(m.generator)))
    model.generator = generator
    with pytest.raises(NotCaptured, match="draws from"):
        ColoTracer().trace(model, (torch.randn(4, 4),))


def test_9_layer_drop_becomes_never(off):
    model, x = Of(lambda m, x: (x @ m.weight).sum() * (0 if torch.rand([]) < 0.5 else 1)), torch.randn(4, 4)
    off(branches, "answer", lambda *_: False)
    replay = ColoTracer().trace(model, (x,)).module(model)
    assert len({float(replay(x)) for _ in range(20)}) == 1 and len({float(model(x)) for _ in range(20)}) == 2


# 10


def test_10_a_function_without_a_name_cannot_be_read_back(off):
    def pools(m, x):
        return F.max_pool2d((x @ m.weight)[None], 2).sum()

    graph = traced(pools)
    assert str(Graph.from_json(graph.to_json())) == str(graph)
    off(
        lookup,
        "SPELLINGS",
        {f: s for f, s in entry.SPELLINGS.items() if f not in (F.max_pool2d, F.max_pool2d_with_indices)},
    )
    for module in (lookup, archive):
        off(module, "own_name", lambda function: function.__qualname__)
    with pytest.raises(BadGraph, match="not a function that a tracer meets"):
        Graph.from_json(traced(pools).to_json())


# and those that this tracer found for itself


def test_views_of_written_memory_go_stale(off):
    def reads_a_view_again(m, x):
        z = torch.zeros(4, 4)
        view = z[1]
        z.add_(x @ m.weight)
        return (view * x).sum()

    check(reads_a_view_again)
    off(values.Values, "node", lambda self, tensor: self.nodes.get(id(tensor)))
    wrong(reads_a_view_again, "outputs")


def test_a_write_under_no_grad_changes_a_gradient(off):
    def hidden(m, x):
        h = x @ m.weight
        with torch.no_grad():
            h.mul_(2)
        return h.sum()

    off(refused_calls, "refuse_write", lambda *_: None)
    with pytest.raises(NotCaptured, match="a gradient in the model and none in the graph"):
        traced(hidden)
    off(values, "_is_trained", lambda *_: False)
    wrong(hidden, "gradients")


def test_running_statistics_are_lost_where_the_schema_is_believed(off):
    def aside(m, x):
        F.batch_norm(x @ m.weight, m.mean[0], m.table[0], training=True)
        return (x @ m.weight).sum()

    check(aside)
    off(recorder.Recorder, "writes", lambda *_: False)
    wrong(aside, "buffers")


def test_a_buffer_that_is_reassigned_is_lost_without_a_look_afterwards(off):
    def reassigns(m, x):
        m.mean = m.mean + x.detach()
        return (x @ m.weight).sum()

    off(changes.Changes, "notice", lambda _: None)
    wrong(reassigns, "buffers")


def test_two_parameters_on_one_memory_train_otherwise(off):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data)
    off(capture, "refuse_shared_memory", lambda _: None)
    assert len(ColoTracer().trace(model, (torch.randn(2, 4),)).parameters) == 2  # a plan would store, and step, each
    with torch.no_grad():
        model[0].weight.zero_()
    assert not model[1].weight.any()  # eager has one


class Leaves(nn.Module):
    """Sets what it has computed, and then fails."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        self.last = self.a(x)
        return {"key": self.last}["another"]


def test_what_the_models_own_code_raises_is_told_and_leaves_nothing():
    model = Leaves()
    with pytest.raises(NotCaptured, match="raises KeyError on these inputs: 'another'") as letter:
        ColoTracer().trace(model, (torch.zeros(2, 4),))
    assert "test_guards.py" in letter.value.at and not hasattr(model, "last")
    for loss, said in (
        (lambda out, inputs: 3.0, "returned 3.0"),
        (lambda out, inputs: inputs["y"], "raises TypeError"),
    ):
        with pytest.raises(NotCaptured, match=said):
            ColoTracer().trace(nn.Linear(4, 4), (torch.zeros(2, 4),), loss=loss)
    with pytest.raises(NotCaptured, match="float32 and float64"):
        ColoTracer().trace(nn.Linear(4, 4), (torch.zeros(2, 4).double(),))
