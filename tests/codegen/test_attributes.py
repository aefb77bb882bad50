"""What modules say of themselves is part of a call: a rate that is changed, a hook that is set later, a module that is exchanged."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.letters import NotCaptured, NotServed
from autopar.testing import on_threads
from tests.models import eager_links

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 12), nn.Dropout(0.4), nn.Linear(12, 6)
        self.scale, self.step, self.gone = 2.0, 0, 1.0

    def forward(self, x):
        return (self.last(self.drop(F.gelu(self.first(x)))) * self.scale).square().mean()


MODEL = Net().double()                                         # one for all ranks: threads share torch's generator


def double(module, args, output):
    return output * 2


CHANGES = {
    "no dropout": lambda m: setattr(m.drop, "p", 0.0), "a scale": lambda m: setattr(m, "scale", 3.0), "a hook": lambda m: m.first.register_forward_hook(double),
    "nothing left": lambda m: setattr(m.drop, "p", 1.0), "back again": lambda m: setattr(m.drop, "p", 0.0),
}


def test_what_is_changed_later_is_computed():
    def body(rank):
        mine, theirs = autopar.autoparallelize(copy.deepcopy(MODEL), {"x": X}, mesh=2, parallel="dp", cluster=eager_links()), copy.deepcopy(MODEL)
        for name, change in CHANGES.items():
            change(mine), change(theirs)
            loss, expected = mine(x=X), theirs(X)
            loss.backward(), expected.backward()
            torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=1e-14, msg=name)
            torch.testing.assert_close(mine.first.weight.grad.full_tensor(), theirs.first.weight.grad, rtol=1e-10, atol=1e-14, msg=name)
        assert len(mine._autopar.programs) == 5                # the first, one a change, and none for what came back
        twin = copy.deepcopy(mine)                             # with its gradients, which are its own
        torch.testing.assert_close(twin.first.weight.grad.full_tensor(), theirs.first.weight.grad)
        assert twin.first.weight.grad is not mine.first.weight.grad
        torch.testing.assert_close(twin(x=X), theirs(X), rtol=1e-12, atol=1e-14)
        assert len(twin._own.programs) == 5
        return True

    assert all(on_threads(2, body))


def test_what_no_forward_reads_is_forgotten_after_one_look():
    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(MODEL), {"x": X}, mesh=2, parallel="dp", cluster=eager_links())
        for step in range(5):
            mine.step = step
            if step == 3:
                del mine.gone
            mine(x=X)
        assert len(mine._autopar.programs) <= 3                # one look for the step, one for what is gone
        before = len(mine._autopar.programs)
        for step in range(100):
            mine.step = step
            mine(x=X)
        assert len(mine._autopar.programs) == before and len(mine._autopar.caller.states) < 100
        mine.scale = 5.0                                       # the rest is watched still
        mine(x=X)
        assert len(mine._autopar.programs) == before + 1
        return True

    assert all(on_threads(2, body))


def test_a_backward_hook_set_later_on_a_part_is_a_letter_and_on_the_whole_fires():
    def body(rank):
        mine, fired = autopar.autoparallelize(copy.deepcopy(MODEL), {"x": X}, mesh=2, parallel="dp", cluster=eager_links()), []
        mine.register_full_backward_hook(lambda *given: fired.append(given))
        mine(x=X).backward()
        assert len(fired) == 1
        mine.first.register_full_backward_hook(lambda *given: None)
        with pytest.raises(NotCaptured, match="backward hooks are set on first"):
            mine(x=X)
        return True

    assert all(on_threads(2, body))


def test_an_exchanged_module_is_a_letter():
    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(MODEL), {"x": X}, mesh=2, parallel="dp", cluster=eager_links())
        mine.last = nn.Linear(12, 6).double()
        with pytest.raises(NotServed, match="were exchanged after"):
            mine(x=X)
        return True

    assert all(on_threads(2, body))
