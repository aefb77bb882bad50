"""Reductions of gradients, which run beside the ops that follow them (see `schedule.py`)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from autopar.codegen.buffers import hands_on, numbers_of
from autopar.codegen.half import Half, Read
from autopar.codegen.halves import COLLECTIVES
from autopar.codegen.joint_graph import BACK, MEMBERS
from autopar.codegen.messages import begin, finish_before
from autopar.graph import walks
from autopar.runtime.collectives import BEGIN, STEPS
from autopar.sharding.convert import REDUCTIONS
from autopar.space.arrivals import Arrivals

_BEGUN_BY = {STEPS[f"{kind}{suffix}"]: kind for kind in BEGIN for suffix in ("", "_bucket")}
_REDUCTIONS = frozenset(step for step, kind in _BEGUN_BY.items() if kind in REDUCTIONS)


def reduce_beside(half: Half) -> None:
    """Run each reduction of gradients beside the ops that follow it.

    before    g = all_reduce(d, "dp");  e = mm(...);  h = all_reduce(e, "dp");  return g, h
    after     a = begin_all_reduce(pack([d]), "dp");  e = mm(...);  g = finish(a)[0];  b = begin_all_reduce(pack([e]),
              "dp");  h = finish(b)[0];  return g, h

    A step is finished where another reduction begins, once it has arrived by the clock of `Arrivals`: a small gradient
    that follows a large one does not wait for it. It is finished behind the window beside which it is priced in any
    case, since its memory is counted so long. Over one axis after another, a reduction goes on there with its next
    step, beside one window more. Local steps on a reduced gradient before it leaves, such as a slice, move to where the
    reduction finishes.
    """
    if not half.is_backward:
        return
    under_way = list[_UnderWay]()
    arrivals = Arrivals()
    found = _reductions(half)
    windows = _windows_of(half, found)
    closes = {window: node for node, window in zip(found, windows, strict=True)}  # the last reduction of each
    for node, window in zip(found, windows, strict=True):
        nbytes = sum(read.nbytes for read in _reads_of(half, node))
        arrivals.now += nbytes
        latest = window if closes[window] is node else window + 1
        due = [one for one in under_way if one.is_due(arrivals.now, latest) or node in one.readers]
        under_way = [one for one in under_way if one not in due] + _go_on(due, half, node, arrivals)
        steps = 1 + len(list(_further_steps(half, node)))
        under_way.append(_UnderWay.of(half, node, arrivals, nbytes / steps, window - 1))
    while under_way:
        under_way = _go_on(under_way, half, half.graph.output_node(), arrivals)


def _reductions(half: Half) -> list[fx.Node]:
    """The first steps of reductions of gradients, in order.

    A reduction that other ops of the step read stays where it is, because they need its result at once.
    """
    found = list[fx.Node]()
    further = set[fx.Node]()
    end = half.graph.output_node()
    for node in half.graph.nodes:
        if node.target in _REDUCTIONS and node not in further and _leads_only_to(_results(node), end):
            found.append(node)
            further.update(_further_steps(half, node))
    return found


def _windows_of(half: Half, reductions: Iterable[fx.Node]) -> list[int]:
    """The window of each reduction; of one whose parameters are not known that of the one before."""
    found = list[int]()
    for node in reductions:
        before = found[-1] if found else 0
        found.append(min((read.window for read in _reads_of(half, node)), default=before))
    return found


def _reads_of(half: Half, node: fx.Node) -> list[Read]:
    """Reads of the parameters of which a reduction sums gradients."""
    names = [half.ways.get(op, "") for op in node.meta.get(MEMBERS, (node.meta.get(BACK),))]
    return [half.reads[name] for name in names if name in half.reads]


def _go_on(due: Iterable[_UnderWay], half: Half, place: fx.Node, arrivals: Arrivals) -> list[_UnderWay]:
    """Finish steps before `place`, in the order in which they arrive; returns those that go on there."""
    further = [one.go_on(half, place, arrivals) for one in sorted(due, key=operator.attrgetter("arrives"))]
    return [one for one in further if one is not None]


def _further_steps(half: Half, node: fx.Node) -> Iterator[fx.Node]:
    """The steps of a reduction behind its first one."""
    while (then := _next_step(half, node)) is not None:
        yield then
        node = then


def _results(node: fx.Node) -> list[fx.Node]:
    """The results of a step: of a bucket its parts, in order."""
    is_bucket = isinstance(node.args[0], (list, tuple))
    return sorted(walks.parts(node), key=lambda r: r.args[1]) if is_bucket else [node]


def _uses_of(node: fx.Node, is_further: bool = False) -> tuple[list[fx.Node], list[fx.Node]]:
    """Split a step's users into local steps on its results, in order, and the ops that read these."""
    is_bucket = is_further or isinstance(node.args[0], (list, tuple))  # further: after other steps of its conversion
    # An op's own reduction ends where the op's gradient is read, so that the unreduced gradient can be freed.
    goes_on = _is_done_alone if is_bucket else functools.partial(_is_done_alone, conversion=node.meta.get(BACK))
    readers = {user for r in _results(node) for user in walks.uses(r, goes_on)}
    steps = sorted(filter(goes_on, readers))
    return steps, sorted(n for n in readers.difference(steps) if n.op != "output")


