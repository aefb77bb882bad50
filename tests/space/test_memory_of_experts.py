"""Bytes of experts: what their functions hold, counted op by op, beside what their entry says of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import autopar
from autopar import DeviceMesh
from autopar.graph.graph import TensorType
from autopar.ops.entry import facts_of
from autopar.ops.local import OpCall, OpOnDevice
from autopar.runtime.bodies import HALVES, read_body
from autopar.runtime.experts import Setup, experts_backward, experts_forward
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.testing import on_processes
from autopar.tracer import ColoTracer
from benchmarks.memory import Live
from tests import routed as travelling
from tests.random_plans import cheapest_at_random, eager_links


def gated(rows):
    gate, other = rows.chunk(2, -1)
    return F.silu(gate) * other


SIZES = ((2048, 2, 8, 64, 256), (2048, 8, 16, 128, 64), (1024, 2, 4, 256, 512))  # rows, slots, experts, width, inner


@pytest.mark.parametrize("dtype, size", itertools.product((torch.bfloat16, torch.float32), SIZES), ids=str)
def test_one_device_holds_what_the_entry_says(dtype, size):
    rows, slots, experts, width, inner = size
    x, weights = torch.randn(rows, width).to(dtype), torch.rand(rows, slots).to(dtype)
    ids = torch.rand(rows, experts).topk(slots).indices
    up, down = torch.randn(experts, 2 * inner, width).to(dtype), torch.randn(experts, width, inner).to(dtype)
    gradient = torch.randn(rows, width).to(dtype)
    tensors = [x, ids, weights, up, down]
    names = ("input", "ids", "weights", "up", "down")
    call = OpCall("experts", dict(zip(names, map(TensorType.of, tensors), strict=True)), (TensorType.of(x),))
    here, held = OpOnDevice.alone(5, 1), [tuple(t.shape) for t in tensors]
    facts = facts_of("experts")
    forward, backward = facts.part_work(call, held, "cpu", here)
    setup = Setup(read_body(gated, HALVES).text, rows * slots).text()
    live = Live([*tensors, gradient])
    before = live.now
    with live:
        out, *kept = experts_forward(tensors, (), setup)
    assert live.now - before - out.nbytes == facts.part_keeps(call, held, here)
    assert 1.0 <= forward / (live.peak - live.now) <= 1.3
    live.peak = before = live.now
    with live:
        made = experts_backward(tensors, (), kept, gradient, setup)
    results = sum(g.nbytes for g in made)
    assert backward == pytest.approx(live.peak - before - results, rel=0.02)


WIDE = dict(ROWS=2048, WIDTH=64, INNER=128)


def held_by(rank, plan, batch):
    """The most bytes that a rank holds in its third step."""
    for name, value in WIDE.items():
        setattr(travelling, name, value)
    model = autopar.autoparallelize(travelling.Routed().float(), batch, plan=plan)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    live = Live([*model.parameters(), *model.buffers(), *batch.values()])
    with live:
        for _ in range(3):
            live.peak = live.now
            model(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return live.peak


@pytest.mark.nightly
@pytest.mark.machines
@pytest.mark.parametrize("mesh, cuts", [((4,), ("e&t",)), ((2, 2), ("e&t", "e&t")), ((2, 2), ("t", "e&t"))], ids=str)
def test_no_routing_takes_more_than_the_plan_says(mesh, cuts, monkeypatch):
    """Also if all rows choose one device: a plan has room for a router that is a quarter off."""
    for name, value in WIDE.items():
        monkeypatch.setattr(travelling, name, value)
    for routing, least in (("random", 0.7), ("one device", 0.8)):
        batch = {"x": torch.randn(2048, 64), "scores": travelling.scores(routing).float()}
        model = travelling.Routed().float()
        space = shardings(ColoTracer().trace(model, batch), Setting(DeviceMesh(mesh), eager_links(), optimizer="adamw"))

        def refused(site):
            if site.op != "experts":
                return [False] * len(site.choices)
            return [tuple(map(travelling.cut_of, choice.strategies)) != cuts for choice in site.choices]

        plan = cheapest_at_random(space, np.random.default_rng(0), refused)
        shares = [peak / plan.peak_bytes for peak in on_processes(4, held_by, plan, batch)]
        assert least <= max(shares) <= 1.0, (routing, shares)
