"""Order the iterations of loops by what reads them, so that a graph does not depend on the order of a set.

A model may loop over a set, `for kind in set(config.layer_types)`. Processes with other hash seeds run iterations in
another order, and would hold different graphs of one model. Iterations of a loop of which none needs another have no
order that matters: they are put in the order in which the rest of the program first reads them. All else stays as it
was recorded, and so do loops whose iterations need each other, such as layers.

    before    b = cos(y);  a = cos(x);  c = mul(z, a);  d = mul(c, b)       # for name in {"x", "y"}
    after     a = cos(x);  b = cos(y);  c = mul(z, a);  d = mul(c, b)

The stack says where an op was recorded: which calls of which functions led to it, and the instruction of each. The
bytecode says which instructions are a loop. Two ops of one loop are of one iteration if the loop has not jumped back
between them.
"""

from __future__ import annotations

import bisect
import dis
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.fx as fx

from autopar.graph import walks
from autopar.graph.graph import info, op_name


class Loop(NamedTuple):
    """The instructions of a loop, or one instruction that makes several calls."""

    start: int
    end: int

    def contains(self, instruction: int) -> bool:
        return self.start <= instruction <= self.end

    def is_inside(self, other: Loop) -> bool:
        return other.start <= self.start and self.end <= other.end and self != other


_WHOLE = Loop(-1, sys.maxsize)


@dataclass(frozen=True, slots=True, eq=False)
class Invocation:
    """One run of a function."""

    code: types.CodeType
    callers: Place  # the invocations that led to it, outermost first


Place = tuple[tuple[Invocation, int], ...]  # the invocations around an op, each with the instruction it is at


