"""Values that wait on the host for backward.

Gradients are bit for bit those of the plan that saves all on the device, where every memory that has left is
overwritten; both memories hold what they should; and broken programs are refused, or compute no numbers.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
from typing import NamedTuple

import pytest
import torch

import autopar
from autopar import DeviceMesh
from autopar.certificate import VARIABLE
from autopar.certificate.host import check_travels
from autopar.codegen import offloaded
from autopar.codegen.joint import LOWERED
from autopar.codegen.joint_graph import BACK, OP
from autopar.codegen.lower import lower
from autopar.kernels import NAMES
from autopar.letters import BadPlan, NotCertified
from autopar.runtime.host import HOST, begin_from_host, begin_to_host, end_from_host, end_to_host
from autopar.testing import on_processes
from autopar.tracer import ColoTracer
from benchmarks.memory import Live
from tests import host, language
from tests.equality.gpt2 import gpt2
from tests.host import broken, first, small_values_travel, travels
from tests.models import eager_links, mlp_case
from tests.stages.models import case
from tests.training import whole

MESHES = {**host.MESHES, "free": dict(mesh=DeviceMesh((2, 2), ("a", "b"))), "turns": dict(mesh=(1,), microbatches=2)}
BY_DAY = {("decoder", "one device"), ("unet", "one device"), ("encoder and decoder", "zero3"), ("decoder", "turns")}
BOTH = [
    pytest.param(name, how, marks=[] if (name, how) in BY_DAY else pytest.mark.nightly)
    for name in ("decoder", "encoder and decoder", "unet")
    for how in MESHES
]


def planned(model, batch, how):
    return autopar.plan(model, batch, memory_budget="inf", cluster=eager_links(), **MESHES[how])


def loss_of(outputs):
    return getattr(outputs, "loss", outputs)


def step(rank, model, batch, plan, **how):
    """Loss and gradients of two micro-batches of which the first waits, and of one alone."""
    torch.manual_seed(0)
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan, **how)
    found = {}
    for waiting in (True, False):
        mine.zero_grad()
        with mine.no_sync() if waiting else contextlib.nullcontext():
            (loss := loss_of(mine(**batch))).backward()
        if waiting:
            loss_of(mine(**batch)).backward()
        found[f"loss {waiting}"] = loss.detach()
        found |= {f"{n} {waiting}": whole(p.grad).clone() for n, p in mine.named_parameters() if p.grad is not None}
    return found


def on_ranks(threads, model, batch, plan, **how):
    ranks = plan.mesh.size
    return [step(0, model, batch, plan)] if ranks == 1 else threads(ranks, step, model, batch, plan)


def differing(found, expected):
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize(("name", "how"), BOTH)
def test_gradients_are_bit_for_bit_those_of_the_plan_that_saves_all_on_the_device(name, how, threads):
    """Where all values travel, and where half of them do while others are recomputed."""
    model, batch = case(name)
    with small_values_travel():
        plan = planned(model, batch, how)
        ops = [n for n, d in plan.decisions.items() if d.kind == "op"]
        some = plan.recomputing(ops[::2])
        expected = on_ranks(threads, model, batch, plan)
        for other in (plan.offloading(travels(plan)), some.offloading(travels(some))):
            HOST.restart()
            for one, all_saved in zip(on_ranks(threads, model, batch, other), expected, strict=True):
                assert not differing(one, all_saved)
            assert HOST.peak
    gc.collect()
    assert not HOST.bytes


LANGUAGE = {
    "gpt2 with dropout": lambda: (language.gpt2(vocabulary=128), language.drawn(4, 16, 128), MESHES["one device"]),
    "bert in chunks": lambda: (language.bert(), language.drawn(4, 16, 256), dict(mesh=(1,), chunks=2)),
    "llama in kernels": lambda: (language.llama(), language.drawn(4, 16, 256), dict(mesh=(1,), kernels=NAMES)),
    "uneven gpt2": lambda: (*gpt2(0.0), MESHES["both"]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", LANGUAGE)
def test_models_of_transformers_too(name, threads, monkeypatch):
    """Draws, kernels and parts that are uneven; what runs once for each chunk stays."""
    monkeypatch.setenv("AUTOPAR_KERNELS", "ops")
    model, batch, how = LANGUAGE[name]()
    with small_values_travel():
        plan = autopar.plan(model, batch, memory_budget="inf", cluster=eager_links(), **how)
        for one in (plan, plan.recomputing([n for n, d in plan.decisions.items() if d.kind == "op"][::3])):
            expected = on_ranks(threads, model, batch, one)  # what recomputes may have other kernels
            HOST.restart()
            found = on_ranks(threads, model, batch, one.offloading(travels(one)))
            assert not any(map(differing, found, expected))
            assert HOST.peak


def in_processes(rank, model, batch, *plans):
    """Steps under plans with gloo, and with halves that are compiled between collectives."""
    with small_values_travel():
        plain = [step(rank, model, batch, plan) for plan in plans]
        most = HOST.peak
        return plain, [step(rank, model, batch, plan, compile="aot_eager") for plan in plans], most


def test_processes_and_compiled_halves_too():
    model, batch = mlp_case()
    plan = planned(model, batch, "dp")
    moved = plan.offloading(travels(plan))
    for plain, by_compiler, most in on_processes(2, in_processes, model, batch, plan, moved, timeout_s=150.0):
        assert not differing(*plain) and not differing(*by_compiler) and most


def test_a_second_backward_brings_values_back_once_more():
    model, batch = mlp_case()
    with small_values_travel():
        plan = planned(model, batch, "one device")
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan.offloading(travels(plan)))
        loss = mine(**batch)
        loss.backward(retain_graph=True)
        once = [whole(p.grad).clone() for p in mine.parameters()]
        loss.backward()
        assert all(torch.equal(whole(p.grad), 2 * first) for p, first in zip(mine.parameters(), once, strict=True))
        gc.collect()
        assert not HOST.bytes


# -- places

PLACES = [  # ops of a plan, with those of the program behind and before whose nodes the value travels
    ("blocks.0.down/linear", "blocks_0_down_linear", "blocks.0.down/linear", "blocks_0_down_linear"),
    ("blocks.1.up/linear", "blocks_1_up_linear", "head/linear", "head_linear"),
    ("blocks.0/add:shared", "blocks_1_norm_layer_norm", "blocks.0/add:shared", "blocks_0_down_linear"),
    ("blocks.0.up/linear", "blocks_0_down_linear", "blocks.0/gelu", "blocks_0_down_linear"),
]


@pytest.mark.parametrize(("gone", "behind", "comes", "before"), PLACES)
def test_a_value_travels_where_the_plan_says(gone, behind, comes, before):
    """Where an op has no node the next one counts; no value is gone, or late, while it is read."""
    model, batch = mlp_case()
    plan = planned(model, batch, "one device").offloading({"blocks.0/gelu": (gone, comes)})
    with small_values_travel():
        joint = lower(ColoTracer().trace(model, batch), plan, (0,)).joint
    (leaves,) = joint.forward.find_nodes(op="call_function", target=begin_to_host)
    (gelu,) = leaves.args
    assert leaves.prev is sorted(gelu.users)[-2]  # the last is `leaves`
    (host,) = leaves.users
    ops = [n.meta.get(OP) for n in joint.forward.nodes if n > host]
    assert behind not in ops and (host.prev is leaves or host.prev.meta[OP] == behind)
    for half in (joint.backward, joint.hold):
        (returns,) = half.find_nodes(op="call_function", target=begin_from_host)
        (end,) = returns.users
        assert end.next in end.users
        assert returns.next is end or returns.next.meta[BACK] == before
        assert returns.next is end or before not in [n.meta.get(BACK) for n in half.nodes if n < returns]


# -- memory


class Held(NamedTuple):
    """Bytes of both memories at the loss, and at the most."""

    device: int
    host: int
    most: int
    most_on_host: int


def held(model, batch, plan):
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
    mine(**batch).backward()
    gc.collect()
    live = Live([*mine.parameters(), *mine.buffers(), *batch.values()])
    HOST.restart()
    with live:
        live.restart()
        mine.zero_grad()
        loss = mine(**batch)
        found = live.now, HOST.bytes
        loss.backward()
    return Held(*found, live.peak, HOST.peak)


def test_the_device_holds_less_by_what_waits_on_the_host():
    """The results of gelu in three layers, where they are large enough; the fullest time is the last layer's."""
    rows, width, depth = 512, 64, 3
    model, batch = mlp_case(width, rows)
    model.blocks.append(copy.deepcopy(model.blocks[0]))
    plan = planned(model, batch, "one device")
    names = [n for n in plan.decisions if n.endswith("gelu")]
    assert len(names) == depth
    one = rows * 4 * width * 8
    for least, count in ((one, depth), (one + 1, 0)):
        with small_values_travel() as patch:
            patch.setattr("autopar.space.timeline.SMALL", least)
            moved = held(model, batch, plan.offloading(travels(plan, names.__contains__, ahead=1)))
            saved = held(model, batch, plan)
        assert (moved.host, moved.most_on_host, saved.most_on_host) == (count * one, count * one, 0)
        assert saved.device - moved.device == count * one
        assert saved.most - moved.most >= max(0, count - 1) * one


