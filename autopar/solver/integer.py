"""A space as a mixed integer program, for any backend that pulp has.

    minimise    sum_s seconds[s, i] x[s, i]  +  sum_e seconds[e, f, g] y[e, f, g]  -  sum_w hidden[w]
    such that   sum_i x[s, i] = 1                                                    _one_choice_per_site
                sum_g y[e, f, g] = sum of x[source, i] over i that give f            _ends_agree
                sum_f y[e, f, g] = sum of x[target, j] over j that take g
                hidden[w] <= communication in w,  hidden[w] <= compute in w          hide
                sum of bytes at time t <= budget                                     within
                x binary, y >= 0

An edge speaks of what it carries, not of the choices at its ends: y has one variable for each pair of flows, however
many choices share them. With x binary the y are whole by themselves. An end that can only be one thing needs no y: its
seconds belong to the choices at the other end (`fold_single_ends`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pulp

from autopar.letters import Infeasible, NotServed
from autopar.solver.limits import LIMITS
from autopar.space.space import Edge, Space

_LIMITS = LIMITS.integer

_SCALE = 1e6  # the program counts microseconds: CBC's tolerances are absolute


@dataclass(frozen=True, slots=True)
class Answer:
    """A backend's choices, their cost, and whether its search ended by itself; `picked` is None without a solution."""

    picked: list[int] | None
    value: float
    ended: bool


class IntegerProgram:
    """The integer program of a space: its variables, objective terms and constraint rows."""

    def __init__(self, space: Space, backend: Any, fold: bool) -> None:
        self.space = space
        self.backend = backend
        costs, edges = fold_single_ends(space) if fold else ([s.seconds for s in space.sites], list(space.edges))
        self.problem = pulp.LpProblem("plan", pulp.LpMinimize)
        self.x = x = [_picks(s, cost) for s, cost in enumerate(costs)]
        self.y = y = [_moves(k, e.seconds) for k, e in enumerate(edges)]
        self.terms = [
            (v, c * _SCALE)
            for row, cost in zip(x, costs, strict=True)
            for v, c in zip(row, cost, strict=True)
            if v is not None
        ]
        self.rows = [_one_choice_per_site(row) for row in x]
        for e, flows in zip(edges, y, strict=True):
            self.terms += [(v, float(e.seconds[fg]) * _SCALE) for fg, v in flows.items()]
            self.rows += _ends_agree(e, flows, x)

    def hide(self) -> None:
        """Add variables for hidden communication: in each window at most all of it and at most its compute."""
        for k, w in enumerate(self.space.windows):
            hidden = pulp.LpVariable(f"h_{k}", lowBound=0)
            self.terms.append((hidden, -w.times))
            moved = [
                (v, -float(table[fg]) * _SCALE)
                for e, table in w.communication
                for fg, v in self.y[e].items()
                if table[fg]
            ]
            run = [
                (v, -c * _SCALE)
                for i, costs in w.compute
                for v, c in zip(self.x[i], costs, strict=True)
                if v is not None and c
            ]
            self.rows += [pulp.LpAffineExpression([(hidden, 1), *part]) <= 0 for part in (moved, run)]

    def within(self, time: int, most: float, unit: float, variable: Any = None) -> None:
        """Bound the bytes at a time by `most`, plus a variable in units of `unit` if one is given.

        What a site holds under any choice stands on the right: beside 4 GiB that nothing moves, a backend's tolerance
        is hundreds of bytes.
        """
        assert self.space.memory is not None
        sites, edges = self.space.memory.row(time)
        least = self._least_of(sites)
        terms = [
            (v, (b - least[i]) / unit)
            for i, held in sites.items()
            for v, b in zip(self.x[i], held, strict=True)
            if v is not None and b > least[i]
        ]
        terms += [(v, float(held[fg]) / unit) for k, held in edges.items() for fg, v in self.y[k].items() if held[fg]]
        terms += [(variable, -1)] if variable is not None else []
        self.problem.addConstraint(pulp.LpAffineExpression(terms) <= (most - sum(least.values())) / unit)

    def _least_of(self, sites: Mapping[int, np.ndarray]) -> dict[int, float]:
        """The least bytes of each site over the choices that it can make."""
        found = {}
        for i, held in sites.items():
            is_there = [v is not None for v in self.x[i]]
            found[i] = float(held[is_there].min())
        return found

    def least(self, time: int) -> float:
        """Bytes that are held at a time whatever is chosen."""
        assert self.space.memory is not None
        return sum(self._least_of(self.space.memory.row(time)[0]).values())

    def unit(self, time: int) -> float:
        """The most bytes that one choice can add at a time."""
        assert self.space.memory is not None
        sites, edges = self.space.memory.row(time)
        moved = [float(held.max() - held.min()) for held in sites.values()]
        return max([1.0, *moved, *(float(held.max()) for held in edges.values())])

    def solve(self) -> Answer:
        """The backend's answer; a letter where the program is infeasible."""
        status = self.problem.solve(self.backend)
        if status in (pulp.LpStatusInfeasible, pulp.LpStatusUnbounded, pulp.LpStatusUndefined):
            raise infeasible(self.space, f"the solver says {pulp.LpStatus[status]}")
        picked = [_largest(row) for row in self.x]
        # A backend that stopped early may have no solution.
        if any(_value(row[i]) < _LIMITS.whole for row, i in zip(self.x, picked, strict=True)):
            return Answer(None, math.inf, False)
        has_ended = self.problem.sol_status == pulp.LpSolutionOptimal
        return Answer(picked, float(pulp.value(self.problem.objective)), has_ended)

    def pose(self, terms: Any) -> None:
        self.problem.setObjective(pulp.LpAffineExpression(terms))
        for row in self.rows:
            self.problem.addConstraint(row)


