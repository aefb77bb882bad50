"""Loops over experts become one op of the rows that each expert gets; what is not surely such a loop stays."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.graph.graph import Assume, info, op_name
from autopar.testing import Equality
from autopar.tracer import ColoTracer
from autopar.tracer.precision import Precision
from tests.shares import one_in
from tests.tracer.loops_over_experts import (
    EXPERTS,
    HIDDEN,
    INNER,
    ROUTES,
    TOKENS,
    TOP,
    WAYS,
    Expert,
    Loop,
    case,
    run,
    where_and_index_add,
)


def traced(model, dtype=torch.float64, assume=None):
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    return ColoTracer().trace(model, {"x": x, "push": ROUTES["random"].to(dtype)}, assume)


def count(graph, name):
    return sum(op_name(node) == name for node in graph.nodes)


def folded(graph):
    (node,) = [node for node in graph.nodes if op_name(node) == "experts"]
    return node


def check_values(model, graph, bound=1e-12):
    """The graph computes what the model does, gradients too, for all routes."""
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    direction = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    captured = graph.module(copy.deepcopy(model))
    for route, push in ROUTES.items():
        found, expected = (run(one, x, push.double(), direction) for one in (captured, model))
        Equality.in_float64(route, found, expected, bound).check()


@pytest.mark.parametrize("way", one_in(2, WAYS, first=1), ids=lambda way: way.__name__)
def test_a_loop_is_one_op_that_computes_the_chosen_rows(way):
    """Values are held to eager's in `test_loops_over_experts.py`, by day those of the other ways."""
    model, x, _ = case(way)
    push = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
    push[torch.arange(TOKENS), torch.arange(TOKENS) % EXPERTS] = 20  # no expert has one row alone
    graph = ColoTracer().trace(model, {"x": x, "push": push})
    experts = folded(graph)
    assert count(graph, "linear") == 1  # the router's
    assert not any("what is done with them" in line for line in graph.assumptions if "is_hit" not in line)
    with FlopCounterMode(display=False) as eager:
        model(x, push)
    with FlopCounterMode(display=False) as counted:
        graph.module(model)(x=x, push=push)  # an op of our own is counted as nothing
    shapes = [info(experts.kwargs[name]).outputs[0].shape for name in ("ids", "up", "down")]
    (tokens, slots), (number, *up), (_, *down) = shapes
    products = 2 * tokens * slots * (up[0] * up[1] + down[0] * down[1])
    assert number == EXPERTS
    assert counted.get_total_flops() + products <= 1.05 * eager.get_total_flops()


def stacked(m, x, weights, ids):
    """Slices of parameters, in products that autograd users write by hand."""
    out = x.clone()
    for e in range(EXPERTS):
        token, nth = torch.where(ids == e)
        hidden = x[token] @ m.first[e] + m.bias[e]
        gate, up = hidden.chunk(2, -1)
        y = (torch.sigmoid(gate.clamp(max=1.5)) * gate * (up + 1)) @ m.second[e].T
        out.index_add_(0, token, y * weights[token, nth, None])
    return out


def with_dropped_ids(m, x, weights, ids):
    ids = torch.where(weights > 0.4, ids, -1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, nth = torch.where(ids == e)
        out = out.scatter_add(0, token[:, None].expand(-1, HIDDEN), expert(x[token]) * weights[token, nth, None])
    return out


def behind_a_first_that_copies(m, x, weights, ids):
    """Id 0 copies its rows, and is no expert."""
    out = torch.zeros_like(x)
    token, nth = torch.where(ids == 0)
    out = out.index_add(0, token, x[token] * weights[token, nth, None])
    for e in range(1, EXPERTS):
        token, nth = torch.where(ids == e)
        out = out.index_add(0, token, m.experts[e](x[token]) * weights[token, nth, None])
    return out


def without_weights(m, x, weights, ids):
    out = torch.zeros_like(x)
    for e in reversed(range(EXPERTS)):
        token, _ = torch.where(ids == e)
        out = out.index_add(0, token, m.experts[e](x[token]))
    return out * weights.sum(-1, keepdim=True)


def some_dropped_by_capacity(m, x, weights, ids):
    hot = F.one_hot(ids, EXPERTS)
    fits = hot * (hot.cumsum(0) <= 3)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, nth = torch.where(fits[..., e] > 0)
        out = out.index_add(0, token, expert(x[token]) * weights[token, nth, None])
    return out


class Stacked(Loop):
    def __init__(self, way):
        super().__init__(way)
        self.first = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * INNER))
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))
        self.second = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER))


OTHERS = (stacked, with_dropped_ids, behind_a_first_that_copies, without_weights, some_dropped_by_capacity)


@pytest.mark.parametrize("way", OTHERS, ids=lambda way: way.__name__)
def test_other_loops_are_folded_and_compute_what_eager_does(way):
    torch.manual_seed(0)
    model = (Stacked if way is stacked else Loop)(way).double()
    graph = traced(model)
    experts = folded(graph)
    assert count(graph, "linear") == 1
    check_values(model, graph)
    if way is stacked:  # a parameter itself is the operand; one of two that lie unlike is turned
        operands = experts.kwargs["up"].kwargs["input"], experts.kwargs["down"], experts.kwargs["up_bias"]
        assert [info(node).key for node in operands] == ["first", "second", "bias"] and not count(graph, "stack")