# -- programs that are refused


@pytest.fixture(scope="module")
def joint():
    """A lowered program whose values travel, of which one is saved as it is and as a view."""
    model, batch = case("decoder")
    with small_values_travel():
        plan = planned(model, batch, "one device")
        graph = ColoTracer().trace(model, batch)
        found = lower(graph, plan.offloading(travels(plan)), (0,)).joint
    check_travels(found)
    return found


def _returns_after_its_reader(graph):
    end = first(graph, end_from_host)
    max(end.users).append(end)


def _is_read_on_the_host(graph):
    begun = first(graph, begin_from_host)
    (end,) = begun.users
    reader = min(end.users)
    reader.replace_input_with(end, begun.args[0])


def _is_read_while_it_returns(graph):
    begun = first(graph, begin_from_host)
    (end,) = begun.users
    min(end.users).replace_input_with(end, begun)


def _returns_twice(graph):
    begun = first(graph, begin_from_host)
    with graph.inserting_after(begun):
        again = graph.call_function(begin_from_host, begun.args)
        graph.call_function(end_from_host, (again,))
    again.append(again.next)


def _never_returns(graph):
    begun = first(graph, begin_from_host)
    (end,) = begun.users
    with graph.inserting_before(end):
        other = graph.call_function(torch.ops.aten.zeros.default, (list(end.meta["val"].shape),))
    end.replace_all_uses_with(other)
    graph.erase_node(end)
    graph.erase_node(begun)


