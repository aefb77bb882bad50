"""A look at copies while a model trains: one flipped bit is named on every rank, and nothing else is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar
from autopar.letters import Diverged, NotServed
from autopar.testing import on_threads
from tests.models import eager_links

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
    return losses, watch.looks if watched else 0


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


@pytest.mark.parametrize("name", MESHES)
def test_a_sound_run_is_not_disturbed(name):
    plain = on_threads(4, trained, name, None, False)
    watched = on_threads(4, trained, name, None, True)
    assert [looks for _, looks in watched] == [2] * 4
    assert [losses for losses, _ in watched] == [losses for losses, _ in plain]


@pytest.mark.parametrize(
    ("name", "where", "said"),
    [
        ("dp", lambda m, o: m.up.weight, "up.weight on rank 2 differs from its copies on 0, 1, 3, at call 6"),
        ("dp", lambda m, o: m.norm.running_var, "norm.running_var on rank 2 differs from its copies on 0, 1, 3"),
        ("dp", lambda m, o: o.state[m.down.bias]["exp_avg"], "so do exp_avg of down.bias"),
        ("tensor", lambda m, o: m.norm.bias, "norm.bias on rank 2 differs from its copies on 0, 1, 3, at call 6"),
        ("zero3 beside copies", lambda m, o: m.up.weight, "up.weight on rank 2 differs from its copies on 0, at call"),
        ("both", lambda m, o: m.up.weight, "up.weight on rank 2 differs from its copies on 0, at call 6"),
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
    assert [looks for _, looks in found] == [2] * 4


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
    for every in (0, -1, 2.5, True):
        with pytest.raises(NotServed, match="number of calls"):
            on_threads(1, wrong, every)


def wrong(rank, every):
    autopar.watch(autopar.autoparallelize(copy.deepcopy(MODEL), (X,), mesh=1), every=every)
