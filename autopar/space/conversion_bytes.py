"""`Temporaries`: memory that conversions need at times of a step, beyond the pieces counted at those times.

The time of an op counts all at once: its operands as they arrive, what it makes, and what it reads for the last time.
A conversion runs before the op has made anything; that of a gradient behind the op's backward, when what only this read
is gone. The temporaries of both (`sharding/temporaries.py`) count by what they are over that. They are found for the
plans that ask for them: of most pairs of shardings nobody does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.graph.graph import TensorType, info, type_of
from autopar.sharding.convert import ShapeConsistencyManager
from autopar.sharding.placement import Sharding
from autopar.sharding.strategies import gradients, values
from autopar.sharding.temporaries import between, temporaries
from autopar.space.lifetimes import Lifetimes
from autopar.space.local_bytes import LocalBytes
from autopar.space.lookup import Tables, Taken, end_to_end
from autopar.space.passage import OWN, Passage, Passages
from autopar.space.schedule import Schedule
from autopar.space.wiring import Wiring

if TYPE_CHECKING:
    from autopar.space.memory import Piece
    from autopar.space.space import Edge

# kinds of pieces that the backward of an op may be the last to read
_FREED = frozenset(("saved activations", "gradients of activations", "transients", "gathered parameters"))
_UNKNOWN = -1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Gather:
    """A gather of a parameter, alone or in one message with others."""

    edge: int
    source: int
    time: int  # when the copy arrives
    made: np.ndarray
    under: tuple[bool, ...]  # whether the gather happens, by choice of the parameter; empty: always
    beside: Callable[[ShapeConsistencyManager, int, int], float]


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Temporary bytes of converting a value and its gradient over an edge, by [given, taken], computed on demand."""

    edge: Edge
    type: TensorType
    is_turned: bool
    of_value: np.ndarray
    of_gradient: np.ndarray
    between: np.ndarray  # bytes that the last step of converting the value starts from

    @staticmethod
    def on(edge: Edge, type_: TensorType, is_turned: bool) -> _Found:
        shape = edge.seconds.shape
        return _Found(edge, type_, is_turned, *(np.full(shape, _UNKNOWN) for _ in range(3)))

    def find(self, manager: ShapeConsistencyManager, given: int, taken: int) -> tuple[float, float]:
        """Temporary bytes of converting the value, and those of converting its gradient."""
        if self.of_value[given, taken] == _UNKNOWN:
            leaves, arrives = self.edge.given[given], self.edge.taken[taken]
            leads = bool(np.isfinite(self.edge.seconds[given, taken]))
            value = self._bytes(manager, values(leaves), values(arrives), is_turned=self.is_turned) if leads else 0.0
            leads = leads and self.type.requires_grad
            gradient = self._bytes(manager, gradients(arrives), gradients(leaves), is_last_use=True) if leads else 0.0
            self.of_value[given, taken], self.of_gradient[given, taken] = value, gradient
        return float(self.of_value[given, taken]), float(self.of_gradient[given, taken])

    def beside_value(self, manager: ShapeConsistencyManager, given: int, taken: int) -> float:
        """Temporary bytes of converting the value."""
        return self.find(manager, given, taken)[0]

    def between_steps(self, manager: ShapeConsistencyManager, given: int, taken: int) -> float:
        """Bytes of the last intermediate value of a conversion; 0 where it has a single step."""
        if self.between[given, taken] == _UNKNOWN:
            source, target = values(self.edge.given[given]), values(self.edge.taken[taken])
            shape, itemsize = self.type.shape, self.type.itemsize
            steps = manager.path(shape, itemsize, source, target).steps
            self.between[given, taken] = between(steps, shape, source, manager.mesh) * itemsize
        return float(self.between[given, taken])

    def _bytes(self, manager: ShapeConsistencyManager, source: Sharding, target: Sharding, **how: bool) -> float:
        if source == target:
            return 0.0
        shape, itemsize = self.type.shape, self.type.itemsize
        steps = manager.path(shape, itemsize, source, target).steps
        return float(temporaries(steps, shape, source, manager.mesh, **how) * itemsize)


