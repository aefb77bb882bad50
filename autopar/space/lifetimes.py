"""`Clock` and `Lifetimes`: the times of a step, and how long each value of a graph is needed in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch.fx as fx

from autopar.graph import walks
from autopar.graph.graph import Graph, info, type_of
from autopar.space.parameter_values import ParameterValues
from autopar.space.saved import freed_first, kept_by, layouts, owners
from autopar.space.traffic import Group


@dataclass(frozen=True, slots=True, eq=False)
class Clock:
    """The times of a step: forward of each op, backward of each, then the optimizer (see `memory.py`)."""

    ops: tuple[fx.Node, ...]
    at: Mapping[fx.Node, int]  # the index of each op
    updates: int  # times of the optimizer's step
    has_loss: bool  # whether backward begins at a scalar output

    @staticmethod
    def of(graph: Graph, updates: int) -> Clock:
        ops = tuple(n for n in graph.nodes if info(n).kind == "op")
        left = [type_of(n) for node in graph.nodes if info(node).kind == "output" for n in node.all_input_nodes]
        has_loss = any(t.requires_grad and not t.shape for t in left)
        return Clock(ops, {n: i for i, n in enumerate(ops)}, updates, has_loss)

    @property
    def n(self) -> int:
        return len(self.ops)

    @property
    def settled(self) -> int:
        """The last time of backward."""
        return 2 * len(self.ops) - 1

    @property
    def last(self) -> int:
        return 2 * len(self.ops) + self.updates - 1

    def forward(self, node: fx.Node) -> int:
        """The time at which a node reads its operands; the output node reads with the last op."""
        return self.at.get(node, len(self.ops) - 1)

    def back(self, node: fx.Node) -> int:
        """The time of a node's backward; for outputs the last one, since the user may hold them that long."""
        return 2 * len(self.ops) - 1 - self.at.get(node, 0)

    def mirrored(self, op: int) -> int:
        """The time of the backward of the op with this index."""
        return 2 * len(self.ops) - 1 - op