def _value(variable: Any) -> float:
    """A variable's value; -1 where the variable is None."""
    return -1.0 if variable is None else float(variable.value() or 0.0)


def _largest(row: Sequence[Any]) -> int:
    """The index of the variable with the largest value."""
    return max(range(len(row)), key=lambda i: _value(row[i]))


def _held(space: Space, picked: Sequence[int]) -> np.ndarray:
    assert space.memory is not None
    held: np.ndarray = np.sum(list(space.memory.held(picked, space.edges).values()), axis=0)
    return held


def optimise(space: Space, backend: Any, budget: float = math.inf, times: Sequence[int] = ()) -> Answer:
    """The choices of least seconds; if the search ended, their value is also a proven lower bound.

    Memory rows are added lazily, at the times where an answer exceeds the budget.
    """
    program = IntegerProgram(space, backend, fold=math.isinf(budget) and not space.windows)
    program.hide()
    program.pose(program.terms)
    counted: set[int] = set()
    while True:
        for time in sorted({*times} - counted):
            program.within(time, budget, max(budget - program.least(time), program.unit(time)))
        counted |= set(times)
        answer = program.solve()
        answer = replace(answer, value=answer.value / _SCALE)
        if answer.picked is None or math.isinf(budget):
            return answer
        held = _held(space, answer.picked)
        if held.max() <= budget:
            return answer
        if not answer.ended:  # A stopped answer to a program that lacks rows says nothing.
            return Answer(None, math.inf, False)
        if int(held.argmax()) in counted:  # The row is there, so only the backend's tolerance lets this plan pass.
            raise infeasible(space, "the solver's own tolerance")
        times = [int(held.argmax())]