class Temporaries:
    """Temporary bytes of all conversions of a space, under one plan or another."""

    def __init__(
        self,
        wiring: Wiring,
        lifetimes: Lifetimes,
        schedule: Schedule,
        passages: Passages,
        pieces: Sequence[Piece],
        manager: ShapeConsistencyManager,
        bytes_: LocalBytes,
    ) -> None:
        self.manager = manager
        self.found = _tables(wiring, lifetimes)
        conversions = _Conversions(wiring, lifetimes, passages, self.found, manager)
        self.parts = (
            _OfValues(conversions, wiring, lifetimes, passages, bytes_),
            _OfGradients(conversions, wiring, lifetimes, pieces, bytes_),
            _OfGathers(wiring, lifetimes, schedule, self.found, bytes_),
        )

    def of_value(self, edge: int, given: int, taken: int) -> float:
        """Temporary bytes of converting the value of an edge."""
        return self.found[edge].beside_value(self.manager, given, taken)

    def over(self, taken: Taken) -> np.ndarray:
        """Temporary bytes, at every time of a step, beyond the pieces that are counted then."""
        found: np.ndarray = np.max([part.over(taken) for part in self.parts], axis=0)
        return found


def _tables(wiring: Wiring, lifetimes: Lifetimes) -> list[_Found]:
    """An empty table of temporaries for each edge; edges that are alike share one."""
    alike: dict[Hashable, _Found] = {}
    found = []
    for edge, value in zip(wiring.edges, wiring.values, strict=True):
        type_, is_turned = type_of(value), value in lifetimes.memories.turned
        key = id(edge.given), id(edge.taken), type_, is_turned
        if key not in alike:
            alike[key] = _Found.on(edge, type_, is_turned)
        found.append(alike[key])
    return found


class _Conversions:
    """The edges that carry values other than parameters, in the order in which the values are taken."""

    def __init__(
        self,
        wiring: Wiring,
        lifetimes: Lifetimes,
        passages: Passages,
        found: Sequence[_Found],
        manager: ShapeConsistencyManager,
    ) -> None:
        clock, edges = lifetimes.clock, wiring.edges
        carried = [k for k, value in enumerate(wiring.values) if value not in lifetimes.parameters.owners]
        carried.sort(key=lambda k: (clock.forward(wiring.takers[k]), edges[k].operand))
        self.edges = np.array(carried, int)
        self.now = np.array([clock.forward(wiring.takers[k]) for k in carried], int)
        self.made = Tables(of_edges=((k, passages.converted[k]) for k in carried))
        self.found = found
        self.manager = manager
        # Ops that take a value as the same flow share one conversion, so source and flow are numbered to find them.
        self._value = _numbers((edges[k].source, passages.sources[k]) for k in carried)
        self._arrives, self._arrives_at = end_to_end([passages.arrives[k] for k in carried])
        self._kinds = int(self._arrives.max(initial=0)) + 1

    def first(self, taken: Taken, is_meant: np.ndarray) -> np.ndarray:
        """Places of the edges that are meant, with each conversion of a value to a flow only once."""
        flows = self._arrives[self._arrives_at + taken.arrives[self.edges]].astype(int)
        places = np.flatnonzero(is_meant)
        _, first = np.unique((self._value * self._kinds + flows)[places], return_index=True)
        found: np.ndarray = np.sort(places[first])
        return found

    def temporaries(self, taken: Taken, places: np.ndarray) -> np.ndarray:
        """Temporary bytes at some places, by [place, value or gradient]."""
        edges = self.edges[places]
        rows, columns = taken.leaves[edges].tolist(), taken.arrives[edges].tolist()
        each = zip(edges.tolist(), rows, columns, strict=True)
        found = [self.found[k].find(self.manager, i, j) for k, i, j in each]
        return np.array(found, float).reshape(-1, 2)


