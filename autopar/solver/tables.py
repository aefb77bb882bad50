"""A sum of small tables, and the minimum over one of its variables.

    variable     a site; its cost table is one number a choice
    factor       a table over classes of choices of some variables: an edge prices what leaves and what arrives, not
                 whole choices

`minimum_over` is the step of an elimination (`elimination.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.once import Once
from autopar.solver.limits import LIMITS

_LIMITS = LIMITS.elimination

NOWHERE = 1e36  # cost that stands for infinity where infinite ones would subtract to nan


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A table over classes of choices: each axis is a variable, with the class of every one of its choices."""

    scope: tuple[int, ...]
    classes: tuple[np.ndarray, ...]
    table: np.ndarray
    generation: int = 0  # number of eliminations that it has been through

    def axes(self) -> Any:
        """Pairs of each variable and its classes."""
        return zip(self.scope, self.classes, strict=True)

    def cost(self, picked: Sequence[int]) -> Any:
        """The entry of its table under the picked choices of all variables."""
        return self.table[tuple(classes[picked[v]] for v, classes in self.axes())]

    def numbers(self, number: Mapping[int, int]) -> tuple[int, ...]:
        """Its variables by their numbers; -1 for a variable without one."""
        return tuple(number.get(v, -1) for v in self.scope)

    def tables(self) -> tuple[np.ndarray, ...]:
        """Its table and the classes of its variables: factors with the same ones cost the same."""
        return self.table, *self.classes

    def over(self, variables: Mapping[int, int]) -> Factor:
        """The same table over renamed variables; others stay."""
        scope = tuple(variables.get(v, v) for v in self.scope)
        return Factor(scope, self.classes, self.table, self.generation)


@dataclass(slots=True)
class Problem:
    """A sum of tables to be minimised: costs by variable, and factors over several."""

    costs: list[np.ndarray]
    factors: list[Factor]
    regions: Sequence[Sequence[int]] = ()  # variables that are eliminated together, before all others
    once: Once = field(default_factory=Once)  # results that depend on the tables
    shapes: Once = field(default_factory=Once)  # results that depend on classes alone, shared by a space's problems

    def __post_init__(self) -> None:
        alike: dict[bytes, np.ndarray] = {}
        apart = {id(c): c for c in self.costs}
        known = {identity: alike.setdefault(c.tobytes(), c) for identity, c in apart.items()}
        self.costs = [known[id(c)] for c in self.costs]

    def in_single_precision(self) -> Problem:
        """The problem rounded to single precision: half the time, with choices and costs to a ten-millionth."""
        once = Once()

        def of(table: np.ndarray) -> np.ndarray:
            return once("rounded", (table,), lambda: table.astype(np.float32))

        factors = [Factor(f.scope, f.classes, of(f.table), f.generation) for f in self.factors]
        return Problem([of(c) for c in self.costs], factors, self.regions, shapes=self.shapes)

    def value(self, picked: Sequence[int]) -> float:
        """The cost of these choices."""
        alone = sum(c[i] for c, i in zip(self.costs, picked, strict=True))
        together = sum(f.cost(picked) for f in self.factors)
        return float(alone + together)


@dataclass(frozen=True, slots=True, eq=False)
class _Spread:
    """How a table is laid out for the elimination of a variable: the variable first, then the axes of the result."""

    first: int  # the variable's axis in the table
    takes: tuple[tuple[int, np.ndarray], ...]  # axes whose classes are not those of the result, with its classes
    order: tuple[int, ...]
    wide: tuple[int, ...]

    def of(self, table: np.ndarray) -> np.ndarray:
        """The table laid out so."""
        table = np.moveaxis(table, self.first, 0)
        for axis, rows in self.takes:
            table = np.take(table, rows, axis=axis)
        return table.transpose(self.order).reshape(table.shape[0], *self.wide)


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """What the elimination of a variable takes of classes alone, whatever the tables say."""

    joint: tuple[np.ndarray, ...]  # classes of each neighbour that all factors together distinguish
    shape: tuple[int, ...]  # shape of the resulting table
    kinds: np.ndarray  # the choices that differ for some factor, as a column of classes each
    where: np.ndarray  # the kind of each choice that can be taken
    spreads: tuple[_Spread, ...]  # layout of each factor's table

    @staticmethod
    def of(v: int, finite: np.ndarray, factors: Sequence[Factor], scope: tuple[int, ...]) -> _Shape:
        """The shape for a variable with these `finite` choices, its factors, and its neighbours."""
        joint, views = _joint_classes(v, factors, scope)
        shape = tuple(int(classes.max()) + 1 for classes in joint)
        own = [m[finite] for f in factors for u, m in f.axes() if u == v]
        stacked = np.stack(own) if own else np.zeros((1, len(finite)), int)
        kinds, where = np.unique(stacked, axis=1, return_inverse=True)
        spreads = tuple(_spread(f, v, scope, shape, views) for f in factors)
        return _Shape(joint, shape, kinds, np.asarray(where).reshape(-1), spreads)


