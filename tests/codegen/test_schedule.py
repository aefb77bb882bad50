"""When gathers and reductions begin and end: as the overlap specification says, and with the same results."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import autopar
from autopar import DeviceMesh, Plan
from autopar.codegen import joint, lower
from autopar.codegen.local import local_program
from autopar.graph.graph import info
from autopar.runtime.collectives import BEGIN, PACK, STEPS, finish
from autopar.space import windows
from autopar.space.schedule import schedule_of
from autopar.space.windows import BLOCK, BUCKET
from autopar.testing import Equality, on_processes, on_threads
from autopar.tracer import ColoTracer
from tests.fuzz.trial import drawn
from tests.models import MLP, eager_links
from tests.training import train, whole


def small_buckets(patch):
    """Few gradients in a bucket."""
    patch.setattr(windows.buckets, "__defaults__", (20_000,))
    joint.LOWERED.clear()


def case():
    torch.manual_seed(2)
    model = MLP(16, 4).double()
    return model, {k: torch.randn(8, 16, dtype=torch.float64) for k in ("x", "y")}


def half_of(name, monkeypatch, parallel="zero3"):
    small_buckets(monkeypatch)
    model, batch = case()
    plan = autopar.plan(model, batch, mesh=2, cluster=eager_links(), parallel=parallel)
    return list(getattr(lower(ColoTracer().trace(model, batch), plan, (0,)).joint, name).nodes)


def test_zero3_gathers_a_block_at_a_time_and_zero2_what_is_worth_a_message():
    model, batch = case()
    plans = {
        parallel: autopar.plan(model, batch, mesh=2, cluster=eager_links(), parallel=parallel, memory_budget="inf")
        for parallel in ("zero3", "zero2")
    }
    assert {parallel: plan.window_bytes for parallel, plan in plans.items()} == {"zero3": BLOCK, "zero2": BUCKET}
    assert Plan.from_dict(plans["zero3"].to_dict()).window_bytes == BLOCK
    ops = [n for n in ColoTracer().trace(model, batch).nodes if info(n).kind == "op"]
    assert [len(schedule_of(ops, least).spans) for least in (BLOCK, 20_000, BUCKET)] == [
        5,
        3,
        1,
    ]  # four blocks of 17 KB, and a head


def test_sums_that_are_cut_afterwards_travel_together_and_are_cut_where_they_arrive(monkeypatch):
    """Where a reduce-scatter is slow, gradients are summed whole and cut: in no more messages for that."""
    small_buckets(monkeypatch)
    model, batch = case()
    links = eager_links()
    slow = replace(links, links=tuple(replace(link, reached=(("reduce_scatter", 1.0),)) for link in links.links))
    plan = autopar.plan(model, batch, mesh=2, cluster=slow, parallel="zero1")
    nodes = list(lower(ColoTracer().trace(model, batch), plan, (0,)).joint.backward.nodes)
    begun = [n for n in nodes if n.target is BEGIN["all_reduce"]]
    assert [len(n.args[0].args[0]) for n in begun] == [10, 8, 8]
    assert not [n for n in nodes if n.target in (STEPS["all_reduce"], STEPS["all_reduce_bucket"])]
    at = {n: i for i, n in enumerate(nodes)}
    for one in begun[:-1]:
        (end,) = one.users
        assert end.target is finish and at[one] + 2 < at[end]  # it runs beside what computes
        for part in end.users:
            (cut,) = part.users
            between = nodes[at[end] : at[cut]]
            assert cut.target is STEPS["slice"] and between and not set(between) & {*begun, *PACK.values()}


@pytest.mark.parametrize("half, ahead", [("forward", -1), ("backward", 1)])
def test_a_window_is_gathered_in_one_message_beside_its_neighbour(half, ahead, monkeypatch):
    nodes = half_of(half, monkeypatch)
    begun = [n for n in nodes if n.target is BEGIN["all_gather"]]
    assert len(begun) == 4 and all(
        len(n.args[0].args[0]) >= 2 for n in begun
    )  # five windows, of which the first to come has nothing before it
    at = {n: i for i, n in enumerate(nodes)}
    ends = [next(iter(n.users)) for n in begun]
    assert all(n.target is finish for n in ends)
    for before, after in zip(
        ends, begun[1:]
    ):  # the next begins once this one has been taken, and well before it is taken itself
        assert at[before] < at[after]
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    assert all(any(n.target in products for n in nodes[at[start] : at[end]]) for start, end in zip(begun, ends))
    alone = [n for n in nodes if n.target in (STEPS["all_gather"], STEPS["all_gather_bucket"])]
    if ahead > 0:
        assert not alone  # backward begins with what the last window has gathered in forward
    else:
        assert len(alone) == 1 and at[alone[0]] < at[ends[0]]  # the first window's, in line
        assert (
            at[
                min(
                    u
                    for part in (alone[0].users if alone[0].target is STEPS["all_gather_bucket"] else alone)
                    for u in part.users
                )
            ]
            - at[alone[0]]
            <= 12
        )  # where it is read


def test_the_last_window_is_priced_and_counted_as_gathered_once():
    model, batch = case()
    how = dict(mesh=2, cluster=eager_links(), memory_budget="inf", parallel="zero3")
    policies = {}
    for policy in ("kept", "regathered"):
        pins = {
            **{f"blocks.*.{name}": "S(0)@0; R; kept" for name in ("weight", "bias")},
            **{f"head.{name}": f"S(0)@0; R; {policy}" for name in ("weight", "bias")},
        }
        policies[policy] = autopar.plan(model, batch, constraints=pins, **how)
    kept, again = policies["kept"], policies["regathered"]
    assert again.regathered and not kept.regathered
    assert (kept.step_time_s, kept.hidden_s, kept.peak_bytes) == (again.step_time_s, again.hidden_s, again.peak_bytes)


def test_a_window_that_comes_first_in_forward_is_gathered_in_one_message(monkeypatch):
    nodes = half_of("forward", monkeypatch)
    (together,) = [n for n in nodes if n.target is STEPS["all_gather_bucket"]]
    assert len(together.args[0]) >= 2 and not [n for n in nodes if n.target is STEPS["all_gather"]]
    assert (
        len({a for n in nodes if n.target in (STEPS["all_gather_bucket"], PACK["all_gather"]) for a in n.args[0]})
        == len([n for n in nodes if n.op == "placeholder"]) - 2
    )  # each parameter once


@pytest.mark.parametrize("half, in_line", [("forward", 1), ("backward", 0)])
def test_what_is_gathered_over_two_axes_goes_on_in_one_message(half, in_line):
    model, batch = case()
    plan = autopar.plan(model, batch, mesh=(2, 2), cluster=eager_links(), parallel="zero3")
    nodes = list(getattr(lower(ColoTracer().trace(model, batch), plan, (0, 0)).joint, half).nodes)
    counted = Counter(n.target for n in nodes)
    assert not counted[STEPS["all_gather"]] and counted[BEGIN["all_gather"]] == 8  # of four windows
    assert counted[STEPS["all_gather_bucket"]] == 2 * in_line
    at = {n: i for i, n in enumerate(nodes)}
    products = [at[n] for n in nodes if n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)]
    begun = [n for n in nodes if n.target is BEGIN["all_gather"]]
    for i, (first, further) in enumerate(zip(begun[::2], begun[1::2])):
        (end,), (last,) = first.users, further.users
        assert at[first] < at[end] < at[further] < at[last] and any(at[further] < k < at[last] for k in products)
        has_places = half == "forward" or i > 0  # beside the head, which is one product, both begin before it
        assert any(at[first] < k < at[end] for k in products) == has_places


def test_reductions_over_two_axes_go_on_as_the_next_begin(monkeypatch):
    small_buckets(monkeypatch)
    model, batch = case()
    plan = autopar.plan(model, batch, mesh=(2, 2), cluster=eager_links(), parallel="zero3")
    nodes = list(lower(ColoTracer().trace(model, batch), plan, (0, 0)).joint.backward.nodes)
    at = {n: i for i, n in enumerate(nodes)}
    begun = [n for n in nodes if n.target is BEGIN["reduce_scatter"]]
    (one, other), ends = {n.args[1] for n in begun}, {n: next(iter(n.users)) for n in begun}
    heads = [n for n in begun if n.args[1] == begun[0].args[1]]
    assert len(begun) == 2 * len(heads) >= 6 and one != other
    for head, after in pairwise(heads):  # its second step begins where the next one's first does
        (second,) = [n for n in begun if at[ends[head]] < at[n] < at[after] and n not in heads]
        assert at[after] < at[ends[second]]


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, ids):
        return self.out(self.table(ids)).square().sum()


def test_a_value_is_not_gathered_from_a_slice_of_itself():
    model, batch = Lookup(), {"ids": torch.zeros(8, dtype=torch.long)}
    plan = autopar.plan(
        model, batch, mesh=2, cluster=eager_links(), constraints={"ids": "S(0)@0", "table.weight": "S(0); S(0)"}
    )
    assert [str(c.forward[0].kind) for c in plan.conversions if c.source.startswith("ids")] == ["slice", "all_gather"]
    nodes = list(lower(ColoTracer().trace(model, batch), plan, (0,)).joint.forward.nodes)
    assert not [n for n in nodes if n.target in (STEPS["all_gather"], STEPS["slice"])]


def test_a_reduction_is_finished_once_as_many_bytes_of_gradients_have_come(monkeypatch):
    """A small gradient behind a large one does not wait for it: both are under way."""
    for parallel, kind in (("zero3", "reduce_scatter"), ("dp", "all_reduce")):
        nodes = half_of("backward", monkeypatch, parallel)
        at = {n: i for i, n in enumerate(nodes)}
        begun = [n for n in nodes if n.target is BEGIN[kind]]
        ends = [next(iter(n.users)) for n in begun]
        assert len(begun) >= 3 and all(n.target is finish for n in ends)
        came, arrives, waits = 0, 0, 0
        come = [came := came + sum(g.meta["val"].nbytes for g in n.args[0].args[0]) for n in begun]
        for k, (end, before) in enumerate(zip(ends, [0, *come])):
            arrives = max(arrives, come[k]) + come[k] - before
            place = next((n for n, bytes_ in zip(begun, come) if bytes_ >= arrives), nodes[-1])
            under_way = [n for n in begun[k + 1 :] if at[n] < at[place]]
            assert all(at[n] < at[end] for n in under_way) and at[end] < at[place]
            waits += len(under_way)
        assert bool(waits) == (parallel == "dp")  # gradients of all windows of zero3 but the last are alike
        assert sum(at[end] - at[start] > 4 for start, end in zip(begun, ends)) >= len(begun) - 1


@pytest.mark.parametrize(
    "parallel, mesh",
    [("zero3", (2,)), ("zero3", (2, 2)), ("dp", (2,)), (dict(data=dict(size=2, zero=3), tensor=2), (2, 2))],
    ids=str,
)
def test_it_trains_as_one_device_does(parallel, mesh, monkeypatch):
    small_buckets(monkeypatch)
    model, batch = case()
    expected = train(copy.deepcopy(model), batch, "adamw", steps=3)

    def body(rank):
        mine = autopar.autoparallelize(
            copy.deepcopy(model), batch, mesh=DeviceMesh(mesh), parallel=parallel, cluster=eager_links()
        )
        return train(mine, batch, "adamw", steps=3)

    for losses, gradients, parameters in on_threads(DeviceMesh(mesh).size, body):
        Equality.in_float64("losses", losses, expected[0], 1e-9).check()
        Equality.in_float64("gradients", gradients, expected[1], 1e-9).check()
        Equality.in_float64("parameters", parameters, expected[2], 1e-8).check()


@pytest.mark.filterwarnings("ignore")
def test_a_reduction_of_what_another_one_sums_begins_behind_it():
    """By the clock of bytes the first one would be under way for longer; the pass would not verify."""
    graph, plan = drawn(72)
    lower(graph, plan, (0,) * len(plan.mesh.shape))


def on_gloo(rank, model, batch):
    small_buckets(pytest.MonkeyPatch())
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, mesh=2, parallel="zero3", cluster=eager_links())
    assert any(n.target is BEGIN["all_gather"] for n in mine.joint.forward.nodes)
    losses, gradients, parameters = train(mine, batch, "adamw", steps=3)
    with mine.no_sync():
        mine(**batch).backward()
    mine.zero_grad()
    return losses, gradients, parameters


def test_gloo_processes_do_so_too():
    model, batch = case()
    expected = train(copy.deepcopy(model), batch, "adamw", steps=3)
    for result in on_processes(2, on_gloo, model, batch):
        for what, ours, theirs in zip(("losses", "gradients", "parameters"), result, expected):
            Equality.in_float64(what, ours, theirs, 1e-8).check()


def test_a_weight_with_two_readers_is_fetched_before_the_first():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return self.a(torch.relu(self.a(x))).square().sum()

    model, x = Twice().double(), torch.randn(4, 8).double()
    own = copy.deepcopy(model)
    own(x).backward()

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), (x,), mesh=2, parallel="zero3", cluster=eager_links())
        mine(x).backward()
        return whole(mine.a.weight.grad)

    for gradient in on_threads(2, body):
        torch.testing.assert_close(gradient, own.a.weight.grad)


def test_a_bucket_begins_with_what_is_read_of_it():
    """Of gradients that travel together some wait for the end of micro-batches, and are read before."""
    model, batch = case()
    plan = autopar.plan(model, batch, mesh=2, cluster=eager_links(), parallel="dp")
    graph = ColoTracer().trace(model, batch)
    program = local_program(graph, plan, (0,))
    names = list(graph.parameters)
    joint.LOWERED.clear()
    lowered = joint.lower_jointly(program, graph.differentiable, joint.States(scattered=frozenset(names[1:3])))
    begun = lowered.hold.find_nodes(op="call_function", target=BEGIN["all_reduce"])
    assert [len(n.args[0].args[0]) for n in begun] == [2]
    parts = [v for v in lowered.hold.output_node().args[0] if v.target is operator.getitem]
    read = [value for value in parts if value.args[0].target is finish]
    assert len(read) == 2
    for value in read:
        (packed, _) = value.args[0].args[0].args[0].args
        assert value.meta["val"].shape == packed[value.args[1]].meta["val"].shape
