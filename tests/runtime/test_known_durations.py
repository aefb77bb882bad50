"""A step of known durations on two processes: ops take their seconds, collectives what their bytes take on one link.

Time is counted and not slept, so that it is the same on any machine. What begins, runs beside and waits is the emitted
program's own, on gloo; the plan must have said how long that takes.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.codegen.buffers import is_view
from autopar.codegen.joint_graph import BACK, OP, RECOMPUTED
from autopar.module import runner
from autopar.runtime import collectives
from autopar.sharding.cluster import Cluster
from autopar.testing import on_processes

RANKS, WIDTH, ROWS, STEPS = 2, 64, 64, 2
FLOPS, WIRE = 2e7, 4e5  # FLOP/s of a device, and bytes/s of its link: ops and messages take some 10 ms each
HOW = {
    "zero3": {"parallel": "zero3"},
    "zero3, all recomputed": {"parallel": "zero3", "recompute": "full"},
    "zero2": {"parallel": "zero2"},
    "tensors": {"parallel": "megatron"},
}


class Deep(nn.Module):
    """Eight blocks, so that parameters move in several windows."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.sum()


def slow_cluster():
    cluster = Cluster.of("generic")
    device = replace(
        cluster.device,
        flops_per_s=(("float32", FLOPS),),
        memory_bytes_per_s=1e15,
        reached_bytes_per_s=0.0,
        launch_s=1e-12,
        products=None,
        attention=(),
        passes=(),
        kernels="cpu",
    )
    link = replace(cluster.links[0], latency_s=1e-12, hop_s=0.0, bytes_per_s=WIRE, reached=())
    return replace(cluster, name="slow", device=device, links=(link,), devices_per_node=RANKS, step_s=0.0)


class Clock:
    """The time of a rank, and of one link, on which messages follow one another."""

    def __init__(self):
        self.now = self.free = 0.0

    def run(self, seconds):
        self.now += seconds

    def pending(self, work, sent, arrives, unpack):
        """A collective that has arrived when its bytes have passed the link."""
        whole = max(t.numel() * t.element_size() for t in (sent, arrives) if t is not None)
        passes = 2 if sent is None else 1  # an all-reduce is a reduce-scatter and an all-gather
        self.free = max(self.free, self.now) + passes * whole * (RANKS - 1) / RANKS / WIRE
        return Pending((work, self.free), sent, arrives, unpack)

    def wait(self, work):
        real, arrives_at = work
        wait_for(real)
        self.now = max(self.now, arrives_at)


Pending = collectives.Pending
wait_for = collectives.wait_for
bind = runner.bind


def slowed(graph, seconds, clock):
    """The half with the seconds of each op in front of it, forward, backward or once more."""
    graph = copy.deepcopy(graph)
    begun = set()
    for node in list(graph.nodes):
        is_back = BACK in node.meta and not node.meta.get(RECOMPUTED)
        op = node.meta.get(BACK if is_back else OP)
        if node.op == "call_function" and op in seconds and not is_view(node) and (op, is_back) not in begun:
            begun.add((op, is_back))
            with graph.inserting_before(node):
                graph.call_function(clock.run, (seconds[op][is_back],))
    return graph


def steps(rank, plan, seconds):
    """The seconds of each step."""
    clock, patch = Clock(), pytest.MonkeyPatch()
    patch.setattr(collectives, "Pending", clock.pending)
    patch.setattr(collectives, "wait_for", clock.wait)
    patch.setattr(runner, "bind", lambda graph, axes: bind(slowed(graph, seconds, clock), axes))
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    model = autopar.autoparallelize(Deep(), {"x": x}, plan=plan)
    took = []
    for _ in range(STEPS):
        begins = clock.now = max(clock.now, clock.free)
        model(x=x).backward()
        took.append(max(clock.now, clock.free) - begins)
    patch.undo()
    return took


@pytest.mark.parametrize("how", HOW)
def test_a_step_takes_what_its_plan_says(how):
    x = torch.zeros(ROWS, WIDTH)
    plan = autopar.plan(Deep(), {"x": x}, mesh=RANKS, cluster=slow_cluster(), memory_budget="inf", **HOW[how])
    space, picked = plan.search.counted.space, plan.search.point.picked
    seconds = {
        site.name.replace(".", "_").replace("/", "_").strip("_"): [float(way[choice]) for way in site.compute]
        for site, choice in zip(space.sites, picked, strict=True)
        if site.compute and max(float(way[choice]) for way in site.compute) > 1e-4
    }
    took = on_processes(RANKS, steps, plan, seconds)
    for of_rank in took:
        assert of_rank == pytest.approx([plan.step_time_s] * STEPS, rel=0.05)
