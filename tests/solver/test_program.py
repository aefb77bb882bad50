"""The integer program agrees with trying everything; a plan is text, data and comparison."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import DeviceMesh, Plan
from autopar.letters import BadPlan, Infeasible, NotServed
from autopar.solver import elimination, integer, polish, program, solve
from autopar.solver.budget import Budgeted
from autopar.solver.eliminate import minimise
from autopar.solver.integer import backend_of, fold_single_ends, optimise
from autopar.solver.limits import LIMITS
from autopar.solver.searches import SEARCHES, WholeProgram
from autopar.solver.tables import Factor, Problem
from autopar.space.setting import Setting
from autopar.space.shardings import shardings
from autopar.tracer import ColoTracer
from benchmarks.hard_plans import causal_masks
from tests.language import NO_PADDING, meta_gpt2, meta_llama_8b, zeros
from tests.models import eager_links, mlp_case, peaks
from tests.solver.random_spaces import layered, problems, spaces

WHOLE = (WholeProgram(always=True),)


def by_trying_everything(space):
    return min(
        space.cost({s.name: c for s, c in zip(space.sites, pick)})
        for pick in itertools.product(*(s.choices for s in space.sites))
    )


@settings(max_examples=100, deadline=None)
@given(spaces(), st.sampled_from(["cbc", "highs"]), st.sampled_from([SEARCHES, WHOLE]))
def test_the_solver_agrees_with_trying_everything(space, solver, searches):
    best = by_trying_everything(space)
    if np.isinf(best):
        with pytest.raises(autopar.Infeasible):
            solve(space, solver, searches=searches)
        return
    plan = solve(space, solver, searches=searches)
    assert plan.step_time_s == pytest.approx(best, abs=1e-12)
    assert plan.lower_bound_s <= best + 1e-12 and plan.gap <= 1e-6
    assert space.cost({name: d.choice for name, d in plan.decisions.items()}) == pytest.approx(
        plan.step_time_s, abs=1e-12
    )


@settings(max_examples=30, deadline=None)
@given(spaces())
def test_folding_keeps_every_cost(space):
    costs, rest = fold_single_ends(space)
    for pick in itertools.islice(itertools.product(*(range(len(s.choices)) for s in space.sites)), 50):
        folded = sum(c[i] for c, i in zip(costs, pick)) + sum(
            e.seconds[e.given_by[pick[e.source]], e.taken_by[pick[e.target]]] for e in rest
        )
        assert folded == pytest.approx(space.cost({s.name: s.choices[i] for s, i in zip(space.sites, pick)}))


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from([1 << 22, 8, 3, 1]))
def test_elimination_finds_the_least_and_goes_under_it_where_variables_are_split(problem, widest):
    best = min(problem.value(pick) for pick in itertools.product(*(range(len(c)) for c in problem.costs)))
    found = minimise(problem, widest)
    assert found.bound <= best + 1e-9
    if not found.split:
        assert found.bound == pytest.approx(best) and found.cost == pytest.approx(best)
    assert found.cost >= best - 1e-9 and (
        np.isinf(found.cost) or problem.value(found.picked) == pytest.approx(found.cost)
    )


def grid(seed: int, side: int = 7, most: int = 6) -> Problem:
    """Variables in a square, each with tables to the next, the one below and the one between.

    As in dynamic programming.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, most + 1, (side, side))
    places = list(itertools.product(range(side), range(side)))
    pairs = [
        ((i, j), (i + a, j + b)) for i, j in places for a, b in ((0, 1), (1, 0), (1, 1)) if max(i + a, j + b) < side
    ]
    factors = [
        Factor(
            (places.index(u), places.index(v)),
            (np.arange(sizes[u]), np.arange(sizes[v])),
            rng.random((sizes[u], sizes[v])),
        )
        for u, v in pairs
    ]
    return Problem([rng.random(sizes[p]) for p in places], factors)


@pytest.mark.parametrize("seed", range(4))
def test_where_everything_goes_together_elimination_finds_choices(seed):
    problem = grid(seed)
    found = minimise(problem, widest=100)
    assert found.split and found.bound <= found.cost == pytest.approx(problem.value(found.picked))


@settings(max_examples=200, deadline=None)
@given(layered(), st.sampled_from([1 << 22, 8, 3, 1]))
def test_regions_are_contracted_to_what_they_were(problem, widest):
    best = min(problem.value(pick) for pick in itertools.product(*(range(len(c)) for c in problem.costs)))
    found = minimise(problem, widest)
    assert (
        found.bound <= best + 1e-9
        and problem.value(found.picked) == pytest.approx(found.cost)
        and found.cost >= best - 1e-9
    )
    if not found.split:
        assert found.cost == pytest.approx(best) == found.bound


