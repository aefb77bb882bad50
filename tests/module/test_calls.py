"""Calls as users make them: slices and transposed tensors, one loss of several, hooks, inputs with any name, anomaly
detection, arguments that differ between ranks.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import Precision
from autopar.letters import Anomaly, Disagreement, Lost, NotCaptured, NotServed
from autopar.testing import Equality, on_threads
from autopar.tracer.precision import reference
from tests.models import eager_links
from tests.shares import by_day, diagonal
from tests.training import whole

DOUBLE = {"dtype": torch.float64}
SPREAD = [(1, None), (2, None), (2, "megatron"), (2, "dp")]


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), **DOUBLE)


def built(cls, *given):
    torch.manual_seed(0)
    return cls(*given).double()


def step(model, batch, gradient=None):
    """Loss, gradients and buffers after one call."""
    out = model(**batch)
    out.backward(gradient)
    gradients = {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"out": whole(out.detach()).clone(), **gradients, **{n: b.clone() for n, b in model.named_buffers()}}


def parallel_of(model, meta, mesh, parallel=None, **how):
    return autopar.autoparallelize(model, meta, mesh=mesh, parallel=parallel, cluster=eager_links(), **how)


def check_step(what, base, meta, batch, gradient=None, spread=SPREAD):
    """The parallel model that was made for `meta` computes on `batch` what the single-device model does."""
    expected = step(copy.deepcopy(base), batch, gradient)
    for mesh, parallel in spread:

        def body(rank, mesh=mesh, parallel=parallel):
            return step(parallel_of(copy.deepcopy(base), meta, mesh, parallel), batch, gradient)

        for found in on_threads(mesh, body):
            assert found.keys() == expected.keys()
            Equality.in_float64(f"{what}, {parallel} on {mesh}", found, expected, 1e-9).check()


# -- how tensors lie in memory


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)

    def forward(self, ids, labels):
        return F.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), labels.reshape(-1))


class Turned(nn.Module):
    """Reads its input, a parameter and a buffer flat."""

    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 4).t())
        self.register_buffer("shift", torch.randn(8, 4).t())

    def forward(self, x):
        h = self.first(x.flatten(0, 1).reshape(-1, 8)).relu()
        return h.view(-1, 4, 8) * self.weight.reshape(8, 4).flatten().view(1, 4, 8) + self.shift.flatten().reshape(4, 8)


@pytest.mark.nightly
def test_the_tokens_of_a_language_model_may_be_slices():
    tokens = torch.randint(0, 24, (4, 9), generator=torch.Generator().manual_seed(1))
    batch = {"ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    check_step("as traced", built(Tokens), batch, batch, spread=[(1, None)])
    meta = {k: v.contiguous() for k, v in batch.items()}
    check_step("otherwise than traced", built(Tokens), meta, batch, spread=[(2, "megatron"), (2, "zero3")])


IN_MEMORY = {
    "sliced": lambda: drawn(4, 5, 8)[:, :-1],
    "transposed": lambda: drawn(8, 4, 4).permute(2, 1, 0),
    "expanded": lambda: drawn(4, 1, 8).expand(4, 4, 8),
    "every second": lambda: drawn(4, 8, 8)[:, ::2],
    "of every row a part": lambda: drawn(4, 4, 16)[..., ::2],
}


@pytest.mark.parametrize("name", IN_MEMORY)
def test_inputs_and_gradients_lie_in_memory_as_they_like(name):
    given = IN_MEMORY[name]()
    assert not given.is_contiguous()
    check_step(name, built(Turned), {"x": given.contiguous()}, {"x": given}, given, spread=SPREAD[:3])


def test_buffers_and_parameters_that_are_exchanged_may_lie_otherwise():
    x = drawn(4, 4, 8)
    theirs = built(Turned)
    theirs.shift, theirs.weight.data = drawn(8, 4).t(), drawn(4, 4, 2).permute(2, 1, 0).reshape(8, 4).t()
    expected = step(copy.deepcopy(theirs), {"x": x}, x)

    def body(rank):
        mine = parallel_of(built(Turned), {"x": x}, 2, "dp")
        mine.load_state_dict(theirs.state_dict())
        mine.shift = theirs.shift
        assert not mine.shift.is_contiguous()
        return step(mine, {"x": x}, x)

    for found in on_threads(2, body):
        Equality.in_float64("exchanged", found, expected, 1e-9).check()


class Averaging(nn.Module):
    """Writes a running mean and reads it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return self.linear(x) + self.mean


