"""Plans under a policy of recompute, and their bounds, against every sharding of small spaces under that policy."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar import DeviceMesh
from autopar.solver import solve
from autopar.solver.availability import Availability, Laid
from autopar.solver.budget import Budgeted
from autopar.solver.eliminate import minimise
from autopar.solver.joint import JointPrices, JointTables
from autopar.solver.policies import named
from autopar.solver.policy_states import PolicyStates
from autopar.solver.states import StateSearch
from autopar.space import timeline
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.space.timeline import Timeline
from autopar.tracer import ColoTracer
from tests.models import eager_links
from tests.shares import one_in


class Block(nn.Module):
    """Functions one after the other, whose results backward reads."""

    def __init__(self, *functions) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x):
        for function in self.functions:
            x = function(x)
        return x


class Blocks(nn.Module):
    """Blocks as a model writes them, or each behind a checkpoint, behind a product."""

    def __init__(self, *blocks, is_written: bool = False, has_residual: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.h = nn.ModuleList(blocks)
        self.is_written, self.has_residual = is_written, has_residual

    def forward(self, x):
        x = F.linear(x, self.weight)
        for block in self.h:
            made = checkpoint(block, x, use_reentrant=False) if self.is_written else block(x)
            x = x + made if self.has_residual else made
        return x.sum()


class Attended(nn.Module):
    """An attention behind a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        h = F.linear(x, self.weight)
        return F.scaled_dot_product_attention(h, h, h).sum()


def some_of_it(line, budget):
    """A user's own: two ops by their names."""
    return [run.name for run in line.runs if run.name.endswith(("/sigmoid", "/linear"))]


def two(**how):
    return Blocks(Block(torch.sigmoid, F.gelu), Block(torch.tanh), **how)


def one():
    return Blocks(Block(torch.sigmoid, F.gelu), has_residual=True)


def narrow():
    """What the block makes first is small, and held when its large operand is gone."""
    return Blocks(Block(lambda x: x.sum(-1, keepdim=True), torch.tanh, F.gelu), Block(torch.sigmoid))


PINS = {"weight": "R; R", "h": "S(0)"}
CASES = {
    "full": (two, (64, 16), "full", PINS),
    "chen": (two, (64, 16), "chen", PINS),
    "as written": (lambda: two(is_written=True), (64, 16), "as written", PINS),
    "a residual": (one, (64, 16), "full", PINS | {"x": "S(0)"}),
    "selective": (Attended, (4, 2, 32, 16), "selective", {"weight": "R; R", "x": "S(0)"}),
    "a small value": (narrow, (64, 16), "full", {"weight": "R; R", "x": "S(0)"}),
    "a function": (one, (64, 16), some_of_it, PINS | {"x": "S(0)"}),
}


class Kept(NamedTuple):
    """A plan that keeps to a policy, by its definition."""

    seconds: float
    held: np.ndarray
    answer: frozenset[str]
    line: Timeline
    picked: tuple[int, ...]


def under(policy, space, slowest):
    """The plans of all shardings of a space that are not slower, each with the states that the policy names."""
    counted = Budgeted(space)
    finite = [[i for i, s in enumerate(site.seconds) if math.isfinite(s)] for site in space.sites]
    for picked in itertools.product(*finite):
        point = counted.point(picked)
        if point.seconds <= slowest:
            line = Timeline.of(space, picked, point.held, point.momentary)
            answer = named(policy, line, math.inf).names
            states = StateSearch(line).of(line.again(answer))
            yield Kept(point.seconds + states.seconds, states.held, answer, line, picked)