def _returns_and_has_not_left(graph):
    begun = first(graph, begin_from_host)
    begun.args = (next(n for n in graph.find_nodes(op="placeholder") if not n.name.endswith("_host")), "cpu")


def _is_free_before_its_last_reader(graph):
    begun = next(n for n in graph.find_nodes(op="call_function", target=begin_to_host) if len(n.args[0].users) > 1)
    (end,) = begun.users
    begun.args[0].append(begun)
    begun.append(end)


def _is_saved_on_the_device_too(graph):
    output = graph.output_node()
    begun = first(graph, begin_to_host)
    output.args = ((*output.args[0], begun.args[0]),)


def _a_view_is_saved_on_the_device(graph):
    output, begun = graph.output_node(), first(graph, begin_to_host)
    with graph.inserting_after(begun.args[0]):
        view = graph.call_function(torch.ops.aten.view.default, (begun.args[0], [-1]))
    output.args = ((*output.args[0], view),)


def _is_saved_before_its_end(graph):
    begun = first(graph, begin_to_host)
    (end,) = begun.users
    end.replace_all_uses_with(begun)


def _leaves_twice(graph):
    output, begun = graph.output_node(), first(graph, begin_to_host)
    with graph.inserting_after(begun):
        again = graph.call_function(begin_to_host, begun.args)
    with graph.inserting_after(again):
        end = graph.call_function(end_to_host, (again,))
    output.args = ((*output.args[0], end),)


