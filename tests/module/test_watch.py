"""A look while a model trains: one flipped bit, and a gradient that no single device has, are named on every rank.

Nothing else is.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar
from autopar.letters import Diverged, NotServed
from autopar.testing import on_processes, on_threads
from tests.equality.matrix import MODELS, made
from tests.models import eager_links
from tests.shares import by_day, one_in

MESHES = {
    "dp": ((4,), {"parallel": "dp"}),
    "zero3": ((4,), {"parallel": "zero3"}),
    "tensor": ((4,), {"parallel": "megatron"}),
    "zero3 beside copies": ((2, 2), {"parallel": "hsdp"}),
    "both": ((2, 2), {"parallel": {"data": 2, "tensor": 2}}),
}


class Net(nn.Module):
    """With a batch norm, whose statistics are copies too, and a width that four do not share."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 18), nn.Linear(18, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x)))).square().mean()


def drawn():
    """The model and a batch, the same for every rank: threads share a generator."""
    torch.manual_seed(0)
    return Net(), torch.randn(8, 8)


MODEL, X = drawn()
LOOKED = "2 looks at copies in 9 calls; 1 gradients beside a single device's, the last of down.bias"


def trained(rank, name, flip, watched, steps=9, every=3):
    """Losses of steps; before the fifth call `flip` writes to what one rank holds."""
    mesh, how = MESHES[name]
    model = autopar.autoparallelize(copy.deepcopy(MODEL), (X,), mesh=mesh, cluster=eager_links(), strict=False, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    watch = autopar.watch(model, every=every, optimizer=optimizer) if watched else None
    losses = []
    for step in range(steps):
        if step == 4 and flip is not None:
            flip(rank, model, optimizer)
        optimizer.zero_grad()
        try:
            loss = model(X)
        except Diverged as letter:
            return losses, str(letter)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 6:
            with torch.no_grad():
                model(X)  # no call in training
    return losses, str(watch) if watched else ""


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def flipped(where, on=2):
    """One bit of an element of what `where(model, optimizer)` gives, on one rank.

    Not the lowest, which rounding may undo.
    """

    def flip(rank, model, optimizer):
        if rank == on:
            with torch.no_grad():
                bits = local(where(model, optimizer)).view(torch.int32)
                bits.flatten()[-1] ^= 1 << 20

    return flip


@pytest.mark.parametrize("name", by_day(MESHES, "both"))
def test_a_sound_run_is_not_disturbed(name):
    plain = on_threads(4, trained, name, None, False)
    watched = on_threads(4, trained, name, None, True)
    assert {said for _, said in watched} == {LOOKED}
    assert [losses for losses, _ in watched] == [losses for losses, _ in plain]


@pytest.mark.parametrize(
    ("name", "where", "said"),
    [
        ("dp", lambda m, o: m.up.weight, "up.weight on rank 2 differs from its copies on 0, 1, 3, at call 6"),
        pytest.param(
            "dp",
            lambda m, o: m.norm.running_var,
            "norm.running_var on rank 2 differs from its copies on 0, 1, 3",
            marks=pytest.mark.nightly,
        ),
        ("dp", lambda m, o: o.state[m.down.bias]["exp_avg"], "so do exp_avg of down.bias"),
        pytest.param(
            "tensor",
            lambda m, o: m.norm.bias,
            "norm.bias on rank 2 differs from its copies on 0, 1, 3, at call 6",
            marks=pytest.mark.nightly,
        ),
        ("zero3 beside copies", lambda m, o: m.up.weight, "up.weight on rank 2 differs from its copies on 0, at call"),
        pytest.param(
            "both",
            lambda m, o: m.up.weight,
            "up.weight on rank 2 differs from its copies on 0, at call 6",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_flipped_bit_is_named_within_one_interval(name, where, said):
    found = on_threads(4, trained, name, flipped(where), True)
    for losses, letter in found:
        assert len(losses) == 6 and said in letter, letter
        assert "elements, by" in letter


def test_what_each_rank_has_alone_is_compared_with_nothing():
    """A part that one rank holds may be anything: no copy contradicts it."""
    found = on_threads(4, trained, "zero3", flipped(lambda m, o: m.up.weight), True)
    assert {said for _, said in found} == {LOOKED}


def removed(rank):
    model = autopar.autoparallelize(copy.deepcopy(MODEL), (X,), mesh=(2,), cluster=eager_links(), parallel="dp")
    watch = autopar.watch(model, every=1)
    watch.look()
    watch.remove()
    flipped(lambda m, o: m.up.weight, on=1)(rank, model, None)
    for _ in range(3):
        model(X).backward()
    with pytest.raises(Diverged):
        watch.look()
    return watch.looks


def test_it_looks_when_it_is_told_and_stops_when_it_is_removed():
    assert on_threads(2, removed) == [2, 2]


def test_wrong_uses_are_letters():
    with pytest.raises(NotServed, match="is not parallel"):
        autopar.watch(nn.Linear(2, 2))
    for what, value in (("every", 0), ("every", -1), ("every", 2.5), ("every", True), ("rows", -1), ("rows", 0.5)):
        with pytest.raises(NotServed, match=f"{what}={value} is not a valid number of"):
            on_threads(1, wrong, what, value)


def wrong(rank, what, value):
    autopar.watch(autopar.autoparallelize(copy.deepcopy(MODEL), (X,), mesh=1), **{what: value})


# -- gradients beside those of a single device


class Rows(nn.Module):
    """A network without a norm, and what stands behind it."""

    def __init__(self, ends, drops=0.0, dtype=torch.float32):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16, dtype=dtype), nn.Dropout(drops), nn.Linear(16, 8, dtype=dtype)
        self.ends = ends

        self.register_buffer("calls", torch.zeros((), dtype=dtype))

    def forward(self, x):
        if self.ends is of_calls:  # a loss that grows from call to call
            self.calls += 1
            return self.calls * of_calls(self.down(torch.relu(self.up(x))))
        return self.ends(self.down(self.drop(torch.relu(self.up(x)))))


def of_sum(y):
    return y.square().sum()


def of_mean(y):
    return y.square().mean()


def of_places(y):
    """Rows count by their places in the batch."""
    return (y.square().mean(1) * torch.arange(len(y), device=y.device)).mean()


def of_the_first(y):
    """A sum of some rows: that on two is twice that on one, and that on eight is not eight times."""
    return y[:4].square().sum()


def as_it_is(y):
    return y


def of_calls(y):
    return y.square().mean()


def beside_one(rank, ends, how, made=None, broken=(), scale=1.0, looks=4, rows=4, stashes=False):
    """What gradients of so many parameters are, beside a single device; `broken` ranks scale those that they make."""
    torch.manual_seed(0)
    how = {"mesh": (4,), "parallel": "dp", "cluster": eager_links(), "strict": False} | how
    net = Rows(ends, **(made or {}))
    x = X.to(net.up.weight.dtype)
    model = autopar.autoparallelize(net, (x,), **how)
    mine = x[2 * rank : 2 * rank + 2] if how.get("inputs") == "local" else x
    (program,) = model._own.programs
    sound, factor = program.runner.gradients, scale if rank in broken else 1.0
    program.runner.gradients = lambda *given: [g if g is None else g * factor for g in sound(*given)]
    watch = autopar.watch(model, every=1, rows=rows)
    if stashes:
        model.left = model(mine)  # with its graph, of which there is no copy
    for _ in range(looks):
        watch.look(mine)
    return str(watch), [found.parameter for found in watch.gradients]


HOWS = {
    "a mean, cut by rows": (of_mean, {}, {}),
    "a sum": (of_sum, {"parallel": "zero3"}, {}),
    "a loss that counts calls": (of_calls, {}, {}),
    "outputs without a loss": (as_it_is, {"outputs": "full"}, {}),
    "outputs that leave in parts": (as_it_is, {"parallel": "megatron", "outputs": "sharded"}, {}),
    "loss=": (as_it_is, {"loss": lambda outputs, inputs: (outputs - inputs[0]).square().mean()}, {}),
    "rows of each rank": (of_sum, {"inputs": "local"}, {}),
    "a loss on rows of each rank": (as_it_is, {"inputs": "local", "outputs": "local"}, {}),
    "micro-batches": (of_mean, {"microbatches": 2}, {}),
    "a precision": (of_mean, {"parallel": "zero3", "precision": autopar.Precision()}, {}),
    "bfloat16": (of_mean, {"parallel": "megatron"}, {"dtype": torch.bfloat16}),
    "float64": (of_mean, {"parallel": "megatron"}, {"dtype": torch.float64}),
}


@pytest.mark.parametrize("name", one_in(2, HOWS))
def test_gradients_are_those_of_a_single_device(name):
    ends, how, made = HOWS[name]
    for said, parameters in on_threads(4, beside_one, ends, how, made):
        assert "4 gradients beside a single device's" in said and "not compared" not in said, said
        assert len(set(parameters)) > 1


@pytest.mark.parametrize(
    ("name", "broken", "scale", "said"),
    [
        ("outputs that leave in parts", [2], 1.001, "on rank 2 is not that of a single device"),
        ("a mean, cut by rows", [0, 1, 2, 3], 4.0, "on ranks 0, 1, 2, 3 is not that"),  # a mean that is none
        ("a sum", [0, 1, 2, 3], 2.0, "on ranks 0, 1, 2, 3 is not that"),
        ("a loss on rows of each rank", [0, 1], 0.999, "on ranks 0, 1 is not that"),
        ("bfloat16", [1], 2.0, "on rank 1 is not that"),
        ("float64", [3], 1 + 1e-6, "on rank 3 is not that"),
        ("a loss that counts calls", [0, 1, 2, 3], 1.1, "on ranks 0, 1, 2, 3 is not that"),
        ("a mean, cut by rows", [1], float("nan"), "on rank 1 is not that"),
    ],
)
def test_a_gradient_that_no_single_device_has_is_named(name, broken, scale, said):
    ends, how, made = HOWS[name]
    with pytest.raises(Diverged, match=f"the gradient of .* {said}"):
        on_threads(4, beside_one, ends, how, made, broken, scale)


@pytest.mark.parametrize(
    ("ends", "made", "said"),
    [
        (of_places, {}, "does not treat rows alike"),
        (of_mean, {"drops": 0.1}, "dropout draws random numbers, at "),
    ],
)
def test_what_cannot_be_compared_is_said(ends, made, said):
    for found, _ in on_threads(4, beside_one, ends, {}, made):
        assert f"4 gradients not compared: {said}" in found or f"not compared: the model {said}" in found, found


def test_what_differs_is_compared_on_as_many_rows_as_the_program_has():
    for found, _ in on_threads(4, beside_one, of_the_first, {}, {}, (), 1.0, 4, 1):
        assert "4 gradients beside a single device's" in found and "not compared" not in found, found
    with pytest.raises(Diverged, match="on ranks 0, 1, 2, 3 is not that"):
        on_threads(4, beside_one, of_the_first, {}, {}, (0, 1, 2, 3), 3.0, 4, 1)


def test_a_model_that_cannot_be_copied_is_said_on_every_rank():
    for found, _ in on_threads(4, beside_one, of_mean, {}, {}, (), 1.0, 4, 4, True):
        assert "4 gradients not compared: raises RuntimeError" in found, found


def test_a_model_that_does_not_fit_on_one_device_is_not_gathered(monkeypatch):
    monkeypatch.setattr("autopar.module.single_device._memory_of_host", lambda: 1000.0)
    for found, _ in on_threads(4, beside_one, of_mean, {}):
        assert "4 gradients not compared: the whole model takes" in found and "rank 0 has" in found, found


def between(rank, watched):
    """Two calls whose gradients wait, with a look between them, and one that reduces all; a batch norm and a hook."""
    model = autopar.autoparallelize(copy.deepcopy(MODEL), (X,), mesh=(2,), cluster=eager_links(), parallel="dp")
    calls = []
    model.up.weight.register_hook(lambda g: calls.append(1))
    watch = autopar.watch(model, every=1) if watched else None
    with model.no_sync():
        for _ in range(2):
            model(X).backward()
    model(X).backward()
    full = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    found = full | dict(model.named_buffers()), len(calls), torch.get_rng_state()
    if watched:
        for _ in range(12):
            watch.look(X)
    return *found, watch and {compared.parameter for compared in watch.gradients}


def test_a_look_leaves_waiting_gradients_statistics_and_hooks_alone():
    plain, watched = on_threads(2, between, False), on_threads(2, between, True)
    for (left, calls, state, _), (other, more, after, names) in zip(plain, watched, strict=True):
        assert left.keys() == other.keys() and all(torch.equal(left[n], other[n]) for n in left)
        assert calls == more and torch.equal(state, after)
        assert len(names) > 3 and "up.weight" not in names  # its hook might change its gradient


# -- nightly: models as they are


def undropped(model):
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (isinstance(module, nn.Dropout) and name == "p")):
                setattr(module, name, 0.0)
    return model


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in MODELS if "timm" not in name])
def test_no_gradient_of_a_sound_model_is_named(name, dtype):
    whole, batch, _ = made(name)
    batch = {n: t.to(dtype) if torch.is_tensor(t) and t.is_floating_point() else t for n, t in batch.items()}
    for how in ({}, {"parallel": "megatron"}, {"parallel": "zero3"}):
        everyone = on_processes(4, looks_at, whole, dtype, batch, how, timeout_s=150)
        assert everyone[0] == everyone[-1]
        why_not = [why for _, why in everyone[0] if why and "rounding" not in why and "zero" not in why]
        assert not why_not, why_not


def looks_at(rank, whole, dtype, batch, how):
    """What six looks at gradients of a model say, whose dropout is off."""
    how = {"mesh": (2, 2), "cluster": eager_links(), "strict": False} | how
    model = autopar.autoparallelize(undropped(copy.deepcopy(whole).to(dtype)), batch, **how)
    watch = autopar.watch(model, every=1)
    for _ in range(6):
        watch.look(**batch)
    return [(found.parameter, found.why_not) for found in watch.gradients]
