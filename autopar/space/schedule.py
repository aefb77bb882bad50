"""`Schedule`: the forward cut into windows, and the times at which parameters are gathered and gradients reduced.

Ops are numbered in the order of the forward. Op i runs at time i, its backward at time 2n-1-i (see `memory.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.fx as fx

from autopar.graph import walks
from autopar.graph.graph import Graph, info, op_name, type_of
from autopar.graph.layers import innermost_block
from autopar.ops.entry import facts_of
from autopar.space.windows import BLOCK, BUCKET, buckets

Span = tuple[int, int]  # first and last op
TABLE = 2**20  # The gradient of a table of at least this many bytes shares no bucket.
NEVER = -1  # marks a parameter that no backward reads by itself, because its region runs in chunks


@dataclass(frozen=True, slots=True)
class Transit:
    """How a parameter or its gradient travels: prices, bytes and emitted code read the same."""

    beside: int | None  # the window whose compute hides it; None where it is in line
    begins: int  # the time at which its message begins
    ends: int  # the time at which what it brings has arrived
    is_shared: bool = True  # whether its message may hold others


@dataclass(frozen=True, slots=True)
class Schedule:
    """The windows of a forward, and the times at which the parameters they read move."""

    of: tuple[int, ...]  # op -> the window that it stands in
    spans: tuple[Span, ...]  # window -> its ops
    # window -> the last op that reads a parameter and whose backward reads a copy that was gathered again. No op that
    # runs in chunks counts: one copy serves its forward and backward.
    ends: tuple[int, ...]
    # parameter -> the first op that reads anything of its bucket, and the last whose backward does. The bucket is the
    # one in which the parameter moves when no window's compute runs at the same time.
    buckets: Mapping[fx.Node, Span]
    # parameter -> the number of its bucket, and the ops that read it: the first, and the last whose backward does
    members: Mapping[fx.Node, tuple[int, Span]]
    # Parameters first read in the last of several windows. They are not gathered again, because their gathered copies
    # are still there when backward begins.
    stays: frozenset[fx.Node]

    def moving(self, parameters: Container[fx.Node]) -> Schedule:
        """The schedule in which only these parameters ever move.

        Members of their buckets that do not move are waited for no more.
        """
        spans: dict[int, list[Span]] = {}
        for parameter, (number, span) in self.members.items():
            if parameter in parameters:
                spans.setdefault(number, []).append(span)
        found = {p: _joined(spans[number]) for p, (number, _) in self.members.items() if p in parameters}
        return replace(self, buckets={**self.buckets, **found})

    def gather(self, op: int, parameter: fx.Node | None = None) -> Transit:
        """The gather of a parameter that this op reads: while the window before computes."""
        w = self.of[op]
        if w:
            return Transit(w - 1, self.spans[w - 1][0], self.spans[w][0])
        first, last = self._bucket(parameter, op)
        return Transit(None, first, first, is_shared=first < last)

    def gather_again(self, op: int, parameter: fx.Node | None = None) -> Transit:
        """Its second gather, for backward: while the backward of the window behind computes."""
        back, w = 2 * len(self.of) - 1, self.of[op]
        if w + 1 < len(self.spans):
            return Transit(w + 1, back - self.ends[w + 1], back - self.spans[w][1])
        first, last = self._bucket(parameter, op)
        return Transit(None, back - last, back - last, is_shared=first < last)

    def reduction(self, op: int) -> Transit:
        """The reduction of the gradient that this op gives: while the backward of the window before computes."""
        back, w = 2 * len(self.of) - 1, self.of[op]
        if w:
            return Transit(w - 1, back - op, back - self.spans[w - 1][0])
        return Transit(None, back - op, back - op)

    def reduction_goes_on(self, op: int) -> int:
        """The time at which the next step of that reduction has ended: it runs beside the window after."""
        w = self.of[op]
        return 2 * len(self.of) - 1 - self.spans[max(0, w - 2)][0]

    def reading(self, parameter: fx.Node) -> Span | None:
        """The first op that reads a parameter, and the last whose backward does; None of one that no op reads."""
        return _joined([self.members[parameter][1]]) if parameter in self.members else None

    def comes_up(self, op: int, is_gathered: bool) -> int:
        """The time from which a part that lies on the host comes up for the first op that reads its parameter.

        It does so beside the window before the one in which it is read; that is where its gather begins, if it has one.
        It begins behind that window's first op, before which gathers of others are finished, and begin.
        """
        w = self.of[op] - 1 - is_gathered
        if w < 0:
            return 0
        first, last = self.spans[w]
        return min(first + 1, last)

    def comes_up_again(self, op: int, is_gathered: bool) -> int:
        """The same time in backward, for the last op that reads the parameter."""
        w = self.of[op] + 1 + is_gathered
        if w >= len(self.spans):
            return len(self.of)
        first, last = self.spans[w]
        return 2 * len(self.of) - 1 - max(first, last - 1)

    def is_down(self, op: int) -> int:
        """The last time at which a gradient of this op is on its way to the host: beside the window after."""
        return self.reduction_goes_on(op)

    def _bucket(self, parameter: fx.Node | None, op: int) -> Span:
        """The ops that read a parameter's bucket; `op` itself for a parameter that no op reads."""
        return (op, op) if parameter is None else self.buckets.get(parameter, (op, op))


