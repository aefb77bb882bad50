"""`Clock` and `Lifetimes`: the times of a step, and how long each value of a graph is needed in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch.fx as fx

from autopar.graph import walks
from autopar.graph.graph import Graph, info, op_name, type_of
from autopar.graph.nodes import tensor_operands
from autopar.space.added_gradients import AddedGradients
from autopar.space.backward_kernels import Backward, Held, backwards
from autopar.space.parameter_values import ParameterValues
from autopar.space.saved import Memories, kept_by
from autopar.space.traffic import Group


@dataclass(frozen=True, slots=True, eq=False)
class Clock:
    """The times of a step: forward of each op, backward of each, then the optimizer (see `memory.py`)."""

    ops: tuple[fx.Node, ...]
    at: Mapping[fx.Node, int]  # the index of each op
    updates: int  # times of the optimizer's step
    has_loss: bool  # whether backward begins at a scalar output
    in_turns: bool = False  # whether a call is of several micro-batches

    @staticmethod
    def of(graph: Graph, updates: int) -> Clock:
        ops = tuple(n for n in graph.nodes if info(n).kind == "op")
        left = [type_of(n) for node in graph.nodes if info(node).kind == "output" for n in node.all_input_nodes]
        has_loss = any(t.requires_grad and not t.shape for t in left)
        return Clock(ops, {n: i for i, n in enumerate(ops)}, updates, has_loss, graph.turns > 1)

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

    def made_at(self, value: fx.Node) -> int:
        """The index of the op that makes a value; 0 for what exists before the step."""
        return self.at.get(_producer(value), 0)

    def mirrored(self, op: int) -> int:
        """The time of the backward of the op with this index."""
        return 2 * len(self.ops) - 1 - op


class Kept(NamedTuple):
    """What one op keeps for its backward."""

    values: frozenset[fx.Node] = frozenset()
    besides: tuple[Held, ...] = ()  # other tensors, which it makes for its backward
    freed_first: frozenset[fx.Node] = frozenset()  # values that its backward frees before it is fullest


class Lifetimes:
    """When values are read, and which memory they share, on one kind of device."""

    def __init__(
        self, graph: Graph, clock: Clock, parameters: ParameterValues, kind: str, groups: Mapping[fx.Node, Group]
    ) -> None:
        self.clock = clock
        self.parameters = parameters
        self.memories = Memories.of(graph, kind)
        self.users = {n: readers(n) for n in graph.nodes}
        self.added = AddedGradients(clock, self.users, self.memories.is_view)
        self.outputs = {n: walks.results(n) for n in graph.nodes}  # the values that each op gives
        self.kept: dict[fx.Node, Kept] = {}
        # the backward of ops that run in kernels of their own
        alone = backwards(graph, self.memories.lies, kind)
        self.backward = {op: back for op, back in alone.items() if op not in groups}
        self.inner = frozenset(op for op, group in groups.items() if group.is_inner)  # their values are in no memory
        self.runs_with = {op: group.last for op, group in groups.items()}  # the ops in whose kernels these run
        for op in clock.ops:
            back = self.backward.get(op)
            own = (groups[op].kept(op), ()) if op in groups else kept_by(op, kind, emitted=True, backward=back)
            self.kept[op] = Kept(frozenset(own[0]), own[1])
        for op, back in self.backward.items():
            self.kept[op] = self.kept[op]._replace(freed_first=self._freed(op, back))
        # value of an op -> the last time at which it is needed without a conversion, by an op of the forward or by
        # the backward of its own op
        made = [value for value in graph.nodes if info(value).kind in ("op", "part")]
        self.end = {value: self._end(value) for value in made}
        # value -> its last reader in forward: where that one converts it, the value ends before the reader runs
        self.last_reader = {value: op for value in made if (op := self._last_reader(value)) is not None}
        self.taken_over = frozenset(self._taken_over(graph, groups))  # memories that gradients of values take
        self._needed: dict[fx.Node, int] = {}
        self._last_uses: dict[fx.Node, int] = {}

    def _freed(self, op: fx.Node, back: Backward) -> frozenset[fx.Node]:
        """Operands that the backward of an op frees before it is fullest: no later backward reads them."""
        operands, at = tensor_operands(op), self.clock.at
        ends = set[int]()
        for place, value in enumerate(operands):
            others = [u for u in self.users[value] if u in at and u is not op and value in self.kept[u].values]
            stays = value in self.kept.get(_producer(value), Kept()).values or info(value).kind in ("input", "buffer")
            if value in self.kept[op].values and not stays and all(at[u] > at[op] for u in others):
                ends.add(place)
        return frozenset(operands[k] for k in back.freed(ends))

    def _end(self, value: fx.Node) -> int:
        op = _producer(value)
        if value in self.kept[op].values:
            return self.clock.back(self.runs_with.get(op, op))
        return max([self.clock.at[op], *map(self.clock.forward, self.users[value])])

    def _last_reader(self, value: fx.Node) -> fx.Node | None:
        end = self.end[value]
        readers = [u for u in self.users[value] if self.clock.forward(u) == end]
        if self.memories.is_view[value] or len(readers) != 1 or self.clock.at.get(readers[0]) != end:
            return None
        op = readers[0]
        return op if op not in self.runs_with and tensor_operands(op).count(value) == 1 else None

    def stays(self, value: fx.Node) -> int:
        """The last time at which a value is in memory, whatever its last reader takes."""
        return self.end.get(value, self.clock.last) - (value in self.last_reader)

    def reach(self) -> dict[int, int]:
        """The last time at which all of each memory is counted, under every choice of conversions."""
        return {memory: self.stays(node) for memory, node in self.memories.owners.items()}

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
        if value not in self.kept[op].values:
            return self.clock.at[op]
        return self.clock.back(self.runs_with.get(op, op)) - (value in self.kept[op].freed_first)

    def last_use(self, value: fx.Node) -> int:
        """The index of the last op that reads a value in forward: its gradient begins there.

        Reads of a view count where the view's gradient is the value's as it lies.
        """
        if value not in self._last_uses:
            places = [self._last_read(value, u) for u in self.users[value]]
            self._last_uses[value] = max(places, default=self.clock.made_at(value))
        return self._last_uses[value]

    def _last_read(self, value: fx.Node, user: fx.Node) -> int:
        """The index of the last op by which one reader reads a value; outputs beside a loss get no gradient."""
        if user in self.clock.at:
            runs = self.runs_with.get(user, user)
            return max(map(self.last_use, self.hands_back(user, value)), default=self.clock.at[runs])
        return self.clock.made_at(value) if self.clock.has_loss and type_of(value).shape else self.clock.n - 1

    def _taken_over(self, graph: Graph, groups: Mapping[fx.Node, Group]) -> Iterator[int]:
        """Memories that gradients overwrite: of values in a chunk that only one kernel, able to do so, reads."""
        for op, group in groups.items():
            if group.over is not None and group.is_last and info(op).chunks > 1:
                memory = self.memories.memory[group.over]
                shown = [n for n in graph.nodes if self.memories.memory.get(n) == memory]
                reading = {u for n in shown for u in self.users[n]}.difference(shown)
                if all(self.runs_with.get(u) is op for u in reading):
                    yield memory

    def gives_first(self, value: fx.Node, op: fx.Node) -> bool:
        """Whether this op's backward is the first to give the value's gradient, alone and through no view.

        A conversion of that gradient runs behind that backward, when what it was the last to read has been freed.
        """
        last = self.last_use(value)
        gives = [u for u in self.users[value] if u in self.clock.at and self._last_read(value, u) == last]
        return gives == [op] and self._is_direct(value, op) and self.has_own_gradient(value)

    def gives_more(self, value: fx.Node, op: fx.Node) -> bool:
        """Whether this op's backward adds to the gradient that later uses gave a value.

        Only an op that reads the value once, and not through a view, does. What comes is converted before the sum is
        made (see `AddedGradients`).
        """
        is_shared = self.memories.is_view[value] and info(value).kind == "op" and op_name(value) == "identity"
        return is_shared and self.clock.at[op] in self.added.uses(value)[:-1] and self._is_direct(value, op)

    def _is_direct(self, value: fx.Node, op: fx.Node) -> bool:
        is_once = sum(operand is value for operand in op.target.operands(op.kwargs)) == 1
        return is_once and op not in self.runs_with and not self.hands_back(op, value)

    def comes_alone(self, value: fx.Node, op: fx.Node) -> int:
        """The last time at which only the views that an op makes have given a part of a value's gradient.

        After that the op's own backward converts it, or another reader gives its part.
        """
        until = self.clock.back(op) - 1
        while True:
            others = [self._last_read(value, u) for u in self.users[value] if u is not op]
            until = min([until, *(self.clock.mirrored(use) - 1 for use in others)])
            op, memory = _producer(value), self.memories.memory[value]
            shown = next((n for n in op.all_input_nodes if self.memories.memory[n] == memory), None)
            if shown is None or not self._shows_gradient(op):
                return until
            value = shown

    def first_use(self, value: fx.Node) -> int:
        """The index of the first op that reads a value in forward, through ops that hand it on to one reader.

        At the backward of that op its gradient is whole. An op that hands it on to several readers counts as a reader.
        """
        return min((self._first_read(u) for u in self.users[value]), default=self.clock.made_at(value))

    def _first_read(self, user: fx.Node) -> int:
        if user in self.clock.at and user in self.parameters.owners and len(self.users[user]) == 1:
            return min(map(self.first_use, self.outputs[user]), default=self.clock.at[user])
        return self.clock.forward(user)

    def views(self, op: fx.Node, value: fx.Node) -> list[fx.Node]:
        """The outputs of an op if they are views of this operand, else none."""
        outputs = self.outputs[op]
        passes = value in op.all_input_nodes and all(self.memories.is_view[w] for w in outputs)
        return outputs if passes else []

    def hands_back(self, op: fx.Node, value: fx.Node) -> list[fx.Node]:
        """The outputs of an op that are views of an operand and whose gradients are its own as they lie."""
        return self.views(op, value) if self._shows_gradient(op) else []

    def has_own_gradient(self, value: fx.Node) -> bool:
        """Whether the gradient of a value lies in memory of its own.

        The gradient of a view mostly shares the memory of its operand's. The backward of an op that gives parts puts
        their gradients together in a new tensor, and that of an op that broadcasts sums them up.
        """
        return not self.memories.is_view[value] or not self._shows_gradient(_producer(value))

    def _shows_gradient(self, op: fx.Node) -> bool:
        """Whether an op that makes views gives its operand the gradient that comes, as it lies."""
        back = self.backward.get(op)
        return back is None or bool(back.shows) or op in self.parameters.owners

    def has_several_uses(self, value: fx.Node) -> bool:
        return len(self.users[value]) > 1


def readers(value: fx.Node) -> list[fx.Node]:
    """The ops that read a value, and the output node where it leaves the graph."""
    return [u for u in value.users if info(u).kind in ("op", "output")]


def _producer(value: fx.Node) -> fx.Node:
    return value.args[0] if info(value).kind == "part" else value