class TwoMeans(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Averaging(), Averaging()

    def forward(self, x):
        return self.second(self.first(x)).pow(2).sum()


@pytest.mark.parametrize("are_tied", [False, True])
def test_buffers_may_be_tied_and_untied_after_the_trace(are_tied):
    base, x = built(TwoMeans), drawn(4, 4)

    def results(model):
        found = {}
        for call in range(4):
            tied = are_tied ^ (call in (1, 2))
            if tied != (model.second.mean is model.first.mean):
                model.second.mean = model.first.mean if tied else model.first.mean.clone()
            found[f"loss {call}"] = model(x).detach()
        return found | {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}

    if are_tied:
        base.second.mean = base.first.mean
    expected = results(copy.deepcopy(base))
    for found in on_threads(2, lambda rank: results(parallel_of(copy.deepcopy(base), {"x": x}, 2, "dp"))):
        Equality.in_float64("tied", found, expected, 1e-9).check()


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Linear(64, 2)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).flatten(1)).pow(2).mean()


def test_models_and_images_in_channels_last():
    images = {"x": drawn(4, 3, 4, 4).to(memory_format=torch.channels_last)}
    check_step("images alone", built(Images), images, images, spread=[(1, None)])
    check_step(
        "both", built(Images).to(memory_format=torch.channels_last), images, images, spread=[(2, None), (2, "dp")]
    )


class Sequence(nn.Module):
    """A batch norm of a transposed tensor.

    The kernel lays out its result otherwise than its form on fake tensors says.
    """

    def __init__(self, norm):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16, bias=False), norm, nn.Linear(16, 4)

    def forward(self, x):
        return self.down(self.norm(self.up(x).transpose(1, 2)).transpose(1, 2)).pow(2).mean()


def test_a_batch_norm_of_a_transposed_tensor():
    x = {"x": drawn(4, 5, 8)}
    check_step("in training", built(Sequence, nn.BatchNorm1d(16)), x, x, spread=[(2, None)])
    check_step("in eval", built(Sequence, nn.BatchNorm1d(16)).eval(), x, x, spread=[(1, None)])


NORMS = {
    "batch": lambda: nn.BatchNorm1d(16),
    "plain": lambda: nn.BatchNorm1d(16, affine=False),
    "instance": lambda: nn.InstanceNorm1d(16, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("param, tolerance, name", diagonal([("float64", 1e-6), ("bfloat16", 0.05)], list(NORMS)))
def test_norms_under_a_precision(name, param, tolerance):
    """Running statistics are stored in float32.

    Computing in float64 leaves next to no rounding, in bfloat16 what its casts bring.
    """
    x, precision, base = (
        {"x": drawn(4, 5, 8).float()},
        Precision(param, "float32"),
        built(Sequence, NORMS[name]()).float(),
    )
    own = copy.deepcopy(base)
    loss = reference(own, precision)(**x)
    loss.backward()
    expected = {"out": loss.detach(), **{n: p.grad for n, p in own.named_parameters()}, **dict(own.named_buffers())}
    in_float64 = copy.deepcopy(base).double()
    exact = in_float64(x["x"].double())
    assert abs(loss.double() - exact) < 0.02 * exact
    for n, buffer in own.named_buffers():
        assert buffer.dtype in (torch.float32, torch.int64)
        torch.testing.assert_close(buffer.double(), in_float64.get_buffer(n).double(), rtol=0.02, atol=0.01)

    for mesh, parallel in SPREAD[:1] if name == "plain" else ((1, None), (2, "dp")):

        def body(rank, mesh=mesh, parallel=parallel):
            return step(parallel_of(copy.deepcopy(base), x, mesh, parallel, precision=precision), x)

        for found in on_threads(mesh, body):
            in_double = ({k: v.double() for k, v in results.items()} for results in (found, expected))
            Equality.in_float64(f"{precision}, {parallel} on {mesh}", *in_double, tolerance).check()


# -- gradients that arrive at some outputs alone


class Losses(nn.Module):
    """Three losses of one trunk.

    The second has an infinite derivative, which times a gradient of zero is not a number.
    """

    def __init__(self):
        super().__init__()
        self.trunk, self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(4))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x, y):
        h = self.trunk(x).tanh()
        first, third = F.mse_loss(self.a(h) + self.bias, y), (self.c(h) * h).pow(2).mean()
        return {"a": first, "b": (self.b(h) * 0).sqrt().sum(), "c": third + self.a(h).mean()}


def both(out):
    out["c"].backward(retain_graph=True)
    out["a"].backward()


BACKWARDS = {
    "one": lambda out: out["a"].backward(),
    "another": lambda out: out["c"].backward(),
    "a sum": lambda out: (out["a"] + 2 * out["c"]).backward(),
    "one after the other": both,
    "one times zero": lambda out: (out["a"] * 0).backward(),
}


