"""What a hostile reading of the tracer found: each once came out wrong, or was left behind wrong."""

from __future__ import annotations

import collections
import functools
import gc
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from autopar.graph.graph import Assume, Graph, info
from autopar.letters import BadGraph, BadInput, NotCaptured
from autopar.tracer import ColoTracer
from tests.tracer.cases import Of, check, traced


def target_of_views(m, x):
    h = m.linear(x)
    with torch.no_grad():
        t, w = h[:, 1:], m.weight.T
        u = h.view(2, 8)
        a, b = h.split(2, 1)
    return ((m.linear(x)[:, :-1] - t) ** 2).sum() + (x @ w).sum() + (u * 2).sum() + (a * b).sum()


def known_into_buffer(m, x):
    m.mean.copy_(x)
    return x @ m.weight


def one_buffer_into_another(m, x):
    m.mean.copy_(m.table)
    return x @ m.weight


def snapshot_and_change(m, x):
    o = m.mean.clone()
    m.mean.add_(1)
    return o, x @ m.weight


def swap(m, x):
    m.mean, m.table = m.table, m.mean
    return x @ m.weight * m.mean


def exponential_average(m, x):
    y = (x @ m.weight) * m.mean
    m.mean = m.mean * 0.9 + x.detach()
    return y


def all_dropped(m, x):
    return F.dropout(x @ m.weight, 1.0) + F.dropout(x @ m.weight, 1.0, inplace=True)


