"""Choose one choice per site: prices and elimination (`solver/budget.py`) give a bound and plans, `solver/polish.py`
better ones out of those, an integer program (`solver/integer.py`) closes what is left open on small spaces.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.letters import Infeasible
from autopar.sharding.convert import ShapeConsistencyManager, Step
from autopar.sharding.placement import Sharding
from autopar.sharding.strategies import Choice, gradients, values
from autopar.solver.budget import Budgeted, Point, Prices
from autopar.solver.eliminate import Factor, Problem, regions_of
from autopar.solver.integer import backend_of, infeasible, optimise, smallest
from autopar.solver.plan import Conversion, Decision, Plan
from autopar.solver.polish import polished
from autopar.solver.ties import settled
from autopar.space.space import Edge, Flows, Space, reduces

_CLOSED, _NEARLY = 1e-9, 1e-3  # a gap that is rounding; and one that a larger integer program is not worth
_FAR, _LESS = 0.05, (0.94, 0.88, 0.8)  # a gap from which on plans of smaller budgets are looked at, and which
_SMALL, _SMALL_WITH_ROWS = 20_000, 4_000  # flow pairs that an integer program is given; memory rows make it hard


def solve(
    space: Space,
    solver: str = "cbc",
    defaults: Sequence[tuple[str, str]] = (),
    assumptions: Sequence[str] = (),
    gap: float = 0.0,
    reduce: bool = True,
    budget: float | None = None,
    precision: tuple[str, str] | None = None,
    until: float = math.inf,
) -> Plan:
    """The fastest plan of the space that was found.

    The search ends within `gap` of its bound, or where elimination and prices can do no more; the plan's own gap says
    how near that is.

    Without `reduce` the whole space goes to the integer program. No device holds more than `budget` bytes. `until` is a
    time of the monotonic clock after which a plan that was found is not improved.
    """
    backend = backend_of(solver)
    limit = float(budget) if budget is not None and np.isfinite(budget) else None
    counted, bound, times = Budgeted(space), -np.inf, list[int]()
    prices = Prices({}, (0.0,) * counted.kinds)
    best: Point | None = None
    stopped: list[str] = []
    if not space.windows:  # a sum of tables: elimination is exact, or nearly
        least = problem_of(space).minimise(gap=gap)
        if not np.isfinite(least.bound):
            raise infeasible(space, "no choices go together")
        best, bound = counted.point(least.picked) if np.isfinite(least.cost) else None, least.bound
    if space.windows or (limit is not None and best is not None and best.peak > limit):
        outcome = counted.fastest(np.inf if limit is None else limit, gap, until=until)
        if limit is not None and outcome.hopeless:
            raise _over(space, counted, limit, backend if _is_small(space, with_rows=True) else None)
        best, bound, times = outcome.best, max(bound, outcome.bound), sorted(counted.rows)
        if time.monotonic() < until:
            best = polished(counted, outcome, np.inf if limit is None else limit, gap, solver, stopped)
        prices = outcome.prices
        if limit is not None and best is not None and best.seconds - bound > _FAR * best.seconds:
            for share in _LESS:  # prices lead past plans here: one for a smaller budget fits too
                if (
                    time.monotonic() < until
                    and (
                        smaller := polished(
                            counted,
                            counted.fastest(limit * share, gap, until=until),
                            limit * share,
                            gap,
                            solver,
                            stopped,
                        )
                    )
                    is not None
                    and smaller.seconds < best.seconds
                ):
                    best = smaller
            times = sorted(counted.rows)
        if not np.isfinite(bound):
            raise infeasible(space, "no choices go together")
    small = _is_small(space, with_rows=bool(times or space.windows))
    left_open = max(gap, _CLOSED if _is_small(space, with_rows=True) else _NEARLY)
    if not reduce or (
        small
        and (best is None or time.monotonic() < until)
        and (best is None or best.seconds - bound > left_open * best.seconds)
    ):
        try:
            answer = optimise(space, backend, limit, times)
            if answer.ended:
                bound = max(bound, answer.value)
            else:
                stopped.append("the integer program of all choices")
            found = counted.point(answer.picked) if answer.picked is not None else None
            if found is not None and (
                answer.ended or (math.isfinite(found.seconds) and (best is None or found.seconds < best.seconds))
            ):
                best = found
        except (
            Infeasible
        ):  # of the space; or a budget that the backend's tolerance steps over, where what prices found stands
            if limit is None:
                raise
    if best is None and limit is not None and (lowest := counted.smallest()[0]).peak <= limit:
        best = lowest  # what prices did not lead to: the smallest that is known
    if best is None:
        raise (
            _over(space, counted, limit, backend if small else None)
            if limit is not None
            else infeasible(space, "elimination had to split, and found no choices that go together")
        )
    if time.monotonic() < until:
        best = settled(counted, best, np.inf if limit is None else limit)
    plan = plan_of(space, best.picked, bound, defaults, assumptions, limit if times else None)
    open_still = plan.gap > max(gap, _CLOSED)  # where the bound is met, what was stopped had nothing left to find
    return replace(
        plan,
        precision=precision,
        stopped=tuple(dict.fromkeys(stopped)) if open_still else (),
        search=Search(counted, best.picked, prices),
    )


def _is_small(space: Space, with_rows: bool) -> bool:
    """Is the whole space something for an integer program?"""
    return sum(e.seconds.size for e in space.edges) <= (_SMALL_WITH_ROWS if with_rows else _SMALL)


def peak_where_nothing_is_dear(space: Space) -> float:
    """What the plan holds whose hidden communication and memory are free.

    One elimination tells whether a budget is near.
    """
    counted = Budgeted(space)
    return counted.at({}, exposed=[0.0] * counted.kinds)[0].peak


@dataclass(frozen=True, eq=False)
class Search:
    """What a plan was chosen from: it lives as long as the plan does in this process, and is in no file."""

    counted: Budgeted
    picked: list[int]
    prices: Prices

    @functools.cached_property
    def around(self) -> tuple[Problem, set[int]]:
        """The problem at the prices of the bound, and the variables that keep their choice while rivals of others are
        looked for.
        """
        return self.counted.priced(self.prices.of_bytes, exposed=self.prices.exposed), set()

    def rivals(self, name: str, most: int = 3) -> list[tuple[Choice, float, float]]:
        """The best other choices of a site.

        Of each the seconds that the best plan with it takes more, at least, and those of the op itself.
        """
        space = self.counted.space
        v = next(i for i, s in enumerate(space.sites) if s.name == name)
        problem, hubs = self.around
        least = problem.by_choice(v, self.picked, hubs=hubs)
        own, mine = space.sites[v].seconds, self.picked[v]
        order = [
            int(i)
            for i in np.argsort(least, kind="stable")
            if i != mine and np.isfinite(least[i]) and space.sites[v].choices[i] != space.sites[v].choices[mine]
        ]
        return [
            (space.sites[v].choices[i], float(least[i] - least[mine]), float(own[i] - own[mine])) for i in order[:most]
        ]


def _over(space: Space, counted: Budgeted, budget: float, backend: Any = None) -> Infeasible:
    """What to say of a budget that nothing fits; with a backend, from the integer program."""
    best, bound = counted.smallest()
    if backend is not None and best.peak > bound:
        answer = smallest(space, backend, best.peak)
        if answer.picked is not None:
            best = min(best, counted.point(answer.picked), key=lambda p: p.peak)
        if answer.ended:
            bound = max(
                bound,
                round(answer.value)
                if abs(answer.value - round(answer.value)) < 1e-6 * answer.value
                else math.floor(answer.value),
            )
    assert space.memory is not None
    time = int(best.held.argmax())
    kinds = {kind: held[time] for kind, held in space.memory.held(best.picked, space.edges).items()}
    fills = ", ".join(f"{kind} {n:,.0f}" for kind, n in sorted(kinds.items(), key=lambda kn: -kn[1]) if n)
    return Infeasible(
        f"no plan of {budget:,.0f} bytes a device was found on mesh {space.mesh}",
        seen=(
            f"{bound:,.0f} bytes are needed by any plan; at the {space.memory.when(time)}, the fullest time of the "
            f"smallest plan: {fills}"
        ),
        advice=f"memory_budget={math.ceil(best.peak)}, the smallest for which a plan was found, or more devices",
    ).of_bytes(bound, best.peak)


def problem_of(space: Space) -> Problem:
    """The space as tables to eliminate."""
    return Problem(
        [s.seconds for s in space.sites],
        [Factor((e.source, e.target), (e.given_by, e.taken_by), e.seconds) for e in space.edges],
        regions_of(space),
    )


def plan_of(
    space: Space,
    picked: Sequence[int],
    bound: float,
    defaults: Sequence[tuple[str, str]] = (),
    assumptions: Sequence[str] = (),
    budget: float | None = None,
) -> Plan:
    """The plan that picks these choices."""
    sites = space.sites
    decisions = {
        s.name: Decision(s.op, s.kind, s.choices[i], float(s.seconds[i]), s.source)
        for s, i in zip(sites, picked, strict=True)
    }
    conversions, total = [], sum(d.seconds for d in decisions.values())
    for e in space.edges:
        f, g = int(e.given_by[picked[e.source]]), int(e.taken_by[picked[e.target]])
        seconds = float(e.seconds[f, g])
        total += seconds
        if e.given[f] != e.taken[g]:
            conversion = _conversion(space, e, e.given[f], e.taken[g], seconds)
            conversions += [conversion] if conversion.forward or conversion.backward else []
    cast = {
        e.target: e.source for e in space.edges if sites[e.target].regathered or sites[e.target].scattered
    }  # whose policy stands at the cast of a parameter
    names = [sites[cast.get(k, k)].name for k in range(len(sites))]
    regathered = frozenset(
        name for name, s, i in zip(names, sites, picked, strict=True) if s.regathered and s.regathered[i]
    )
    scattered = frozenset(
        name for name, s, i in zip(names, sites, picked, strict=True) if s.scattered and s.scattered[i]
    )
    sizes = {s.name: s.bytes for s in sites if s.kind == "parameter"}
    without_rule = tuple(s.name for s in sites if not s.has_rule)
    suspected = tuple(sorted({(s.op, s.suspected) for s in sites if s.suspected}))
    pairs = [(w.times, *w.seconds(picked, space.edges)) for w in space.windows]
    beside, hidden = (
        float(sum(times * moved for times, moved, _ in pairs)),
        float(sum(times * min(moved, run) for times, moved, run in pairs)),
    )
    total -= hidden
    return Plan(
        space.mesh,
        str(space.cluster),
        decisions,
        tuple(conversions),
        regathered,
        total,
        min(bound, total),
        sizes,
        space.digest,
        space.optimizer,
        without_rule,
        tuple(assumptions),
        tuple(defaults),
        *_peak(space, picked),
        None if budget is None else int(budget),
        beside_s=beside,
        hidden_s=hidden,
        accumulation=space.accumulation,
        scattered=scattered,
        first_peak_bytes=round(space.memory.first(picked, space.edges)) if space.memory else 0,
        window_bytes=space.window_bytes,
        suspected=suspected,
    )


def _peak(space: Space, picked: Sequence[int]) -> tuple[dict[str, int], str]:
    """Bytes at the fullest time by kind, and when that is."""
    if space.memory is None:
        return {}, ""
    held = space.memory.held(picked, space.edges)
    time = int(np.sum(list(held.values()), axis=0).argmax())
    return {kind: round(float(n[time])) for kind, n in held.items()}, space.memory.when(time)


def _conversion(space: Space, e: Edge, given: Flows, taken: Flows, seconds: float) -> Conversion:
    def steps(
        source: Sharding, target: Sharding, by: ShapeConsistencyManager = space.conversions, itemsize: int = e.itemsize
    ) -> tuple[Step, ...]:
        return by.path(e.shape, itemsize, source, target).steps

    value = values(given), values(taken)
    gradient = (gradients(taken), gradients(given)) if e.has_gradient else None
    back = e.reduced_in if e.reduced_in and reduces([taken], [given]).any() else e.itemsize
    return Conversion(
        space.sites[e.source].name,
        space.sites[e.target].name,
        e.operand,
        value,
        gradient,
        steps(*value),
        steps(*gradient, by=e.back or space.conversions, itemsize=back) if gradient else (),
        seconds,
    )