def gradients_left(model, x):
    return {n: None if p.grad is None else whole(p.grad).clone() for n, p in (*model.named_parameters(), ("x", x))}


def several(model, waiting):
    """Gradients that each of the backwards leaves.

    Alone, after another micro-batch, and after one that waits and one that is forgotten.
    """
    left = {}
    for name, backward in BACKWARDS.items():
        for before in ("", "another", "forgotten"):
            x = drawn(4, 8).requires_grad_()
            y = drawn(8, 4).t()
            model.zero_grad()
            with waiting(model) if before else contextlib.nullcontext():
                if before == "forgotten":
                    both(model(x, y))
                    torch.optim.SGD([model.trunk.weight, model.a.weight]).zero_grad()
                elif before:
                    BACKWARDS[before](model(x, y))
            backward(model(x, y))
            left[f"{name} after {before}"] = gradients_left(model, x)
    return left


EVERYWHERE = by_day([(1, None), (2, "zero3"), ((2, 2), None), (2, "dp")], (2, "zero3"))


@pytest.mark.parametrize("mesh, parallel", EVERYWHERE, ids=str)
def test_parameters_that_no_loss_reaches_have_no_gradient(mesh, parallel):
    base, meta = built(Losses), {"x": drawn(4, 8).requires_grad_(), "y": drawn(4, 8)}
    expected = several(copy.deepcopy(base), lambda model: contextlib.nullcontext())
    assert [n for n, g in expected["one after "].items() if g is None] == ["b.weight", "b.bias", "c.weight", "c.bias"]

    def body(rank):
        mine = parallel_of(copy.deepcopy(base), meta, mesh, parallel)
        return several(mine, autopar.module.ParallelModule.no_sync)

    for found in on_threads(autopar.DeviceMesh.of(mesh).size, body):
        for name, gradients in expected.items():
            for key, gradient in gradients.items():
                assert (found[name][key] is None) == (gradient is None), f"{name}: {key}"
            there = ({k: v for k, v in of_one.items() if v is not None} for of_one in (found[name], gradients))
            Equality.in_float64(f"{name}, {parallel} on {mesh}", *there, 1e-9).check()


@pytest.mark.nightly
def test_an_optimizer_leaves_alone_what_no_loss_reaches():
    def trained(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            model(drawn(4, 8), drawn(4, 8))["c"].backward()
            optimizer.step()
        return {n: whole(p).detach().clone() for n, p in model.named_parameters()}

    base = built(Losses)
    expected = trained(copy.deepcopy(base))
    assert torch.equal(expected["b.weight"], base.b.weight) and not torch.equal(expected["c.weight"], base.c.weight)
    meta = {"x": drawn(4, 8), "y": drawn(4, 8)}
    for found in on_threads(2, lambda rank: trained(parallel_of(copy.deepcopy(base), meta, 2, "zero3"))):
        Equality.in_float64("AdamW", found, expected, 1e-8).check()


def test_gradients_that_arrive_elsewhere_on_another_rank_are_a_letter():
    def body(rank):
        mine = parallel_of(built(Losses), {"x": drawn(4, 8), "y": drawn(4, 8)}, 2, "dp")
        with pytest.raises(Disagreement, match="outputs that gradients arrive at"):
            mine(drawn(4, 8), drawn(4, 8))["ac"[rank]].backward()
        return True

    assert all(on_threads(2, body))


# -- hooks


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).relu()).pow(2).mean()


def hooked(hook, later=False):
    """Runs calls of a model with a hook, set before or after it is made parallel.

    The eager model's step and the parallel one's.
    """
    base, x = built(Pair), drawn(4, 8)
    theirs = copy.deepcopy(base)
    theirs.first.register_forward_hook(hook)
    expected = [step(theirs, {"x": x}), step(theirs, {"x": x})]
    if not later:
        base.first.register_forward_hook(hook)

    def body(rank):
        mine = parallel_of(base, {"x": x}, 1)
        if later:
            mine.first.register_forward_hook(hook)
        return [step(mine, {"x": x}), step(mine, {"x": x})]

    (found,) = on_threads(1, body)
    for mine, eager in zip(found, expected, strict=True):
        Equality.in_float64("hooked", mine, eager, 1e-9).check()


