"""Pipelines for tests whose backward runs in two parts, each in an order that a test writes down."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import torch
from torch import nn

import autopar
from autopar.codegen import lower
from autopar.request import Request
from tests.stages.models import Decoder, case


class Places(nn.Module):
    """Blocks that add a parameter of the shape of one row, so that it has the gradient of what a block reads."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.places = nn.ParameterList(nn.Parameter(torch.randn(1, 3, 8)) for _ in range(2))

    def forward(self, x, y):
        for layer, place in zip(self.layers, self.places, strict=True):
            x = layer(x + place)
        return ((x - y) ** 2).mean()


class Biased(nn.Module):
    """Blocks that add a bias of parameters and of data without rows, so that it crosses from one to the other."""

    class Block(nn.Linear):
        def forward(self, x, bias):
            return torch.tanh(super().forward(x) + bias)

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 8))
        self.layers = nn.ModuleList(self.Block(8, 8) for _ in range(2))

    def forward(self, x, y, away):
        bias = (away @ self.table)[None]
        for layer in self.layers:
            x = layer(x, bias)
        return ((x - y) ** 2).mean()


def built(name):
    """A case of `models`, or one with dropout, or one of four rows with places, of which a stage may be frozen."""
    if name == "dropout":
        return Decoder(layers=2, dropout=0.3).double(), case("decoder")[1]
    if name == "biased":
        torch.manual_seed(0)
        batch = {"x": torch.randn(8, 3, 8), "y": torch.randn(8, 3, 8), "away": torch.randn(3, 4)}
        return Biased().double(), {key: value.double() for key, value in batch.items()}
    if name in ("places", "frozen first", "frozen last"):
        torch.manual_seed(0)
        model = Places().double()
        if name != "places":
            for of_blocks in (model.layers, model.places):
                of_blocks[0 if name == "frozen first" else 1].requires_grad_(False)
        return model, {key: torch.randn(4, 3, 8).double() for key in ("x", "y")}
    return case(name)


def planned(model, batch, mesh, turns, axes=("pp", "tp"), **how):
    """A plan with a stage for each coordinate of the first axis."""
    asked = {"microbatches": turns, "memory_budget": "inf", "pipeline": {"schedule": "gpipe"}, **how}
    return autopar.plan(model, batch, mesh=autopar.DeviceMesh(mesh, axes), **asked)


def ordered(plan, orders):
    """The plan with these orders of actions, one a coordinate."""
    return replace(plan, pipeline=replace(plan.pipeline, orders=tuple(orders)))


def delayed(stages, turns, delay):
    """Orders in which each stage runs I of a turn as soon as it can, and W `delay` turns later."""
    found = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, turns)
        actions = [("F", turn) for turn in range(ahead)]
        for turn in range(turns):
            actions += [("F", turn + ahead)] if turn + ahead < turns else []
            actions += [("I", turn), *([("W", turn - delay)] if turn >= delay else [])]
        actions += [("W", turn) for turn in range(max(turns - delay, 0), turns)]
        found.append(" ".join(f"{stage}{kind}{turn}" for kind, turn in actions))
    return found


def on_one_rank(plan, backward):
    """The plan with all stages on one rank, forward of all turns first; `backward` are the kinds that follow."""
    pipeline = plan.pipeline
    stages, turns = len(pipeline.place), range(plan.microbatches)
    first = [f"{stage}F{turn}" for turn in turns for stage in range(stages)]
    last = [
        f"{stage}{kind}{turn}"
        for kinds in backward
        for turn, stage in itertools.product(turns, reversed(range(stages)))
        for kind in kinds
    ]
    mesh = autopar.DeviceMesh((1, 1), pipeline.mesh.axes)
    alone = replace(pipeline, mesh=mesh, place=(0,) * stages, orders=(" ".join(first + last),))
    return replace(plan, pipeline=alone)


@functools.cache
def lowered(name, is_parted, stages=2, devices=1, turns=2, **how):
    """The lowered stages of a case on the first device of each, with backward in parts or not."""
    model, batch = built(name)
    plan = planned(model, batch, (stages, devices), turns, **how)
    if is_parted:
        plan = ordered(plan, delayed(stages, turns, delay=0))
    request = Request.of(plan)
    graph = request.as_planned(request.trace(model, batch), plan)
    return [lower(graph, plan, (0,), place=stage) for stage in range(stages)]