class _OfValues:
    """Temporaries of converting values: they run before the op, and later conversions, have made anything."""

    def __init__(
        self, conversions: _Conversions, wiring: Wiring, lifetimes: Lifetimes, passages: Passages, bytes_: LocalBytes
    ) -> None:
        self.conversions = conversions
        self.times = lifetimes.clock.last + 1
        made = [(time, op.site, table) for time, op in enumerate(passages.ops) for table in _made_by(op)]
        self.made_at = np.array([time for time, _, _ in made], int)
        self.made = Tables((site, table) for _, site, table in made)
        # a value that is converted where it ends is there until then, and is not counted at the time of the op
        self.leaves = Tables(of_edges=((k, _ending(wiring, lifetimes, bytes_, k)) for k in conversions.edges.tolist()))

    def over(self, taken: Taken) -> np.ndarray:
        """Bytes beyond the counted pieces, at every time."""
        conversions, over = self.conversions, np.zeros(self.times)
        by_ops = np.bincount(self.made_at, self.made.of_sites(taken), self.times)
        made, leaves = conversions.made.of_edges(taken), self.leaves.of_edges(taken)
        places = conversions.first(taken, made > 0)
        own, times = conversions.temporaries(taken, places)[:, 0], conversions.now[places]
        made, leaves = made[places], leaves[places]
        there = leaves + _behind(times, leaves) - _behind(times, made)
        np.maximum.at(over, times, own + there - by_ops[times])
        return over


def _ending(wiring: Wiring, lifetimes: Lifetimes, bytes_: LocalBytes, k: int) -> np.ndarray:
    """Bytes of the value of an edge, by [given, taken], where it ends with being converted."""
    value, taker = wiring.values[k], wiring.takers[k]
    tables = bytes_.by_flows(wiring.edges[k], type_of(value))
    if lifetimes.last_reader.get(value) is not taker:
        return bytes_.scaled(tables.sent, 0.0)
    return tables.sent


class _OfGradients:
    """Temporaries of converting gradients: by then, what only the op's backward read has been freed."""

    def __init__(
        self,
        conversions: _Conversions,
        wiring: Wiring,
        lifetimes: Lifetimes,
        pieces: Sequence[Piece],
        bytes_: LocalBytes,
    ) -> None:
        clock = lifetimes.clock
        self.conversions = conversions
        self.count = clock.last + 1
        self.times = clock.settled - conversions.now
        edges = conversions.edges.tolist()
        bytes_of = [bytes_.by_flows(wiring.edges[k], type_of(wiring.values[k])) for k in edges]
        self.comes = Tables(of_edges=((k, b.unreduced) for k, b in zip(edges, bytes_of, strict=True)))
        self.goes_on = Tables(of_edges=((k, b.reduced) for k, b in zip(edges, bytes_of, strict=True)))
        self.is_there = np.array([type_of(wiring.values[k]).requires_grad for k in edges], bool)
        self.memory = _numbers(_comes_in(wiring, lifetimes, k) for k in edges)
        self.lasts = np.array([_lasts(wiring, lifetimes, k) for k in edges], bool)
        freed = [p for p in pieces if p.kind in _FREED and clock.n <= p.last <= clock.settled]
        freed.sort(key=lambda p: p.is_edge)
        of_sites = [(p.place, p.bytes) for p in freed if not p.is_edge]
        of_edges = [(p.place, p.bytes) for p in freed if p.is_edge]
        self.freed = Tables(of_sites, of_edges)
        self.freed_at = np.array([p.last for p in freed], int)

    def over(self, taken: Taken) -> np.ndarray:
        """Bytes beyond the counted pieces, at every time."""
        amounts = np.concatenate([self.freed.of_sites(taken), self.freed.of_edges(taken)])
        freed = np.bincount(self.freed_at, amounts, self.count)
        comes, goes_on = self.comes.of_edges(taken), self.goes_on.of_edges(taken)
        places = self.conversions.first(taken, (comes > 0) & self.is_there)
        own, times = self.conversions.temporaries(taken, places)[:, 1], self.times[places]
        stays = np.unique(self.memory[(comes == 0) & self.lasts])
        comes, goes_on = np.where(self._is_counted(places, stays), comes[places], 0.0), goes_on[places]
        over = np.zeros(self.count)
        np.maximum.at(over, times, own + comes + _behind(times, comes) - _behind(times, goes_on) - freed[times])
        return over

    def _is_counted(self, places: np.ndarray, stays: np.ndarray) -> np.ndarray:
        """Whether each conversion is the one that counts the memory of the gradient it reads.

        The last conversion to read a memory counts it. Memories that stay for a gradient that nothing converts are
        among the pieces.
        """
        memory = self.memory[places]
        last: np.ndarray = np.zeros(len(self.memory), int)
        last[memory] = places
        return (last[memory] == places) & ~np.isin(memory, stays)


