"""What the host starts in a step: views that are not needed are gone, calls are torch's own bindings, values stay."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx

import autopar
from autopar.codegen import bound_calls, joint
from autopar.codegen.bound_calls import by_bindings
from autopar.codegen.half import Half
from autopar.codegen.idle_views import drop_idle_views
from tests.language import drawn, gpt2

ATEN = torch.ops.aten


def half_of(write, operands, outputs=None):
    """A half that `write` fills: it is given the graph, a way to call, and a node for each operand."""
    graph = fx.Graph()
    given = [graph.placeholder(f"x{i}") for i in range(len(operands))]
    for node, operand in zip(given, operands, strict=True):
        node.meta["val"] = operand.to("meta")

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    graph.output(tuple(write(call, *given)))
    return Half(graph, {}, is_backward=False, outputs=outputs)


def left(half):
    """The ops of a half, in their order."""
    return [str(n.target).removeprefix("aten.") for n in half.graph.nodes if n.op == "call_function"]


def values(half, operands):
    return fx.GraphModule({}, half.graph)(*operands)


def shared(call, x, w):
    u = call(ATEN.t.default, w)
    v = call(ATEN.t.default, u)
    return [call(ATEN.mm.default, x, v), call(ATEN.mm.default, x, call(ATEN.t.default, w)), u]


def reshaped(call, x, w):
    a = call(ATEN.reshape.default, call(ATEN.reshape.default, call(ATEN.reshape.default, x, [16]), [2, 8]), [2, 2, 4])
    return [call(ATEN.mul.Tensor, a, a), call(ATEN.tanh.default, call(ATEN.reshape.default, w, [4, 4]))]


def read_between(call, x, w):
    a = call(ATEN.reshape.default, x, [16])
    return [call(ATEN.tanh.default, a), call(ATEN.tanh.default, call(ATEN.reshape.default, a, [2, 8]))]


def summed(call, x, w):
    s = call(ATEN.sum.dim_IntList, x, [0], True)
    other = call(ATEN.sum.dim_IntList, w, [1], True)
    return [
        call(ATEN.tanh.default, call(ATEN.reshape.default, s, [4])),
        call(ATEN.tanh.default, call(ATEN.reshape.default, other, [1, 4])),
    ]


def turned(call, x, w):
    y = call(ATEN.transpose.int, call(ATEN.transpose.int, x, 0, 1), 1, 0)
    z = call(ATEN.transpose.int, call(ATEN.reshape.default, w, [2, 2, 4]), 1, 2)
    return [call(ATEN.exp.default, y), call(ATEN.exp.default, call(ATEN.transpose.int, z, 0, 1))]


@pytest.mark.parametrize(
    "write, ops",
    [
        (shared, ["t.default", "mm.default", "mm.default"]),
        (reshaped, ["reshape.default", "reshape.default", "reshape.default", "mul.Tensor", "tanh.default"]),
        (read_between, ["reshape.default", "tanh.default", "reshape.default", "tanh.default"]),
        (
            summed,
            ["sum.dim_IntList", "sum.dim_IntList", "tanh.default", "reshape.default", "tanh.default"],
        ),  # a dim that moves
        (turned, ["reshape.default", "transpose.int", "exp.default", "transpose.int", "exp.default"]),
    ],
)
def test_views_that_show_nothing_new_are_gone(write, ops):
    operands = torch.randn(4, 4), torch.randn(4, 4)
    half = half_of(write, operands)
    before = values(half, operands)
    drop_idle_views(half)
    assert sorted(left(half)) == sorted(ops)
    for one, other in zip(values(half, operands), before, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


def test_a_result_that_leaves_is_not_what_was_given_nor_another_result():
    def write(call, x, w):
        same = call(ATEN.t.default, call(ATEN.t.default, x))  # saved: x itself will do
        made = call(ATEN.mul.Tensor, x, w)
        twice = call(ATEN.t.default, call(ATEN.t.default, made))
        return [call(ATEN.t.default, call(ATEN.t.default, w)), twice, made, same]

    operands = torch.randn(4, 4), torch.randn(4, 4)
    half = half_of(write, operands, outputs=3)
    drop_idle_views(half)
    leaves = half.graph.output_node().args[0]
    assert len(set(leaves[:3])) == 3 and leaves[3].op == "placeholder"
    assert all(n.op == "call_function" for n in leaves[:3])


def test_what_writes_is_no_view():
    half = half_of(
        lambda call, x, w: [call(ATEN.add_.Tensor, call(ATEN.add_.Tensor, call(ATEN.mul.Tensor, x, w), w), w)],
        (torch.randn(4, 4), torch.randn(4, 4)),
    )
    drop_idle_views(half)
    assert left(half) == ["mul.Tensor", "add_.Tensor", "add_.Tensor"]


ARGUMENTS = {
    "reshape": ([2, 8],),
    "transpose": (0, 1),
    "permute": ([1, 0],),
    "expand": ([3, 4, 4],),
    "unsqueeze": (1,),
    "squeeze": (0,),
    "select": (0, 2),
    "split_with_sizes": ([1, 3], 1),
    "add": (torch.ones(4),),
    "add_": (2.0,),
    "sub": (torch.ones(4),),
    "mul": (2.5,),
    "div": (3,),
    "pow": (3.0,),
    "sum": ([0], True),
    "mean": ([0, 1], False),
    "mm": (torch.ones(4, 4),),
    "bmm": (torch.ones(2, 2, 4),),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize(("overload", "name"), bound_calls._METHODS.items(), ids=str)
def test_a_binding_runs_the_op_of_the_overload(overload, name, dtype):
    """One op in either way, as a dispatch mode sees it: the same overload, values and strides."""
    x = torch.arange(1, 17, dtype=dtype).view(4, 4)
    more = [a.to(dtype) if isinstance(a, torch.Tensor) else a for a in ARGUMENTS.get(name, ())]
    more = [] if overload is ATEN.sum.default else more
    operands = [x.view(2, 4, 2) if name == "bmm" else x, *(a for a in more if isinstance(a, torch.Tensor))]
    graph = fx.Graph()
    given = [graph.placeholder(f"x{i}") for i in range(len(operands))]
    rest = iter(given)
    graph.output(graph.call_function(overload, (next(rest), *(next(rest) if torch.is_tensor(a) else a for a in more))))
    plain = seen(graph, operands)
    by_bindings(graph)
    assert [n.target for n in graph.nodes if n.op == "call_method"] == [name]
    assert seen(graph, operands) == plain


def seen(graph, operands):
    """The ops that a graph runs and the values that it gives, or the error that it ends with."""
    operands = [x.clone() for x in operands]
    with Ops() as ops:
        try:
            made = fx.GraphModule({}, graph)(*operands)
        except RuntimeError as e:
            return type(e)
    made = made if isinstance(made, (tuple, list)) else (made,)
    return ops.seen, [(m.dtype, m.stride(), m.tolist()) for m in made]


X, W = torch.randn(2, 4, 4), torch.randn(4)
CALLS = {
    "addmm": (W, X[0], X[1]),
    "cat": ([X[0], X[1]], 1),
    "embedding": (X[0], torch.tensor([[1, 3]]), 2),
    "convolution": (X[None], torch.randn(3, 2, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "native_layer_norm": (X, [4], W, W, 1e-5),
    "where": (X[0] > 0, X[0], X[1]),
}


@pytest.mark.parametrize("overload", bound_calls._FUNCTIONS, ids=str)
def test_a_function_runs_the_op_of_the_overload(overload):
    function = bound_calls._FUNCTIONS[overload]
    arguments = CALLS[function.__name__]
    found = []
    for call in (overload, function):
        with Ops() as ops:
            made = call(*arguments)
        found.append((ops.seen, [m.tolist() for m in (made if isinstance(made, tuple) else (made,))]))
    assert found[0] == found[1]


class Ops(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **kwargs or {})


def test_the_host_starts_no_more_for_a_layer_than_this():
    """Two layers more of GPT-2, forward and backward: all but the parts of results."""

    def started(layers):
        joint.LOWERED.clear()
        model, batch = gpt2(layers, dropout=0.0), drawn(4, 16, 64)
        autopar.autoparallelize(model, batch, mesh=(1,), memory_budget="inf")
        (made,) = joint.LOWERED.known.values()
        nodes = [n for g in (made.forward, made.backward) for n in g.nodes if n.op == "call_function"]
        return sum("getitem" not in str(n.target) for n in nodes)

    assert (started(4) - started(2)) / 2 <= 88