def test_a_variable_may_have_a_hundred_neighbours():
    rng = np.random.default_rng(0)
    costs = [rng.random(3) for _ in range(120)]
    one, three = np.zeros(3, int), np.arange(3)
    factors = [
        Factor((0, v), (three, one if v % 2 else three), rng.random((3, 1 if v % 2 else 3))) for v in range(1, 120)
    ]
    factors += [Factor((v, v + 1), (three, three), rng.random((3, 3))) for v in range(1, 119)]
    found = minimise(Problem(costs, factors))
    by_hand = []
    for k in range(3):  # a chain, once the hub is held
        along = costs[1] + factors[0].table[k, factors[0].classes[1]]
        for v in range(2, 120):
            along = (
                (along[:, None] + factors[119 + v - 2].table).min(0)
                + costs[v]
                + factors[v - 1].table[k, factors[v - 1].classes[1]]
            )
        by_hand.append(costs[0][k] + along.min())
    assert found.cost == pytest.approx(min(by_hand)) and found.bound == pytest.approx(min(by_hand))


def small_plan(**how):
    model, batch = mlp_case()
    return autopar.plan(model, batch, **{"mesh": DeviceMesh((2, 2), ("dp", "tp")), "cluster": eager_links(), **how})


def test_a_plan_survives_json_and_planning_again(tmp_path):
    plan = small_plan()
    plan.save(tmp_path / "plan.json")
    again = small_plan()
    again.save(tmp_path / "again.json")
    assert Plan.load(tmp_path / "plan.json") == plan == again
    assert (tmp_path / "plan.json").read_bytes() == (tmp_path / "again.json").read_bytes()


def test_a_plan_speaks():
    plan = small_plan()
    text = plan.table()
    assert (
        "mesh (dp=2, tp=2)" in text
        and "blocks.*.up.weight (x2)" in text
        and "gap" in text
        and "memory    " in text
        and "default   memory_budget: 90% of the 80 GiB" in text
    )
    assert "blocks.0.up/linear" in plan.explain("blocks.0.up") and "models.py" in plan.explain("blocks.0")
    assert plan.diff(plan) == "the plans are the same"
    other = small_plan(constraints={"blocks.0.up.weight": "R"})
    assert plan.parameters["blocks.0.up.weight"] == other.parameters[
        "blocks.0.up.weight"
    ] or "blocks.0.up.weight" in plan.diff(other)


def test_plans_are_monotone_in_what_is_allowed():
    free = small_plan().step_time_s
    for pins in ({"x": "S(0)@dp"}, {"*.weight": "R"}, {"out": "R"}):
        assert small_plan(constraints=pins).step_time_s >= free - 1e-12