class _OfGathers:
    """Temporaries of gathering parameters, beside messages that several share (`gather_messages.py`)."""

    def __init__(
        self,
        wiring: Wiring,
        lifetimes: Lifetimes,
        schedule: Schedule,
        found: Sequence[_Found],
        bytes_: LocalBytes,
    ) -> None:
        self.edges = wiring.edges
        self.times = lifetimes.clock.last + 1
        self.gathers: list[_Gather] = []
        owners, clock = lifetimes.parameters.owners, lifetimes.clock
        for k, (value, taker) in enumerate(zip(wiring.values, wiring.takers, strict=True)):
            if value not in owners or taker not in clock.at:
                continue
            parameter, now, source = owners[value], clock.at[taker], wiring.edges[k].source
            made = bytes_.by_flows(wiring.edges[k], type_of(value)).made
            if not bytes_.is_any(made):
                continue
            transit = schedule.gather(now, parameter)
            time = transit.ends if transit.is_shared else now
            beside = found[k].between_steps if transit.is_shared else found[k].beside_value
            self.gathers.append(_Gather(k, source, time, made, (), beside))
            again, needs = wiring.sites[source].regathered, lifetimes.needs(value, taker)
            if any(again) and parameter not in schedule.stays and needs >= clock.n:
                transit = schedule.gather_again(now, parameter)
                time = max(now + 1, transit.ends) if transit.is_shared else needs
                beside = found[k].between_steps if transit.is_shared else found[k].beside_value
                self.gathers.append(_Gather(k, source, time, made, again, beside))

    def over(self, taken: Taken) -> np.ndarray:
        """Bytes beyond the counted pieces, at every time."""
        over: np.ndarray = np.zeros(self.times)
        leaves, arrives, choices = taken.leaves.tolist(), taken.arrives.tolist(), taken.choices.tolist()
        for gather in self.gathers:
            k = gather.edge
            if gather.made[leaves[k], arrives[k]] and (not gather.under or gather.under[choices[gather.source]]):
                manager = self.edges[k].ahead
                assert manager is not None, "a parameter is gathered by a manager of its own"
                over[gather.time] += gather.beside(manager, leaves[k], arrives[k])
        return over


def _comes_in(wiring: Wiring, lifetimes: Lifetimes, k: int) -> Hashable:
    """The memory of the gradient that arrives on an edge; operands of a sum share its result's."""
    value, taker = wiring.values[k], wiring.takers[k]
    back, place = lifetimes.backward.get(taker), wiring.edges[k].operand
    if back is None or place not in back.shows:
        return k
    port = back.shows[place]
    is_whole = info(taker).outputs[port].nbytes == type_of(value).nbytes
    return (taker, port) if is_whole else k


def _lasts(wiring: Wiring, lifetimes: Lifetimes, k: int) -> bool:
    """Whether the gradient of an edge stays in memory as it comes, where nothing converts it."""
    value, taker = wiring.values[k], wiring.takers[k]
    if taker not in lifetimes.clock.at or not type_of(value).requires_grad:
        return False
    return lifetimes.last_use(value) == lifetimes.clock.at[taker] or not lifetimes.added.is_added(value, taker)


def _made_by(op: Passage) -> Iterator[np.ndarray]:
    """Bytes by choice of each thing that an op makes: outputs in memory of their own, extras, workspace."""
    yield from (made.bytes for made in op.made if made.shows == OWN)
    yield from (table for table in (op.besides, op.work) if table is not None)


def _behind(times: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """For each place, the sum of later amounts at the same time; `times` are sorted."""
    if not len(times):
        return amounts
    total = np.cumsum(amounts)
    ends = np.flatnonzero(np.diff(times, append=times[-1] + 1))
    found: np.ndarray = np.repeat(total[ends], np.diff(ends, prepend=-1)) - total
    return found


def _numbers(keys: Iterator[Hashable]) -> np.ndarray:
    """An index for each key, the same for equal keys."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], int)
