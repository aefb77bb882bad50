"""The kernels themselves, run by Triton's interpreter: no further from float64 than twice what eager torch is."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import CASES

_CANARY = 12345.0
_WIDTH = 64  # of canaries on either side


def _results(function, operands, gradient):
    y = function(*operands)
    wanted = [x for x in operands if x.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, gradient.to(y.dtype))]


def _wide(operands):
    return [x.detach().double().requires_grad_(x.requires_grad) for x in operands]


def is_near(case, dtype):
    """Is each result at most twice as far from float64 as eager's, but for the last bit of the largest number?"""
    operands = case.operands(dtype)
    gradient = torch.randn(case.shapes[0], generator=torch.Generator().manual_seed(1)).to(dtype)
    found = _results(case.call, operands, gradient)
    eager = _results(case.reference, operands, gradient)
    exact = _results(case.in_double, _wide(operands), gradient)
    for kernel, plain, right in zip(found, eager, exact, strict=True):
        assert kernel.dtype == dtype and kernel.shape == right.shape
        allowed = 2 * _error(plain, right) + torch.finfo(dtype).eps * right.abs().max() if right.numel() else 0
        if right.numel() and not _error(kernel, right) <= allowed:
            return False
    return True


def _error(value, right):
    return (value.double() - right).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_as_near_to_float64_as_eager(name, dtype, interpret):
    assert is_near(CASES[name], dtype)


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_writes_and_reads_nothing_beside_its_tensors(name, interpret, monkeypatch):
    """Operands stand between numbers that are none, results between canaries: neither leaves a trace."""
    case, made = CASES[name], []
    operands = [_between_nans(x.detach()).requires_grad_(x.requires_grad) for x in case.operands(torch.float32)]
    empty, empty_like = torch.empty, torch.empty_like

    def guarded(shape, **how):
        x = empty((*shape[:0], 2 * _WIDTH + torch.Size(shape).numel()), **how).fill_(_CANARY)
        made.append(x)
        return x[_WIDTH : x.numel() - _WIDTH].view(shape)

    monkeypatch.setattr(torch, "empty", guarded)
    monkeypatch.setattr(
        torch, "empty_like", lambda x: guarded(x.shape, dtype=x.dtype) if x.is_contiguous() else empty_like(x)
    )
    found = _results(case.call, operands, torch.ones(case.shapes[0]))
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
    whole = _results(case.call, operands, gradient)
    rows, cut = case.shapes[0][0], 1
    parts = []
    for start, stop in ((0, cut), (cut, rows)):
        shares = [
            x.detach()[start:stop].requires_grad_(x.requires_grad) if x.shape[0] == rows and x.dim() > 1 else x
            for x in operands
        ]
        parts.append(_results(case.call, shares, gradient[start:stop]))
    for place, (one, two, all_) in enumerate(zip(*parts, whole, strict=True)):
        is_weight = place > 0 and operands[place - 1].dim() == 1
        together = one + two if is_weight else torch.cat([one, two])
        torch.testing.assert_close(together, all_, rtol=1e-6, atol=1e-5 if is_weight else 0)