@pytest.mark.parametrize(
    "broken", ["", "[]", "{}", '{"version": 99}', "not json", '{"version": 3, "step_time_s": Infinity}', "[" * 100_000]
)
def test_what_is_no_plan_is_a_letter(broken, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(broken)
    with pytest.raises(BadPlan):
        Plan.load(path)


def test_a_hostile_plan_is_only_data(tmp_path):
    data = json.loads(json.dumps(small_plan().to_dict()))
    for poison in ("__import__('os')@dp", "S(0)@nowhere", {"a": 1}):
        data["conversions"][0]["forward"] = [poison]
        with pytest.raises(autopar.Letter):
            Plan.from_dict(data)


def test_a_plan_knows_its_model():
    model, _ = mlp_case()
    small_plan().validate(model)
    with pytest.raises(BadPlan, match="another model"):
        small_plan().validate(mlp_case(width=8)[0])


def test_an_unknown_solver_is_a_letter():
    with pytest.raises(NotServed, match="not available"):
        small_plan(solver="abacus")


def test_the_solver_and_the_package_import_no_torch():
    code = "import sys, autopar, autopar.solver, autopar.sharding; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def two_layers():
    """A model whose windows leave something open between prices and plans."""
    return meta_gpt2(2, 8, 16)


def layers_of_linears():
    with torch.device("meta"):
        model, x = (
            torch.nn.Sequential(
                *(torch.nn.Sequential(torch.nn.Linear(4096, 4096, bias=False), torch.nn.GELU()) for _ in range(3))
            ),
            torch.empty(512, 4096),
        )
    graph = ColoTracer().trace(model, (x,), loss=lambda out, inputs: out.square().mean())
    return shardings(graph, Setting(DeviceMesh((2, 2)), peaks("h100-8x1")))


def test_a_backend_is_stopped_by_work_that_it_counts_and_claims_no_bound_then(monkeypatch):
    space = layers_of_linears()
    whole, cut = optimise(space, backend_of("cbc")), optimise(space, backend_of("cbc", nodes=1, pivots=10))
    assert whole.ended and not cut.ended
    monkeypatch.setattr(program, "backend_of", lambda name: backend_of(name, nodes=1, pivots=10))
    plan = solve(space, searches=(*SEARCHES, *WHOLE))
    assert (
        plan.stopped and plan.lower_bound_s <= whole.value * (1 + 1e-6) and plan.step_time_s >= whole.value * (1 - 1e-6)
    )


def test_another_search_is_another_entry():
    """One that knows a plan, and no bound, between elimination and the rest."""
    space = layers_of_linears()
    best = solve(space)

    class Told:
        def accepts(self, task, found):
            return found.best is None

        def look(self, task, found):
            picked = [s.choices.index(best.decisions[s.name].choice) for s in task.space.sites]
            return replace(found, best=task.counted.point(picked), bound=0.0)

    plan = solve(space, searches=(Told(), *SEARCHES))
    assert plan.step_time_s == best.step_time_s and plan.lower_bound_s == best.lower_bound_s
    assert solve(space, searches=(Told(),)).lower_bound_s == 0.0


def test_a_plan_says_what_was_stopped(monkeypatch, tmp_path):
    model, batch = two_layers()
    monkeypatch.setattr(polish, "_LIMITS", replace(LIMITS.polish, pivots=10))
    plan = autopar.plan(model, batch, mesh=(2, 2))
    assert plan.stopped and "stopped   the integer program" in plan.table() and plan.gap > 0
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").stopped == plan.stopped


def test_a_hopeless_budget_is_known_after_a_few_eliminations(monkeypatch):
    """The first prices that no plan can pay are a proof, and the smallest plan is looked for once."""
    asked = []
    eliminate = Budgeted.at
    monkeypatch.setattr(Budgeted, "at", lambda self, *how, **more: asked.append(how) or eliminate(self, *how, **more))
    model, batch = two_layers()
    with pytest.raises(Infeasible, match="no plan of"):
        autopar.plan(model, batch, mesh=(2, 2), memory_budget=1 << 20, microbatches=1, chunks=1)
    assert len(asked) <= 80


def test_what_a_site_needs_to_be_explained_serves_the_next(monkeypatch):
    runs = []
    start = elimination.Elimination.__init__
    monkeypatch.setattr(
        elimination.Elimination, "__init__", lambda self, *how, **more: runs.append(how[1]) or start(self, *how, **more)
    )
    model, batch = meta_llama_8b(2, rows=16)
    plan = autopar.plan(
        model,
        batch,
        mesh=(8, 8),
        cluster="h100-8x8",
        assume=NO_PADDING,
        gap=0.05,
    )
    plan.explain("model.layers.0.mlp")
    runs.clear()
    again = plan.explain("model.layers.1.mlp")
    whole = [how for how in runs if how]  # those of everything: a region's has nothing fixed
    assert again.count("rival") >= 8 and len(whole) == sum(
        name.startswith("model.layers.1.mlp") for name in plan.decisions
    )


def test_thirteen_attentions_with_thirteen_masks_need_no_large_program(monkeypatch):
    """Variables that elimination had to split are agreed on by descent.

    The program of all choices, of 120,000 pairs, kept CBC busy for minutes.
    """
    sizes = []
    build = integer.IntegerProgram.__init__

    def noted(self, *how, **more):
        build(self, *how, **more)
        sizes.append(sum(map(len, self.y)))

    monkeypatch.setattr(integer.IntegerProgram, "__init__", noted)
    model, batch = causal_masks()
    plan = autopar.plan(model, batch, mesh=(2, 2), cluster=eager_links())
    assert plan.gap < 0.005 and max(sizes, default=0) <= 20_000


@pytest.mark.nightly
def test_granites_rotary_tables_are_agreed_on():
    config = transformers.GraniteConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=64,
    )
    plan = autopar.plan(transformers.GraniteForCausalLM(config).train(), zeros(8, 16), mesh=(2, 2, 2))
    assert plan.gap < 0.02