def cast_without_gradient(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            t = m.linear(x)
        return ((m.linear(x) - t) ** 2).sum() + m.linear(x).sum()


def truths_in_place(m, x):
    y, n = x * 1, torch.arange(16).view(4, 4)
    y.gt_(0.0)
    n.eq_(3)
    return (y + y) @ m.weight + n


def second_numbers(m, x):
    return (
        x @ m.weight
        + torch.empty(4).normal_(std=2.0)
        + torch.empty(4).log_normal_(std=0.3)
        + torch.empty(4).uniform_(to=3.0)
        + torch.empty(4).random_(5)
    )


def overwritten(m, x):
    h, k = x @ m.weight, m.linear(x)
    h.zero_()
    k[:] = 2.0
    return h, k


def narrow_from_the_end(m, x):
    h = x @ m.weight
    h.narrow(1, -2, 2).mul_(2)
    return h


def copy_of_a_number(m, x):
    z = torch.zeros(4, 4)
    z.copy_(3.5)
    return z + x @ m.weight


def slices_added_to(m, x):
    z = torch.zeros(4, 4)
    z[1:3] += (x @ m.weight)[1:3]
    z[:, 2] *= 2
    return (z**2).sum()


def lists_of_tensors(m, x):
    return x @ m.weight * m.many[0] + m.named["a"]


CASES = [
    target_of_views,
    known_into_buffer,
    one_buffer_into_another,
    snapshot_and_change,
    exponential_average,
    all_dropped,
    cast_without_gradient,
    truths_in_place,
    second_numbers,
    overwritten,
    narrow_from_the_end,
    copy_of_a_number,
    slices_added_to,
    lambda m, x: m.weight.mean(dim=0).sum().mean(0) + (x @ m.weight).sum(),
    lambda m, x: torch.vmap(lambda r: r + torch.tensor(1.0))(x @ m.weight),
]


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_it_is_right_now(function):
    check(function)


def test_buffers_may_be_swapped():
    model, x = Of(swap), torch.randn(4, 4)
    a, b = model.mean.clone(), model.table.clone()
    ColoTracer().trace(model, (x,)).module(model)(x)
    assert torch.equal(model.mean, b)
    assert torch.equal(a, torch.zeros(4, 4))


def test_tensors_in_lists_and_dicts_are_named():
    model, x = Of(lists_of_tensors), torch.randn(4, 4)
    model.many, model.named = [torch.ones(4), torch.zeros(4)], {"a": torch.full((4,), 2.0)}
    graph = ColoTracer().trace(model, (x,))
    torch.testing.assert_close(graph.module(model)(x), model(x))
    assert {info(n).key for n in graph.nodes if info(n).kind == "buffer"} == {"many.0", "named.a"}


def test_a_snapshot_of_a_parameter_is_not_the_parameter():
    model, x = Of(lambda m, x: (m.weight.clone(), x.clone(), x @ m.weight)), torch.randn(4, 4)
    weight, given, _ = ColoTracer().trace(model, (x,)).module(model)(x)
    assert (
        weight is not model.weight and weight.data_ptr() != model.weight.data_ptr() and given.data_ptr() != x.data_ptr()
    )


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 5


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x @ w

    @staticmethod
    def backward(ctx, g):
        return g, g


@torch.library.custom_op("autopar_tests::increment", mutates_args={"x"})
def increment(x: torch.Tensor) -> None:
    x.add_(1)


increment.register_fake(lambda x: None)


@torch.jit.script
def has_run(x):
    return (x * 2).sin() * x


def hidden_write(m, x):
    increment(m.mean)
    return x @ m.weight


def under_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return Product.apply(x, m.weight)


def seeds(m, x):
    torch.manual_seed(0)
    return x @ m.weight + torch.rand(4, 4)


def forks(m, x):
    with torch.random.fork_rng():
        return x @ m.weight + torch.rand(4, 4)


def draws_into_a_view(m, x):
    z = torch.zeros(8, 8)
    z[::2, ::2].normal_()
    return z.sum() + (x @ m.weight).sum()


def reads_what_it_writes(m, x):
    h = x @ m.weight
    h -= h[:, :1]
    return h


def new_parameter(m, x):
    m.weight = nn.Parameter(m.weight.data * 2)
    return x @ m.weight


def removed_buffer(m, x):
    m.mean = None
    return x @ m.weight


def hooked_saving(m, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return (x @ m.weight).sin()


def kept_on_a_class(m, x):
    Product.cache = torch.arange(4.0)
    return x @ m.weight + Product.cache


@pytest.mark.parametrize(
    "function, match",
    [
        (lambda m, x: Dirty.apply(x @ m.weight), "writes to a tensor"),
        (hidden_write, "writes to a tensor"),
        (under_autocast, "under autocast"),
        (seeds, "manual_seed"),
        (forks, "fork_rng"),
        (draws_into_a_view, "fills a view with draws"),
        (reads_what_it_writes, "reads memory that it writes"),
        (new_parameter, "replaces the parameter weight"),
        (removed_buffer, "takes the buffer"),
        (hooked_saving, "saved_tensors_hooks"),
        (kept_on_a_class, "Product.cache"),
        (lambda m, x: (x * 1).apply_(lambda v: v + 1), "Python function"),
        (lambda m, x: has_run(x @ m.weight), "TorchScript detaches"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_it_is_a_letter_now(function, match):
    has_run(torch.ones(2, 2, requires_grad=True)).sum().backward()
    has_run(torch.ones(2, 2, requires_grad=True)).sum().backward()
    model, x = Of(function), torch.randn(4, 4)
    state = torch.get_rng_state()
    with pytest.raises(NotCaptured, match=match):
        ColoTracer().trace(model, (x,))
    assert torch.equal(torch.get_rng_state(), state)
    if hasattr(Product, "cache"):
        del Product.cache


def test_memory_with_two_names_is_not_written():
    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("a", torch.zeros(4))
            self.view = self.a[:2]

        def forward(self, x):
            self.view.add_(1)
            return x * self.weight * self.a

    with pytest.raises(NotCaptured, match="shares"):
        ColoTracer().trace(Shares(), (torch.randn(4),))

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x, y):
            x.add_(1)
            return y * self.weight

    t = torch.zeros(4)
    with pytest.raises(NotCaptured, match="shares"):
        ColoTracer().trace(Takes(), (t, t))


def test_a_letter_inside_torchscript_is_not_swallowed():
    @torch.jit.script
    def asks(x):
        if bool(x.sum() > 0):
            return x
        return -x

    with pytest.raises(NotCaptured, match=r"value of a tensor|depends on the values"):
        traced(lambda m, x: asks(x @ m.weight))


def test_what_is_known_needs_no_assumption():
    def guarded(m, x):
        mask = torch.full((4, 4), float("-inf")).triu(1)
        return x @ m.weight * (2 if torch.isinf(mask).any() else 1)

    graph = check(guarded, Assume(finite=True))
    assert "depends on no input" in graph.assumptions[0]


def test_only_attention_masks_are_masks():
    class Masked(nn.Module):
        def forward(self, x, bool_masked_pos):
            return x if bool_masked_pos.all() else -x

    with pytest.raises(NotCaptured, match="bool_masked_pos"):
        ColoTracer().trace(
            Masked(),
            {"x": torch.randn(2, 3), "bool_masked_pos": torch.ones(2, 3, dtype=torch.bool)},
            assume=Assume(no_padding=True),
        )


def test_a_branch_that_is_never_asked_is_a_letter():
    with pytest.raises(NotCaptured, match=r"nowhere.py:1 was never asked"):
        traced(lambda m, x: x @ m.weight, assume=Assume(branches={"nowhere.py:1": True}))


def test_an_empty_draw_proves_nothing():
    with pytest.raises(NotCaptured, match="random numbers"):
        traced(lambda m, x: x @ m.weight if (torch.rand((0,)) < 1.0).any() else x)


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


def test_only_what_draws_is_random():
    def draws_from_a_view_of_written_memory(m, x):
        z = torch.zeros(4, 4)
        v = z[1]
        z.add_(x @ m.weight)
        return F.dropout(v, 0.5)

    def draws_under_autocast(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention((x @ m.weight)[None], x[None], x[None], dropout_p=0.2)

    for function in (draws_from_a_view_of_written_memory, draws_under_autocast):
        drawn = [n.target.name for n in traced(function).nodes if info(n).random >= 0]
        assert drawn in (["dropout"], ["scaled_dot_product_attention"])


def test_an_output_taken_under_no_grad_carries_none():
    def target(m, x):
        h = x @ m.weight
        with torch.no_grad():
            t = h[0]
        return h.sum(), t

    assert [t.requires_grad for t in info(traced(target).output).outputs] == [True, False]


def test_graphs_whose_gradients_differ_are_not_equal():
    def without(m, x):
        with torch.no_grad():
            k = (x @ m.weight) * 2
        return (k + x @ m.weight).sum()

    assert traced(without) != traced(lambda m, x: ((x @ m.weight) * 2 + x @ m.weight).sum())
    assert "no gradient" in str(traced(without))


def test_a_hostile_structure_imports_nothing():
    data = json.loads(traced(lambda m, x: {"a": x @ m.weight}).to_json())
    spec = json.loads(pytree.treespec_dumps(pytree.tree_structure(collections.defaultdict(list, a=1))))
    spec[1]["context"] |= {"default_factory_module": "this", "default_factory_name": "s"}
    data["output_spec"] = json.dumps(spec)
    with pytest.raises(BadGraph, match="not read"):
        Graph.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "name", ["from_file", "set_num_threads", "frombuffer", "fork", "import_ir_module", "_from_blob"]
)
def test_a_hostile_function_is_not_read(name):
    data = json.loads(traced(lambda m, x: torch.fft.rfft(x @ m.weight).abs().sum()).to_json())
    next(n for n in data["nodes"] if isinstance(n["target"], dict) and "function" in n["target"])["target"][
        "function"
    ] = name
    with pytest.raises(BadGraph):
        Graph.from_json(json.dumps(data))


def test_a_scripted_submodule_is_itself_afterwards():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    x = torch.randn(2, 4)
    before = model(x)
    ColoTracer().trace(model, (x,))
    torch.testing.assert_close(model(x), before)


@functools.lru_cache
def positions(n):
    return torch.arange(n).float()


def test_a_cache_keeps_no_tensor_of_the_capture():
    model, x = Of(lambda m, x: x @ m.weight + positions(4)), torch.randn(4, 4)
    graph = ColoTracer().trace(model, (x,))
    torch.testing.assert_close(graph.module(model)(x), model(x))
    positions.cache_clear()


class Kept(nn.Linear):
    mask = None

    def forward(self, x):
        Kept.mask = x > 0
        return super().forward(x) * Kept.mask


def test_a_class_that_keeps_a_tensor_of_the_capture_is_a_letter():
    with pytest.raises(NotCaptured, match=r"keeps a tensor as Kept\.mask"):
        ColoTracer().trace(Kept(4, 4), (torch.randn(2, 4),))
    Kept.mask = None


def test_what_keeps_tensors_of_the_capture_is_looked_for_once(monkeypatch):
    looks, look = [], gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *objects: (looks.append(len(objects)), look(*objects))[1])
    caches = [functools.lru_cache(lambda n: torch.arange(n).float()) for _ in range(4)]
    model, x = Of(lambda m, x: x @ m.weight + sum(cache(4) for cache in caches)), torch.randn(4, 4)
    graph = ColoTracer().trace(model, (x,))
    assert len(looks) <= 2  # each look goes through all objects of the process
    torch.testing.assert_close(graph.module(model)(x), model(x))


def test_defaults_are_put_back():
    def changes(m, x):
        torch.set_default_dtype(torch.float64)
        return x @ m.weight

    traced(changes)
    assert torch.get_default_dtype() == torch.float32


def test_lazy_modules_are_a_letter():
    with pytest.raises(NotCaptured, match="no shape yet"):
        ColoTracer().trace(nn.LazyLinear(4), (torch.randn(2, 3),))


def test_modules_made_in_forward_draw_their_weights():
    check(lambda m, x: (x @ m.weight).sum() + nn.Linear(4, 4)(x).detach().sum())
