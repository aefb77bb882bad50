"""Choose one choice per site: by elimination (`solver/eliminate.py`), and as an integer program, which closes what that leaves open.

    minimise    sum_s seconds[s, i] x[s, i]  +  sum_e seconds[e, f, g] y[e, f, g]  -  sum_w hidden[w]
    such that   sum_i x[s, i] = 1                                                    one_choice_per_site
                sum_g y[e, f, g] = sum of x[source, i] over i that give f            ends_agree
                sum_f y[e, f, g] = sum of x[target, j] over j that take g
                hidden[w] <= communication in w,  hidden[w] <= compute in w                                hidden
                sum of bytes at time t <= budget                                                          _Program.within
                x binary, y >= 0

An edge speaks of what it carries, not of the choices at its ends: y has one variable for each pair of flows, however many
choices share them. With x binary the y are whole by themselves. An end that can only be one thing needs no y: its seconds
belong to the choices at the other end (`fold_single_ends`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pulp

from autopar.letters import Infeasible, NotServed
from autopar.sharding.convert import Step
from autopar.sharding.placement import Sharding
from autopar.sharding.space import Edge, Flows, Space
from autopar.sharding.strategies import Choice, gradients, values
from autopar.solver.budget import Budgeted, Point, Prices
from autopar.solver.eliminate import Factor, Problem, regions_of
from autopar.solver.plan import Conversion, Decision, Plan

_CLOSED, _NEARLY = 1e-9, 1e-3                                  # a gap that is rounding; and one that a larger integer program is not worth
_SMALL, _SMALL_WITH_ROWS = 200_000, 4_000                      # flow pairs that an integer program is given; memory rows make it hard
_SCALE = 1e6                                                   # the program counts microseconds: CBC's tolerances are absolute


def solve(space: Space, solver: str = "cbc", defaults: Sequence[tuple[str, str]] = (), assumptions: Sequence[str] = (), gap: float = 0.0, reduce: bool = True, budget: float | None = None,
          precision: tuple[str, str] | None = None) -> Plan:
    """The fastest plan of the space that was found: the search ends within `gap` of its bound, or where elimination and prices can do no more; the plan's own gap says how near that is.

    Without `reduce` the whole space goes to the integer program. No device holds more than `budget` bytes.
    """
    backend = _backend(solver)
    limit = float(budget) if budget is not None and np.isfinite(budget) else None
    counted, bound, times = Budgeted(space), -np.inf, list[int]()
    prices = Prices({}, (0.0,) * counted.kinds)
    best: Point | None = None
    if not space.windows:                                      # a sum of tables: elimination is exact, or nearly
        found = problem_of(space).minimise(gap=gap)
        if not np.isfinite(found.bound):
            raise _infeasible(space, "no choices go together")
        best, bound = counted.point(found.picked) if np.isfinite(found.cost) else None, found.bound
    if space.windows or (limit is not None and best is not None and best.peak > limit):
        outcome = counted.fastest(np.inf if limit is None else limit, gap)
        best, bound, times = outcome.best, max(bound, outcome.bound), sorted(counted.rows)
        prices = outcome.prices
        if not np.isfinite(bound):
            raise _infeasible(space, "no choices go together")
    pairs = sum(e.seconds.size for e in space.edges)
    small = pairs <= (_SMALL_WITH_ROWS if times or space.windows else _SMALL)
    left_open = max(gap, _CLOSED if pairs <= _SMALL_WITH_ROWS else _NEARLY)
    if not reduce or (small and (best is None or best.seconds - bound > left_open * best.seconds)):
        try:
            picked, proven = _optimise(space, backend, limit, times)
            best, bound = counted.point(picked), max(bound, proven)
        except Infeasible:                                     # of the space; or a budget that the backend's tolerance steps over, where what prices found stands
            if limit is None:
                raise
    if best is None:
        raise _over(space, counted, limit, backend if small else None) if limit is not None else _infeasible(space, "elimination had to split, and found no choices that go together")
    return replace(plan_of(space, best.picked, bound, defaults, assumptions, limit if times else None), precision=precision, search=Search(counted, best.picked, prices))


def peak_where_nothing_is_dear(space: Space) -> float:
    """What the plan holds whose hidden communication and memory are free: one elimination tells whether a budget is near."""
    counted = Budgeted(space)
    return counted.at({}, exposed=[0.0] * counted.kinds)[0].peak


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """What a plan was chosen from: it lives as long as the plan does in this process, and is in no file."""

    counted: Budgeted
    picked: list[int]
    prices: Prices

    def rivals(self, name: str, most: int = 3) -> list[tuple[Choice, float, float]]:
        """The best other choices of a site: of each the seconds that the best plan with it takes more, at least, and those of the op itself."""
        space = self.counted.space
        v = next(i for i, s in enumerate(space.sites) if s.name == name)
        least = self.counted.priced(self.prices.of_bytes, exposed=self.prices.exposed).by_choice(v, self.picked)
        own, mine = space.sites[v].seconds, self.picked[v]
        order = [int(i) for i in np.argsort(least, kind="stable") if i != mine and np.isfinite(least[i]) and space.sites[v].choices[i] != space.sites[v].choices[mine]]
        return [(space.sites[v].choices[i], float(least[i] - least[mine]), float(own[i] - own[mine])) for i in order[:most]]


def _over(space: Space, counted: Budgeted, budget: float, backend: Any = None) -> Infeasible:
    """What to say of a budget that nothing fits; with a backend, from the integer program."""
    best, bound = counted.smallest()
    if backend is not None and best.peak > bound:
        picked, least = _smallest(space, backend, best.peak)
        best, bound = min(best, counted.point(picked), key=lambda p: p.peak), max(bound, round(least) if abs(least - round(least)) < 1e-6 * least else math.floor(least))
    assert space.memory is not None
    time = int(best.held.argmax())
    kinds = {kind: held[time] for kind, held in space.memory.held(best.picked, space.edges).items()}
    fills = ", ".join(f"{kind} {n:,.0f}" for kind, n in sorted(kinds.items(), key=lambda kn: -kn[1]) if n)
    return Infeasible(f"no plan of {budget:,.0f} bytes a device was found on mesh {space.mesh}", seen=f"{bound:,.0f} bytes are needed by any plan; at the {space.memory.when(time)}, the fullest time of the smallest plan: {fills}",
                      advice=f"memory_budget={math.ceil(best.peak)}, the smallest for which a plan was found, or more devices")


def problem_of(space: Space) -> Problem:
    """The space as tables to eliminate."""
    return Problem([s.seconds for s in space.sites], [Factor((e.source, e.target), (e.given_by, e.taken_by), e.seconds) for e in space.edges], regions_of(space))


def plan_of(space: Space, picked: Sequence[int], bound: float, defaults: Sequence[tuple[str, str]] = (), assumptions: Sequence[str] = (), budget: float | None = None) -> Plan:
    """The plan that picks these choices."""
    sites = space.sites
    decisions = {s.name: Decision(s.op, s.kind, s.choices[i], float(s.seconds[i]), s.source) for s, i in zip(sites, picked, strict=True)}
    conversions, total = [], sum(d.seconds for d in decisions.values())
    for e in space.edges:
        f, g = int(e.given_by[picked[e.source]]), int(e.taken_by[picked[e.target]])
        seconds = float(e.seconds[f, g])
        total += seconds
        if e.given[f] != e.taken[g]:
            conversion = _conversion(space, e, e.given[f], e.taken[g], seconds)
            conversions += [conversion] if conversion.forward or conversion.backward else []
    cast = {e.target: e.source for e in space.edges if sites[e.target].regathered or sites[e.target].scattered}     # whose policy stands at the cast of a parameter
    names = [sites[cast.get(k, k)].name for k in range(len(sites))]
    regathered = frozenset(name for name, s, i in zip(names, sites, picked, strict=True) if s.regathered and s.regathered[i])
    scattered = frozenset(name for name, s, i in zip(names, sites, picked, strict=True) if s.scattered and s.scattered[i])
    sizes = {s.name: s.bytes for s in sites if s.kind == "parameter"}
    without_rule = tuple(s.name for s in sites if not s.has_rule)
    pairs = [(w.times, *w.seconds(picked, space.edges)) for w in space.windows]
    beside, hidden = sum(times * moved for times, moved, _ in pairs), sum(times * min(moved, run) for times, moved, run in pairs)
    total -= hidden
    return Plan(space.mesh, str(space.cluster), decisions, tuple(conversions), regathered, total, min(bound, total), sizes, space.digest, space.optimizer,
                without_rule, tuple(assumptions), tuple(defaults), *_peak(space, picked), None if budget is None else int(budget), beside_s=beside, hidden_s=hidden, accumulation=space.accumulation, scattered=scattered)


def _peak(space: Space, picked: Sequence[int]) -> tuple[dict[str, int], str]:
    """Bytes at the fullest time by kind, and when that is."""
    if space.memory is None:
        return {}, ""
    held = space.memory.held(picked, space.edges)
    time = int(np.sum(list(held.values()), axis=0).argmax())
    return {kind: round(float(n[time])) for kind, n in held.items()}, space.memory.when(time)


def _conversion(space: Space, e: Edge, given: Flows, taken: Flows, seconds: float) -> Conversion:
    def steps(source: Sharding, target: Sharding) -> tuple[Step, ...]:
        return space.conversions.path(e.shape, e.itemsize, source, target).steps

    value = values(given), values(taken)
    gradient = (gradients(taken), gradients(given)) if e.has_gradient else None
    return Conversion(space.sites[e.source].name, space.sites[e.target].name, e.operand, value, gradient, steps(*value), steps(*gradient) if gradient else (), seconds)


def fold_single_ends(space: Space) -> tuple[list[np.ndarray], list[Edge]]:
    """Costs of the sites with those edges folded in that have one flow at an end, and the edges that are left."""
    costs, rest = [s.seconds.astype(float).copy() for s in space.sites], []
    for e in space.edges:
        if len(e.given) == 1:
            costs[e.target] += e.seconds[0, e.taken_by]
        elif len(e.taken) == 1:
            costs[e.source] += e.seconds[e.given_by, 0]
        else:
            rest.append(e)
    return costs, rest


def _infeasible(space: Space, why: str) -> Infeasible:
    return Infeasible(f"no plan satisfies the constraints on mesh {space.mesh}", seen=why, advice="pin fewer things")


class _Program:
    """The space as an integer program: its variables, and the rows that hold whatever is asked of it."""

    def __init__(self, space: Space, backend: Any, fold: bool) -> None:
        self.space, self.backend = space, backend
        costs, edges = fold_single_ends(space) if fold else ([s.seconds for s in space.sites], list(space.edges))
        self.problem = pulp.LpProblem("plan", pulp.LpMinimize)
        self.x = x = [[pulp.LpVariable(f"x_{s}_{i}", cat="Binary") if np.isfinite(c) else None for i, c in enumerate(cost)] for s, cost in enumerate(costs)]
        self.y = y = [{(f, g): pulp.LpVariable(f"y_{k}_{f}_{g}", lowBound=0) for f, g in zip(*np.nonzero(np.isfinite(e.seconds)), strict=True)} for k, e in enumerate(edges)]
        self.terms = [(v, c * _SCALE) for row, cost in zip(x, costs, strict=True) for v, c in zip(row, cost, strict=True) if v is not None]
        self.rows = [_one_choice_per_site(row) for row in x]
        for e, flows in zip(edges, y, strict=True):
            self.terms += [(v, float(e.seconds[fg]) * _SCALE) for fg, v in flows.items()]
            self.rows += _ends_agree(e, flows, x)

    def hide(self) -> None:
        """What is hidden of a window's communication: at most either of the two."""
        for k, w in enumerate(self.space.windows):
            hidden = pulp.LpVariable(f"h_{k}", lowBound=0)
            self.terms.append((hidden, -w.times))
            moved = [(v, -float(table[fg]) * _SCALE) for e, table in w.communication for fg, v in self.y[e].items() if table[fg]]
            run = [(v, -c * _SCALE) for i, costs in w.compute for v, c in zip(self.x[i], costs, strict=True) if v is not None and c]
            self.rows += [pulp.LpAffineExpression([(hidden, 1), *part]) <= 0 for part in (moved, run)]

    def within(self, time: int, most: float, unit: float, variable: Any = None) -> None:
        """What is held at a time is at most this, or at most a variable; both in units."""
        assert self.space.memory is not None
        sites, edges = self.space.memory.row(time)
        terms = [(v, b / unit) for i, held in sites.items() for v, b in zip(self.x[i], held, strict=True) if v is not None and b]
        terms += [(v, float(held[fg]) / unit) for k, held in edges.items() for fg, v in self.y[k].items() if held[fg]]
        self.problem.addConstraint(pulp.LpAffineExpression(terms + ([(variable, -1)] if variable is not None else [])) <= most / unit)

    def unit(self, time: int) -> float:
        """The largest that anything holds at a time."""
        assert self.space.memory is not None
        sites, edges = self.space.memory.row(time)
        return max([1.0, *(float(held.max()) for held in (*sites.values(), *edges.values()))])

    def solve(self) -> tuple[list[int], float]:
        """The picked choice of every site, and the optimum."""
        status = self.problem.solve(self.backend)
        if pulp.LpStatus[status] != "Optimal":
            raise _infeasible(self.space, f"the solver says {pulp.LpStatus[status]}")
        return [max(range(len(row)), key=lambda i, row=row: row[i].value() if row[i] is not None else -1.0) for row in self.x], float(pulp.value(self.problem.objective))     # type: ignore[misc]

    def pose(self, terms: Any) -> None:
        self.problem.setObjective(pulp.LpAffineExpression(terms))
        for row in self.rows:
            self.problem.addConstraint(row)


