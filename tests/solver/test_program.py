"""The integer program agrees with trying everything; a plan is text, data and comparison."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import Cluster, DeviceMesh, Plan
from autopar.letters import BadPlan, NotServed
from autopar.sharding.convert import ShapeConsistencyManager
from autopar.sharding.placement import Flow, P, R, S, flow
from autopar.sharding.space import Edge, Site, Space
from autopar.sharding.strategies import Choice, Strategy
from autopar.solver import solve
from autopar.solver.eliminate import Factor, Problem
from autopar.solver.integer import fold_single_ends
from tests.models import eager_links, mlp_case

MESH = DeviceMesh((2,))
FLOWS = [flow(R), flow(S(0)), flow(S(1)), flow(P()), Flow(R, P())]


@st.composite
def spaces(draw):
    """A random small space: sites in a row or a tree, some edges forbidden."""
    count = draw(st.integers(1, 5))
    numbers = st.integers(0, 50)
    parents = {i: sorted(set(draw(st.lists(st.integers(0, i - 1), max_size=2)))) for i in range(1, count)}
    sites, edges = [], []
    for i in range(count):
        rows = draw(st.lists(st.tuples(*[st.sampled_from(FLOWS)] * (len(parents.get(i, ())) + 1)), min_size=1, max_size=4, unique=True))
        choices = tuple(Choice((Strategy(row[:-1], row[-1:]),)) for row in rows)
        sites.append(Site(f"s{i}", "op", "op", choices, np.array([draw(numbers) for _ in choices]) * 1e-6))
    manager = ShapeConsistencyManager(MESH, Cluster.of("generic"))
    for i in range(count):
        for k, p in enumerate(parents.get(i, ())):
            given_ = list(dict.fromkeys(c.output() for c in sites[p].choices))
            taken = list(dict.fromkeys(c.operand(k) for c in sites[i].choices))
            seconds = np.array([[draw(st.one_of(numbers, st.just(np.inf) if draw(st.booleans()) else numbers)) for _ in taken] for _ in given_], float) * 1e-6
            edges.append(Edge(p, i, k, tuple(given_), tuple(taken), np.array([given_.index(c.output()) for c in sites[p].choices]),
                              np.array([taken.index(c.operand(k)) for c in sites[i].choices]), seconds, (8, 8), 4, True))
    return Space(MESH, manager.cluster, tuple(sites), tuple(edges), manager, "none")


def by_trying_everything(space):
    return min(space.cost({s.name: c for s, c in zip(space.sites, pick)}) for pick in itertools.product(*(s.choices for s in space.sites)))


@settings(max_examples=100, deadline=None)
@given(spaces(), st.sampled_from(["cbc", "highs"]), st.booleans())
def test_the_solver_agrees_with_trying_everything(space, solver, reduce):
    best = by_trying_everything(space)
    if np.isinf(best):
        with pytest.raises(autopar.Infeasible):
            solve(space, solver, reduce=reduce)
        return
    plan = solve(space, solver, reduce=reduce)
    assert plan.step_time_s == pytest.approx(best, abs=1e-12)
    assert plan.lower_bound_s <= best + 1e-12 and plan.gap <= 1e-6
    assert space.cost({name: d.choice for name, d in plan.decisions.items()}) == pytest.approx(plan.step_time_s, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(spaces())
def test_folding_keeps_every_cost(space):
    costs, rest = fold_single_ends(space)
    for pick in itertools.islice(itertools.product(*(range(len(s.choices)) for s in space.sites)), 50):
        folded = sum(c[i] for c, i in zip(costs, pick)) + sum(e.seconds[e.given_by[pick[e.source]], e.taken_by[pick[e.target]]] for e in rest)
        assert folded == pytest.approx(space.cost({s.name: s.choices[i] for s, i in zip(space.sites, pick)}))


@st.composite
def problems(draw):
    """Random tables over few variables, loops and all; several factors may see a variable by different classes."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    sizes = [int(n) for n in rng.integers(1, 4, draw(st.integers(2, 7)))]
    costs = [rng.integers(0, 30, n).astype(float) for n in sizes]
    for c in costs:
        c[rng.random(len(c)) < 0.1] = np.inf
    factors = []
    for _ in range(draw(st.integers(1, 14))):
        scope = tuple(sorted(rng.choice(len(sizes), 2, replace=False).tolist()))
        classes = tuple(np.unique(rng.integers(0, sizes[v], sizes[v]), return_inverse=True)[1] for v in scope)
        table = rng.integers(0, 30, [int(m.max()) + 1 for m in classes]).astype(float)
        table[rng.random(table.shape) < 0.05] = np.inf
        factors.append(Factor(scope, classes, table))
    owner = rng.integers(0, 4, len(sizes))                     # of a region, or of none
    regions = [[int(v) for v in np.flatnonzero(owner == r)] for r in range(1, draw(st.integers(1, 3)))]
    return Problem(costs, factors, [r for r in regions if r])


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from([1 << 22, 8, 3, 1]))
def test_elimination_finds_the_least_and_goes_under_it_where_variables_are_split(problem, widest):
    best = min(problem.value(pick) for pick in itertools.product(*(range(len(c)) for c in problem.costs)))
    found = problem.minimise(widest)
    assert found.bound <= best + 1e-9
    if not found.split:
        assert found.bound == pytest.approx(best) and found.cost == pytest.approx(best)
    assert found.cost >= best - 1e-9 and (np.isinf(found.cost) or problem.value(found.picked) == pytest.approx(found.cost))


