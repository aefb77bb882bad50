"""Steps on the host: parameters, states and checkpoints are bit for bit those of states that stay on devices."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import autopar
from autopar.kernels import adamw
from autopar.letters import NotServed
from autopar.runtime.host import HOST
from autopar.runtime.host_step import HostSteps, Piece, lent_like
from autopar.runtime.private import local_part
from benchmarks.memory import Live
from tests.host import CASES, model_in, planned, stepped
from tests.models import mlp_case
from tests.training import whole


def train(rank, model, batch, plan, max_norm):
    """Parameters, states and the norm after three steps, of which the last goes on from the states of a checkpoint."""
    torch.manual_seed(0)
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
    optimizer = autopar.optim.AdamW(mine.parameters(), lr=1e-2, max_norm=max_norm)
    stepped(mine, batch, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer = autopar.optim.AdamW(mine.parameters(), lr=1e-2, max_norm=max_norm)
    optimizer.load_state_dict(saved)
    del saved
    stepped(mine, batch, optimizer, 1)
    found = {name: whole(p.detach()).clone() for name, p in mine.named_parameters()}
    for name, p in mine.named_parameters():
        states = {k: v for k, v in optimizer.state[p].items() if k != "step"}
        on_host = {HOST.holds(local_part(v)) for v in states.values()}
        assert on_host == {name in plan.hosted}
        found |= {f"{name} {k}": whole(v).clone() for k, v in states.items()}
    return found | {"norm": optimizer.norm}


@pytest.mark.parametrize(("name", "how", "dtype"), CASES)
def test_steps_on_the_host_are_those_of_devices(name, how, dtype, threads):
    """With clipping, where all parameters are stepped on the host, and where every second one is."""
    model, batch = model_in(name, dtype)
    plan = planned(model, batch, how)
    expected = threads(plan.mesh.size, train, model, batch, plan, 0.5)
    for names in (list(plan.parameters), list(plan.parameters)[::2]):
        there = replace(plan, hosted=frozenset(names))
        for found, right in zip(threads(plan.mesh.size, train, model, batch, there, 0.5), expected, strict=True):
            assert found.keys() == right.keys()
            assert not [k for k in right if not torch.equal(found[k], right[k])]
    gc.collect()
    assert not HOST.bytes


def test_other_optimizers_are_refused_before_they_change_anything():
    model, batch = mlp_case()
    plan = planned(model, batch, "one device")
    mine = autopar.autoparallelize(model, batch, plan=replace(plan, hosted=frozenset({"head.weight"})))
    before = whole(mine.head.weight.detach()).clone()
    with pytest.raises(NotServed, match=r"torch's|AdamW cannot step.*states of 1 of them on the host"):
        stepped(mine, batch, torch.optim.AdamW(mine.parameters()), 1)
    assert torch.equal(whole(mine.head.weight.detach()), before)
    stepped(mine, batch, autopar.optim.AdamW(mine.parameters()), 1)


def test_checkpoints_of_torch_go_from_the_host_to_devices_and_back(threads):
    def run(rank, model, batch, plans):
        """Each plan goes on from the states of the one before it, as torch's checkpoints name them."""
        found, states, values = [], None, None
        for plan in plans:
            mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
            optimizer = autopar.optim.AdamW(mine.parameters(), lr=1e-2)
            if states is not None:
                mine.load_state_dict(values)
                set_optimizer_state_dict(mine, optimizer, states)
            stepped(mine, batch, optimizer, 1)
            states, values = copy.deepcopy(get_optimizer_state_dict(mine, optimizer)), copy.deepcopy(mine.state_dict())
            found.append({name: whole(p.detach()).clone() for name, p in mine.named_parameters()})
        return found

    model, batch = mlp_case()
    plan = planned(model, batch, "zero3")
    there = replace(plan, hosted=frozenset(plan.parameters))
    right = threads(2, run, model, batch, [plan] * 3)[0]
    found = threads(2, run, model, batch, [there, plan, there])[0]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(found, right, strict=True) for name in a)