class Lifetimes:
    """When values are read, and which memory they share, on one kind of device."""

    def __init__(
        self, graph: Graph, clock: Clock, parameters: ParameterValues, kind: str, groups: Mapping[fx.Node, Group]
    ) -> None:
        self.clock = clock
        self.parameters = parameters
        self.memory, self.turned = layouts(graph)  # the memory of each value; and those that are not contiguous
        owner = owners(graph, self.memory)
        self.is_view = {n: owner[self.memory[n]] is not n for n in graph.nodes}
        self.whole = {m: type_of(n).nbytes for m, n in owner.items() if info(n).outputs}  # bytes of each memory
        self.users = {n: readers(n) for n in graph.nodes}
        self.outputs = {n: walks.results(n) for n in graph.nodes}  # of an op, the values that it gives
        self.keeps: dict[fx.Node, set[fx.Node]] = {}  # the values that an op keeps for its backward
        self.besides: dict[fx.Node, int] = {}  # and the bytes of what it makes besides
        # the value of these that its backward frees before it makes as much
        self.freed_first: dict[fx.Node, fx.Node] = {}
        self.inner = frozenset(op for op, group in groups.items() if group.is_inner)  # their values are in no memory
        self.runs_with = {op: group.last for op, group in groups.items()}  # the ops in whose kernels these run
        for op in clock.ops:
            kept, self.besides[op] = kept_by(op, kind, emitted=True) if op not in groups else (groups[op].kept(op), 0)
            self.keeps[op] = set(kept)
            if op not in groups and (first := freed_first(op)) in self.keeps[op]:
                self.freed_first[op] = first
        # of each value of an op, the last time at which it is needed as it is: by an op of the forward, or by its own
        # op's backward
        made = [value for value in graph.nodes if info(value).kind in ("op", "part")]
        self.end = {value: self._end(value) for value in made}
        # of each memory, the last time until which all of it is counted, if nothing converts it
        self.reach = {m: self.end.get(node, clock.last) for m, node in owner.items()}
        self.taken_over = frozenset(self._taken_over(graph, groups))  # memories that gradients of values take
        self._needed: dict[fx.Node, int] = {}
        self._last_uses: dict[fx.Node, int] = {}

    def _end(self, value: fx.Node) -> int:
        op = _producer(value)
        if value in self.keeps[op]:
            return self.clock.back(self.runs_with.get(op, op))
        return max([self.clock.at[op], *map(self.clock.forward, self.users[value])])

    def needed(self, value: fx.Node) -> int:
        """The last time at which a value or any view on it is needed."""
        if value not in self._needed:
            uses = [self.needs(value, u) for u in self.users[value]]
            self._needed[value] = max([self.end.get(value, 0), *uses])
        return self._needed[value]

    def needs(self, value: fx.Node, op: fx.Node) -> int:
        """The last time at which an op needs a value as it arrives: itself, its backward, or its views."""
        if op not in self.clock.at:
            return self.clock.settled
        return max([self._own(value, op), *map(self.needed, self.views(op, value))])

    def needs_itself(self, value: fx.Node, op: fx.Node) -> int:
        """The last time at which an op, or the views that it makes directly, need a value."""
        own = self._own(value, op) if op in self.clock.at else self.clock.back(op)
        return max([own, *(self.end[w] for w in self.views(op, value))])

    def _own(self, value: fx.Node, op: fx.Node) -> int:
        """The last time at which an op or its own backward needs a value."""
        if value not in self.keeps[op]:
            return self.clock.at[op]
        return self.clock.back(self.runs_with.get(op, op)) - (self.freed_first.get(op) is value)

    def last_use(self, value: fx.Node) -> int:
        """The index of the last op that reads a value in forward, views included: there its gradient begins."""
        if value not in self._last_uses:
            places = [self._last_read(value, u) for u in self.users[value]]
            self._last_uses[value] = max(places, default=self._place(value))
        return self._last_uses[value]

    def _last_read(self, value: fx.Node, user: fx.Node) -> int:
        """The index of the last op by which one reader reads a value; outputs beside a loss get no gradient."""
        if user in self.clock.at:
            runs = self.runs_with.get(user, user)
            return max(map(self.last_use, self.views(user, value)), default=self.clock.at[runs])
        return self._place(value) if self.clock.has_loss and type_of(value).shape else self.clock.n - 1

    def _taken_over(self, graph: Graph, groups: Mapping[fx.Node, Group]) -> Iterator[int]:
        """Memories that gradients overwrite: of values in a chunk that only one kernel, able to do so, reads."""
        for op, group in groups.items():
            if group.over is not None and group.is_last and info(op).chunks > 1:
                memory = self.memory[group.over]
                shown = [n for n in graph.nodes if self.memory.get(n) == memory]
                reading = {u for n in shown for u in self.users[n]}.difference(shown)
                if all(self.runs_with.get(u) is op for u in reading):
                    yield memory

    def gives_first(self, value: fx.Node, op: fx.Node) -> bool:
        """Whether this op's backward is the first to give the value's gradient, alone and through no view.

        A conversion of that gradient runs behind that backward, when what it was the last to read has been freed.
        """
        last = self.last_use(value)
        gives = [u for u in self.users[value] if u in self.clock.at and self._last_read(value, u) == last]
        is_once = sum(operand is value for operand in op.target.operands(op.kwargs)) == 1
        is_direct = gives == [op] and is_once and op not in self.runs_with and not self.views(op, value)
        return is_direct and not self.is_view[value]

    def first_use(self, value: fx.Node) -> int:
        """The index of the first op that reads a value in forward, through ops that hand it on to one reader.

        At the backward of that op its gradient is whole. An op that hands it on to several readers counts as a reader.
        """
        return min((self._first_read(u) for u in self.users[value]), default=self._place(value))

    def _first_read(self, user: fx.Node) -> int:
        if user in self.clock.at and user in self.parameters.owners and len(self.users[user]) == 1:
            return min(map(self.first_use, self.outputs[user]), default=self.clock.at[user])
        return self.clock.forward(user)

    def _place(self, value: fx.Node) -> int:
        """The index of the op that makes a value; 0 for what exists before the step."""
        return self.clock.at.get(_producer(value), 0)

    def views(self, op: fx.Node, value: fx.Node) -> list[fx.Node]:
        """The outputs of an op if they are views of this operand, else none."""
        outputs = self.outputs[op]
        passes = value in op.all_input_nodes and all(self.is_view[w] for w in outputs)
        return outputs if passes else []

    def has_several_uses(self, value: fx.Node) -> bool:
        return len(self.users[value]) > 1


def readers(value: fx.Node) -> list[fx.Node]:
    """The ops that read a value, and the output node where it leaves the graph."""
    return [u for u in value.users if info(u).kind in ("op", "output")]


def _producer(value: fx.Node) -> fx.Node:
    return value.args[0] if info(value).kind == "part" else value
