"""What a graph cannot hold is an error that says so, and the process is as it was before."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.graph.graph import Graph
from autopar.letters import NotCaptured
from autopar.tracer import ColoTracer
from tests.models import FunctionModel
from tests.tracer.cases import Of, check, traced


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
    assert "test_refusals.py:" in letter.value.at or "rnn.py" in letter.value.at


def test_a_model_that_communicates_is_a_letter(fake_world):
    def reduces(m, x):
        y = x @ m.weight
        torch.distributed.all_reduce(y.detach().clone())
        return y

    with fake_world(2), pytest.raises(NotCaptured, match="communicates itself"):
        traced(reduces)


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


def generator_under_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ m.weight + torch.rand(4, 4, generator=torch.Generator())


@torch.jit.script
def into_out(x, z):
    torch.mul(x, x, out=z)
    return z


def out_below(m, x):
    return into_out(x, torch.zeros(4, 4)) + x @ m.weight


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
        (generator_under_autocast, "generator of the model's own"),
        (out_below, "writes to out="),
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
def test_it_is_refused_and_the_generator_is_as_it_was(function, match):
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


def test_parameters_on_one_memory_are_a_letter():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(NotCaptured, match=r"0.weight and 1.weight are two on the same memory"):
        ColoTracer().trace(model, (torch.randn(2, 4),))


def test_an_output_that_hides_tensors_is_a_letter():
    class Box:
        def __init__(self, x):
            self.x = x

    with pytest.raises(NotCaptured, match="Box holds tensors"):
        traced(lambda m, x: Box(x @ m.weight))


class Kept(nn.Linear):
    mask = None

    def forward(self, x):
        Kept.mask = x > 0
        return super().forward(x) * Kept.mask


def test_a_class_that_keeps_a_tensor_of_the_capture_is_a_letter():
    with pytest.raises(NotCaptured, match=r"keeps a tensor as Kept\.mask"):
        ColoTracer().trace(Kept(4, 4), (torch.randn(2, 4),))
    Kept.mask = None


def test_lazy_modules_are_a_letter():
    with pytest.raises(NotCaptured, match="no shape yet"):
        ColoTracer().trace(nn.LazyLinear(4), (torch.randn(2, 3),))


def hooked(m, x):
    h = x @ m.weight
    h.register_hook(lambda g: g * 10)
    return h.sum()


@pytest.mark.parametrize("function, match", [(hooked, "register_hook")])
def test_what_would_be_lost_is_a_letter(function, match):
    with pytest.raises(NotCaptured, match=match):
        autopar.plan(FunctionModel(function, 6, 6), {"x": torch.randn(6, 6).double()}, mesh=2)


def test_backward_hooks_that_would_be_lost_are_a_letter():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_full_backward_hook(lambda *a: None)
    with pytest.raises(NotCaptured, match="backward hooks"):
        autopar.plan(model, (torch.randn(2, 4),), mesh=2)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.fft.rfft(input=x).abs(),
        lambda m, x: torch.logdet(x @ m.weight),
        lambda m, x: torch.inverse(x),
    ],
)
def test_an_op_that_torch_lacks_in_the_dtype_of_precision_is_a_letter(function):
    traced(function)
    with pytest.raises(NotCaptured, match="in bfloat16, in which precision= has the model compute") as letter:
        traced(function, precision=autopar.Precision())
    assert "x.float()" in letter.value.advice and "test_refusals.py" in letter.value.at


@pytest.mark.parametrize("precision", [None, autopar.Precision()])
def test_operands_that_fail_in_every_dtype_are_the_models_error(precision):
    with pytest.raises(NotCaptured, match=r"raises RuntimeError on these inputs.*4 by 3"):
        traced(lambda m, x: torch.logdet(x[:, :3]), precision=precision)


def test_what_a_method_raises_is_the_models_error_though_it_is_patched():
    """Once a model runs in parallel, tensors that are written in place pass through a function of autopar's."""

    def adds(m, x):
        with torch.no_grad():
            part = (x @ m.weight)[:2]
        return part.add_(m.weight[:2]).sum()

    autopar.autoparallelize(torch.nn.Linear(2, 2), torch.randn(2, 2), mesh=1)
    with pytest.raises(NotCaptured, match=r"raises RuntimeError on these inputs.*view"):
        traced(adds)