def _is_written_over_on_its_way(graph):
    begun = first(graph, begin_to_host)
    with graph.inserting_after(begun):
        graph.call_function(torch.ops.aten.mul_.Tensor, (begun.args[0], 2.0))


def _a_primal_leaves(graph):
    first(graph, begin_to_host).args = (graph.find_nodes(op="placeholder")[0],)


BROKEN = {
    "forward": (
        _is_free_before_its_last_reader,
        _is_saved_on_the_device_too,
        _a_view_is_saved_on_the_device,
        _is_saved_before_its_end,
        _leaves_twice,
        _is_written_over_on_its_way,
        _a_primal_leaves,
    ),
    "backward": (
        _returns_after_its_reader,
        _is_read_on_the_host,
        _is_read_while_it_returns,
        _returns_twice,
        _never_returns,
        _returns_and_has_not_left,
    ),
}


@pytest.mark.parametrize(("half", "how"), [(half, how) for half, ways in BROKEN.items() for how in ways])
def test_a_wrong_order_is_refused(half, how, joint):
    with pytest.raises(NotCertified, match="in a wrong order"):
        check_travels(broken(joint, half, how))


def _leave_where_they_are_made(patch):
    """The device's memory is free before its last reader."""
    patch.setattr(offloaded, "_readers", lambda forward: {node: [] for node in forward.nodes})
    patch.setattr(offloaded, "_ends", lambda forward, times: {10**9: next(iter(forward.nodes))})


def _views_are_owners(patch):
    """A view travels, and not the memory that it shows."""
    patch.setattr(offloaded, "buffer_of", lambda node: node)
    patch.setattr(offloaded, "views_of", lambda node: [])


@pytest.mark.parametrize("mutant", [_leave_where_they_are_made, _views_are_owners])
@pytest.mark.parametrize("is_certified", [True, False])
def test_a_broken_compiler_is_noticed(mutant, is_certified):
    """By the certificate, and without it by gradients that are not numbers."""
    model, batch = case("decoder")
    with small_values_travel() as patch:
        plan = planned(model, batch, "one device")
        expected = step(0, model, batch, plan)
        mutant(patch)
        moved = plan.offloading(travels(plan))
        if is_certified:
            with pytest.raises(NotCertified, match="in a wrong order"):
                step(0, model, batch, moved)
        else:
            patch.setenv(VARIABLE, "off")
            try:
                assert differing(step(0, model, batch, moved), expected)
            except IndexError as e:  # a target that was overwritten
                assert "out of" in str(e)


def test_what_is_recomputed_too_waits_on_no_host(monkeypatch):
    """A plan has one state for a value; a compiler that recomputes what travels is noticed by the host's bytes."""
    model, batch = mlp_case()
    plan = planned(model, batch, "one device")
    names = [n for n in plan.decisions if n.endswith("gelu")]
    moves = travels(plan, names.__contains__)
    again = plan.recomputing(names)
    with pytest.raises(BadPlan, match="on the host, and also"):
        again.offloading(moves)
    assert plan.offloading(moves).recomputing(names) == again
    with small_values_travel():
        moved = plan.offloading(moves)
        assert held(model, batch, moved).host == 2 * 8 * 64 * 8
        lowering = importlib.import_module("autopar.codegen.lower")
        its_own = lowering.recomputed_of
        monkeypatch.setattr(lowering, "recomputed_of", lambda graph, plan, *rest: its_own(graph, again, *rest))
        LOWERED.clear()
        assert held(model, batch, moved).host == 0


def test_plans_that_cannot_be_are_letters():
    model, batch = mlp_case()
    plan = planned(model, batch, "one device")
    name = op = next(n for n in plan.decisions if n.endswith("gelu"))
    graph = ColoTracer().trace(model, batch)
    with pytest.raises(BadPlan, match="nowhere"):
        lower(graph, plan.offloading({name: (op, "nowhere")}), (0,))
    code = str(lower(graph, plan.offloading({name: (op, op)}), (0,)).program)
    assert f"on the host from behind {op} until before the backward of {op}" in code