KEPT = []
LETTERS = {
    "keeps it": lambda module, given, out: KEPT.append(out),
    "keeps what it makes of it": lambda module, given, out: KEPT.append({"mean": out.detach().mean()}),
    "keeps what it returns": lambda module, given, out: (KEPT.append(out * 2), KEPT[-1])[1],
    "prints it": lambda module, given, out: print(out),
    "writes it into text": lambda module, given, out: KEPT.append(f"{out.mean():.3f}"),
    "takes its value": lambda module, given, out: KEPT.append(out.mean().item()),
}


@pytest.mark.parametrize(
    "name, later",
    [
        # what is kept is found by one look at what hooks left, through all objects: at a value made of it by day
        *(pytest.param(name, False, marks=pytest.mark.nightly if name.startswith("keeps") else []) for name in LETTERS),
        ("keeps what it makes of it", True),
    ],
)
def test_a_hook_that_needs_values_is_a_letter(name, later):
    KEPT.clear()
    try:
        with pytest.raises(NotCaptured, match=r"hook|value"):
            hooked(LETTERS[name], later)
    finally:
        KEPT.clear()


def test_hooks_that_compute_are_part_of_the_graph():
    def writes(module, given, out):
        out.mul_(3)

    for later in (False, True):
        hooked(lambda module, given, out: out * 2 + given[0], later)
        hooked(writes, later)


def test_hooks_that_count_or_look_at_shapes_run_in_every_call():
    seen, base, x = [], built(Pair), drawn(4, 8)
    base.register_forward_pre_hook(lambda module, given: seen.append("the model"))
    base.first.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape))
    base.second.register_forward_hook(
        lambda module, given, named, out: seen.append((out.dtype, len(named))), with_kwargs=True
    )

    def body(rank):
        mine = parallel_of(base, {"x": x}, 1)
        found = []
        for call in (lambda: mine(x), lambda: mine(x), lambda: mine(drawn(6, 8)), lambda: copy.deepcopy(mine)(x)):
            mine(drawn(6, 8))  # what is captured anew was captured before
            seen.clear()
            call()
            found.append(list(seen))
        late = mine.first.register_forward_hook(lambda module, given, out: seen.append("late"))
        mine(x)
        seen.clear()
        mine(x)
        found.append(list(seen))
        late.remove()
        mine(x)
        seen.clear()
        mine(x)
        return [*found, list(seen)]

    (found,) = on_threads(1, body)
    of = {n: ["the model", torch.Size([n, 8]), (torch.float64, 0)] for n in (4, 6)}
    assert found == [of[4], of[4], of[6], of[4], [*of[4][:2], "late", of[4][2]], of[4]]


def test_a_hook_that_asks_for_values_only_later_is_a_letter_then():
    calls, base, x = [], built(Pair), drawn(4, 8)

    def hook(module, given, out):
        calls.append(1)
        if len(calls) > 2:
            float(out.detach().mean())

    base.first.register_forward_hook(hook)

    def body(rank):
        mine = parallel_of(base, {"x": x}, 1)
        mine(x)
        with pytest.raises(NotServed, match="needs more than shapes"):
            mine(x)
        return True

    assert all(on_threads(1, body))


# -- names


class Named(nn.Module):
    """Its inputs and outputs are called as its buffer, its parameters, and what plans call outputs."""

    def __init__(self):
        super().__init__()
        self.out, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8))
        self.register_buffer("mask", torch.randn(8))

    def forward(self, x, mask, weight):
        h = self.out(x) * self.mask * mask * self.weight + weight
        return {"weight": h.pow(2).mean(), "bias": h.detach()}


def test_inputs_and_outputs_may_be_called_as_parameters_and_buffers_are():
    batch, base = {"x": drawn(4, 8), "mask": drawn(4, 1), "weight": drawn(4, 8)}, built(Named)
    theirs = copy.deepcopy(base)
    expected = theirs(**batch)
    expected["weight"].backward()
    plan = autopar.plan(base, batch, mesh=2, parallel="dp", cluster=eager_links(), constraints={"input mask": "R"})
    assert (
        autopar.Plan.from_dict(plan.to_dict()) == plan
        and {"input mask", "input weight", "mask", "weight"} <= plan.decisions.keys()
    )

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(base), batch, plan=plan)
        assert list(mine.input_specs) == ["x", "mask", "weight"]
        found = mine(**batch)
        found["weight"].backward()
        gradients = {n: whole(p.grad) for n, p in mine.named_parameters()}
        return {f"out.{n}:value": whole(v.detach()) for n, v in found.items()} | gradients

    gradients = {n: p.grad for n, p in theirs.named_parameters()}
    wanted = {f"out.{n}:value": v.detach() for n, v in expected.items()} | gradients
    for found in on_threads(2, body):
        Equality.in_float64("named alike", found, wanted, 1e-9).check()