def test_the_device_holds_no_states_that_the_plan_has_on_the_host():
    """Bytes of a process beyond its parameters, gradients and inputs, after a step; and those of the host."""
    model, batch = model_in("decoder", "float32")
    plan = planned(model, batch, "one device", constraints={"*": "R; R; kept; end; host"})
    assert plan.hosted == set(plan.parameters)
    mine = autopar.autoparallelize(model, batch, plan=plan)
    gc.collect()  # what other tests have left there
    HOST.restart()
    with Live([*mine.parameters(), *batch.values()]) as live:
        before = live.now
        optimizer = autopar.optim.AdamW(mine.parameters(), lr=1e-2)
        stepped(mine, batch, optimizer)
        gradients = sum(local_part(p.grad).nbytes for p in mine.parameters())
        gc.collect()
        assert live.now - before - gradients < 0.05 * plan.host_bytes
    assert HOST.bytes == plan.host_bytes == 2 * sum(plan.parameter_bytes.values())
    assert HOST.peak <= plan.host_bytes + 3 * max(plan.parameter_bytes.values()) * (HostSteps().ahead + 1)


@pytest.mark.parametrize("size", [7, 64, 2**20])
def test_pieces_in_turn_are_the_whole_and_a_late_copy_shows(size, monkeypatch):
    dice = torch.Generator().manual_seed(0)
    parameters = [torch.randn(shape, generator=dice) for shape in ((5, 13), (64,), (3, 4), (0,))]
    parameters[2] = parameters[2].t()  # not contiguous: stepped whole
    gradients = [torch.randn(p.shape, generator=dice) for p in parameters]
    rates = adamw.Rates(0.1, (0.9, 0.99), 1e-8, 0.1, 1)

    def step(exact, gradient, states):
        adamw.step(exact, gradient, *states, None, None, rates)

    def pieces(of):
        return [Piece(p, g, (torch.zeros(p.shape), torch.zeros(p.shape)), None, step) for p, g in zip(of, gradients)]

    expected = [p.clone() for p in parameters]
    for p, g in zip(expected, gradients, strict=True):
        adamw.step(p, g, torch.zeros(p.shape), torch.zeros(p.shape), None, None, rates)
    found = [p.clone() for p in parameters]
    HostSteps(size=size).run(pieces(found))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    monkeypatch.setattr(HostSteps, "_end", lambda self, left: None)  # the last values never arrive
    late = [p.clone() for p in parameters]
    HostSteps(size=size).run(pieces(late))
    assert not all(torch.equal(*pair) for pair in zip(late, expected, strict=True))


def test_torchs_kernel_of_cpus_makes_the_step_of_the_ops():
    """It serves devices with other memory, whose own kernels round in another order as well."""
    dice = torch.Generator().manual_seed(0)
    given = [torch.randn(1000, generator=dice) for _ in range(3)] + [torch.rand(1000, generator=dice)]
    rates = adamw.Rates(0.02, (0.8, 0.95), 1e-7, 0.1, 3)
    for scale in (None, torch.tensor(0.5)):
        mine, theirs = ([t.clone() for t in given] for _ in range(2))
        adamw.fused(*mine, scale, rates)
        adamw.step(*theirs, None, scale, rates)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpus_parameter_is_stepped_by_the_cpus(dtype):
    """In several pieces, with compute of the device before and behind; within the rounding of other sums."""
    dice = torch.Generator().manual_seed(0)
    values, gradient = (torch.randn(300_000, generator=dice).to(dtype).cuda() for _ in range(2))
    found, expected = values.clone(), values.float().cpu()
    states = [torch.zeros(300_000) for _ in range(4)]
    lent = tuple(lent_like(found) for _ in range(2))
    master = None if dtype == torch.float32 else lent_like(found).copy_(values)
    for number in (1, 2, 3):
        rates = adamw.Rates(0.1, (0.9, 0.99), 1e-8, 0.1, number)

        def step(exact, gradient, states, rates=rates):
            adamw.fused(exact, gradient, *states, None, rates)

        gradient = gradient * 1.5
        HostSteps(size=70_000).run([Piece(found, gradient, lent, master, step)])
        adamw.step(expected, gradient.float().cpu(), states[0], states[1], None, None, rates)
    torch.testing.assert_close(
        found.float().cpu(), expected.to(dtype).float(), rtol=2e-2 if master is not None else 1e-5, atol=1e-5
    )