def schedule_of(ops: Sequence[fx.Node], least: int = BUCKET) -> Schedule:
    """Cut a forward into windows, by the blocks of the model.

    A block that reads less than `least` bytes of parameters is joined with what follows.
    """
    readers = _readers(ops)
    reads: list[list[fx.Node]] = [[] for _ in ops]  # the parameters that each op is the first to read
    for parameter, places in readers.items():
        reads[min(places)].append(parameter)
    spans = _spans(ops, reads, least)
    window_of = [w for w, (first, last) in enumerate(spans) for _ in range(first, last + 1)]
    reading = sorted({i for places in readers.values() for i in places if info(ops[i]).chunks == 1})
    last_reads = {window_of[i]: i for i in reading}
    last_begins = spans[-1][0] if len(spans) > 1 else len(ops)
    of_none = Schedule(
        tuple(window_of),
        spans,
        tuple(last_reads.get(w, last) for w, (_, last) in enumerate(spans)),
        {},
        _members(ops, readers, reads, spans),
        frozenset(parameter for parameter, places in readers.items() if min(places) >= last_begins),
    )
    return of_none.moving(readers)


def windows_to_search(graph: Graph) -> tuple[int, ...]:
    """The least bytes of windows: BUCKET, and BLOCK where that cuts the forward in another way."""
    ops = [n for n in graph.nodes if info(n).kind == "op"]
    return (BUCKET,) if schedule_of(ops, BLOCK) == schedule_of(ops, BUCKET) else (BUCKET, BLOCK)


def travels_alone(parameter: fx.Node) -> bool:
    """Whether a parameter's gradient shares no bucket, as that of a large table with looked-up rows.

    It is the last to be made, and whether it is a sum depends on where the tokens are: others would wait for it.
    """
    reading = (user for user in walks.uses(parameter, _is_same) if info(user).kind == "op")
    return type_of(parameter).nbytes >= TABLE and any(facts_of(op_name(user)).counts for user in reading)


def _is_same(user: fx.Node) -> bool:
    return info(user).kind == "op" and facts_of(op_name(user)).same


def _readers(ops: Sequence[fx.Node]) -> dict[fx.Node, list[int]]:
    """Indices of the ops that read each parameter, through ops that hand it on, these included.

    Parameters stand in the order in which they are first read.
    """
    at = {op: i for i, op in enumerate(ops)}

    def hands_on(user: fx.Node) -> bool:
        return user in at and facts_of(op_name(user)).same

    found: dict[fx.Node, list[int]] = {}
    for op in ops:
        for value in op.all_input_nodes:
            if info(value).kind == "parameter" and value not in found:
                found[value] = [at[user] for user in walks.uses(value, hands_on) if user in at]
    return found


def _spans(ops: Sequence[fx.Node], reads: Sequence[Sequence[fx.Node]], least: int) -> tuple[Span, ...]:
    """The first and last op of each window: blocks joined until they read `least` bytes of parameters."""
    counts = list[int]()
    count = 0
    read = 0
    for _, block in itertools.groupby(range(len(ops)), lambda i: innermost_block(info(ops[i]).module)):
        for i in block:
            count += 1
            read += _bytes(reads[i])
        if read >= least:
            counts.append(count)
            count = 0
            read = 0
    if counts and count and not read:  # the rest computes only
        counts[-1] += count
    elif count:
        counts.append(count)
    ends = itertools.accumulate(counts)
    return tuple((end - count, end - 1) for end, count in zip(ends, counts, strict=True))


def _members(
    ops: Sequence[fx.Node],
    readers: Mapping[fx.Node, Sequence[int]],
    reads: Sequence[Sequence[fx.Node]],
    spans: Sequence[Span],
) -> dict[fx.Node, tuple[int, Span]]:
    """The number of each parameter's bucket, and the ops that read the parameter."""
    found: dict[fx.Node, tuple[int, Span]] = {}
    numbers = itertools.count()
    for first, last in spans:
        read = [parameters for parameters in reads[first : last + 1] if parameters]
        for places in buckets([_bytes(parameters) for parameters in read]):
            number = next(numbers)
            for parameter in (p for k in places for p in read[k]):
                reading = readers[parameter]
                back = [i for i in reading if info(ops[i]).chunks == 1]
                found[parameter] = number, (min(reading), max(back, default=NEVER))
    return found


def _joined(spans: Sequence[Span]) -> Span:
    """The first op of all spans and the last that reads in backward, or the first again where none does."""
    first = min(first for first, _ in spans)
    last = max(last for _, last in spans)
    return first, first if last == NEVER else last


def _bytes(parameters: Iterable[fx.Node]) -> int:
    return sum(type_of(p).nbytes for p in parameters)