@pytest.mark.parametrize("is_cast", [False, True], ids=["in bfloat16", "cast to bfloat16"])
def test_a_folded_loop_is_rounded_as_half_precision_is(is_cast):
    torch.manual_seed(0)
    exact = Loop(where_and_index_add)
    half = copy.deepcopy(exact).bfloat16()
    x, push = torch.randn(TOKENS, HIDDEN), ROUTES["random"]
    if is_cast:
        model = copy.deepcopy(exact)
        graph = ColoTracer().trace(model, {"x": x, "push": push}, precision=Precision(torch.bfloat16))
        assert folded(graph).kwargs["down"].kwargs["tensors"][0].kwargs["dtype"] == torch.bfloat16
        found = graph.module(model)(x=x, push=push)
    else:
        graph = traced(half, torch.bfloat16, Assume(imbalance=1.5))
        assert folded(graph).kwargs["imbalance"] == 1.5
        found = graph.module(half)(x=x.bfloat16(), push=push.bfloat16())
    expected = exact(x, push)
    of_eager = half(x.bfloat16(), push.bfloat16())
    error, allowed = ((one.float() - expected).abs().max() for one in (found, of_eager))
    assert folded(graph).meta["info"].outputs[0].dtype == "bfloat16" and error <= 1.5 * allowed


class Wide(Expert):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INNER + 4)
        self.up = nn.Linear(HIDDEN, INNER + 4, bias=False)
        self.down = nn.Linear(INNER + 4, HIDDEN)


class Relu(Expert):
    def forward(self, x):
        return self.down(F.relu(self.gate(x)) * self.up(x))


class Normed(Expert):
    """Looks at all columns of a row, which is more than elementwise."""

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x).softmax(-1))


class Detached(Expert):
    def forward(self, x):
        up = self.up(x)
        with torch.no_grad():
            share = torch.sigmoid(up)
        return self.down(F.silu(self.gate(x)) * up * share)


class Dropping(Expert):
    def forward(self, x):
        return self.down(F.dropout(F.silu(self.gate(x)), 0.1, True) * self.up(x))


class Residual(Expert):
    def forward(self, x):
        return x + super().forward(x)


def less_the_mean_of_all(m, x, weights, ids):
    """Rows of an expert that look at one another: dense, as no rows that are chosen may."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = (ids == e).any(-1, keepdim=True)
        y = expert(torch.where(mask, x, 0))
        out = out + torch.where(mask, y - y.mean(0), 0)
    return out


def read_on_the_way(m, x, weights, ids):
    out = torch.zeros_like(x)
    total = 0
    for e, expert in enumerate(m.experts):
        token, nth = torch.where(ids == e)
        out = out.index_add(0, token, expert(x[token]) * weights[token, nth, None])
        total = total + out.square().mean()
    return out + total


def other_rows_each(m, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, nth = torch.where(ids == e)
        scaled = x * (e + 1)
        out = out.index_add(0, token, expert(scaled[token]) * weights[token, nth, None])
    return out


def other_weights_for_gate(m, x, weights, ids):
    out = torch.zeros_like(x)
    turned = x.roll(1, -1)
    for e, expert in enumerate(m.experts):
        token, nth = torch.where(ids == e)
        y = expert.down(F.silu(expert.gate(x[token])) * expert.up(turned[token]))
        out = out.index_add(0, token, y * weights[token, nth, None])
    return out


def later_ones_win(m, x, weights, ids):
    """An expert takes the place of those before it."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = (ids == e).any(-1)
        out[mask] = expert(x[mask])
    return out


def shared_ids_of_several_slots(m, x, weights, ids):
    """Ids that may come twice in a row, and count once."""
    ids = ids // 2
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = (ids == e).any(-1)
        out[mask] = out[mask] + expert(x[mask])
    return out


def one_of(kind):
    def change(model):
        model.experts[2] = kind()

    return change


def all_of(kind):
    def change(model):
        model.experts = nn.ModuleList(kind() for _ in range(EXPERTS))

    return change


STAY = {
    "an expert of another shape": (where_and_index_add, one_of(Wide)),
    "an expert with another activation": (where_and_index_add, one_of(Relu)),
    "a body over columns": (where_and_index_add, all_of(Normed)),
    "a gradient that stops": (where_and_index_add, all_of(Detached)),
    "draws": (where_and_index_add, all_of(Dropping)),
    "a residual": (where_and_index_add, all_of(Residual)),
    "a body over rows": (less_the_mean_of_all, None),
    "a sum that is read on the way": (read_on_the_way, None),
    "other rows each": (other_rows_each, None),
    "other rows for the gate": (other_weights_for_gate, None),
    "the last expert wins": (later_ones_win, None),
    "ids that come twice": (shared_ids_of_several_slots, None),
}


@pytest.mark.parametrize("name", one_in(2, STAY))
def test_what_is_no_such_loop_stays(name):
    torch.manual_seed(0)
    way, change = STAY[name]
    model = Loop(way)
    if change:
        change(model)
    model.double()
    graph = traced(model)
    assert count(graph, "experts") == 0 and count(graph, "linear") == 1 + 3 * EXPERTS
    if name != "draws":
        check_values(model, graph)


def test_rows_that_may_go_to_all_experts_stay():
    torch.manual_seed(0)
    graph = traced(Loop(where_and_index_add, top=EXPERTS).double())
    assert count(graph, "experts") == 0
    assert TOP < EXPERTS
