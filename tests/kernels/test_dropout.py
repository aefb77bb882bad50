"""Dropout in one kernel: the draw of the tensor's places, with a sum, forward and backward; nothing is kept for it."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.codegen.local_passes import use_kernels
from autopar.kernels.dropout import dropped
from autopar.runtime import random
from tests.kernels.sites import counts, program_of

KEY = torch.tensor(0x1234_5678_9ABC)
SHAPE = (6, 5, 40)


def places(*cuts):
    return [torch.arange(*cut) for cut in cuts]


WHOLE = places((0, 6), (0, 5), (0, 40))


@pytest.mark.parametrize("adds", [False, True])
def test_a_part_is_that_of_the_whole_in_forward_and_in_backward(adds, interpret):
    """A device with some rows and some columns draws for their places; backward drops what forward dropped."""
    x, added = (torch.randn(SHAPE, requires_grad=True) for _ in range(2))
    whole = dropped(x, added if adds else None, KEY, 3, 0.25, list(SHAPE), WHOLE)
    gradient = torch.randn(SHAPE)
    wanted = [x, added] if adds else [x]
    of_whole = torch.autograd.grad(whole, wanted, gradient)
    rows, columns = slice(2, 5), slice(8, 24)
    part, other = (v.detach()[rows, :, columns].requires_grad_() for v in (x, added))
    here = places((2, 5), (0, 5), (8, 24))
    found = dropped(part, other if adds else None, KEY, 3, 0.25, list(SHAPE), here)
    assert torch.equal(found, whole[rows, :, columns])
    given = torch.autograd.grad(found, [part, other] if adds else [part], gradient[rows, :, columns])
    for one, right in zip(given, of_whole, strict=True):
        assert torch.equal(one, right[rows, :, columns])
    mask = random._kept_at(KEY, 3, 0.25, list(SHAPE), WHOLE)
    assert torch.equal(of_whole[0] != 0, mask) and 0.2 < 1 - mask.float().mean() < 0.3
    assert not adds or torch.equal(of_whole[1], gradient)


@pytest.mark.parametrize("adds", [False, True])
def test_what_torch_is_told_of_the_op_is_right(adds, as_ops):
    x, added = (torch.randn(SHAPE, requires_grad=True) for _ in range(2))
    given = (x, added if adds else None, KEY, 3, 0.25, list(SHAPE), WHOLE)
    torch.library.opcheck(torch.ops.autopar.dropout.default, given)


def test_forward_and_backward_are_one_node_each_and_keep_no_mask(as_ops):
    x, added = (torch.randn(SHAPE, requires_grad=True) for _ in range(2))

    def step(x, added, key, *places):
        y = dropped(x, added, key, 3, 0.25, list(SHAPE), list(places))
        return torch.autograd.grad(y.square().sum(), (x, added))

    traced = make_fx(step, tracing_mode="fake")(x, added, KEY, *WHOLE)
    assert [str(n.target) for n in traced.graph.nodes if "autopar" in str(n.target)] == [
        "autopar.dropout.default",
        "autopar.dropout_backward.default",
    ]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        dropped(x, added, KEY, 3, 0.25, list(SHAPE), WHOLE)
    assert max(kept) <= max(SHAPE)


class Residual(torch.nn.Module):
    """Dropout whose sum no norm reads, then one that others read too."""

    def __init__(self, p):
        super().__init__()
        self.up, self.drop = torch.nn.Linear(16, 16), torch.nn.Dropout(p)

    def forward(self, x):
        y = x + self.drop(self.up(x))
        z = self.drop(y)
        return (z * y + z).square().mean()


@pytest.mark.parametrize(("p", "expected"), [(0.1, {"dropout": 2}), (1.0, {})])
def test_a_sum_goes_with_its_dropout_where_nothing_else_takes_it(p, expected):
    program = program_of(Residual(p).train(), {"x": torch.randn(4, 16)})
    use_kernels(program)
    assert counts(program) == expected
    assert str(program).count("in the place of dropout_by_position, add") == bool(expected)
