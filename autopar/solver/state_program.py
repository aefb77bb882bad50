"""The states of a timeline by an integer program: which values are saved, and which runs are repeated.

    minimise   sum_u seconds_u A_u                       those that a step is likely to take more
    such that  K_v + A_u >= 1        u makes v, and the backward of some op reads v
               K_v + A_u >= A_w      u makes v, and w reads it
               sum_v bytes_v (K_v [v is read in forward, and needed still] + (1 - K_v) [v is needed here]) <= budget
                                     at every time of backward

A_u = 1 where run u is repeated, K_v = 1 where value v is saved. What is repeated is counted from the first op whose
backward reads it to the last; what it is made of, at no time. Where the exact bytes of an answer are over the budget,
the rows are given so much less.
"""

from __future__ import annotations

import pulp

from autopar.solver.limits import LIMITS
from autopar.solver.states import StateSearch, StepStates

_LIMITS = LIMITS.states.program


def by_program(search: StateSearch, budget: float) -> StepStates | None:
    """The fastest states within a budget that integer programs lead to; None where none was found."""
    if search.none.peak <= budget:
        return search.none
    program = _Program(search)
    room = budget
    for _ in range(_LIMITS.programs):
        states = program.solved(room)
        if states is None or states.peak <= budget:
            break
        room -= states.peak - budget
    return search.fastest(budget)


class _Program:
    """The integer program of a timeline, solved for one amount of memory after the other."""

    def __init__(self, search: StateSearch) -> None:
        line = search.line
        self.search = search
        self.program = pulp.LpProblem("states", pulp.LpMinimize)
        able = [v for v in range(len(line.bytes)) if not line.fixed[v] and line.made_by[v] not in line.forced]
        self.saved = {v: pulp.LpVariable(f"K_{v}", cat="Binary") for v in able}
        makers = sorted({line.made_by[v] for v in able})
        self.runs = {u: pulp.LpVariable(f"A_{u}", cat="Binary") for u in makers}
        self.rows: list[tuple[pulp.LpConstraint, float]] = []  # memory rows, each with the bytes that no choice changes
        self.program.setObjective(pulp.lpSum(line.costs[u] * variable for u, variable in self.runs.items()))
        self._add_availability()
        self._add_bytes()

    def solved(self, room: float) -> StepStates | None:
        """The states of the fewest seconds in `room` bytes; None where the backend found no solution."""
        for row, there in self.rows:
            row.changeRHS(room - there)
        backend = pulp.PULP_CBC_CMD(msg=False, threads=1, gapRel=_LIMITS.gap, options=[f"maxNodes {_LIMITS.nodes}"])
        self.program.solve(backend)
        if self.program.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return None
        half = _LIMITS.half
        return self.search.of(frozenset(u for u, variable in self.runs.items() if (variable.value() or 0.0) > half))

    def _add_availability(self) -> None:
        line = self.search.line
        for v, saved in self.saved.items():
            there = saved + self.runs[line.made_by[v]]
            if v in line.needed:
                self.program.addConstraint(there >= 1)
            for w in (u for u in self.runs if v in line.runs[u].reads):
                self.program.addConstraint(there >= self.runs[w])

    def _add_bytes(self) -> None:
        line = self.search.line
        windows = self.search.windows
        end = 2 * line.ops - 1
        last = [-1] * len(line.bytes)  # times of backward at which a value is needed by the backward of an op
        for run in line.runs:
            for v in run.keeps:
                last[v] = max(last[v], end - run.time)
        for time in range(line.ops, 2 * line.ops):
            waits = [v for v in self.saved if windows[v][0] <= time < windows[v][1]]
            here = sum(float(line.bytes[v]) for v in self.saved if windows[v][1] <= time <= last[v])
            if waits:
                row = pulp.lpSum(float(line.bytes[v]) * self.saved[v] for v in waits) <= 0
                self.program.addConstraint(row)
                self.rows.append((row, here + float(line.other[time])))
