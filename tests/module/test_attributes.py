"""What modules say of themselves is part of a call.

A rate that is changed, a hook that is set later, a module that is exchanged.
"""

from __future__ import annotations

import copy
import threading
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.letters import NotCaptured, NotServed
from autopar.testing import on_threads
from tests.models import eager_links
from tests.shares import by_day, diagonal
from tests.training import whole

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Arguments:
    """Neither a module nor settings."""

    def __init__(self):
        self.k = 1.0


class Net(nn.Module):
    temperature = 1.0

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 12), nn.Dropout(0.4), nn.Linear(12, 6)
        self.scale, self.step, self.gone = 2.0, 0, 1.0
        self._power, self.weights, self.rates, self.told, self.act, self.seen = (
            2,
            [1.0, (2.0, [3.0])],
            {"of": {"all": 0.5}},
            types.SimpleNamespace(shift=0.25),
            F.gelu,
            None,
        )
        self.args, self.options = Arguments(), types.SimpleNamespace(inner=Arguments())

    def forward(self, x):
        x = x * self.temperature * (2.0 if getattr(self, "warm", False) else 1.0)
        x = x * self.args.k / self.options.inner.k
        x = self.last(self.drop(self.act(self.first(x)))) * self.scale
        self.seen = x  # is put back after capture
        return (x * self.weights[0] + self.weights[1][1][0] + self.told.shift).pow(self._power).mean() * self.rates[
            "of"
        ]["all"]


MODEL = Net().double()  # one for all ranks: threads share torch's generator


def double(module, args, output):
    return output * 2


CHANGES = {
    "no dropout": lambda m: setattr(m.drop, "p", 0.0),
    "a scale": lambda m: setattr(m, "scale", 3.0),
    "a hook": lambda m: m.first.register_forward_hook(double),
    "nothing left": lambda m: setattr(m.drop, "p", 1.0),
    "back again": lambda m: setattr(m.drop, "p", 0.0),
    "in a list": lambda m: m.weights.__setitem__(0, 4.0),
    "in a list in a list": lambda m: m.weights[1][1].append(m.weights[1][1].pop() + 1),
    "in a dict": lambda m: m.rates["of"].update(all=0.7),
    "of settings": lambda m: setattr(m.told, "shift", 1.0),
    "other settings": lambda m: setattr(m, "told", types.SimpleNamespace(shift=2.0)),
    "of those": lambda m: setattr(m.told, "shift", 3.0),
    "a private one": lambda m: setattr(m, "_power", 4),
    "a function": lambda m: setattr(m, "act", torch.tanh),
    "nothing at all": lambda m: m.rates["of"].update(all=0.7),
}


def test_what_is_changed_later_is_computed():
    def body(rank):
        mine, theirs = (
            autopar.autoparallelize(copy.deepcopy(MODEL), {"x": X}, mesh=2, parallel="dp", cluster=eager_links()),
            copy.deepcopy(MODEL),
        )
        for name, change in CHANGES.items():
            change(mine), change(theirs)
            loss, expected = mine(x=X), theirs(X)
            loss.backward(), expected.backward()
            torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=1e-14, msg=name)
            torch.testing.assert_close(
                mine.first.weight.grad.full_tensor(), theirs.first.weight.grad, rtol=1e-10, atol=1e-14, msg=name
            )
        assert len(mine._autopar.programs) == 13  # the first, one a change, and none for what came back or for nothing
        twin = copy.deepcopy(mine)
        assert (
            mine.first.weight.grad is not None
            and all(p.grad is None for p in twin.parameters())
            and copy.deepcopy(theirs.first).weight.grad is None
        )
        torch.testing.assert_close(twin(x=X), theirs(X), rtol=1e-12, atol=1e-14)
        assert len(twin._own.programs) == 13
        return True

    assert all(on_threads(2, body))