class Stack:
    """The invocations that are running, below the call that `follow` makes."""

    def __init__(self) -> None:
        self._base: types.FrameType | None = None
        # Frames of the last op. They are held so that a frame is known again, for a later one may take its memory.
        self._frames: list[tuple[types.FrameType, Invocation]] = []
        self._depths: dict[int, int] = {}  # id(frame) -> its index in `_frames`

    def follow(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a function, whose invocations are followed."""
        self._base = sys._getframe()
        try:
            return function(*args)
        finally:
            self._base = None
            self._keep(0)

    def place(self) -> Place:
        """The place that the program has reached; empty outside `follow`."""
        new: list[types.FrameType] = []
        frame: Any = sys._getframe(1)
        while frame is not None and frame is not self._base and id(frame) not in self._depths:
            new.append(frame)
            frame = frame.f_back
        if frame is None:
            return ()
        self._keep(self._depths.get(id(frame), -1) + 1)
        for frame in reversed(new):
            self._depths[id(frame)] = len(self._frames)
            self._frames.append((frame, Invocation(frame.f_code, self._top())))
        return self._top()

    def _keep(self, count: int) -> None:
        for frame, _ in self._frames[count:]:
            del self._depths[id(frame)]
        del self._frames[count:]

    def _top(self) -> Place:
        if not self._frames:
            return ()
        frame, invocation = self._frames[-1]
        return (*invocation.callers, (invocation, frame.f_lasti))


class Order:
    """A new order of ops, made from the last one to the first."""

    def __init__(self, ops: Sequence[fx.Node], places: dict[fx.Node, Place], output: fx.Node) -> None:
        self.is_free = False  # whether iterations of any loop have no order of their own
        self._places = places
        self._placed = [output]
        self._positions = {output: 0}  # op -> its index in `_placed`
        for is_known, run in reversed([(k, list(r)) for k, r in itertools.groupby(ops, lambda op: bool(places[op]))]):
            if is_known:
                self._place(run, None, _WHOLE)
            else:
                for op in reversed(run):
                    self._put(op)

    @property
    def ops(self) -> list[fx.Node]:
        """The ops in their order."""
        return self._placed[:0:-1]

    def _put(self, op: fx.Node) -> None:
        self._positions[op] = len(self._placed)
        self._placed.append(op)

    def _place(self, ops: list[fx.Node], inside: Invocation | None, loop: Loop) -> None:
        """Place ops that were recorded one after another, within a loop of an invocation or anywhere."""
        if len(ops) == 1:
            self._put(ops[0])
            return
        depth = _depth(self._places[ops[0]], self._places[ops[-1]])
        invocation = self._places[ops[0]][depth][0]
        within = loop if invocation is inside else _WHOLE
        for inner, iterations in reversed(self._loops(ops, depth, within)):
            for iteration in self._last_first(iterations):
                self._place(iteration, invocation, inner)

    def _loops(self, ops: list[fx.Node], depth: int, within: Loop) -> list[tuple[Loop, list[list[fx.Node]]]]:
        """The loops and calls by which one invocation came to its ops, in order, each with its iterations."""
        loops: list[tuple[Loop, list[list[list[fx.Node]]]]] = []  # an iteration has pieces, with jumps between them
        before: tuple[int, Any] = (0, None)
        for op in ops:
            invocation, at = self._places[op][depth]
            called = self._places[op][depth + 1][0]
            code = _read(invocation.code)
            around = [loop for loop in code.loops if loop.contains(at) and loop.is_inside(within)]
            loop, *inner = around or (Loop(at, at),)
            goes_on = called is before[1] or (at > before[0] and not code.may_skip(before[0], at))
            may_go_on = at > before[0] or any(other.contains(before[0]) for other in inner)
            if not loops or loops[-1][0] != loop:
                loops.append((loop, [[[op]]]))
            elif goes_on:
                loops[-1][1][-1][-1].append(op)
            elif may_go_on:
                loops[-1][1][-1].append([op])
            else:
                loops[-1][1].append([[op]])
            before = (at, called)
        return [(loop, list(itertools.chain.from_iterable(map(_joined, iterations)))) for loop, iterations in loops]

    def _last_first(self, iterations: list[list[fx.Node]]) -> Iterator[list[fx.Node]]:
        """Iterations of one loop, the last one first: each after all that read it."""
        if len(iterations) == 1:
            yield iterations[0]
            return
        number = {op: i for i, ops in enumerate(iterations) for op in ops}
        reads: list[set[int]] = [set() for _ in iterations]
        for op, i in number.items():
            for _, user in _uses(op):
                if number.get(user, i) != i:
                    reads[number[user]].add(i)
        waiting = [0 for _ in iterations]  # number of iterations that read it and are not placed
        for read in reads:
            for i in read:
                waiting[i] += 1
        numbers = _numbers(iterations)
        ready = {i: (numbers[i], self._first_use(iterations[i])) for i, count in enumerate(waiting) if not count}
        while ready:
            self.is_free |= len(ready) > 1
            chosen = min(ready, key=ready.__getitem__)
            del ready[chosen]
            yield iterations[chosen]
            for i in reads[chosen]:
                waiting[i] -= 1
                if not waiting[i]:
                    ready[i] = numbers[i], self._first_use(iterations[i])

    def _first_use(self, ops: list[fx.Node]) -> tuple[int, int, str]:
        """The first use of some ops by others: the smaller, the later in the program."""
        own = set(ops)
        uses = [(self._positions[user], result) for op in ops for result, user in _uses(op) if user not in own]
        if not uses:
            return -1, 0, "; ".join(map(_text, ops))
        first = max(position for position, _ in uses)
        operands = walks.operands(self._placed[first])
        return first, -min(operands.index(result) for position, result in uses if position == first), ""


def _uses(op: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each result of an op with each op that reads it."""
    parts = walks.parts(op)
    for result in (op, *parts):
        for user in result.users:
            if user not in parts:
                yield result, user


def _numbers(iterations: list[list[fx.Node]]) -> list[int]:
    """A number of each iteration, smaller for later ones; 0 unless modules of a list are looped over."""

    def path_of(ops: list[fx.Node]) -> tuple[int, ...]:
        return max(_numbers_in(info(op).module) for op in ops)

    paths = list(map(path_of, iterations))
    for numbers in itertools.zip_longest(*paths):
        if len(set(numbers)) > 1:
            is_list = None not in numbers and len(set(numbers)) == len(numbers)
            return [-number for number in numbers] if is_list else [0 for _ in numbers]
    return [0 for _ in paths]


def _numbers_in(path: str) -> tuple[int, ...]:
    return tuple(int(name) for name in path.split(".") if name.isdecimal())


def _text(op: fx.Node) -> str:
    """A text that tells an op from others, whatever order they were recorded in."""
    attributes = [info(n).key for n in op.all_input_nodes if n.op == "get_attr"]
    return " ".join((info(op).module, op_name(op), *attributes))


def _depth(one: Place, other: Place) -> int:
    """The index of the innermost invocation that is common to two places."""
    return sum(1 for (a, _), (b, _) in zip(one, other, strict=False) if a is b) - 1


def _joined(pieces: list[list[fx.Node]]) -> list[list[fx.Node]]:
    """Pieces of one pass through a loop, those together that read each other.

    The others may be of several iterations, each of which took another branch.
    """
    number = {op: i for i, piece in enumerate(pieces) for op in piece}
    group = list(range(len(pieces)))
    for op, i in number.items() if len(pieces) > 1 else ():
        for _, user in _uses(op):
            one = group[i]
            other = group[number.get(user, i)]
            group = [one if g == other else g for g in group] if one != other else group
    joined: dict[int, list[fx.Node]] = {}
    for op, i in number.items():
        joined.setdefault(group[i], []).append(op)
    return list(joined.values())


class _Code(NamedTuple):
    """The jumps of a function."""

    loops: tuple[Loop, ...]  # outer ones before those inside them; each ends at its last jump back to its start
    jumps: tuple[int, ...]  # instructions that may go elsewhere than to the next one

    def may_skip(self, before: int, after: int) -> bool:
        """Whether a jump lies between two instructions, so that an iteration may run only one of them."""
        return bisect.bisect(self.jumps, before) < bisect.bisect(self.jumps, after)


@functools.lru_cache(maxsize=4096)
def _read(code: types.CodeType) -> _Code:
    jumps = [i for i in dis.get_instructions(code) if i.opcode in dis.hasjrel or i.opcode in dis.hasjabs]
    ends = {i.argval: i.offset for i in jumps if i.argval <= i.offset}
    loops = sorted((Loop(start, end) for start, end in ends.items()), key=lambda loop: (loop.start, -loop.end))
    return _Code(tuple(loops), tuple(i.offset for i in jumps))
