"""Bytes of drawn schedules of a small model, as oracles of bounds."""

from __future__ import annotations

import math

import numpy as np

from autopar import DeviceMesh
from autopar.request import Request
from autopar.solver.lined import Lined
from autopar.solver.searches import Task
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from tests.language import llama, zeros


def schedules(space, counted):
    """Bytes at every time under drawn shardings with drawn states: each sharding, its rows, its line, and those."""
    draw, task = np.random.default_rng(0), Task(counted, math.inf, "cbc", None, 0.0, math.inf, recomputes=True)
    for times in draw.integers(0, space.memory.times, (8, 2)):
        point, _ = counted.at({int(t): 1.0 for t in times}, float(draw.choice([1e-9, 1.0])))
        lined = Lined.of(task, counted.point(point.picked))
        for share in (0.0, 0.3, 0.7, 1.0):
            again = lined.line.again([name for name in lined.line.names if draw.random() < share])
            yield lined, counted.points.by_tables(point).held, lined.line.under(again).held


def language_space(turns):
    """The space of a small LLaMA on two devices."""
    request = Request(mesh=(2,), microbatches=turns)
    graph = request.in_turns(request.trace(llama(1), zeros(8, 16)), turns)
    return shardings(graph, Setting(DeviceMesh((2,)), request.hardware, regather=True, turns=turns))
