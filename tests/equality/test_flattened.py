"""A sequence that is cut inside a flattened (batch, sequence), beside an axis that cuts the batches."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.ops.products import einsum
from autopar.testing import Equality
from tests.random_plans import random_plan
from tests.shares import by_day
from tests.training import whole


class Flattened(nn.Module):
    """What GPT-2's Conv1D does, and a loss over flattened tokens."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 10)

    def forward(self, x, labels):
        b, s, d = x.shape
        h = self.up(x.tanh().view(b * s, d))
        y = self.down(F.gelu(h)).view(b, s, 10)
        return F.cross_entropy(y.tanh().view(-1, 10), labels.view(-1))


BLOCKS = "blocks=(8, 8, 8, 8)"
PINS = {
    "sequence": ((2,), {"up": f"S(0, {BLOCKS})", "down": f"S(0, {BLOCKS})"}),
    "both": ((2, 2), {"up": f"S(0)@0, S(0, {BLOCKS})@1", "down": f"S(0)@0, S(0, {BLOCKS})@1"}),
    "both, the other way": ((2, 2), {"up": f"S(0, {BLOCKS})@0, S(0)@1", "down": f"S(0, {BLOCKS})@0, S(0)@1"}),
    "in turn": ((2, 2), {"up": f"S(0)@0, S(0, {BLOCKS})@1", "down": "S(0)@0, S(0)@1"}),
    **{f"random {i}": ((2, 2, 2), i) for i in range(2)},
}


@pytest.mark.parametrize("name", by_day(PINS, *(name for name in PINS if name != "random 1")))
def test_the_sequence_is_cut_inside_each_batch(name, threads):
    mesh, pins = PINS[name]
    model, batch = Flattened().double(), {"x": torch.randn(4, 8, 6).double(), "labels": torch.randint(0, 10, (4, 8))}
    reference = copy.deepcopy(model)
    loss = reference(**batch)
    loss.backward()
    expected = {"loss": loss.detach(), **{n: p.grad for n, p in reference.named_parameters()}}
    mesh = autopar.DeviceMesh(mesh)
    plan = (
        random_plan(model, batch, mesh, pins)
        if isinstance(pins, int)
        else autopar.plan(model, batch, mesh=mesh, constraints=pins)
    )

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
        loss = mine(**batch)
        loss.backward()
        return {"loss": loss.detach(), **{n: whole(p.grad) for n, p in mine.named_parameters()}}

    for result in threads(mesh.size, body):
        Equality.in_float64(name, result, expected, 1e-9).check()


class Spelled(nn.Module):
    """Attention by einsum, and a product that is summed over both dims of a matrix."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.parts, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.parts(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        shares = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
        found = x + self.out(torch.einsum("bhij,bjhd->bihd", shares, v).flatten(2))
        return found.square().mean() + torch.einsum("bij,bij->b", found, x).tanh().mean()


@pytest.mark.parametrize(
    "rows, length, width, heads, mesh, parallel",
    [
        (4, 8, 8, 4, (4,), "dp"),
        (4, 4, 32, 4, (4,), "zero3"),
        (4, 32, 32, 4, (4,), "tp"),
        (4, 16, 32, 4, (2, 2), "megatron"),
        (3, 3, 8, 2, (3,), "dp"),
    ],
)
def test_an_einsum_of_one_row_or_one_head_a_device(rows, length, width, heads, mesh, parallel, threads):
    """torch contracts a dim of one row with what stands beside it, where sizes of others may look alike."""
    torch.manual_seed(0)
    model, x = Spelled(width, heads).double(), torch.randn(rows, length, width, dtype=torch.float64)
    reference = copy.deepcopy(model)
    loss = reference(x)
    loss.backward()
    expected = {"loss": loss.detach(), **{n: p.grad for n, p in reference.named_parameters()}}

    def body(rank):
        mine = autopar.autoparallelize(copy.deepcopy(model), {"x": x}, mesh=mesh, parallel=parallel)
        loss = mine(x)
        loss.backward()
        return {"loss": loss.detach(), **{n: whole(p.grad) for n, p in mine.named_parameters()}}

    for result in threads(autopar.DeviceMesh(mesh).size, body):
        Equality.in_float64(str((rows, length, width, heads, mesh)), result, expected, 1e-9).check()


@pytest.mark.parametrize(
    "equation, left, right",
    [
        ("bihd,bjhd->bhij", (1, 3, 2, 5), (1, 4, 2, 5)),
        ("bhij,bjhd->bihd", (2, 1, 3, 4), (2, 4, 1, 5)),
        ("bij,bji->b", (2, 1, 5), (2, 5, 1)),
        ("ij,kj->ki", (1, 3), (4, 3)),
        ("i,j->ji", (1,), (4,)),
        ("bi,bi->ib", (1, 3), (1, 3)),
        ("ij,jk->", (1, 3), (3, 2)),  # torch's own from here on
        ("bi,bj->ij", (1, 3), (2, 4)),
        ("...i,ij->...j", (1, 3), (3, 2)),
    ],
)
def test_an_einsum_of_one_row_is_torch_s(equation, left, right):
    dice = torch.Generator().manual_seed(5)
    x, y = (torch.randn(shape, dtype=torch.float64, generator=dice, requires_grad=True) for shape in (left, right))
    found, expected = einsum(equation, [x, y]), torch.einsum(equation, x, y)
    torch.testing.assert_close(found, expected)
    gradient = torch.randn(expected.shape, dtype=torch.float64, generator=dice)
    for one, other in zip(*(torch.autograd.grad(r, (x, y), gradient) for r in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)