@pytest.mark.parametrize("precision", [None, autopar.Precision()])
def test_a_write_to_a_parameter_is_a_letter_under_precision_too(precision):
    """A momentum encoder moves parameters that are not trained: the cast that stands for one would take the write."""

    class Momentum(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                self.key.weight.mul_(0.5).add_(self.query.weight, alpha=0.5)
            return (self.query(x) - self.key(x)).pow(2).mean()

    with pytest.raises(NotCaptured, match=r"mul_ writes to the parameter key\.weight inside the model"):
        ColoTracer().trace(Momentum(), (torch.randn(2, 4),), precision=precision)


def test_an_assertion_of_the_model_that_fails_is_its_error():
    with pytest.raises(NotCaptured, match="raises AssertionError on these inputs: too few"):
        traced(lambda m, x: torch._assert(x.shape[0] > 9, "too few"))


class Warmed(nn.Module):
    """A module that counts its calls, or remembers the longest of them."""

    def __init__(self, goes_by):
        super().__init__()
        self.inner, self.step, self.longest, self.goes_by = nn.Linear(4, 4), 0, 0, goes_by

    def forward(self, x):
        y = self.inner(x)
        if self.goes_by == "its length":  # once for all calls that are no longer
            if len(x) > self.longest:
                self.longest = len(x)
                y = y * 1.0
            return y.sum()
        self.step += 1
        return y.sum() * (min(1.0, self.step / 4) if self.goes_by == "its step" else 1.0)


def test_a_number_that_forward_changes_and_goes_by_is_a_letter():
    model = Warmed("its step")
    with pytest.raises(
        NotCaptured, match="forward changes step and goes by it: each call is another program"
    ) as letter:
        ColoTracer().trace(model, (torch.randn(2, 4),))
    assert "test_refusals.py" in letter.value.at and "Warmed.forward" in letter.value.at
    assert model.step == 0


def test_a_number_that_forward_changes_is_kept_where_a_call_goes_by_it():
    graph = ColoTracer().trace(Warmed("nothing"), (torch.randn(2, 4),))
    assert graph.assumptions == ("the attribute step that forward sets on the model is not kept",) and not graph.sets
    graph = ColoTracer().trace(Warmed("its length"), (torch.randn(2, 4),))
    assert graph.sets == (("longest", 2),) and not graph.assumptions and "attribute longest = 2" in str(graph)
    assert Graph.from_json(graph.to_json()).sets == graph.sets


@pytest.mark.parametrize("table", [nn.Embedding(8, 4, sparse=True), nn.EmbeddingBag(8, 4, sparse=True, mode="sum")])
def test_a_sparse_gradient_is_a_letter(table):
    with pytest.raises(NotCaptured, match="gives a sparse gradient") as letter:
        ColoTracer().trace(table, (torch.zeros(2, 3, dtype=torch.int64),))
    assert "sparse=False" in letter.value.advice


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        raise ValueError("in an autograd.Function")

    @staticmethod
    def backward(ctx, dy):
        return dy


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def raises_mute(m, x):
    raise Mute


@pytest.mark.parametrize(
    "function, match",
    [(lambda m, x: Raises.apply(x), "raises ValueError .*in an autograd.Function"), (raises_mute, "raises Mute on")],
)
def test_errors_of_the_models_own_code_are_letters(function, match):
    with pytest.raises(NotCaptured, match=match):
        traced(function)


class Neighbours(nn.Module):
    """A product with a sparse matrix: a buffer, an input, or made in forward."""

    def __init__(self, is_held):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("around", torch.eye(6).to_sparse() if is_held else None)

    def forward(self, x, around=None):
        if around is None:
            places = torch.arange(6).expand(2, 6)
            around = self.around if self.around is not None else torch.sparse_coo_tensor(places, torch.ones(6), (6, 6))
        return torch.sparse.mm(around, self.layer(x)).sum()


@pytest.mark.parametrize(
    "is_held, given, name",
    [(True, None, "around is"), (False, torch.eye(6).to_sparse(), "around is"), (False, None, "sparse_coo_tensor")],
    ids=["buffer", "input", "made"],
)
def test_a_sparse_tensor_is_a_letter(is_held, given, name):
    batch = {"x": torch.randn(6, 4)} | ({} if given is None else {"around": given})
    with pytest.raises(NotCaptured, match=f"{name}.*sparse_coo"):
        autopar.plan(Neighbours(is_held), batch, mesh=2)


def test_forward_mode_and_gradients_of_gradients_say_what_is_captured():
    def forward_mode(m, x):
        return torch.func.jvp(
            lambda z: nn.functional.linear(z, m.weight, m.weight[0]).tanh(), (x,), (torch.ones_like(x),)
        )[1].sum()

    def penalty(m, x):
        h = x.detach().requires_grad_()
        return torch.autograd.grad((h @ m.weight).pow(2).sum(), h, create_graph=True)[0].norm()

    def as_it_is_captured(m, x):
        return torch.func.grad(lambda h: (h @ m.weight).pow(2).sum())(x).norm()

    for function, match in ((forward_mode, "forward mode.*torch.func.grad"), (penalty, "torch.func.grad")):
        with pytest.raises(NotCaptured) as letter:
            traced(function)
        assert re.search(match, str(letter.value), re.DOTALL), str(letter.value)
    check(as_it_is_captured)


@pytest.mark.parametrize(
    "loss, said",
    [
        (nn.MSELoss(), "loss= raises AttributeError"),
        (lambda out: out.mean(), "loss= does not take the outputs and the inputs"),
        (lambda out, inputs: out.nothing, "loss= raises AttributeError"),
    ],
)
def test_errors_of_a_loss_are_told_as_the_loss_s(loss, said):
    with pytest.raises(NotCaptured, match=said) as letter:
        ColoTracer().trace(nn.Linear(4, 4), (torch.randn(2, 4),), loss=loss)
    assert "lambda out, inputs" in letter.value.advice and letter.value.at