def minimum_over(
    v: int, cost: np.ndarray, factors: Sequence[Factor], scope: tuple[int, ...], shapes: Once
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The minimum over a variable of its cost and factors: each neighbour's classes, and their table.

    `shapes` has what was made of the same classes before.
    """
    is_finite = np.isfinite(cost)
    finite = np.flatnonzero(is_finite)
    if not len(finite):
        joint, _ = _joint_classes(v, factors, scope)
        return joint, np.full([int(classes.max()) + 1 for classes in joint], math.inf, cost.dtype)
    place = {u: i for i, u in enumerate(scope)}
    what = (is_finite.tobytes(), tuple(f.numbers(place) for f in factors))
    classes = tuple(m for f in factors for m in f.classes)
    at = shapes(what, classes, lambda: _Shape.of(v, finite, factors, scope))
    kinds = at.kinds
    shape = at.shape
    least = np.full(kinds.shape[1], math.inf, cost.dtype)
    np.minimum.at(least, at.where, cost[finite])
    terms = [spread.of(f.table) for spread, f in zip(at.spreads, factors, strict=True)]
    # Small tables are summed before they are broadcast to the shape of the result.
    order = sorted(range(len(terms)), key=lambda i: math.prod(terms[i].shape[1:]))
    count = kinds.shape[1]
    size = math.prod(shape)
    if count * size > _LIMITS.large and (sides := _sides(least, terms, kinds, shape)) is not None:
        axis, rows, others = sides
        by_rows = _least_sums(rows, others).reshape(shape[axis], *shape[:axis], *shape[axis + 1 :])
        return at.joint, np.ascontiguousarray(np.moveaxis(by_rows, 0, axis))
    result = np.full(shape, math.inf, cost.dtype)
    whole: np.ndarray = np.empty(shape, cost.dtype)
    for k in _undominated(least, terms, kinds) if count * size > _LIMITS.cheap else range(count):
        total: Any = least[k]
        for i in order[:-1]:
            total = total + terms[i][kinds[i, k]]
        if order:  # without factors there is one kind, and no term
            total = np.add(total, terms[order[-1]][kinds[order[-1], k]], out=whole)
        np.minimum(result, total, out=result)
    return at.joint, result


def _joint_classes(
    v: int, factors: Sequence[Factor], scope: tuple[int, ...]
) -> tuple[tuple[np.ndarray, ...], list[dict[int, np.ndarray | None]]]:
    """Each neighbour's classes that all factors together distinguish, and each factor's class of them.

    None stands for classes that are the factor's own.
    """
    seen: dict[int, dict[int, np.ndarray]] = {u: {} for u in scope}  # variable -> its classes, by their identity
    for f in factors:
        for u, m in f.axes():
            if u != v:
                seen[u].setdefault(id(m), m)
    joint: list[np.ndarray] = []
    views: list[dict[int, np.ndarray | None]] = []
    for u in scope:
        known = list(seen[u].values())
        if len(known) > 1:
            rows, inverse = np.unique(np.stack(known), axis=1, return_inverse=True)
            joint.append(np.asarray(inverse).reshape(-1))
            views.append({id(m): rows[i] for i, m in enumerate(known)})
        else:
            joint.append(known[0])
            views.append({id(known[0]): None})
    return tuple(joint), views


def _spread(
    f: Factor, v: int, scope: tuple[int, ...], shape: tuple[int, ...], views: Sequence[Mapping[int, np.ndarray | None]]
) -> _Spread:
    """The layout of a factor's table: its variable first, and its other axes aligned with the result's."""
    others = [u for u in f.scope if u != v]
    rows = [views[scope.index(u)][id(f.classes[f.scope.index(u)])] for u in others]
    order = np.argsort([scope.index(u) for u in others], kind="stable")
    wide = [1] * len(scope)
    for u in others:
        wide[scope.index(u)] = shape[scope.index(u)]
    takes = tuple((axis, classes) for axis, classes in enumerate(rows, 1) if classes is not None)
    return _Spread(f.scope.index(v), takes, (0, *(int(o) + 1 for o in order)), tuple(wide))


def _undominated(least: np.ndarray, terms: Sequence[np.ndarray], kinds: np.ndarray) -> list[int]:
    """The kinds of a variable that none of the cheapest ones dominates, whatever its neighbours choose."""
    # Large finite numbers replace infinite ones, which would subtract to nan.
    rows = [np.minimum(term.reshape(term.shape[0], -1), NOWHERE) for term in terms]
    rough = least + sum(r.mean(axis=1)[own] for r, own in zip(rows, kinds, strict=True))
    left: np.ndarray = np.isfinite(least)
    for rival in np.argsort(rough, kind="stable")[: _LIMITS.rivals]:
        if not left[rival]:
            continue
        worst = least[rival] - least  # most by which the rival can exceed each kind
        for r, own in zip(rows, kinds, strict=True):
            worst = worst + (r[own[rival]] - r).max(axis=1)[own]
        beaten = worst <= 0
        beaten[rival] = False
        left &= ~beaten
    return [int(k) for k in np.flatnonzero(left)]


def _sides(
    least: np.ndarray, terms: Sequence[np.ndarray], kinds: np.ndarray, shape: tuple[int, ...]
) -> tuple[int, np.ndarray, np.ndarray] | None:
    """An axis of the result that no term shares with others, and sums of terms over it and the others.

    The sums are by kind of the variable: [kind, place on the axis] and [kind, place on all other axes]. None where
    every axis is shared, or where the table of the others would be too large.
    """
    count = kinds.shape[1]
    for axis in sorted(range(len(shape)), key=lambda axis: -shape[axis]):
        over = [term.shape[axis + 1] > 1 for term in terms]
        alone = [term.size == term.shape[0] * term.shape[axis + 1] for term in terms]
        size = math.prod(shape) // shape[axis]
        if any(o and not a for o, a in zip(over, alone, strict=True)) or count * size > _LIMITS.room:
            continue
        rows = np.zeros((count, shape[axis]), least.dtype)
        others = np.zeros((count, *shape[:axis], *shape[axis + 1 :]), least.dtype)
        for term, own, is_over in zip(terms, kinds, over, strict=True):
            if is_over:
                rows += term.reshape(term.shape[0], -1)[own]
            else:
                others += np.squeeze(term, axis + 1)[own]
        return axis, rows + least[:, None], others.reshape(count, -1)
    return None


def _least_sums(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The minimum over k of rows[k, i] + others[k, j], by [i, j].

    Most k cannot be least anywhere in a row i: a rival is cheaper there whatever j is. They are left out.
    """
    a, b = np.minimum(rows, NOWHERE), np.minimum(others, NOWHERE)
    mean = b.mean(axis=1)
    nearest, count = np.unique((a + mean[:, None]).argmin(axis=0), return_counts=True)
    rivals = nearest[np.argsort(-count, kind="stable")[: _LIMITS.rivals]]
    able: np.ndarray = np.ones(a.shape, bool)
    for rival in rivals:
        more = (b - b[rival]).min(axis=1)  # least by which each kind exceeds the rival
        may = a - a[rival] + more[:, None] < 0
        may[rival] = True
        able &= may | ~able[rival]  # Of two equal kinds, only one may rule out the other.
    result = np.empty((rows.shape[1], others.shape[1]), rows.dtype)
    able = np.ascontiguousarray(able.T)
    left = np.nonzero(able)[1]
    of_rows = np.ascontiguousarray(rows.T)[able][:, None]
    sums = np.empty_like(others)
    start = 0
    for i, end in enumerate(able.sum(axis=1).cumsum().tolist()):
        here = sums[: end - start]
        # The mode "raise" would write to a buffer first, and copy it.
        np.take(others, left[start:end], axis=0, out=here, mode="clip")
        here += of_rows[start:end]
        np.minimum.reduce(here, axis=0, out=result[i])
        start = end
    return result
