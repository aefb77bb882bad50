"""The kernels themselves, run by Triton's interpreter: no further from float64 than twice what eager torch is."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.kernels import cross_entropy
from autopar.kernels.cross_entropy_part import rows_of_part
from tests.kernels import over
from tests.kernels.cases import CASES, is_near, results
from tests.shares import by_day

_CANARY = 12345.0
_WIDTH = 64  # of canaries on either side


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Rows that are long, or read again because they do not fit, take the interpreter seconds: by day two of them. Others
# run in single precision and in one of the halves.
LONG = ("rms_norm, wide", "rms_norm, read again")
SHORT = [name for name in CASES if "wide" not in name and "read again" not in name]
NEAR = by_day(
    itertools.product(CASES, DTYPES),
    *((name, torch.float32) for name in SHORT),
    *zip(SHORT, itertools.cycle(DTYPES[1:])),
    *((name, torch.bfloat16) for name in LONG),
)


@pytest.mark.parametrize("name, dtype", NEAR, ids=str)
def test_a_kernel_is_as_near_to_float64_as_eager(name, dtype, interpret):
    assert is_near(CASES[name], dtype)


@pytest.mark.parametrize("runs", ["interpret", "as_ops"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gradient_over_logits_is_that_beside_them(dtype, runs, request):
    request.getfixturevalue(runs)
    over.check(dtype, "cpu")


@pytest.mark.parametrize("name", by_day(CASES, *SHORT, LONG[1]))
def test_a_kernel_writes_and_reads_nothing_beside_its_tensors(name, interpret, monkeypatch):
    """Operands stand between numbers that are none, results between canaries: neither leaves a trace."""
    case, made = CASES[name], []
    operands = [
        _between_nans(x.detach()).requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x in case.operands(torch.float32)
    ]
    empty, empty_like = torch.empty, torch.empty_like

    def guarded(shape, **how):
        x = empty((*shape[:0], 2 * _WIDTH + torch.Size(shape).numel()), **how).fill_(_CANARY)
        made.append(x)
        return x[_WIDTH : x.numel() - _WIDTH].view(shape)

    monkeypatch.setattr(torch, "empty", guarded)
    monkeypatch.setattr(
        torch, "empty_like", lambda x: guarded(x.shape, dtype=x.dtype) if x.is_contiguous() else empty_like(x)
    )
    found = results(case.call, operands)
    assert all(x.isfinite().all() for x in found)
    for x in made:
        assert (x[:_WIDTH] == _CANARY).all() and (x[-_WIDTH:] == _CANARY).all()


def _between_nans(x):
    whole = torch.full((2 * _WIDTH + x.numel(),), torch.nan)
    whole[_WIDTH : whole.numel() - _WIDTH] = x.reshape(-1)
    return whole[_WIDTH : whole.numel() - _WIDTH].view(x.shape)


@pytest.mark.parametrize("name", ["rms_norm, odd columns", "layer_norm, odd columns", "gated by silu", "rotary"])
def test_parts_of_the_rows_are_the_rows(name, interpret):
    """Two devices with some of the rows each give the results of one; gradients of weights add up."""
    case = CASES[name]
    operands = case.operands(torch.float32)
    gradient = torch.randn(case.shapes[0], generator=torch.Generator().manual_seed(1))

    def shares(start, stop):
        of_rows = [x.dim() > 1 and x.shape[0] == gradient.shape[0] for x in operands]
        given = [
            x.detach()[start:stop].requires_grad_(x.requires_grad) if has else x
            for x, has in zip(operands, of_rows, strict=True)
        ]
        y = case.call(*given)
        return [y, *torch.autograd.grad(y, [x for x in given if x.requires_grad], gradient[start:stop])]

    for place, (one, two, whole) in enumerate(zip(shares(0, 1), shares(1, None), shares(0, None), strict=True)):
        is_weight = place > 0 and operands[place - 1].dim() == 1
        together = one + two if is_weight else torch.cat([one, two])
        torch.testing.assert_close(together, whole, rtol=1e-6, atol=1e-5 if is_weight else 0)


def test_a_target_that_is_no_column_is_no_number(interpret):
    case = CASES["cross_entropy, some ignored"]
    (logits, targets) = case.operands(torch.float32)
    assert case.call(logits, targets.where(targets != 0, 300)).isnan()


def test_logits_that_are_masked_have_no_share(interpret):
    """A whole block of them before the others, and a whole part of the vocabulary."""
    logits = torch.randn(3, 9000)
    logits[:, :8192] = -torch.inf
    targets = torch.tensor([8200, 8999, 8500])
    right = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    one = logits.clone().requires_grad_()
    found = cross_entropy.cross_entropy(one, targets, -100, 0.0)
    torch.testing.assert_close(found, right, rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(found, one)
    assert gradient.isfinite().all() and (gradient[:, :8192] == 0).all()
    for part in (
        rows_of_part(logits[:, :8192], targets, torch.tensor(0), -100, False),
        rows_of_part(logits[:, 8192:], targets, torch.tensor(8192), -100, False),
    ):
        assert not part[0].isnan().any() and not part[1][:, 0].isnan().any()
