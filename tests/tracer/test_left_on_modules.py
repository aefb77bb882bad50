"""What forward leaves on its modules: the next call goes by it as on one device, or a letter says that it cannot."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch import nn

import autopar
from autopar.letters import NotCaptured, NotServed
from autopar.testing import Equality, on_threads
from autopar.tracer import ColoTracer
from tests.models import eager_links
from tests.training import whole

CALLS = 4


class Leaves(nn.Module):
    """A product, and what a function makes of it and of the state that the module holds."""

    def __init__(self, function, **state):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("bias", torch.zeros(6, dtype=torch.float64))
        self.function = function
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self, x, x @ self.weight).pow(2).mean()


def begins_from_data(m, x, y):
    if not m.ready:
        m.bias.copy_(-y.detach().mean(0))
        m.ready = True
    return y + m.bias


def other_at_first(m, x, y):
    first, m.first = m.first, False
    return 2 * y if first else y.tanh()


def by_turns(m, x, y):
    m.flips = not m.flips
    return y.sin() if m.flips else y.cos()


def warms_up(m, x, y):
    m.calls += 1
    return y * (0.5 if m.calls <= 2 else 1.0)


def every_third(m, x, y):
    m.calls += 1
    return y.exp() if m.calls % 3 == 0 else y


def last_one(m, x, y):
    y = y if m.last is None else y + m.last
    m.last = y.detach()
    return y


def table_of_the_longest(m, x, y):
    if m.cached < len(x):
        m.cached = len(x)
        m.table = torch.arange(m.cached, dtype=x.dtype)[:, None].cos()
    return y * m.table[: len(x)]


def mean_in_a_dict(m, x, y):
    m.state["mean"] = 0.9 * m.state["mean"] + 0.1 * y.detach().mean(0)
    return y + m.state["mean"]


def grown_dict(m, x, y):
    y = y + m.state.get("a.sum", 0) * m.state["layer.0"]
    m.state["a.sum"] = y.detach().sum(0)
    return y


def in_a_list(m, x, y):
    m.held[0] = m.held[0] + y.detach().mean(0)
    return y * m.held[0]


def written_in_a_list(m, x, y):
    m.held[0].add_(1)
    return y * m.held[0]


def of_an_object(m, x, y):
    begun, m.about.begun = m.about.begun, True
    return y if begun else -3 * y


def counted(m, x, y):
    m.calls += 1
    m.shown.append(y.mean())
    m.hidden = y
    return y


ZEROS = torch.zeros(6, dtype=torch.float64)
SERVED = {
    "begins from data": (begins_from_data, {"ready": False}, 2),
    "other at first": (other_at_first, {"first": True}, 2),
    "by turns": (by_turns, {"flips": False}, 2),
    "warms up": (warms_up, {"calls": 0}, None),
    "every third": (every_third, {"calls": 0}, None),
    "the last one": (last_one, {"last": None}, 2),
    "a table of the longest": (table_of_the_longest, {"cached": 0, "table": None}, 2),
    "a mean in a dict": (mean_in_a_dict, {"state": {"mean": ZEROS}}, 1),
    "a dict that grows": (grown_dict, {"state": {"layer.0": ZEROS + 2}}, 2),
    "in a list": (in_a_list, {"held": [ZEROS, 3]}, 1),
    "written in a list": (written_in_a_list, {"held": [ZEROS]}, 1),
    "of an object": (of_an_object, {"about": types.SimpleNamespace(begun=False)}, 2),
    "counted, and shown to nobody": (counted, {"calls": 0, "shown": []}, 1),
}


@pytest.mark.parametrize("name", SERVED)
def test_the_next_call_goes_by_it(name):
    function, state, programs = SERVED[name]
    made = lambda: Leaves(function, **copy.deepcopy(state))  # noqa: E731
    batches = [torch.randn(4, 6, dtype=torch.float64) for _ in range(CALLS)]

    def train(model, calls):
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
        for x in calls:
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return {"losses": torch.stack(losses), "weight": whole(model.weight).detach(), "bias": model.bias}

    def body(rank):
        mine = autopar.autoparallelize(made(), (batches[0],), mesh=2, parallel="dp", cluster=eager_links())
        found = train(mine, batches)
        assert programs is None or len(mine._autopar.programs) == programs
        if name.startswith("counted"):
            with pytest.raises(NotServed, match="sets the attribute hidden to a tensor"):
                float(mine.hidden.mean())
        return found

    expected = train(made(), batches)
    for rank in on_threads(2, body):
        Equality.in_float64(name, rank, expected, 1e-9).check()
    model = made()
    replayed = ColoTracer().trace(model, (batches[0],)).module(model)
    model_again = made()
    torch.testing.assert_close(replayed(batches[0]), model_again(batches[0]))
    assert str(ColoTracer().trace(model, (batches[0],))) == str(ColoTracer().trace(model_again, (batches[0],)))


def count_in_a_dict(m, x, y):
    m.state["calls"] += 1
    return y * m.state["calls"]


def with_its_gradient(m, x, y):
    y = y + m.held[0]
    m.held[0] = y
    return y


class Memory:
    def __init__(self, calls):
        self.calls = calls


def other_object(m, x, y):
    before, m.memory = m.memory, Memory(1)
    return y if before is None else y.sin()


REFUSED = {
    "a count": (count_in_a_dict, {"state": {"calls": 0}}, "state.calls and goes by it: each call is another program"),
    "a gradient": (with_its_gradient, {"held": [ZEROS]}, "held.0 and goes by it: it has a gradient"),
    "an object": (other_object, {"memory": None}, "memory and goes by it: what it sets there is not a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_a_letter(name):
    function, state, says = REFUSED[name]
    model = Leaves(function, **copy.deepcopy(state))
    with pytest.raises(NotCaptured, match=says) as letter:
        ColoTracer().trace(model, (torch.randn(4, 6, dtype=torch.float64),))
    assert "test_left_on_modules.py" in letter.value.at and str({name: vars(model)[name] for name in state}) == str(
        state
    )


def test_tensors_in_lists_are_those_of_rank_0():
    def body(rank):
        torch.manual_seed(rank)
        tables = [torch.randn(6, dtype=torch.float64) for _ in range(2)]
        model = Leaves(lambda m, x, y: y * m.tables[0] + m.tables[1], tables=tables)
        mine = autopar.autoparallelize(model, (torch.ones(4, 6, dtype=torch.float64),), mesh=2, cluster=eager_links())
        return [mine(torch.ones(4, 6, dtype=torch.float64)).detach(), *mine.tables]

    one, other = on_threads(2, body)
    assert all(map(torch.equal, one, other))
