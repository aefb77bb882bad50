"""`Temporaries`: bytes by which a step holds more while it converts values than what is counted at those times.

The time of an op counts all at once: its operands as they arrive, what it makes, and what it reads for the last time.
A conversion runs before the op has made anything; that of a gradient behind the op's backward, when what only this read
is gone. The temporaries of both (`sharding/temporaries.py`) count by what they are over that. They are found for the
plans that ask for them: of most pairs of shardings nobody does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.graph.graph import TensorType, type_of
from autopar.sharding.convert import ShapeConsistencyManager
from autopar.sharding.placement import Sharding
from autopar.sharding.strategies import gradients, values
from autopar.sharding.temporaries import temporaries
from autopar.space.lifetimes import Lifetimes
from autopar.space.local_bytes import LocalBytes
from autopar.space.lookup import Tables, Taken, end_to_end
from autopar.space.timeline import OWN, Passage, Passages
from autopar.space.wiring import Wiring

if TYPE_CHECKING:
    from autopar.space.memory import Piece
    from autopar.space.space import Edge

# kinds of what the backward of an op may be the last to read
_FREED = frozenset(("saved activations", "gradients of activations", "transients", "gathered parameters"))
_UNKNOWN = -1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Temporaries of converting a value and its gradient, by [given, taken], as far as anything asked for them."""

    edge: Edge
    type: TensorType
    is_turned: bool
    of_value: np.ndarray
    of_gradient: np.ndarray

    @staticmethod
    def on(edge: Edge, type_: TensorType, is_turned: bool) -> _Found:
        shape = edge.seconds.shape
        return _Found(edge, type_, is_turned, np.full(shape, _UNKNOWN), np.full(shape, _UNKNOWN))

    def find(self, manager: ShapeConsistencyManager, given: int, taken: int) -> tuple[float, float]:
        """Bytes beside the value and beside the gradient."""
        if self.of_value[given, taken] == _UNKNOWN:
            leaves, arrives = self.edge.given[given], self.edge.taken[taken]
            leads = bool(np.isfinite(self.edge.seconds[given, taken]))
            value = self._bytes(manager, values(leaves), values(arrives), self.is_turned) if leads else 0.0
            leads = leads and self.type.requires_grad
            gradient = self._bytes(manager, gradients(arrives), gradients(leaves), False) if leads else 0.0
            self.of_value[given, taken], self.of_gradient[given, taken] = value, gradient
        return float(self.of_value[given, taken]), float(self.of_gradient[given, taken])

    def _bytes(self, manager: ShapeConsistencyManager, source: Sharding, target: Sharding, is_turned: bool) -> float:
        if source == target:
            return 0.0
        shape, itemsize = self.type.shape, self.type.itemsize
        steps = manager.path(shape, itemsize, source, target).steps
        return float(temporaries(steps, shape, source, manager.mesh, is_turned) * itemsize)


