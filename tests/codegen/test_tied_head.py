"""A table that is the head as well: the program gathers it as often as the plan counts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import autopar
from autopar import DeviceMesh
from autopar.codegen import joint, lower, schedule
from autopar.codegen.halves import COLLECTIVES
from autopar.graph.graph import info
from autopar.request import Request
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from tests.language import gpt2, zeros
from tests.models import eager_links
from tests.random_plans import cheapest_at_random

TABLE = "transformer.wte.weight"
SHARED = f"{TABLE}:shared"


@pytest.fixture(autouse=True)
def without_schedule(monkeypatch):
    """Collectives stand one by one, each with the conversion that it belongs to."""
    joint.LOWERED.clear()
    monkeypatch.setattr(schedule, "PASSES", ())
    yield
    joint.LOWERED.clear()


def graph_of(turns=1):
    request = Request(mesh=(4,), microbatches=turns)
    return request.in_turns(request.trace(gpt2(1, dropout=0.0), zeros(8, 16)), turns)


def emitted(graph, plan):
    """How often a step communicates for each conversion of a value, by the names of both."""
    lowered = lower(graph, plan, (0,))
    keys = {n.name: info(n).key for n in lowered.program.fx.nodes if n.op == "call_function"}
    found = Counter()
    parts = [(lowered.joint.forward, graph.turns), (lowered.joint.backward, graph.turns), (lowered.joint.beginning, 1)]
    for half, times in parts:
        for node in half.nodes if half is not None else ():
            if node.target in COLLECTIVES:
                found[keys.get(node.meta.get("op", ""), "")] += times
    return found


def sends(conversion):
    return sum(step.kind not in ("slice", "lodge") for step in conversion.forward)


@pytest.mark.parametrize("parallel", ["zero3", None])
def test_of_a_planned_model(parallel):
    graph = graph_of()
    plan = autopar.plan(gpt2(1, dropout=0.0), zeros(8, 16), mesh=4, cluster=eager_links(), parallel=parallel)
    found = emitted(graph, plan)
    for conversion in plan.conversions:
        if conversion.source in (TABLE, SHARED):
            times = 2 if conversion.source in plan.regathered else 1
            assert found[f"{conversion.source} to {conversion.target}"] == times * sends(conversion)


@pytest.mark.parametrize("turns", [1, 2])
def test_what_is_converted_behind_the_table_is_converted_once(turns):
    """In drawn plans that gather the table again, whoever of both readers takes it as it is handed on."""
    graph = graph_of(turns)
    space = shardings(graph, Setting(DeviceMesh((4,)), eager_links(), regather=True, turns=turns))
    seen = 0
    for seed in range(40):
        plan = cheapest_at_random(space, np.random.default_rng(seed))
        behind = [c for c in plan.conversions if c.source == SHARED and sends(c)]
        if TABLE in plan.regathered and any(c.target == "lm_head/linear" for c in behind):
            found = emitted(graph, plan)
            for c in behind:  # readers that convert alike share one
                assert found[f"{SHARED} to {c.target}"] in (0, sends(c))
            assert any(found[f"{SHARED} to {c.target}"] for c in behind)
            seen += 1
        if seen == 3:
            return
    raise AssertionError(f"{seen} of 40 plans gather the table again and convert it for the head")