@st.composite
def layered(draw):
    """Layers that share their tables, but for some; the first variable of each is read by the next; hubs that any may read."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    layers, width, hubs = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    maps = [np.array(m) for m in ([0, 1], [0, 0], [1, 0])]
    kinds = [([rng.integers(0, 30, 2).astype(float) for _ in range(width)], [rng.integers(0, 30, (2, 2)).astype(float) for _ in range(16)]) for _ in range(2)]
    wiring = [(int(a), int(b), int(m)) for a, b, m in zip(rng.integers(0, width, 4), rng.integers(0, width, 4), rng.integers(0, 3, 4))]
    to_hubs = [(int(v), int(h)) for v, h in zip(rng.integers(0, width, 3), rng.integers(0, max(hubs, 1), 3))]
    costs, factors, regions = [rng.integers(0, 9, 2).astype(float) for _ in range(hubs)], [], []
    for layer in range(layers):
        own, tables = kinds[int(rng.random() < 0.3)]
        first = hubs + layer * width
        costs += own
        ends = [(first + a, first + b, m) for a, b, m in wiring if a != b] + [(first - width, first + width - 1, 0)] * (layer > 0 and width > 0)
        ends += [(first + v, h, 0) for v, h in to_hubs if hubs]
        factors += [Factor(((a, b) if a < b else (b, a)), (maps[m], maps[0]), tables[k][: int(maps[m].max()) + 1]) for k, (a, b, m) in enumerate(ends)]
        regions.append(list(range(first + 1, first + width)))
    return Problem(costs, factors, [r for r in regions if r])


@settings(max_examples=200, deadline=None)
@given(layered(), st.sampled_from([1 << 22, 8, 3, 1]))
def test_regions_are_contracted_to_what_they_were(problem, widest):
    best = min(problem.value(pick) for pick in itertools.product(*(range(len(c)) for c in problem.costs)))
    found = problem.minimise(widest)
    assert found.bound <= best + 1e-9 and problem.value(found.picked) == pytest.approx(found.cost) and found.cost >= best - 1e-9
    if not found.split:
        assert found.cost == pytest.approx(best) == found.bound


def test_a_variable_may_have_a_hundred_neighbours():
    rng = np.random.default_rng(0)
    costs = [rng.random(3) for _ in range(120)]
    one, three = np.zeros(3, int), np.arange(3)
    factors = [Factor((0, v), (three, one if v % 2 else three), rng.random((3, 1 if v % 2 else 3))) for v in range(1, 120)]
    factors += [Factor((v, v + 1), (three, three), rng.random((3, 3))) for v in range(1, 119)]
    found = Problem(costs, factors).minimise()
    by_hand = []
    for k in range(3):                                         # a chain, once the hub is held
        along = costs[1] + factors[0].table[k, factors[0].classes[1]]
        for v in range(2, 120):
            along = (along[:, None] + factors[119 + v - 2].table).min(0) + costs[v] + factors[v - 1].table[k, factors[v - 1].classes[1]]
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
    text = str(plan)
    assert "mesh (dp=2, tp=2)" in text and "blocks.*.up.weight (x2)" in text and "gap" in text and "memory    " in text and "default   memory_budget: 90% of the 80 GiB" in text
    assert "blocks.0.up/linear" in plan.explain("blocks.0.up") and "models.py" in plan.explain("blocks.0")
    assert plan.diff(plan) == "the plans are the same"
    other = small_plan(constraints={"blocks.0.up.weight": "R"})
    assert plan.parameters["blocks.0.up.weight"] == other.parameters["blocks.0.up.weight"] or "blocks.0.up.weight" in plan.diff(other)


def test_plans_are_monotone_in_what_is_allowed():
    free = small_plan().step_time_s
    for pins in ({"x": "S(0)@dp"}, {"*.weight": "R"}, {"out": "R"}):
        assert small_plan(constraints=pins).step_time_s >= free - 1e-12


@pytest.mark.parametrize("broken", ["", "[]", "{}", '{"version": 99}', "not json", '{"version": 3, "step_time_s": Infinity}', "[" * 100_000])
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