def space_of(name, monkeypatch):
    """The space of a case, whose values are small and may be dropped all the same."""
    monkeypatch.setattr(timeline, "SMALL", 0)
    build, shape, policy, pins = CASES[name]
    torch.manual_seed(0)
    graph = ColoTracer().trace(build(), (torch.randn(shape),))
    space = shardings(graph, Setting(DeviceMesh((2,)), eager_links(), 0.0, regather=True), constraints=pins)
    assert math.prod(len(site.choices) for site in space.sites) < 3_000
    return space, policy


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_the_bound_is_of_plans_that_keep_to_the_policy(name, monkeypatch):
    """Against all of them: under it without a budget and with, and near it where memory is nothing."""
    space, policy = space_of(name, monkeypatch)
    free, bare = solve(space, recompute=policy), solve(space)
    plans = list(under(policy, space, 1.4 * free.step_time_s))
    assert free.recomputed and free.lower_bound_s > 1.02 * bare.step_time_s
    assert free.gap < 1e-9 and free.step_time_s == pytest.approx(min(plan.seconds for plan in plans), rel=1e-9)
    lowest = min(plan.held.max() for plan in plans)
    for share in (0.5, 0.1):
        budget = lowest + share * (free.peak_bytes - lowest)
        plan = solve(space, budget=budget, recompute=policy)
        fits = [p for p in plans if p.held.max() <= budget and (isinstance(policy, str) or plan.recomputed <= p.answer)]
        truth = min(p.seconds for p in fits)
        assert plan.peak_bytes <= budget and plan.lower_bound_s <= truth * (1 + 1e-9)
        assert truth * (1 - 1e-9) <= plan.step_time_s <= truth * 1.06


@pytest.mark.parametrize("name", one_in(2, CASES, 1))
def test_what_a_policy_always_repeats_or_never_is_so_on_every_line(name, monkeypatch):
    space, policy = space_of(name, monkeypatch)
    plans = list(under(policy, space, math.inf))
    states = PolicyStates.of(policy, space, plans[0].answer if not isinstance(policy, str) else frozenset())
    assert {True, False} <= set(states.repeats)
    for plan in plans:
        line = plan.line
        for time, is_repeated in enumerate(states.repeats):
            run = line.runs[line.run_of[time]]
            moved = (line.travels.get(k, (0, 0)) for k in states.unless.get(time, ()))
            if is_repeated is not None and all(given == arrived for given, arrived in moved):
                assert (run.name in plan.answer) == is_repeated
                assert not is_repeated or not any(line.fixed[v] for v in run.makes)


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_whatever_prices_are_the_tables_of_a_policy_give_a_bound(name, monkeypatch):
    """At every time of backward, at prices of bytes and of having values that are drawn."""
    space, policy = space_of(name, monkeypatch)
    counted, rng = Budgeted(space), np.random.default_rng(0)
    plans = list(under(policy, space, 2 * solve(space).step_time_s))
    ops = plans[0].line.ops
    names = plans[0].answer if not isinstance(policy, str) else frozenset()
    alike = [
        plan for plan in plans if isinstance(policy, str) or plan.answer & {op.name for op in plan.line.runs} == names
    ]
    shapes = [e.seconds.shape for e in space.edges]
    for time in range(ops, 2 * ops):
        tables = JointTables(counted, time, 2 * ops, PolicyStates.of(policy, space, names))
        for _ in range(4):
            byte = rng.choice([0.0, 1e-13, 1e-12, 1e-11])
            most = rng.choice([0.0, 1e-9, 1e-8], 3)
            worths = [[rng.random(n) * most[i] for n in flows] for i, flows in enumerate(zip(*shapes, strict=True))]
            truth, best = min(((plan.seconds + byte * plan.held[time], plan) for plan in alike), key=lambda p: p[0])
            line = best.line
            again = line.again(named(policy, line, math.inf).names)
            own = tables.repeated_for_themselves(line) & again
            drawn = Availability(*worths, rng.random(ops) * most[2])
            for worth in (drawn, tables.prices.worth_under(Laid(best.picked, line), byte, (), again, own)):
                least = minimise(tables.problem(JointPrices(byte, ()), worth)).bound
                assert least <= truth * (1 + 1e-9), (time, byte)
