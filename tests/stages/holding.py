"""What the ranks of a pipeline hold, one after the other in one process: the other ranks are as fast as the plan says.

A rank runs as it truly does, on real CPU tensors; what it receives has no meaningful values. What it sends is kept by
its executor until the simulated receiver has received it.
"""

from __future__ import annotations

import gc
from typing import NamedTuple
from unittest import mock

import torch

import autopar
from autopar.runtime.transfers import Line
from autopar.stages import Order, Prices, StagePrices, simulated
from autopar.testing import fake_world
from benchmarks.memory import Live, cpu
from tests.stages.models import Decoder, EncoderDecoder, UNet


def decoder(layers=8, width=128, vocabulary=256):
    ids = torch.randint(vocabulary, (32, 12))
    return Decoder(layers, width, vocabulary), {"ids": ids, "labels": ids.roll(1, 1)}


def encoder_decoder():
    ids = torch.randint(128, (32, 12))
    return EncoderDecoder(layers=4, width=64, vocabulary=128), {"ids": ids, "labels": ids.roll(1, 1)}


def unet():
    return UNet(8), {"x": torch.randn(32, 2, 16, 16), "y": torch.randn(32, 1, 16, 16)}


MODELS = {
    "decoder": decoder,
    "wide head": lambda: decoder(layers=4, width=64, vocabulary=1024),
    "encoder and decoder": encoder_decoder,
    "unet": unet,
}


class Pair(NamedTuple):
    """A model on a mesh of stages and of the axis inside them, in an order; `how` is what else its plan is asked."""

    model: str
    shape: tuple[int, int]
    schedule: str
    how: tuple[tuple[str, object], ...] = ()

    def __str__(self):
        return ", ".join([self.model, f"p={self.shape[0]}", self.schedule, *(f"{k}={v}" for k, v in self.how)])


MEGATRON = (("parallel", "megatron"),)
BY_DAY = (
    Pair("wide head", (2, 1), "gpipe"),
    Pair("unet", (4, 1), "zero-bubble"),
)
PAIRS = (
    *BY_DAY,
    Pair("wide head", (2, 1), "1f1b", (("chunks", 4),)),
    Pair("encoder and decoder", (2, 1), "interleaved"),
    *(Pair("decoder", (4, 1), order) for order in ("gpipe", "1f1b", "zero-bubble")),
    *(Pair("decoder", (4, 1), order) for order in ("zb-v", "dualpipe-v", "v-half", "greedy")),
    *(Pair("decoder", (2, 1), order) for order in ("1f1b", "interleaved")),
    *(Pair("decoder", (2, 2), order, MEGATRON) for order in ("gpipe", "zb-v")),
    Pair("decoder", (2, 1), "gpipe", (("recompute", "selective"),)),
    Pair("decoder", (4, 1), "1f1b", (("recompute", "full"),)),
    Pair("decoder", (2, 1), "zb-v", (("recompute", "full"),)),
    Pair("unet", (4, 1), "gpipe"),
    Pair("wide head", (4, 1), "zero-bubble"),
    Pair("encoder and decoder", (4, 1), "gpipe"),
    Pair("encoder and decoder", (4, 1), "1f1b"),
    Pair("encoder and decoder", (4, 1), "zero-bubble", (("recompute", "selective"),)),
    Pair("unet", (4, 1), "1f1b"),
    Pair("unet", (2, 1), "interleaved"),
)


class Sent:
    """A message on its way, which has arrived at a time of the simulation."""

    def __init__(self, clock, arrives=0.0):
        self.clock = clock
        self.arrives = arrives

    def is_completed(self):
        return self.clock.now >= self.arrives

    def wait(self, timeout=None):
        return True


class Clock:
    """The simulated time of one rank within a step, action by action, and of all others."""

    def __init__(self, plan, coordinate):
        pipeline = plan.pipeline
        self.coordinate = coordinate
        self.order = Order.of(pipeline.place, plan.microbatches, pipeline.orders)
        stages = tuple(StagePrices(s.forward_s, s.inward_s, s.weights_s) for s in pipeline.stages)
        prices = Prices(stages, tuple(s.transfer_s for s in pipeline.stages[:-1]))
        self.run = simulated(self.order, prices)
        self.hops = prices.hops(pipeline.place)
        self.at = -1

    @property
    def now(self):
        return self.run.starts[self.coordinate][self.at]

    def let_go(self, line, own=Line.let_go):
        self.at = (self.at + 1) % len(self.order.at(self.coordinate))  # once for each action, before it
        own(line)

    def begin(self, line, value, way):
        if way.sender != self.coordinate:
            return Sent(self)
        turn = self.order.at(self.coordinate)[self.at].turn
        reader, kinds = (way.source, "BI") if way.is_gradient else (way.reader, "F")
        theirs = self.order.at(way.receiver)
        reads = next(i for i, a in enumerate(theirs) if (a.stage, a.turn) == (reader, turn) and a.kind in kinds)
        awaited = self.run.starts[way.receiver][max(reads - 1, 0)]  # one action ahead
        low, high = sorted((way.source, way.reader))
        return Sent(self, max(self.run.ends[self.coordinate][self.at] + sum(self.hops[low:high]), awaited))


def said(plan, coordinate):
    """The most bytes that a plan predicts for a coordinate."""
    pipeline = plan.pipeline
    return next(s.peak_bytes for s, at in zip(pipeline.stages, pipeline.place, strict=True) if at == coordinate)


def peaks(pair):
    """For each coordinate of a pipeline, the most bytes that the plan predicts, and the most that it holds."""
    found = []
    plan = None
    for coordinate in range(pair.shape[0]):
        torch.manual_seed(0)
        model, batch = MODELS[pair.model]()
        mesh = autopar.DeviceMesh(pair.shape, ("pp", "tp"))
        asked = dict(mesh=mesh, microbatches=8, memory_budget="inf", cluster=cpu(), optimizer="sgd-momentum")
        asked |= {"pipeline": {"schedule": pair.schedule}, **dict(pair.how)}
        with fake_world(mesh.size, rank=coordinate * pair.shape[1]):
            plan = plan or autopar.plan(model, batch, **asked)
            mine = autopar.autoparallelize(model, batch, plan=plan, sync=False)
            clock = Clock(plan, coordinate)
            begin, let_go = (lambda *given: clock.begin(*given)), (lambda *given: clock.let_go(*given))
            with mock.patch.multiple(Line, _begin=begin, let_go=let_go):
                found.append((said(plan, coordinate), peak(mine, batch)))
    return found


def peak(mine, batch):
    """The most bytes of a forward and backward, beside the states of an optimizer."""
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.01, momentum=0.9, foreach=False)
    for _ in range(2):
        mine(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    live = Live([*mine.parameters(), *mine.buffers(), *batch.values(), *states])
    with live:
        live.restart()
        mine(**batch).backward()
    return live.peak