# -- anomaly detection


@pytest.mark.filterwarnings("ignore:Error detected in StepBackward:UserWarning")
def test_anomalies_are_detected():
    """Lowering, training and calls of new shapes under detect_anomaly.

    A gradient that is not a number is a letter that names its parameters.
    """
    base, x = built(Pair), drawn(4, 8)
    expected = step(copy.deepcopy(base), {"x": x})

    def body(rank):
        mine = parallel_of(copy.deepcopy(base), {"x": x}, 2, "zero3")
        found = step(mine, {"x": x})
        step(mine, {"x": drawn(6, 8)})
        loss = mine(torch.full((4, 8), torch.nan, dtype=torch.float64))
        with pytest.raises(Anomaly, match=r"4 gradients are not numbers: those of first\.weight"):
            loss.backward()
        return found

    with torch.autograd.set_detect_anomaly(True):
        for found in on_threads(2, body):
            Equality.in_float64("under detect_anomaly", found, expected, 1e-9).check()
        assert torch.is_anomaly_enabled()


# -- arguments that differ between ranks


def made_for(rank, how):
    """A model made with arguments that are other ones on the second rank."""
    base, x = built(Pair), {"x": drawn(4, 8)}
    plan = autopar.plan(base, x, mesh=2, parallel="dp", cluster=eager_links())
    searched = {"mesh": 2, "parallel": "dp", "cluster": eager_links()}
    other = autopar.plan(base, x, mesh=2, parallel="zero3", cluster=eager_links())
    given = {
        "inputs=": {"inputs": ("global", "local")[rank]},
        "outputs=": {"outputs": ("full", "sharded")[rank]},
        "sync=": {"sync": rank == 0},
        "plan=": ({"plan": plan}, searched)[rank],
        "plan= of another kind": {"plan": (plan, other)[rank]},
        "parallel=": {**searched, "parallel": ("dp", "zero3")[rank]},
        "models or meta_inputs": {},
    }[how]
    if how == "models or meta_inputs":
        x = {"x": drawn(4 + 2 * rank, 8)}
    if not given.keys() & {"plan", "mesh"}:
        given = {**searched, **given}
    with pytest.raises(Disagreement) as letter:
        autopar.autoparallelize(base, x, **given)
    return str(letter.value)


@pytest.mark.parametrize(
    "how", ["inputs=", "outputs=", "sync=", "plan=", "plan= of another kind", "parallel=", "models or meta_inputs"]
)
def test_arguments_that_differ_between_ranks_are_a_letter_on_all(how):
    letters = on_threads(2, made_for, how, timeout_s=20)
    assert (
        letters[0] == letters[1] and f"different {how.partition(' of')[0]}" in letters[0] and "rank 1: " in letters[0]
    )


def test_what_one_rank_raises_before_any_collective_all_are_told():
    class Asks(Pair):
        def forward(self, x):
            return super().forward(x) * (2 if x.sum() > 0 else 1)

    def body(rank):
        model = built((Pair, Asks)[rank])
        with pytest.raises(
            (Lost, NotCaptured)[rank],
            match=r"value of a tensor" if rank else r"rank 1 has raised NotCaptured: .*value of a tensor",
        ):
            parallel_of(model, {"x": drawn(4, 8)}, 2, "dp")
        with pytest.raises((Lost, NotServed)[rank]):
            parallel_of(built(Pair), {"x": drawn(4, 8)}, 2, "dp", inputs=("global", "here")[rank])
        return True

    assert all(on_threads(2, body, timeout_s=20))


@pytest.mark.machines
@pytest.mark.nightly
def test_processes_are_told_too(processes):
    letters = processes(2, made_for, "plan=")
    assert letters[0] == letters[1] and "different plan=" in letters[0]


class Still(nn.Module):
    """With a dropout, so that a call in eval is another situation."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x, y):
        return self.drop(self.linear(x))


def test_a_loss_takes_inputs_by_place_in_every_situation():
    """In eval, of other rows, and where the caller names them, as in the call that the model was made for."""
    base, x, y = built(Still), drawn(4, 8), drawn(8, 8)[:4]

    def loss(outputs, inputs):
        return (outputs - inputs[1]).square().mean()

    model = parallel_of(copy.deepcopy(base), (x, y), 1, loss=loss).eval()
    base.eval()
    for rows in (4, 2):
        expected = loss(base(x[:rows], y[:rows]), (x[:rows], y[:rows]))
        for given in (model(x[:rows], y[:rows]), model(y=y[:rows], x=x[:rows])):
            torch.testing.assert_close(given[0], expected)
