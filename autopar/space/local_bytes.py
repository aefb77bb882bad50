"""`LocalBytes`: bytes that the fullest device holds of values, by choice of a site or by flows of an edge.

Every table is made once: sites and edges that are alike share the same object, which solvers see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autopar.graph.graph import TensorType
from autopar.once import Once
from autopar.sharding.mesh import DeviceMesh
from autopar.sharding.placement import Sharding, largest_local_shape
from autopar.sharding.strategies import Choice, gradients, values
from autopar.space.space import Edge, Flows, reduces


@dataclass(frozen=True, slots=True, eq=False)
class EdgeBytes:
    """Bytes of a value and its gradient on an edge, by [given, taken]."""

    made: np.ndarray  # the result of a conversion; 0 where there is none
    kept: np.ndarray  # the value where there is no conversion
    sent: np.ndarray  # the operand of a conversion
    sent_last: np.ndarray  # the operand of its last step, where it gathers over several axes
    gradient: np.ndarray  # the gradient as it comes
    unreduced: np.ndarray  # the part of `gradient` that is converted
    reduced: np.ndarray  # the gradient as it goes on
    is_sum: np.ndarray  # whether the gradient is a partial sum that is reduced here
    between: np.ndarray  # the gradient between two steps of its reduction; 0 of a reduction over one axis


class Tensors(NamedTuple):
    """Which tensor is meant: the index of an operand or output, and whether its value or its gradient."""

    place: int = 0
    end: Callable[[Choice, int], Flows] = Choice.output
    of: Callable[[Flows], Sharding] = values


VALUE = Tensors()  # the value of the first output


class LocalBytes:
    """Bytes of the largest part of tensors on a mesh, in tables that are made once."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._sizes: dict[tuple[tuple[int, ...], int, Sharding], int] = {}
        self.once = Once()  # cache of tables that are made of others
        # Tables by their identity, which they keep, and whether they have any entry that is not zero.
        self._any: dict[int, tuple[np.ndarray, bool]] = {}

    def of(self, type_: TensorType, sharding: Sharding) -> int:
        key = (type_.shape, type_.itemsize, sharding)
        if key not in self._sizes:
            self._sizes[key] = math.prod(largest_local_shape(type_.shape, sharding, self.mesh)) * type_.itemsize
        return self._sizes[key]

    def by_choice(self, choices: tuple[Choice, ...], type_: TensorType, tensors: Tensors) -> np.ndarray:
        """Bytes of one operand or output, by choice."""

        def table() -> np.ndarray:
            place, end, of = tensors
            return np.array([self.of(type_, of(end(c, place))) for c in choices], float)

        return self.once(("by choice", type_, tensors), (choices,), table)

    def by_flows(self, edge: Edge, type_: TensorType) -> EdgeBytes:
        """Bytes of what an edge carries, by [given, taken]."""
        what = ("by flows", type_, edge.reduced_in)
        return self.once(what, (edge.given, edge.taken), lambda: self._edge(edge, type_))

    def _edge(self, edge: Edge, type_: TensorType) -> EdgeBytes:
        given, taken = [values(f) for f in edge.given], [values(f) for f in edge.taken]
        moves = _differ(given, taken)
        leaves = self._column(type_, given)
        arrives = self._row(type_, taken)
        last = np.maximum(leaves, arrives / self._least_axis(given, taken, "is_shard", "is_replicated"))
        given, taken = [gradients(f) for f in edge.given], [gradients(f) for f in edge.taken]
        moves_back = _differ(given, taken)
        goes_on = self._column(type_, given)
        comes = self._row(type_, taken)
        is_sum = reduces(edge.taken, edge.given).T
        wide = np.ones(moves.shape)
        if edge.reduced_in:  # a partial sum is cast before it is reduced
            wide = np.where(is_sum, edge.reduced_in / type_.itemsize, 1.0)
        unreduced = np.where(moves_back, comes * wide, 0.0)
        return EdgeBytes(
            made=np.where(moves, arrives, 0.0),
            kept=np.where(moves, 0.0, leaves),
            sent=np.where(moves, leaves, 0.0),
            sent_last=np.where(moves, last, 0.0),
            gradient=comes * wide,
            unreduced=unreduced,
            reduced=goes_on * wide,
            is_sum=is_sum,
            between=unreduced / self._least_axis(taken, given, "is_partial", "is_shard").T,
        )

    def _least_axis(
        self, before: Sequence[Sharding], after: Sequence[Sharding], leaves: str, arrives: str
    ) -> np.ndarray:
        """The devices of the smallest of several axes on which a placement changes so, by [before, after].

        Infinite where it changes so on fewer than two.
        """
        count = np.zeros((len(before), len(after)))
        least = np.full(count.shape, np.inf)
        for axis, size in enumerate(self.mesh.shape):
            if size > 1:
                changes = np.logical_and.outer(
                    [getattr(s.placements[axis], leaves) for s in before],
                    [getattr(s.placements[axis], arrives) for s in after],
                )
                count += changes
                least = np.where(changes, np.minimum(least, size), least)
        return np.where(count > 1, least, np.inf)

    def _row(self, type_: TensorType, shardings: Sequence[Sharding]) -> np.ndarray:
        return np.array([self.of(type_, s) for s in shardings], float)[None, :]

    def _column(self, type_: TensorType, shardings: Sequence[Sharding]) -> np.ndarray:
        return np.array([self.of(type_, s) for s in shardings], float)[:, None]

    def scaled(self, table: np.ndarray, factor: float) -> np.ndarray:
        return self.once(("scaled", factor), (table,), lambda: table * factor)

    def where(self, table: np.ndarray, marks: tuple[bool, ...]) -> np.ndarray:
        """The entries of a table that are marked; 0 instead of others."""
        return self.once(("marked", marks), (table,), lambda: np.where(marks, table, 0.0))

    def copied(self, bytes_: EdgeBytes) -> EdgeBytes:
        """The tables of a value that is not contiguous.

        Where only its gradient is converted, the value is still made contiguous: a copy.
        """

        def copied() -> EdgeBytes:
            copy = np.where((bytes_.made == 0) & (bytes_.unreduced > 0), bytes_.kept, 0.0)
            return replace(bytes_, made=bytes_.made + copy, kept=bytes_.kept - copy)

        return self.once("copied", (bytes_,), copied)

    def is_any(self, table: np.ndarray) -> bool:
        """Whether a table has any entry that is not zero."""
        known = self._any.get(id(table))
        if known is None:
            known = self._any[id(table)] = table, bool(table.any())
        return known[1]


def _differ(rows: Sequence[Sharding], columns: Sequence[Sharding]) -> np.ndarray:
    """Whether two shardings differ, by [row, column]."""
    numbers: dict[Sharding, int] = {}
    left = [numbers.setdefault(s, len(numbers)) for s in rows]
    right = [numbers.setdefault(s, len(numbers)) for s in columns]
    return np.not_equal.outer(left, right)


def divided_by(mask: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes where the mask is set, and bytes where it is not."""
    return np.where(mask, whole, 0.0), np.where(mask, 0.0, whole)