def _held(space: Space, picked: Sequence[int]) -> np.ndarray:
    assert space.memory is not None
    held: np.ndarray = np.sum(list(space.memory.held(picked, space.edges).values()), axis=0)
    return held


def _optimise(space: Space, backend: Any, budget: float | None = None, times: Sequence[int] = ()) -> tuple[list[int], float]:
    """The picked choice of every site, and the proven bound in seconds. A time joins the memory rows where a plan holds more than the budget."""
    program = _Program(space, backend, fold=budget is None and not space.windows)
    program.hide()
    program.pose(program.terms)
    counted: set[int] = set()
    while True:
        for time in sorted({*times} - counted):
            program.within(time, budget or 0.0, max(budget or 0.0, program.unit(time)))
        counted |= set(times)
        picked, optimum = program.solve()
        if budget is None or (held := _held(space, picked)).max() <= budget:
            return picked, optimum / _SCALE
        if int(held.argmax()) in counted:                      # within the backend's tolerance of a budget that nothing fits
            raise _infeasible(space, "the solver's own tolerance")
        times = [int(held.argmax())]


def _smallest(space: Space, backend: Any, unit: float) -> tuple[list[int], float]:
    """The choices whose peak is least, and that peak."""
    program = _Program(space, backend, fold=False)
    peak = pulp.LpVariable("peak", lowBound=0)
    program.pose([(peak, 1)])
    counted: set[int] = set()
    while True:
        picked, least = program.solve()
        held = _held(space, picked)
        if held.max() <= least * unit * (1 + 1e-9) or int(held.argmax()) in counted:
            return picked, least * unit
        counted.add(int(held.argmax()))
        program.within(int(held.argmax()), 0.0, unit, peak)