def _next_step(half: Half, node: fx.Node) -> fx.Node | None:
    """The same gradients' step over the next axis; None if anything else reads the reduction.

    It may begin late: only further such steps, and local ones, read it. What stands between steps of other values may
    be left out on some ranks, where they only seem to meet.
    """
    steps, readers = _uses_of(node)
    if len(readers) != 1 or readers[0].target not in _BEGUN_BY:
        return None
    (then,) = readers
    way, goes_on = (half.ways.get(n.meta.get(BACK, "")) for n in (node, then))
    is_all = {*_results(node), *steps}.issuperset(then.all_input_nodes)
    if way is None or way != goes_on or not is_all:
        return None
    return then if _next_step(half, then) or not _uses_of(then, is_further=True)[1] else None


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    """A reduction that has begun: the nodes that it replaces, and what reads them."""

    begun: fx.Node
    results: list[fx.Node]
    steps: list[fx.Node]  # local steps, casts and views of the results, in order
    readers: list[fx.Node]  # other readers of the results or of `steps`
    then: fx.Node | None  # the step over the next axis
    nbytes: float  # each step is timed by them
    arrives: float
    window: int  # the last one beside which it moves

    @staticmethod
    def of(
        half: Half, node: fx.Node, arrivals: Arrivals, nbytes: float, window: int, is_further: bool = False
    ) -> _UnderWay:
        """Begin a step of a reduction where it stands."""
        arrives = arrivals.send(node.args[1], nbytes)
        is_bucket = isinstance(node.args[0], (list, tuple))
        results = _results(node)
        steps, readers = _uses_of(node, is_further)
        then = _next_step(half, node)
        begun = _begin_reduction(half.graph, _BEGUN_BY[node.target], node, results if is_bucket else None)
        if is_bucket:
            for r in results:  # the parts read the begun message until it is finished
                r.replace_input_with(node, begun)
            half.graph.erase_node(node)
        return _UnderWay(begun, results, steps, readers if then is None else [], then, nbytes, arrives, window)

    def is_due(self, now: float, window: int) -> bool:
        """Whether it has arrived by now, or may not move beside what comes before a window."""
        return self.arrives <= now or self.window >= window

    def go_on(self, half: Half, place: fx.Node, arrivals: Arrivals) -> _UnderWay | None:
        """Finish before `place` or the first reader, and begin the step over the next axis there."""
        place = min([place, *self.readers])
        for node in self.steps:
            place.prepend(node)
        finish_before(half.graph, self.begun, self.results, min([place, *self.steps]))
        if self.then is None:
            return None
        place.prepend(self.then)
        return _UnderWay.of(half, self.then, arrivals, self.nbytes, self.window - 1, is_further=True)


def _begin_reduction(graph: fx.Graph, kind: str, node: fx.Node, read: list[fx.Node] | None) -> fx.Node:
    """Begin a reduction where it stands, of its one tensor or of the `read` tensors of its bucket.

    While micro-batches accumulate, only some gradients of a bucket may be read.
    """
    tensors, axis, *numbers = node.args
    with graph.inserting_before(node):
        if read is not None:
            places = [r.args[1] for r in read]

            def of_read(row: Sequence[Any]) -> list[Any]:
                return [row[i] for i in places]

            return begin(graph, kind, of_read(tensors), axis, *map(of_read, numbers))
        return begin(graph, kind, [tensors], axis, *numbers_of([node]))


def _leads_only_to(nodes: list[fx.Node], end: fx.Node) -> bool:
    """Whether the nodes have readers, and reach `end` through steps and views alone."""

    def goes_on(node: fx.Node) -> bool:
        return hands_on(node) or node.target in _BEGUN_BY or node.target is operator.getitem

    users = [user for node in nodes for user in walks.uses(node, goes_on)]
    return bool(users) and all(user is end or goes_on(user) for user in users)


def _is_done_alone(node: fx.Node, conversion: str | None = None) -> bool:
    """Whether the node is a local step, cast, copy or view of one tensor, of `conversion` if given."""
    is_of_it = conversion is None or node.meta.get(BACK) == conversion
    return hands_on(node) and node.target not in COLLECTIVES and is_of_it
