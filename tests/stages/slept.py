"""Pipelines whose stages and links take known times and no compute: all else is the executor's own, over gloo.

The halves of a stage sleep instead of computing, until the seconds of the action are over: these count from when it was
its turn and what it reads had arrived, as the price of an action has what it takes to launch it. A message says when it
was sent, and is kept from its receiver until its link has had its time, from when it was sent and awaited.
"""

from __future__ import annotations

import functools
import random
import time
from unittest import mock

import torch
import torch.distributed as dist

import autopar
from autopar.module.stage_runner import InStages
from autopar.runtime.transfers import Line
from autopar.stages import Order, Prices, StagePrices, simulated
from tests.stages.models import Twice

# Coordinates, order, micro-batches, and the seed of the seconds.
BY_DAY = [(2, "1f1b", 3, 0), (2, "zero-bubble", 3, 1), (2, "zb-v", 3, 2)]
BY_NIGHT = [
    [(2, order, 6, seed) for seed, order in enumerate(("gpipe", "1f1b", "zero-bubble", "interleaved", "zb-v"), 3)],
    [
        (4, order, 8, seed)
        for seed, order in enumerate(("gpipe", "1f1b", "zero-bubble", "interleaved", "zb-v", "dualpipe-v", "greedy"), 8)
    ],
]
KINDS = {"hold": "B", "inward": "I", "weights": "W"}


def prices_of(pipeline, seed):
    """20 to 40 ms for each kind of action, unlike in each stage; 5 to 15 ms across each border of stages."""
    draw = random.Random(seed)
    each = [[draw.uniform(0.02, 0.04) for _ in "FIW"] for _ in pipeline.place]
    each[0][1:] = [0.0, sum(each[0][1:])]  # nobody waits for the first stage
    return Prices(tuple(StagePrices(*one) for one in each), tuple(draw.uniform(0.005, 0.015) for _ in each[1:]))


class Sleeping:
    """The halves of a stage: they compute in the first step, and from then on sleep and give the same again."""

    def __init__(self, halves, price, links):
        self.halves = halves
        self.price = price
        self.links = links
        self.results = {}

    def __getattr__(self, name):
        return getattr(self.halves, name)

    def _slept(self, kind, compute):
        if kind in self.results:
            time.sleep(max(0.0, self.links.ready + self.price.of(kind) - time.monotonic()))
        else:
            self.results[kind] = list(compute())
        return list(self.results[kind])

    def forward(self, *primals):
        return self._slept("F", lambda: self.halves.forward(*primals))

    def half(self, name, arrived):
        return lambda given: self._slept(KINDS[name], lambda: self.halves.half(name, arrived)(given))


class OnLinks:
    """What a rank sends and receives in a pipeline, where the borders of stages take these seconds."""

    def __init__(self, hops):
        self.hops = hops
        self.ready = 0.0  # the time from which the current action could run

    def let_go(self, line, own=Line.let_go):
        self.ready = time.monotonic()
        own(line)

    def send(self, line, value, way, own=Line.send):
        value = value.clone()
        value.view(-1)[:2].view(torch.float64).fill_(time.monotonic())
        own(line, value, way)

    def receive(self, line, into, way, own=Line.receive):
        low, high = sorted((way.source, way.reader))
        return Awaited(own(line, into, way), sum(self.hops[low:high]), self)


class Awaited:
    """A value on its way, over a link that takes some seconds."""

    def __init__(self, arrival, seconds, links):
        self.arrival = arrival
        self.links = links
        self.since = time.monotonic()
        self.seconds = seconds

    def wait(self):
        was_there = self.arrival.work.is_completed()
        value = self.arrival.wait()
        came = 0.0 if was_there else time.monotonic()
        sent = value.view(-1)[:2].view(torch.float64).item()
        arrives = max(sent, self.since) + self.seconds
        time.sleep(max(0.0, arrives - time.monotonic()))
        self.links.ready = max(self.links.ready, arrives, came)
        return value


def steps(rank, cases, count=3):
    """For each case (coordinates, schedule, turns, seed): predicted seconds, and when steps began and ended here."""
    return [_steps_of(*case, count) for case in cases]


def _on(line, method, *given):
    return method(line, *given)


def _steps_of(p, schedule, turns, seed, count):
    torch.manual_seed(0)
    batch = {"x": torch.randn(turns, 8), "y": torch.randn(turns, 8)}
    mesh = autopar.DeviceMesh((p, dist.get_world_size() // p), ("pp", "dp"))
    how = dict(mesh=mesh, microbatches=turns, memory_budget="inf", pipeline={"schedule": schedule})
    mine = autopar.autoparallelize(Twice(layers=2 * p), batch, **how)
    pipeline = mine.plan.pipeline
    order = Order.of(pipeline.place, turns, pipeline.orders)
    prices = prices_of(pipeline, seed)
    links = OnLinks(prices.hops(order.place))
    times = []

    def timed(runner, given, own=InStages.results):
        if not times:
            for stage in runner.stages.values():
                stage.halves = Sleeping(stage.halves, prices.stages[stage.number], links)
        start = time.monotonic()
        results = own(runner, given)
        times.append((start, time.monotonic()))
        return results

    patched = {name: functools.partialmethod(_on, getattr(links, name)) for name in ("send", "receive", "let_go")}
    with mock.patch.multiple(Line, **patched), mock.patch.object(InStages, "results", timed):
        for _ in range(1 + count):
            dist.barrier()
            mine(**batch)
    return simulated(order, prices).seconds, times[1:]


def seconds_of(ranks):
    """Predicted seconds of each case, and those of its steps: from the first rank to begin to the last to end."""
    for case in zip(*ranks, strict=True):
        (said, *_), times = zip(*case, strict=True)
        yield said, [max(end for _, end in step) - min(start for start, _ in step) for step in zip(*times, strict=True)]


def best(ranks):
    """For each case predicted seconds, and those of its fastest step: others use the machine, too."""
    return [(said, min(each)) for said, each in seconds_of(ranks)]
