"""Stages whose saved values wait on the host: planned within blocks, and the same as where all stays on devices."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar import DeviceMesh
from autopar.letters import NotServed
from autopar.runtime.host import HOST
from autopar.space import timeline
from autopar.testing import on_processes
from tests.host import travels, with_host
from tests.language import gpt2, zeros
from tests.models import eager_links
from tests.stages.models import case

# model, mesh, order, micro-batches, preset, and the share of the bytes that the fastest plan holds
PLANNED = [
    ("decoder", (4, 1), "1f1b", 8, None, 0.7),
    ("decoder", (2, 2), "interleaved", 4, "zero3", 0.9),
    ("encoder and decoder", (2, 2), "gpipe", 4, "dp", 0.9),
]
DRAWN = [  # backward in two parts, and blocks that are too short for the link
    ("twice", (2, 2), "zb-v", 4, "dp"),
    ("unet", (2, 2), "gpipe", 4, "dp"),
    ("decoder", (4, 1), "zero-bubble", 2, None),
]


@pytest.fixture(autouse=True)
def small_values_travel(monkeypatch):
    monkeypatch.setattr(timeline, "SMALL", 0)


def planned(name, shape, schedule, turns, preset, budget="inf", rate=1e12):
    model, batch = case(name)
    how = {"mesh": DeviceMesh(shape, ("pp", "dp")), "microbatches": turns, "parallel": preset}
    how |= {"host_budget": "1GiB"} if rate else {}
    cluster = with_host(eager_links(), rate or 1.0)
    return autopar.plan(model, batch, cluster=cluster, memory_budget=budget, pipeline={"schedule": schedule}, **how)


def within(*one, share):
    """The plan of a case within a share of what its fastest plan holds."""
    return planned(*one, budget=int(share * planned(*one).peak_bytes))


def gradients(name, plan):
    """Loss and gradients of two steps on this rank, as they lie, and the most on its host."""
    torch.manual_seed(0)
    model, batch = case(name)
    mine = autopar.autoparallelize(copy.deepcopy(model), batch, plan=plan)
    found = []
    HOST.restart()
    for _ in range(2):
        mine.zero_grad()
        loss = mine(**batch)
        loss.backward()
        found += [loss.detach(), *(p.grad.to_local().clone() for p in mine.parameters() if p.grad is not None)]
    return found, HOST.peak


def on_ranks(rank, plans):
    timeline.SMALL = 0
    HOST.overwrites = True  # Whoever reads what has left computes no numbers.
    found = []
    for name, plan in plans:
        moved, peak = gradients(name, plan)
        kept, nothing = gradients(name, plan.offloading({}))
        same = len(moved) == len(kept) and all(map(torch.equal, moved, kept))
        assert not nothing
        found.append((same, peak))
    dist.barrier()
    return found


@pytest.mark.machines
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=[pytest.mark.nightly, pytest.mark.timeout(300)])])
def test_every_bit_is_that_of_stages_that_move_nothing(first):
    some = slice(1, None) if first else slice(1)
    plans = [(name, within(name, *rest, share=share)) for name, *rest, share in PLANNED[some]]
    drawn = [(name, planned(name, *rest, rate=0.0)) for name, *rest in DRAWN[some]]
    plans += [(name, plan.offloading(travels(plan))) for name, plan in drawn]
    assert all(plan.offloaded for _, plan in plans)
    ranks = on_processes(4, on_ranks, plans, timeout_s=240.0)
    for k, (name, plan) in enumerate(plans):
        assert all(rank[k][0] for rank in ranks), (name, plan.pipeline.schedule)
        assert any(rank[k][1] for rank in ranks)
        # Statistics of norms in double precision are twice as large as a plan counts them; a copy of a single row's
        # head is a view.
        most = max(rank[k][1] for rank in ranks)
        assert most <= 1.03 * plan.host_bytes or not plan.host_bytes
        assert k + first > 0 or most >= 0.97 * plan.host_bytes > 0


def test_a_link_makes_stages_faster_under_a_budget():
    """Than recompute alone; no more is on the host than it has room for, and what does not go together is a letter."""
    model, batch = gpt2(4, dropout=0.0), zeros(16, 32)
    how = {"mesh": DeviceMesh((2, 1), ("pp", "dp")), "microbatches": 4, "optimizer": "sgd"}

    def stages(share=None, host=0, schedule="1f1b", rate=1e12, **more):
        budget = "inf" if share is None else int(share * free.peak_bytes)
        more |= {"cluster": with_host(eager_links(), rate), "host_budget": host, "pipeline": {"schedule": schedule}}
        return autopar.plan(model, batch, memory_budget=budget, **how, **more)

    free = stages()
    alone, beside = stages(0.6), stages(0.6, "1GiB")
    assert alone.recomputed and not beside.recomputed and beside.offloaded
    assert free.step_time_s <= beside.step_time_s < alone.step_time_s and beside.peak_bytes <= 0.6 * free.peak_bytes
    flights = [stage.in_flight * stage.host_bytes for stage in beside.pipeline.stages]
    assert beside.host_bytes == max(flights) and sum(flights) > max(flights)
    assert "on the host" in beside.explain("pipeline") and autopar.Plan.from_dict(beside.to_dict()) == beside
    little = stages(0.6, beside.host_bytes // 2)
    assert 0 < little.host_bytes <= beside.host_bytes // 2 and little.peak_bytes <= 0.6 * free.peak_bytes
    slow = stages(0.6, "1GiB", rate=1e6)
    assert not slow.offloaded and slow.step_time_s == alone.step_time_s
    assert stages(0.6, "1GiB", recompute="none").offloaded
    with pytest.raises(NotServed, match="two parts"):
        stages(0.6, "1GiB", "zero-bubble")
