"""Memory: what a plan holds and when, the fastest plan under a budget, and the letter where there is none."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._tools.mem_tracker import MemTracker

import autopar
from autopar import Cluster, DeviceMesh
from autopar.letters import BadBudget, Infeasible
from autopar.solver import solve
from autopar.solver.budget import Budgeted
from autopar.solver.figures import budget_for, size
from autopar.solver.points import Point
from autopar.solver.prices import prices_of
from autopar.space.memory import Memory, Piece
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.space.timeline import Momentary
from autopar.space.windows import Window
from autopar.tracer import ColoTracer
from tests.language import CASES, gpt2, meta_gpt2, zeros
from tests.models import mlp_case, still
from tests.shares import one_in
from tests.solver.random_spaces import spaces


@st.composite
def spaces_with_memory(draw):
    """A random small space with pieces of memory over a few times, and perhaps windows."""
    space = draw(spaces())
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    ops = tuple(f"op{i}" for i in range(draw(st.integers(1, 3))))
    pieces = []
    for i, site in enumerate(space.sites):
        for _ in range(rng.integers(0, 3)):
            first = int(rng.integers(0, 2 * len(ops) + 1))
            pieces.append(
                Piece(
                    "transients",
                    i,
                    False,
                    rng.integers(0, 40, len(site.choices)).astype(float),
                    first,
                    int(rng.integers(first, 2 * len(ops) + 1)),
                )
            )
    for k, e in enumerate(space.edges):
        first = int(rng.integers(0, 2 * len(ops) + 1))
        pieces.append(
            Piece(
                "gradients",
                k,
                True,
                rng.integers(0, 40, e.seconds.shape).astype(float),
                first,
                int(rng.integers(first, 2 * len(ops) + 1)),
            )
        )
    windows = []
    for _ in range(draw(st.integers(0, 3)) if space.edges else 0):
        part = {
            int(k): np.where(np.isfinite(space.edges[k].seconds), space.edges[k].seconds, 0) * rng.choice([0, 0.5, 1])
            for k in rng.choice(len(space.edges), 2)
        }
        windows.append(
            Window(
                "forward",
                (0, 0),
                "w",
                int(rng.integers(1, 3)),
                tuple(part.items()),
                tuple((int(i), space.sites[i].seconds * 0.5) for i in set(rng.choice(len(space.sites), 2).tolist())),
            )
        )
    share = max(1, sum(w.times for w in windows))  # no more is hidden than there is
    windows = [
        replace(
            w,
            communication=tuple((k, t / share) for k, t in w.communication),
            compute=tuple((i, c / share) for i, c in w.compute),
        )
        for w in windows
    ]
    return replace(space, memory=Memory(tuple(pieces), ops), windows=tuple(windows))


def everything(space):
    """Seconds and peak of every assignment, added up here."""
    counted = Budgeted(space)
    for pick in itertools.product(*(range(len(s.choices)) for s in space.sites)):
        seconds = sum(s.seconds[i] for s, i in zip(space.sites, pick)) + sum(
            e.seconds[e.given_by[pick[e.source]], e.taken_by[pick[e.target]]] for e in space.edges
        )
        if np.isfinite(seconds):
            for w in space.windows:
                moved = sum(
                    t[
                        space.edges[k].given_by[pick[space.edges[k].source]],
                        space.edges[k].taken_by[pick[space.edges[k].target]],
                    ]
                    for k, t in w.communication
                )
                seconds -= w.times * min(moved, sum(c[pick[i]] for i, c in w.compute))
        held = [0.0] * (2 * len(space.memory.ops) + 1)
        for p in space.memory.pieces:
            e = space.edges[p.place] if p.is_edge else None
            amount = p.bytes[e.given_by[pick[e.source]], e.taken_by[pick[e.target]]] if e else p.bytes[pick[p.place]]
            for t in range(p.first, p.last + 1):
                held[t] += amount
        assert not np.isfinite(seconds) or counted.point(pick).seconds == pytest.approx(seconds, abs=1e-12)
        yield seconds, max(held)


@settings(max_examples=50, deadline=None)
@given(spaces_with_memory(), st.floats(0.0, 1.0), st.sampled_from(["cbc", "highs"]))
def test_under_a_budget_the_solver_agrees_with_trying_everything(space, share, solver):
    all_ = [(s, p) for s, p in everything(space) if np.isfinite(s)]
    if not all_:
        return
    low, high = min(p for _, p in all_), max(p for _, p in all_)
    budget = low + share * (high - low) + 0.5
    best = min(s for s, p in all_ if p <= budget)
    plan = solve(space, solver, budget=budget)
    assert (
        plan.step_time_s == pytest.approx(best, abs=1e-12)
        and plan.peak_bytes <= budget
        and plan.lower_bound_s <= best + 1e-12
    )
    free = solve(space, solver)
    assert (
        free.step_time_s == pytest.approx(min(s for s, _ in all_), abs=1e-12)
        and free.lower_bound_s <= free.step_time_s + 1e-15
    )
    counted = Budgeted(space)
    outcome = counted.fastest(budget, 0.0)
    assert (
        not outcome.hopeless
        and outcome.bound <= best + 1e-12
        and (outcome.best is None or (outcome.best.seconds >= best - 1e-12 and outcome.best.peak <= budget))
    )
    found, bound = counted.smallest()
    assert bound <= low + 1e-6 and found.peak >= low - 1e-6
    if low > 1:
        with pytest.raises(Infeasible, match="no plan of"):
            solve(space, solver, budget=low - 0.5)


def convolutions():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 64, 8),
    )
    return model, (torch.zeros(16, 3, 16, 16),)


MODELS = {"gpt2": CASES["gpt2"], "mlp": mlp_case, "llama": lambda: CASES["llama"](1), "convolutions": convolutions}


@pytest.mark.parametrize("name", one_in(4, MODELS, 1))
def test_more_memory_is_never_slower(name):
    model, batch = MODELS[name]()
    how = {
        "mesh": (2,) if name == "llama" else (2, 2),
        "loss": (lambda out, inputs: out.square().mean()) if name == "convolutions" else None,
        "recompute": "none",  # what recompute adds is in tests/codegen/test_recompute.py,
        "microbatches": 1,  # and what turns do in tests/turns
        "chunks": 1,
    }
    free = autopar.plan(model, batch, **how)
    with pytest.raises(Infeasible) as letter:
        autopar.plan(model, batch, **how, memory_budget=1)
    least = math.ceil(letter.value.smallest)
    assert budget_for(least) in letter.value.advice
    plans = [
        autopar.plan(model, batch, **how, memory_budget=int(least + (free.peak_bytes - least) * k / 6))
        for k in (0, 1, 3, 6)
    ]
    assert all(p.peak_bytes <= p.budget for p in plans)
    # a search that stops within a gap may find a plan that is a little slower than one that needs less
    assert all(b.step_time_s <= a.step_time_s * 1.01 for a, b in itertools.pairwise(plans))
    # with windows both searches may end a little above their bounds
    assert plans[-1].step_time_s == pytest.approx(free.step_time_s, rel=1e-4)
    assert len({p.step_time_s for p in plans}) >= 4
    bound = math.floor(letter.value.needs)
    with pytest.raises(Infeasible):
        autopar.plan(model, batch, **how, memory_budget=bound - 1)


@pytest.mark.parametrize("budget", ["16 gigs", "", -1, 0, True, "GiB", [1]])
def test_a_budget_that_cannot_be_read_is_a_letter(budget):
    model, batch = mlp_case()
    with pytest.raises(BadBudget, match="not a number of bytes"):
        autopar.plan(model, batch, mesh=2, memory_budget=budget)


@pytest.mark.parametrize("policy", one_in(2, ["selective", "full", "chen"]))
def test_the_budget_that_a_letter_names_is_met_under_a_policy(policy):
    model, batch = meta_gpt2(2, rows=16, length=128)
    how = {"mesh": (2,), "recompute": policy, "microbatches": 1, "chunks": 1}
    with pytest.raises(Infeasible) as letter:
        autopar.plan(model, batch, memory_budget="200MiB", **how)
    assert 'recompute="auto"' in letter.value.advice
    plan = autopar.plan(model, batch, memory_budget=math.ceil(letter.value.smallest), **how)
    assert plan.recomputed and plan.peak_bytes <= letter.value.smallest


def test_a_letter_about_all_meshes_tells_of_the_smallest_plan():
    model, batch = meta_gpt2(2, rows=16, length=128)
    with pytest.raises(Infeasible) as letter:
        autopar.plan(model, batch, mesh=4, memory_budget="150MiB", microbatches=1, chunks=1)
    told = re.search(r"the smallest plan is on mesh .*: (.*) at the .*, which recomputes \d+ values", letter.value.seen)
    assert told[1] == size(letter.value.smallest)


def test_a_budget_beyond_the_device_is_told():
    model, batch = mlp_case()
    said = [
        dict(autopar.plan(model, batch, mesh=2, cluster="h100-8x1", memory_budget=budget).defaults).get("memory_budget")
        for budget in ("81GiB", "79GiB", "inf", None)
    ]
    assert said == ["more than the 80 GiB of a device", None, None, "90% of the 80 GiB of a device"]


@pytest.mark.parametrize(
    "text, nbytes", [("16GiB", 16 * 2**30), ("1.5 GB", 1_500_000_000), ("4096", 4096), (2**20, 2**20)]
)
def test_a_budget_is_read(text, nbytes):
    model, batch = mlp_case()
    assert autopar.plan(
        model, batch, mesh=2, memory_budget=text if not isinstance(text, str) or text != "4096" else "400 KiB"
    ).budget == (nbytes if text != "4096" else 400 * 1024)


def test_on_one_device_the_peak_is_what_torch_counts():
    """MemTracker counts what tensors of a real step hold."""
    model, batch = still(gpt2(3)), zeros(8, 64)
    cpu = replace(Cluster.of("generic"), device=replace(Cluster.of("generic").device, kernels="cpu"))
    graph = ColoTracer().trace(model, batch)
    space = shardings(graph, Setting(DeviceMesh((1,)), cpu))
    plan = solve(space)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tracker = MemTracker()
    tracker.track_external(model, optimizer, *batch.values())
    with tracker:
        for step in range(2):
            if step:
                tracker.reset_mod_stats()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
    measured = (
        sum(n for name, n in tracker.get_tracker_snapshot("peak")[torch.device("cpu")].items() if str(name) == "Total")
        or tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    )
    assert plan.peak_bytes == pytest.approx(measured, rel=0.1)


def test_a_budget_of_nothing_has_prices():
    """A plan that holds nothing is the smallest, and its peak a budget."""
    point = Point([0], 1.0, np.array([27.0]), Momentary.nothing(1), 1.0)
    prices, worth = prices_of([point], {0: 0.0}, 0)
    assert np.isfinite(worth) and np.isfinite(prices.of_bytes[0])