class Temporaries:
    """Those of all conversions of values, for one plan after the other."""

    def __init__(
        self,
        wiring: Wiring,
        lifetimes: Lifetimes,
        passages: Passages,
        pieces: Sequence[Piece],
        manager: ShapeConsistencyManager,
        bytes_: LocalBytes,
    ) -> None:
        clock, self.manager = lifetimes.clock, manager
        self.ops, self.times = clock.n, clock.last + 1
        edges = [k for k, value in enumerate(wiring.values) if value not in lifetimes.parameters.owners]
        edges.sort(key=lambda k: (clock.forward(wiring.takers[k]), wiring.edges[k].operand))
        self.edges = np.array(edges, int)
        self.now = np.array([clock.forward(wiring.takers[k]) for k in edges], int)
        self.found = self._tables(wiring, lifetimes)
        # what is converted once: a value, as one flow
        self._value = _numbers((wiring.edges[k].source, passages.sources[k]) for k in edges)
        self._arrives, self._arrives_at = end_to_end([passages.arrives[k] for k in edges])
        self._kinds = int(self._arrives.max(initial=0)) + 1
        bytes_of = [bytes_.by_flows(wiring.edges[k], type_of(wiring.values[k])) for k in edges]
        self._made = Tables(of_edges=((k, passages.converted[k]) for k in edges))
        self._comes = Tables(of_edges=((k, b.unreduced) for k, b in zip(edges, bytes_of, strict=True)))
        self._goes_on = Tables(of_edges=((k, b.reduced) for k, b in zip(edges, bytes_of, strict=True)))
        self._has_gradient = np.array([type_of(wiring.values[k]).requires_grad for k in edges], bool)
        begins = [(time, op.site, table) for time, op in enumerate(passages.ops) for table in _made_by(op)]
        self._begins_at = np.array([time for time, _, _ in begins], int)
        self._begins = Tables((site, table) for _, site, table in begins)
        ends = sorted((p for p in pieces if p.kind in _FREED and clock.n <= p.last <= clock.settled), key=_is_edge)
        self._ends_at = np.array([p.last for p in ends], int)
        self._ends = Tables(
            ((p.place, p.bytes) for p in ends if not p.is_edge), ((p.place, p.bytes) for p in ends if p.is_edge)
        )

    def _tables(self, wiring: Wiring, lifetimes: Lifetimes) -> list[_Found]:
        alike: dict[Hashable, _Found] = {}
        found = []
        for edge, value in zip(wiring.edges, wiring.values, strict=True):
            type_, is_turned = type_of(value), value in lifetimes.turned
            key = id(edge.given), id(edge.taken), type_, is_turned
            if key not in alike:
                alike[key] = _Found.on(edge, type_, is_turned)
            found.append(alike[key])
        return found

    def of_value(self, edge: int, given: int, taken: int) -> float:
        """Bytes beside a value while it is converted."""
        return self.found[edge].find(self.manager, given, taken)[0]

    def over(self, taken: Taken) -> np.ndarray:
        """Bytes at every time of a step, over what is counted."""
        once = self._value * self._kinds + self._arrives[self._arrives_at + taken.arrives[self.edges]].astype(int)
        over: np.ndarray = np.zeros(self.times)
        forward = np.bincount(self._begins_at, self._begins.of_sites(taken), self.times)
        made = self._made.of_edges(taken)
        places = _first(once, made > 0)
        own = self._of(taken, places)[:, 0]
        _at_most(over, self.now[places], own - _after(self.now[places], made[places]) - forward[self.now[places]])
        ends = np.concatenate([self._ends.of_sites(taken), self._ends.of_edges(taken)])
        backward = np.bincount(self._ends_at, ends, self.times)
        comes, goes_on = self._comes.of_edges(taken), self._goes_on.of_edges(taken)
        places = _first(once, (comes > 0) & self._has_gradient)
        own, then = self._of(taken, places)[:, 1], 2 * self.ops - 1 - self.now[places]
        held = own + comes[places] + _after(then, comes[places]) - _after(then, goes_on[places])
        _at_most(over, then, held - backward[then])
        return over

    def _of(self, taken: Taken, places: np.ndarray) -> np.ndarray:
        """Temporaries of the value and of the gradient at these places of `edges`."""
        edges = self.edges[places]
        rows, columns = taken.leaves[edges].tolist(), taken.arrives[edges].tolist()
        found = [
            self.found[k].find(self.manager, i, j) for k, i, j in zip(edges.tolist(), rows, columns, strict=True)
        ]
        return np.array(found, float).reshape(-1, 2)


def _made_by(op: Passage) -> Iterator[np.ndarray]:
    """Bytes, by choice, of what an op makes."""
    yield from (made.bytes for made in op.made if made.shows == OWN)
    yield from (table for table in (op.besides, op.work) if table is not None)


def _first(keys: np.ndarray, is_meant: np.ndarray) -> np.ndarray:
    """The first place of each key, of those that are meant, in order."""
    places = np.flatnonzero(is_meant)
    _, first = np.unique(keys[places], return_index=True)
    found: np.ndarray = np.sort(places[first])
    return found


def _after(times: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """Of each place, the sum of the amounts that come behind it at the same time; times are in groups."""
    if not len(times):
        return amounts
    total = np.cumsum(amounts)
    ends = np.append(np.flatnonzero(np.diff(times)), len(times) - 1)
    of_group = np.repeat(total[ends], np.diff(ends, prepend=-1))
    found: np.ndarray = of_group - total
    return found


def _at_most(over: np.ndarray, times: np.ndarray, amounts: np.ndarray) -> None:
    """Raise the bytes at these times to these amounts."""
    np.maximum.at(over, times, amounts)


def _numbers(keys: Iterator[Hashable]) -> np.ndarray:
    """A number for each key, equal for equal ones."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], int)


def _is_edge(piece: Piece) -> bool:
    return piece.is_edge