class Stopping(nn.Module):
    """Where it stops a gradient its program is the same, op by op, but for what is recorded."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.stop = nn.Linear(6, 12), nn.Linear(12, 6), False

    def forward(self, x):
        with torch.set_grad_enabled(not self.stop):
            h = self.first(x)
        return self.last(h.tanh()).pow(2).mean()


@pytest.mark.parametrize("is_one", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kinds", [(False, True), (True, False)], ids=str)
def test_programs_that_differ_by_what_is_recorded_alone_are_two(kinds, is_one):
    one = Stopping().double()

    def body(rank):
        mine = None
        for stop in kinds:
            theirs = copy.deepcopy(one)
            theirs.stop = stop
            if mine is None or not is_one:
                mine = autopar.autoparallelize(copy.deepcopy(theirs), {"x": X}, mesh=2, cluster=eager_links())
            mine.stop = stop
            mine.zero_grad()
            theirs(X).backward(), mine(x=X).backward()
            for (name, p), q in zip(theirs.named_parameters(), mine.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), (name, stop)
                if p.grad is not None:
                    torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-10, atol=1e-14)
        return True

    assert all(on_threads(2, body))


LATER = {
    "a default of the class": lambda m: setattr(m, "temperature", 0.5),
    "one that was missing": lambda m: setattr(m, "warm", True),
    "one that nobody asks for": lambda m: setattr(m, "cold", True),
    "in a plain object": lambda m: setattr(m.args, "k", 3.0),
    "in one of settings": lambda m: setattr(m.options.inner, "k", 2.0),
}


def test_what_was_not_there_before_is_seen_where_it_is_asked_for():
    theirs = copy.deepcopy(MODEL).eval()
    mine = autopar.autoparallelize(copy.deepcopy(theirs), {"x": X}, mesh=1, cluster=eager_links())
    try:
        for name, change in LATER.items():
            change(mine), change(theirs)
            torch.testing.assert_close(mine(x=X), theirs(X), rtol=1e-12, atol=1e-14, msg=name)
        assert len(mine._autopar.programs) == 5  # the first, and one a change but for what nobody asks for
    finally:
        torch.distributed.destroy_process_group()


def theirs_with(**attributes):
    model = copy.deepcopy(MODEL)
    vars(model).update(attributes)
    return model


@pytest.mark.nightly
def test_what_no_forward_reads_is_looked_at_once():
    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(MODEL), {"x": X}, mesh=2, parallel="dp", cluster=eager_links())
        for step in range(5):
            mine.step = step
            if step == 3:
                del mine.gone
            if step > 1:
                mine.seen = torch.randn(4)  # what was a plain thing may be any later
            mine(x=X)
        assert (
            len(mine._autopar.programs) == 1
        )  # one look for the step, one for what was seen, one for what is gone; nothing was lowered again
        looks = list[int]()
        mine._autopar.replan = lambda *given, replan=mine._autopar.replan, **how: (
            looks.append(1) or replan(*given, **how)
        )
        for step in range(100):
            mine.step = step
            mine(x=X)
        assert not looks and len(mine._autopar.caller.attributes.states) < 20
        mine.scale, mine.weights[0] = 5.0, 3.0  # what is read
        mine(x=X)
        mine.weights[0] = 1.0
        mine(x=X)
        assert len(mine._autopar.programs) == 3 and len(looks) == 2
        twin = copy.deepcopy(mine)  # watches what it did
        twin.step, twin.scale = 1000, 7.0
        torch.testing.assert_close(twin.eval()(x=X), theirs_with(scale=7.0).eval()(X), rtol=1e-12, atol=1e-14)
        twin.weights[0] = 9.0
        torch.testing.assert_close(
            twin(x=X), theirs_with(scale=7.0, weights=[9.0, twin.weights[1]]).eval()(X), rtol=1e-12, atol=1e-14
        )
        return True

    assert all(on_threads(2, body))


class Locked(nn.Linear):
    """Holds what cannot be copied, and says so."""

    def __init__(self):
        super().__init__(6, 6)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {k: v for k, v in vars(self).items() if k != "lock"}


def test_a_copy_is_what_the_model_says_of_its_state():
    mine = autopar.autoparallelize(Locked(), (X.float(),), mesh=1)
    for twin in (copy.deepcopy(mine), copy.copy(mine)):
        assert not hasattr(twin, "lock") and torch.equal(twin(X.float()), mine(X.float()))


def test_what_is_exchanged_on_a_fresh_copy_is_seen():
    mine, theirs = (
        autopar.autoparallelize(nn.Sequential(nn.Linear(6, 6), nn.GELU()).double(), (X,), mesh=1),
        nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double(),
    )
    twin = copy.deepcopy(mine)
    twin[1] = nn.Tanh()
    theirs[0].weight.data, theirs[0].bias.data = whole(mine[0].weight.data), whole(mine[0].bias.data)
    torch.testing.assert_close(twin(X), theirs(X))
    other = copy.deepcopy(mine)
    other.append(nn.Tanh())
    with pytest.raises(NotServed, match="has 4 modules"):
        other(X)


def test_hooks_of_the_whole_model_from_before_may_be_removed():
    model = copy.deepcopy(MODEL)
    handles = [
        model.register_forward_hook(double),
        model.register_forward_pre_hook(lambda m, given, named: (given, {"x": named["x"] + 1}), with_kwargs=True),
    ]
    theirs = copy.deepcopy(MODEL)
    theirs.drop.p = model.drop.p = 0.0
    mine = autopar.autoparallelize(model, {"x": X}, mesh=1)
    for handle, expected in zip([None, *handles], (theirs(X + 1) * 2, theirs(X + 1), theirs(X)), strict=True):
        if handle is not None:
            handle.remove()
        torch.testing.assert_close(mine(x=X).detach(), expected.detach(), rtol=1e-12, atol=1e-14)


def test_a_backward_hook_set_later_on_a_part_is_a_letter_and_on_the_whole_fires():
    def body(rank):
        mine, fired = (
            autopar.autoparallelize(copy.deepcopy(MODEL), {"x": X}, mesh=2, parallel="dp", cluster=eager_links()),
            [],
        )
        mine.register_full_backward_hook(lambda *given: fired.append(given))
        mine(x=X).backward()
        assert len(fired) == 1
        mine.first.register_full_backward_hook(lambda *given: None)
        with pytest.raises(NotCaptured, match="backward hooks are set on first"):
            mine(x=X)
        return True

    assert all(on_threads(2, body))


class Warm(nn.Module):
    """Reads its step, which makes a difference late, and other things in other calls."""

    def __init__(self):
        super().__init__()
        self.lin, self.drop, self.step, self.alpha, self.kind = nn.Linear(6, 6), nn.Dropout(0.0), 0, 0.0, True

    def forward(self, x, target=None):
        y = self.drop(self.lin(x)) * min(1.0, max(0, self.step - 2) / 4) * (3.0 if self.kind is True else 1.0)
        return y.mean() if target is None else F.cross_entropy(y, target, label_smoothing=self.alpha)

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) * 2


class Own(Warm):
    """Reads attributes in a way of its own."""

    def __getattribute__(self, name):
        return object.__getattribute__(self, name)


class Behind:
    """Reads attributes in a way of its own, and stands behind nn.Module.

    What it gives is what forward computes with.
    """

    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        return found + 1 if name == "step" else found


class Before(Warm, Behind):
    pass


@pytest.mark.parametrize("cls", by_day([Warm, Own, Before], Own))
def test_what_made_no_difference_once_is_not_forgotten(cls):
    theirs, target = cls().double(), torch.arange(8) % 6
    mine = autopar.autoparallelize(copy.deepcopy(theirs), {"x": X}, mesh=1)
    for step in range(7):
        for model in (mine, theirs):
            model.step, model.alpha, model.kind = step, step / 10, (True, 1, 1.0, True, 1, True, 1.0)[step]
            model.seen = np.float32(step)  # nobody's
        for given in ({}, {"target": target}):
            torch.testing.assert_close(mine(x=X, **given), theirs(X, **given), rtol=1e-12, atol=1e-14)
    for p in (0.0, 1.0, 0.0):
        mine.drop.p = theirs.drop.p = p
        for train in (False, True):
            torch.testing.assert_close(mine.train(train)(x=X), theirs.train(train)(X), rtol=1e-12, atol=1e-14)


class Centred(nn.Module):
    """Two layers with centres of their own, registered, as attributes or in a list; the first may be written."""

    def __init__(self, kind, moves):
        super().__init__()
        self.kind, self.moves = kind, moves
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        centres = [torch.full((6,), value, dtype=torch.float64) for value in (0.5, 0.25)]
        self.many = centres if kind == "in a list" else []
        for layer, centre in zip(self.layers, centres, strict=True):
            if kind == "registered":
                layer.register_buffer("centre", centre)
            elif kind == "an attribute":
                layer.centre = centre

    def forward(self, x):
        first, second = self.many or [layer.centre for layer in self.layers]
        x = self.layers[0](x) - first
        if self.moves:
            first.add_(1.0)
        return self.layers[1](x) * second

    def hold(self, first, second):
        if self.many:
            self.many = [first, second]
        else:
            self.layers[0].centre, self.layers[1].centre = first, second


@pytest.mark.parametrize("moves, kind", diagonal([False, True], ["registered", "an attribute", "in a list"]))
def test_buffers_may_be_tied_and_untied_later(kind, moves):
    theirs = Centred(kind, moves).double()
    mine = autopar.autoparallelize(copy.deepcopy(theirs), (X,), mesh=1)
    for is_tied in (False, True, True, False, True):
        for model in (mine, theirs):
            one, other = (torch.full((6,), v, dtype=torch.float64) for v in (0.5, 0.25))
            model.hold(one, one if is_tied else other)
        for _ in range(2):
            torch.testing.assert_close(mine(X), theirs(X), rtol=1e-12, atol=1e-14)


def tied():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    model[1].weight = model[0].weight
    return model


def set_to(model, name, value):
    setattr(model[1], name, value)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda m: set_to(m, "weight", nn.Parameter(torch.ones(6, 6, dtype=torch.float64))), "1.weight was not there"),
        (
            lambda m: set_to(m, "scale", torch.ones(6, dtype=torch.float64, requires_grad=True)),
            "the buffer 1.scale wants a gradient",
        ),
    ],
    ids=["untied", "a buffer that wants a gradient"],
)
def test_what_came_later_and_trains_is_a_letter(change, words):
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(6, 6)
            self.scale = torch.ones(6)

        def forward(self, x):
            return super().forward(x) * self.scale

    model = tied()
    model[1] = Scaled().double()
    model[1].weight, model[1].scale = model[0].weight, torch.ones(6, dtype=torch.float64)
    mine = autopar.autoparallelize(model, (X,), mesh=1)
    mine(X)
    change(mine)
    with pytest.raises(NotServed, match=words):
        mine(X)


def test_a_parameter_that_is_changed_before_backward_is_a_letter():
    def body(rank):
        for parallel in ("dp", "zero3"):
            mine = autopar.autoparallelize(
                copy.deepcopy(MODEL), {"x": X}, mesh=2, parallel=parallel, cluster=eager_links()
            )
            loss = mine(x=X)
            with torch.no_grad():
                mine.last.bias.mul_(2.0)  # which backward does not need
            loss.backward()
            loss = mine(x=X)
            torch.optim.SGD(mine.parameters(), 0.1).step()
            with pytest.raises(NotServed, match="modified in place between forward and backward"):
                loss.backward()
        return True

    assert all(on_threads(2, body))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_what_draws_nothing(reentrant):
    """It counts what autograd saves: not what lowering does, which its first call may start."""
    mine, theirs = autopar.autoparallelize(copy.deepcopy(MODEL), {"x": X}, mesh=1), copy.deepcopy(MODEL)
    mine.drop.p = theirs.drop.p = 0.0
    checkpoint(mine, X.clone().requires_grad_(), use_reentrant=reentrant).backward(), theirs(X).backward()
    torch.testing.assert_close(mine.first.weight.grad.full_tensor(), theirs.first.weight.grad, rtol=1e-10, atol=1e-14)


def test_an_exchanged_module_is_a_letter():
    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(MODEL), {"x": X}, mesh=2, parallel="dp", cluster=eager_links())
        mine.last = nn.Linear(12, 6).double()
        with pytest.raises(NotServed, match="were exchanged after"):
            mine(x=X)
        return True

    assert all(on_threads(2, body))


def test_a_copy_has_modes_and_gradients_of_its_own():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    own = copy.deepcopy(model)
    x = torch.arange(32, dtype=torch.float64).view(8, 4) / 10
    own(x)
    expected = copy.deepcopy(own).eval()(x)

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), (x,), mesh=2, cluster=eager_links())
        mine(x)
        with mine.no_sync():
            mine(x).sum().backward()
        statistics = mine[1].running_mean.clone()
        other = copy.deepcopy(mine).eval()
        other[1].running_mean.copy_(own[1].running_mean)
        other[1].running_var.copy_(own[1].running_var)
        found = other(x)
        other.zero_grad()
        assert (
            torch.equal(mine[1].running_mean, statistics)
            and mine._autopar.waiting.of
            and not other._autopar.waiting.of
            and mine.training
        )
        return whole(found.detach())

    for found in on_threads(2, body):
        torch.testing.assert_close(found, expected)


def test_buffers_are_those_of_the_module_in_each_call():
    """Replaced one by one, tied afterwards, or all at once with the dict that holds them."""
    x = torch.randn(8, 4)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    mine = autopar.autoparallelize(copy.deepcopy(plain), {"input": x}, mesh=1)
    for each in (plain, mine):
        norm = each[1]
        each(x)
        norm.running_mean = torch.full((4,), 3.0)
        each(x)
        norm.__setstate__(copy.copy({**norm.__dict__, "_buffers": {k: v.clone() for k, v in norm._buffers.items()}}))
        each(x)
        norm._buffers = {k: v + 1 for k, v in norm._buffers.items()}
        each(x)
    torch.testing.assert_close(dict(mine.named_buffers()), dict(plain.named_buffers()))
    assert mine[1].num_batches_tracked == 5
    torch.testing.assert_close(mine.eval()(x), plain.eval()(x))