def _one_choice_per_site(row: list[Any]) -> Any:
    return pulp.LpAffineExpression([(v, 1) for v in row if v is not None]) == 1


def _ends_agree(e: Edge, y: dict[Any, Any], x: list[list[Any]]) -> list[Any]:
    rows = []
    for ends, by, site, count in ((0, e.given_by, e.source, len(e.given)), (1, e.taken_by, e.target, len(e.taken))):
        for flow in range(count):
            chosen = [(x[site][i], -1) for i in np.flatnonzero(by == flow) if x[site][i] is not None]
            rows.append(pulp.LpAffineExpression([(v, 1) for fg, v in y.items() if fg[ends] == flow] + chosen) == 0)
    return rows


def _backend(name: str) -> Any:
    known = {"cbc": "PULP_CBC_CMD", "highs": "HiGHS"}
    wanted = known.get(name.lower(), name)
    if wanted not in pulp.listSolvers(onlyAvailable=True):
        raise NotServed(f"the solver {name!r} is not available", seen=", ".join(pulp.listSolvers(onlyAvailable=True)), advice='solver="cbc"')
    return pulp.getSolver(wanted, msg=False, **({"threads": 1, "gapRel": 0} if wanted == "PULP_CBC_CMD" else {"gapRel": 0} if wanted == "HiGHS" else {}))   # what it calls optimal is the bound
