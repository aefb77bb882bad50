"""Random numbers by position: their bits are the published ones, and their distributions are torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from autopar.runtime import forms
from autopar.runtime.random import Draws, key_of, mix
from tests.oracle import kept, murmur_finalizer


def test_the_bits_are_murmurs():
    """Published: MurmurHash3_x86_32 of nothing with seed 1 is 0x514E28B7, with seed 0xFFFFFFFF 0x81F16F39."""
    assert mix(torch.tensor([1, -1], dtype=torch.int32)).tolist() == [0x514E28B7, 0x81F16F39 - 2**32]
    assert [hex(int(murmur_finalizer(s))) for s in (1, 0xFFFFFFFF)] == ["0x514e28b7", "0x81f16f39"]


@pytest.mark.parametrize("shape", [(3, 5, 7), (11,), (), (1, 64)])
@pytest.mark.parametrize("seed, step, op", [(0, 0, 0), (2**63 - 1, 3, 41), (1234567, 2**40, 7)])
def test_bits_equal_numpys(shape, seed, step, op):
    found = Draws(torch.tensor(key_of(seed, step)), op, shape, [()] * len(shape), shape).bits()
    for p in (0.0, 0.1, 0.5, 0.9):
        assert np.array_equal((found >= int(p * 2**32) - 2**31).numpy(), kept(seed, step, op, p, shape))


def test_the_bits_look_random():
    found = Draws(torch.tensor(12345), 0, (1000, 1000), [(), ()], (1000, 1000)).bits()
    ones = torch.stack([(found >> i) & 1 for i in range(32)]).double()
    assert ((ones.mean((1, 2)) - 0.5).abs() < 5 * 0.5 / 1000).all()
    for axis in (1, 2):  # no correlation with the neighbour
        a, b = ones.narrow(axis, 0, 999) - 0.5, ones.narrow(axis, 1, 999) - 0.5
        assert ((a * b).mean((1, 2)).abs() < 5 * 0.25 / 1000).all()
    others = Draws(torch.tensor(12345), 1, (1000, 1000), [(), ()], (1000, 1000)).bits()
    assert (found == others).double().mean() < 1e-5


KEY, N = torch.tensor(key_of(11, 2)), 60000


def drawn(kind, a=None, b=None, dtype=torch.float64):
    return forms.drawn_by_position(kind, KEY, 3, (N,), ((),), (N,), dtype, a, b)


@pytest.mark.parametrize(
    "kind, a, b",
    [
        ("uniform", None, None),
        ("uniform", -2.0, 5.0),
        ("normal", None, None),
        ("normal", 3.0, 0.5),
        ("exponential", 2.0, None),
        ("log_normal", 0.5, 0.3),
        ("cauchy", 1.0, 2.0),
        ("geometric", 0.3, None),
        ("random", 3, 17),
    ],
)
def test_their_distribution_is_that_of_torch(kind, a, b):
    eager = getattr(torch.empty(N, dtype=torch.float64), f"{kind}_")(*(v for v in (a, b) if v is not None))
    for dtype in (torch.float64, torch.float32):
        ours = drawn(kind, a, b, dtype)
        assert ours.dtype == dtype and ours.isfinite().all()
        edges = torch.linspace(0.02, 0.98, 25).double()
        share = [
            (x.double()[:, None] <= eager.quantile(edges)).double().mean(0) for x in (ours, eager)
        ]  # the empirical distributions, at the same points
        assert (share[0] - share[1]).abs().max() < 0.012
    if kind != "geometric":
        assert drawn(kind, a, b).unique().numel() > (13 if kind == "random" else N // 2)


def test_whole_numbers_reach_both_ends_and_no_further():
    ours = drawn("random", -2, 3, torch.int64)
    assert ours.unique().tolist() == [-2, -1, 0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_uniform_number_is_never_rounded_to_one(dtype):
    """As torch draws halves: up to the number before one, and near zero as finely as they are (torch from 2.12 on)."""
    ours, eager = drawn("uniform", dtype=dtype), torch.rand(N, dtype=dtype)
    assert ours.dtype == dtype and ours.max() < 1 and ours.min() >= 0
    assert ours.unique().numel() >= 0.95 * eager.unique().numel()
    assert torch.log1p(-ours).isfinite().all() and drawn("normal", dtype=dtype).isfinite().all()


@pytest.mark.parametrize("first, last", [(0, 2**40), (-(2**62), 2**62 - 5), (7, 7 + 2**33)])
def test_whole_numbers_of_a_wide_range_have_all_their_bits(first, last):
    ours = drawn("random", first, last, torch.int64)
    assert ours.min() >= first and ours.max() < last
    low = torch.bincount(ours % 16, minlength=16) / N
    assert (low - 1 / 16).abs().max() < 0.006
    assert ours.double().mean().item() == pytest.approx((first + last) / 2, abs=0.01 * (last - first))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int8]
)
def test_whole_numbers_without_a_range_have_that_of_torch(dtype):
    ours, eager = drawn("random", dtype=dtype).double(), torch.empty(N, dtype=dtype).random_().double()
    assert ours.isfinite().all() and ours.min() >= 0
    for some in (0.1, 0.5, 0.9, 1.0):
        assert ours.quantile(some).item() == pytest.approx(eager.quantile(some).item(), rel=0.05, abs=1)


def test_uniform_numbers_are_the_published_finalizer_of_places():
    def mix(h):
        with np.errstate(over="ignore"):
            h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
            h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
            return h ^ (h >> np.uint32(16))

    key, op, shape = int(KEY) % 2**64, 5, (4, 7)
    with np.errstate(over="ignore"):
        seed = mix(mix(np.uint32(key % 2**32) ^ np.uint32(op * 0x85EBCA77 % 2**32)) ^ np.uint32(key >> 32))
        rows = mix(mix(np.uint32(0) ^ seed) ^ np.arange(4, dtype=np.uint32))
        bits = mix(rows[:, None] + np.arange(7, dtype=np.uint32) * np.uint32(0x9E3779B9))
    assert np.array_equal(Draws(KEY, op, shape, ((), ()), shape).uniform(torch.float64).numpy(), bits / 2.0**32)
    assert np.array_equal(
        Draws(KEY, op, shape, ((), ()), shape).uniform().numpy(), (bits >> 8).astype(np.float32) / np.float32(2**24)
    )


@pytest.mark.parametrize("replacement", [False, True])
def test_categories_come_by_their_weights(replacement):
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0]).expand(20000, 4)
    ours = forms.multinomial_by_position(weights, KEY, 1, (20000, 4), ((), ()), 2, replacement)
    eager = torch.multinomial(weights, 2, replacement)
    for i in range(2):
        shares = [torch.bincount(x[:, i], minlength=4) / 20000 for x in (ours, eager)]
        assert (shares[0] - shares[1]).abs().max() < 0.015
    assert replacement or (ours[:, 0] != ours[:, 1]).all()


def test_alpha_dropout_keeps_mean_and_variance():
    x = torch.randn(400, 300).double()
    ours = forms.alpha_dropout_by_position(x, KEY, 1, (400, 300), ((), ()), 0.3)
    assert abs(ours.mean().item()) < 0.02 and abs(ours.var().item() - 1) < 0.02
    torch.manual_seed(0)
    eager = F.alpha_dropout(x, 0.3, True)
    low = torch.stack([y.min() for y in (ours, eager)])
    torch.testing.assert_close(ours[ours <= low[0] + 1e-9].mean(), eager[eager <= low[1] + 1e-9].mean())


def test_attention_that_sees_nothing_attends_to_nothing():
    q = torch.randn(1, 1, 3, 4).double().requires_grad_()
    mask = torch.tensor([[True, True, True], [False, False, False], [True, False, True]])
    expected = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    found = forms.attention_by_position(
        q, q, q, torch.tensor(7), 0, (1, 1, 3, 3), [(), (), (), ()], attn_mask=mask, dropout_p=1e-9
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), q), torch.autograd.grad(expected.sum(), q))
