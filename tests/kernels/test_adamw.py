"""`autopar.optim.AdamW`: the step of torch's, in single precision, by ops and by the kernel in the interpreter."""

from __future__ import annotations

import copy
import importlib.util
import pathlib
import sys

import pytest
import torch

import autopar
from autopar.kernels import adamw
from autopar.letters import NotServed
from benchmarks.memory import Live
from tests.kernels.cases import _error
from tests.shares import diagonal

RATES = dict(lr=0.02, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.1)


def parameters(dtype=torch.float32):
    dice = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=dice).to(dtype)) for shape in ((70_000,), (3, 5), (), (0,))]


def stepped(optimizer, mine, steps=3):
    """After some steps of drawn gradients."""
    dice = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in mine:
            p.grad = torch.randn(p.shape, generator=dice).to(p.dtype)
        optimizer.step()
    return mine


def test_ops_make_torchs_step_bit_for_bit():
    mine, theirs = parameters(), parameters()
    stepped(autopar.optim.AdamW(mine, **RATES), mine)
    stepped(torch.optim.AdamW(theirs, **RATES, foreach=False), theirs)
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def _clipped(mine, norm):
    torch.nn.utils.clip_grad_norm_(mine, norm)


@pytest.mark.parametrize("norm, dtype", diagonal([None, 0.5], [torch.float32, torch.bfloat16, torch.float16]), ids=str)
def test_the_kernel_is_as_near_to_double_as_the_ops(dtype, norm, interpret, monkeypatch):
    """What it leaves, states and master copy."""
    found = {}
    for how in ("kernel", "ops", "double"):
        mine = parameters(dtype)
        if how == "double":
            mine = [torch.nn.Parameter(p.detach().double()) for p in mine]
            optimizer = torch.optim.AdamW(mine, **RATES, foreach=False)
            if norm:
                optimizer.register_step_pre_hook(lambda *_, mine=mine: _clipped(mine, norm))
        else:
            monkeypatch.setenv("AUTOPAR_KERNELS", "interpret" if how == "kernel" else "")
            optimizer = autopar.optim.AdamW(mine, **RATES, max_norm=norm)
        dice = torch.Generator().manual_seed(1)
        for _ in range(3):
            for p in mine:
                p.grad = torch.randn(p.shape, generator=dice).to(dtype).to(p.dtype)
            optimizer.step()
        states = [optimizer.state[p] for p in mine]
        masters = [s.get("master", p.detach()) for s, p in zip(states, mine, strict=True)]
        found[how] = masters + [s[name] for s in states for name in ("exp_avg", "exp_avg_sq")]
        if how != "double":
            assert all(t.dtype == torch.float32 for t in found[how])
            assert all(torch.equal(p, m.to(dtype)) for p, m in zip(mine, masters, strict=True))
    for kernel, plain, right in zip(*found.values(), strict=True):
        if right.numel():
            unit = torch.finfo(torch.float32).eps * right.abs().max()
            assert _error(kernel, right) <= 2 * _error(plain, right) + unit


WRONG = (("(g - m) * (1 - beta1)", "g * (1 - beta1)"), ("g * g * (1 - beta2)", "g * (1 - beta2)"), ("p * kept", "p"))


@pytest.mark.parametrize("right, wrong", WRONG)
def test_a_wrong_kernel_is_caught(right, wrong, interpret, tmp_path):
    source = pathlib.Path(adamw.__file__).read_text()
    assert right in source
    path = tmp_path / "wrong_adamw.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    rates = adamw.Rates(0.1, (0.9, 0.99), 1e-8, 0.1, 3)
    dice = torch.Generator().manual_seed(0)
    given = [torch.rand(40, generator=dice) for _ in range(4)]
    found = {}
    for how in ("ops", "kernel", "wrong"):
        found[how] = [x.clone() for x in given]
        if how == "ops":
            adamw.by_ops(*found[how], rates)
        else:
            (adamw if how == "kernel" else module).step(*found[how], None, None, rates)
    torch.testing.assert_close(found["kernel"], found["ops"])
    assert any(not torch.allclose(one, other) for one, other in zip(found["wrong"], found["ops"], strict=True))


def test_sixteen_bits_do_not_lose_small_steps():
    """Steps of a thousandth of the last bit add up in the master copy."""
    mine, torchs = torch.nn.Parameter(torch.ones(8).bfloat16()), torch.nn.Parameter(torch.ones(8).bfloat16())
    how = dict(lr=1e-5, weight_decay=0.0)
    optimizers = autopar.optim.AdamW([mine], **how), torch.optim.AdamW([torchs], **how)
    for _ in range(1000):
        for p, optimizer in zip((mine, torchs), optimizers, strict=True):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert (torchs == 1).all() and (mine < 1).all()
    torch.testing.assert_close(optimizers[0].state[mine]["master"], torch.full((8,), 0.99), rtol=1e-3, atol=0)


@pytest.mark.parametrize("first", ["torch's", "autopar's"])
def test_checkpoints_are_read_either_way(first):
    """A run that is taken up by the other optimizer goes on as one that never stopped."""
    both = {
        "torch's": lambda mine: torch.optim.AdamW(mine, **RATES, foreach=False),
        "autopar's": lambda mine: autopar.optim.AdamW(mine, **RATES),
    }
    second = next(name for name in both if name != first)
    mine, whole = parameters(), parameters()
    one = both[first](mine)
    stepped(one, mine)
    other = both[second](mine)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    stepped(other, mine)
    throughout = both["torch's"](whole)
    stepped(throughout, whole)
    stepped(throughout, whole)
    assert all(torch.equal(a, b) for a, b in zip(mine, whole, strict=True))


def test_states_stay_in_single_precision_when_they_are_loaded():
    mine = parameters(torch.bfloat16)
    one = autopar.optim.AdamW(mine, **RATES)
    stepped(one, mine)
    other = autopar.optim.AdamW(mine, **RATES)
    other.load_state_dict(one.state_dict())
    for p in mine:
        for name in ("exp_avg", "exp_avg_sq", "master"):
            assert torch.equal(one.state[p][name], other.state[p][name])
            assert one.state[p][name] is not other.state[p][name]


def test_a_step_makes_little_beside(monkeypatch):
    big = torch.nn.Parameter(torch.randn(2**22))
    big.grad = torch.randn(2**22)
    optimizer = autopar.optim.AdamW([big])
    optimizer.step()
    live = Live([big, big.grad, *optimizer.state[big].values()])
    with live:
        optimizer.step()
    assert live.peak <= 1.1 * 4 * big.nbytes


def test_what_is_no_rate_is_a_letter():
    for wrong in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"max_norm": 0.0}, {"eps": -1e-8}):
        with pytest.raises(NotServed, match="AdamW cannot step by"):
            autopar.optim.AdamW(parameters(), **wrong)


def test_a_plan_counts_its_states_and_no_temporaries():
    model, batch = torch.nn.Linear(512, 512), (torch.randn(4, 512),)
    asked = dict(mesh=(1,), cluster="h100-1x8", memory_budget="inf", loss=lambda y, _: y.square().mean())
    mine = autopar.plan(model, batch, optimizer=autopar.optim.AdamW, **asked)
    torchs = autopar.plan(model, batch, optimizer="adamw", **asked)
    assert mine.optimizer == "autopar-adamw" and autopar.Plan.from_dict(mine.to_dict()) == mine
    size = sum(p.nbytes for p in model.parameters())
    assert torchs.peak_bytes - mine.peak_bytes == pytest.approx(size, rel=0.05)
    assert mine.step_time_s < torchs.step_time_s