def smallest(space: Space, backend: Any, peak: float) -> Answer:
    """The choices of the lowest peak, and a proven lower bound if the search ended; `peak` is a known one."""
    assert space.memory is not None
    program = IntegerProgram(space, backend, fold=False)
    base = max(program.least(time) for time in range(2 * len(space.memory.ops) + 1))
    unit = max(1.0, peak - base)
    over = pulp.LpVariable("peak", lowBound=0)  # peak over the base, in units
    program.pose([(over, 1)])
    counted: set[int] = set()
    while True:
        answer = program.solve()
        answer = replace(answer, value=base + answer.value * unit)
        if answer.picked is None or not answer.ended:
            return answer
        held = _held(space, answer.picked)
        if held.max() <= answer.value * (1 + 1e-9) or int(held.argmax()) in counted:
            return answer
        counted.add(int(held.argmax()))
        program.within(int(held.argmax()), base, unit, over)


def _picks(site: int, costs: np.ndarray) -> list[Any]:
    """A variable for each choice that a site can make, None for the others."""
    return [
        pulp.LpVariable(f"x_{site}_{choice}", cat="Binary") if np.isfinite(cost) else None
        for choice, cost in enumerate(costs)
    ]


def _moves(edge: int, seconds: np.ndarray) -> dict[Any, Any]:
    """A variable for each conversion of an edge that exists, by (given, taken)."""
    there = zip(*np.nonzero(np.isfinite(seconds)), strict=True)
    return {(f, g): pulp.LpVariable(f"y_{edge}_{f}_{g}", lowBound=0) for f, g in there}


def _one_choice_per_site(row: list[Any]) -> Any:
    return pulp.LpAffineExpression([(v, 1) for v in row if v is not None]) == 1


def _ends_agree(e: Edge, y: dict[Any, Any], x: list[list[Any]]) -> list[Any]:
    rows = []
    for ends, by, site, count in ((0, e.given_by, e.source, len(e.given)), (1, e.taken_by, e.target, len(e.taken))):
        for flow in range(count):
            chosen = [(x[site][i], -1) for i in np.flatnonzero(by == flow) if x[site][i] is not None]
            rows.append(pulp.LpAffineExpression([(v, 1) for fg, v in y.items() if fg[ends] == flow] + chosen) == 0)
    return rows


def backend_of(name: str, gap: float = 0.0, nodes: int = _LIMITS.nodes, pivots: int = _LIMITS.pivots) -> Any:
    """The backend that pulp knows by this name.

    It stops at a gap, or after work that it counts: nodes, and pivots of each linear program. Never after seconds: the
    same program has the same answer on any machine.
    """
    known = {"cbc": "PULP_CBC_CMD", "highs": "HiGHS"}
    wanted = known.get(name.lower(), name)
    if wanted not in pulp.listSolvers(onlyAvailable=True):
        raise NotServed(
            f"the solver {name!r} is not available",
            seen=", ".join(pulp.listSolvers(onlyAvailable=True)),
            advice='solver="cbc"',
        )
    # Without a gap, the cost that a backend calls optimal is a bound. Without a limit on pivots, a linear program of
    # CBC's feasibility pump may cycle through vertices of equal cost without end.
    limits: dict[str, dict[str, Any]] = {
        "PULP_CBC_CMD": {"threads": 1, "gapRel": gap, "maxNodes": nodes, "options": [f"maxIterations {pivots}"]},
        "HiGHS": {"gapRel": gap, "mip_max_nodes": nodes, "simplex_iteration_limit": pivots},
    }
    return pulp.getSolver(wanted, msg=False, **limits.get(wanted, {}))


def fold_single_ends(space: Space) -> tuple[list[np.ndarray], list[Edge]]:
    """The costs of sites with edges of a single flow at one end folded in, and the edges that remain."""
    costs = [s.seconds.astype(float).copy() for s in space.sites]
    rest = []
    for e in space.edges:
        if len(e.given) == 1:
            costs[e.target] += e.seconds[0, e.taken_by]
        elif len(e.taken) == 1:
            costs[e.source] += e.seconds[e.given_by, 0]
        else:
            rest.append(e)
    return costs, rest


def infeasible(space: Space, why: str) -> Infeasible:
    return Infeasible(
        f"no plan satisfies the constraints on mesh {space.setting.mesh}", seen=why, advice="pin fewer things"
    )
