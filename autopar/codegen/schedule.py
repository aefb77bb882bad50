"""Schedule an emitted half: when it recomputes, and when its collectives of parameters run, as `space/` prices them.

Each pass of `PASSES` has a before and an after; none changes what is computed.

Order of nodes is order of execution: a collective that has begun runs on its own while the ops after it compute, until
its `finish`.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from autopar.codegen.buffer_reuse import write_over
from autopar.codegen.buffers import hands_on, is_view, numbers_of, read_instead
from autopar.codegen.halves import COLLECTIVES
from autopar.codegen.idle_views import drop_idle_views
from autopar.codegen.joint_graph import BACK, OP, RECOMPUTED, WANTED
from autopar.codegen.recomputed import NOTHING, Recomputed
from autopar.graph import walks
from autopar.runtime.collectives import BEGIN, PACK, STEPS, finish
from autopar.sharding.convert import REDUCTIONS

_LOCAL = (STEPS["slice"], STEPS["lodge"])  # steps that do not communicate
_MOVES = {STEPS[kind]: kind for kind in BEGIN}  # steps of one tensor
_BEGUN_BY = {STEPS[f"{kind}{suffix}"]: kind for kind in BEGIN for suffix in ("", "_bucket")}
_REDUCTIONS = frozenset(step for step, kind in _BEGUN_BY.items() if kind in REDUCTIONS)


@dataclass(frozen=True, slots=True, order=True)
class Read:
    """Where forward first reads a parameter: its window, and its bucket within the window."""

    window: int
    bucket: int
    nbytes: int  # bytes of the whole parameter
    # the windows beside whose compute it is gathered, in forward and again in backward; None: in line
    beside: tuple[int | None, int | None] = (None, None)
    stays: bool = False  # whether its gathered copy is kept for backward
    is_alone: bool = False  # whether its gradient shares no bucket


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """Forward or backward of a training step, while its collectives are scheduled."""

    graph: fx.Graph
    reads: Mapping[str, Read]  # keyed by the names of the parameters' placeholders
    is_backward: bool
    kept: Mapping[str, Read] = field(default_factory=dict)  # placeholders of parameters that are kept from forward
    recomputed: Recomputed = NOTHING  # nodes that backward recomputes, and the places that want them
    outputs: int | None = None  # number of forward's results that the caller gets; the others are saved
    regrouped: frozenset[str] = frozenset()  # views that change whole shapes, even where shapes of parts stay
    # the parameter from which each conversion, cast and view leads that reads nothing else
    ways: Mapping[str, str] = field(default_factory=dict)

    @property
    def leaving(self) -> list[fx.Node]:
        """The results that the caller gets: outputs in forward, gradients in backward."""
        results: Any = self.graph.output_node().args[0]
        return [n for n in results[: self.outputs] if isinstance(n, fx.Node)]

    def text(self) -> str:
        """The graph as readable Python."""
        return str(self.graph.python_code("self").src)


def fetched(graph: fx.Graph, reads: Mapping[str, Read]) -> dict[fx.Node, fx.Node]:
    """The nodes that are made of one parameter alone, each with the placeholder of that parameter."""

    def is_parameter(node: fx.Node) -> bool:
        return node.op == "placeholder" and node.name in reads

    return walks.made_of_one(graph.nodes, is_parameter, hands_on)


def repeat_in_passing(half: Half) -> None:
    """Copy nodes that are recomputed in passing, once for each place that wants them.

    before    a = gelu(x);  b = mm(a, w);  e = mm(g, b);  f = mm(g, a)              # a is wanted at 8, by b, and at 3
    after     a = gelu(x);  b = mm(a, w);  c = gelu(x);  e = mm(g, b);  f = mm(g, c)
    """
    wanted, places = half.recomputed.wanted, half.recomputed.places
    if not half.is_backward or all(len(times) < 2 for times in wanted.values()):
        return
    instances = _instances(half)
    for several in instances.values():
        _read_nearest(several, places)
    for node in reversed([n for several in instances.values() for n in several.values()]):
        if not node.users and node.target not in COLLECTIVES:  # every rank must run the same collectives
            half.graph.erase_node(node)


def _instances(half: Half) -> dict[fx.Node, dict[int, fx.Node]]:
    """Copies of each node that several places want, by place; the node itself serves the first place."""
    wanted, places = half.recomputed.wanted, half.recomputed.places
    instances: dict[fx.Node, dict[int, fx.Node]] = {}
    for node in [n for n in half.graph.nodes if n.meta.get(RECOMPUTED)]:
        op = node.meta.get(OP, "")
        follows = {place for operand in node.all_input_nodes for place in instances.get(operand, ())}
        # A view is made of each copy of its operand: the backward of its op may read it behind the last run of that op.
        times = follows if op not in wanted or (is_view(node) and follows) else set(wanted[op])
        if len(times) < 2:
            node.meta[WANTED] = max(times, default=places.get(op, 0))
            continue
        own: dict[int, fx.Node] = {}
        instances[node] = own
        last = node
        for place in sorted(times, reverse=True):
            if own:
                with half.graph.inserting_after(last):
                    last = half.graph.node_copy(node)
            last.meta[WANTED] = place
            own[place] = last
    return instances


def _read_nearest(several: Mapping[int, fx.Node], places: Mapping[str, int]) -> None:
    """Redirect each reader of a repeated node to the last copy before it."""
    first = several[max(several)]
    for reader in list(first.users):
        place = reader.meta[WANTED] if WANTED in reader.meta else places.get(reader.meta.get(BACK, ""), -1)
        known = [p for p in several if p >= place] or [max(several)]
        reader.replace_input_with(first, several[min(known)])


def recompute_late(half: Half) -> None:
    """Move recomputed nodes before the first op's backward that wants them, or before an earlier reader.

    before    a = gelu(x);  b = gelu(y);  d = mm(g, w);  e = gelu_backward(d, y, b);  f = gelu_backward(e, x, a)
    after     d = mm(g, w);  b = gelu(y);  e = gelu_backward(d, y, b);  a = gelu(x);  f = gelu_backward(e, x, a)
    """
    made = [n for n in half.graph.nodes if n.meta.get(RECOMPUTED)] if half.is_backward else []
    if not made:
        return
    places, wanted = half.recomputed.places, half.recomputed.wanted
    rest = [n for n in half.graph.nodes if n.op != "placeholder" and not n.meta.get(RECOMPUTED)]
    at = {node: i for i, node in enumerate(rest)}
    steps: list[int] = []  # negated places that backward reaches, in ascending order
    begins: list[int] = []  # index in `rest` at which each of these places begins
    for node, i in at.items():
        place = places.get(node.meta.get(BACK, ""))
        if place is not None and (not steps or -place > steps[-1]):
            steps.append(-place)
            begins.append(i)
    goal: dict[fx.Node, int] = {}
    for node in reversed(made):
        op = node.meta.get(OP, "")
        place = node.meta[WANTED] if WANTED in node.meta else max(wanted.get(op, (places.get(op, 0),)))
        step = bisect.bisect_left(steps, -place)
        before = begins[step] if step < len(steps) else len(rest) - 1
        goal[node] = min([before, *(goal[u] if u in goal else at[u] for u in node.users)])
    for node in made:
        if node.target is operator.getitem and node.args[0] in goal:  # a part stays with the op
            goal[node] = goal[node.args[0]]
        rest[goal[node]].prepend(node)
    _sink(half)


def _sink(half: Half) -> None:
    """Move recomputed nodes that read no parameter down to their first reader, but past no collective.

    With uneven parts the first readers of ranks may differ, but the order of collectives, and of gathers for an op,
    must not.
    """
    held = fetched(half.graph, half.reads)
    barrier = half.graph.output_node()
    for node in reversed(list(half.graph.nodes)):
        if node.target in COLLECTIVES:
            barrier = node
        elif node.meta.get(RECOMPUTED) and node.target is not operator.getitem:
            parts = walks.parts(node)
            readers = [u for of in (node, *parts) for u in of.users if u not in parts]
            if readers and not any(operand in held for operand in node.all_input_nodes):
                min(barrier, *readers).prepend(node)
                for part in reversed(parts):
                    node.append(part)


def fetch_late(half: Half) -> None:
    """Move nodes made of one parameter down to their first reader, where recomputed ones already stand.

    before    w = all_gather(p);  v = all_gather(q);  y = mm(x, w);  z = mm(y, v)
    after     w = all_gather(p);  y = mm(x, w);  v = all_gather(q);  z = mm(y, v)
    """
    made = [n for n in fetched(half.graph, half.reads) if n.op != "placeholder" and not n.meta.get(RECOMPUTED)]
    for node in reversed(made):  # a node's readers move before it does
        if readers := [u for u in node.users if u.op != "output"]:
            min(readers).prepend(node)  # nodes compare by their place


def gather_ahead(half: Half) -> None:
    """Prefetch a window's parameters while its neighbour computes.

    Each step, axis and dtype is one message. The neighbour is the window before it in forward, and the window after it
    in backward. Over one axis after another, each step begins as its share of the neighbour does.

    before    y = mm(x, u);  w = all_gather(p);  z = mm(y, w);  v = all_gather(q);  r = mm(z, v)   # p, q: next window
    after     g = begin_all_gather(pack([p, q]));  y = mm(x, u);  f = finish(g);  w = f[0];  v = f[1];  z = mm(y, w);  r
              = mm(z, v)
    """
    graph = half.graph
    made = fetched(half.graph, half.reads)
    places = _places(half, made)
    for (number, count, window), gathers in sorted(_chains(half, made).items(), key=lambda item: item[0][0]):
        beside = places.get(window)
        if beside is None:
            _gather_together(graph, gathers, made)
            continue
        anchor = _at_share(beside, number / count)
        # A step must have finished before the chain's next step begins.
        then = [_at_share(beside, (number + 1) / count)] if number + 1 < count else []
        groups: dict[tuple[str, object, torch.dtype], list[fx.Node]] = {}
        for node in gathers:
            if anchor < node:
                groups.setdefault((_MOVES[node.target], node.args[1], node.meta["val"].dtype), []).append(node)
        for (kind, axis, _), nodes in groups.items():
            _move_before(anchor, nodes, made)
            with graph.inserting_before(anchor):
                begun = _begin(graph, kind, [n.args[0] for n in nodes], axis, *numbers_of(nodes))
            _finish_before(graph, begun, nodes, min(nodes + then))


Gathers = dict[fx.Node, tuple[int, int]]  # the window and the bucket of each


def _places(half: Half, made: Mapping[fx.Node, fx.Node]) -> dict[int | None, list[tuple[fx.Node, int]]]:
    """Where the ops that first read each window's parameters begin, with whole bytes, in an order that all ranks share.

    Backward of a product begins with the gradient of the weight, which does not read it.
    """
    mark = BACK if half.is_backward else OP
    begins: dict[str, fx.Node] = {}
    for node in half.graph.nodes:
        if mark in node.meta and node not in made and not node.meta.get(RECOMPUTED):
            begins.setdefault(node.meta[mark], node)
    first: dict[str, fx.Node] = {}
    reads: dict[str, Read] = {}

    def note(name: str, read: Read, reader: fx.Node) -> None:
        first[name] = min(reader, begins.get(reader.meta.get(mark, ""), reader), first.get(name, reader))
        reads[name] = read

    for node, parameter in made.items():
        for user in node.users:
            if user not in made and user.op != "output":
                note(parameter.name, half.reads[parameter.name], user)
    for node in half.graph.find_nodes(op="placeholder"):
        if node.name in half.kept:
            for reader in _readers(node):
                note(node.name, half.kept[node.name], reader)
    windows: dict[int | None, dict[fx.Node, int]] = {}
    for name, node in first.items():
        of_nodes = windows.setdefault(reads[name].window, {})
        of_nodes[node] = of_nodes.get(node, 0) + reads[name].nbytes
    return {window: sorted(of_nodes.items()) for window, of_nodes in windows.items()}  # nodes compare by their place


def _at_share(places: Sequence[tuple[fx.Node, int]], share: float) -> fx.Node:
    """The place before which about a share of all bytes is read: compute goes with them."""
    before = list(itertools.accumulate((nbytes for _, nbytes in places[:-1]), initial=0))
    goal = share * (before[-1] + places[-1][1])
    return places[min(range(len(places)), key=lambda i: abs(before[i] - goal))][0]


def _chains(half: Half, made: Mapping[fx.Node, fx.Node]) -> dict[tuple[int, int, int | None], Gathers]:
    """The steps that move parameters, by their number in their chain, its length, and the window beside them."""
    number: dict[fx.Node, int] = {}  # a step's place in its chain
    count: dict[fx.Node, int] = {}  # length of a step's chain
    for node in made:  # Recomputed steps are left out: they stay one by one, where they are wanted.
        if node.target in _MOVES and not node.meta.get(RECOMPUTED):
            before = [n for n in _before(node, made) if n.target in STEPS.values() and n.target not in _LOCAL]
            if all(n in number for n in before):
                number[node] = len(before)
                for n in (node, *before):
                    count[n] = max(number[node] + 1, count.get(n, 0))
    found: dict[tuple[int, int, int | None], Gathers] = {}
    for node, place in number.items():
        read = half.reads[made[node].name]
        window = read.beside[half.is_backward]
        found.setdefault((place, count[node], window), {})[node] = (read.window, read.bucket)
    return found


def _move_before(place: fx.Node, nodes: list[fx.Node], made: Mapping[fx.Node, fx.Node]) -> None:
    """Move the steps from parameters to these nodes in front of `place`, where they stand behind it."""
    for node in nodes:
        for before in reversed(_before(node, made)):
            if place < before:
                place.prepend(before)


def _gather_together(
    graph: fx.Graph, gathers: Mapping[fx.Node, tuple[int, int]], made: Mapping[fx.Node, fx.Node]
) -> None:
    """Bucket gathers that are not prefetched: one message for each step, axis, dtype and bucket.

    before    w = all_gather(p);  y = mm(x, w);  v = all_gather(q);  z = mm(y, v)
    after     g = all_gather_bucket([p, q]);  w = g[0];  v = g[1];  y = mm(x, w);  z = mm(y, v)
    """
    groups: dict[tuple[str, object, torch.dtype, tuple[int, int]], list[fx.Node]] = {}
    for node in sorted(gathers):
        kind = _MOVES[node.target]
        groups.setdefault((kind, node.args[1], node.meta["val"].dtype, gathers[node]), []).append(node)
    for (kind, axis, _, _), of_bucket in groups.items():
        parameters = {n: [n, *_before(n, made)][-1].all_input_nodes[0] for n in of_bucket}
        # A gather can join only if its parameter exists before the bucket's first gather.
        nodes = [n for n in of_bucket if parameters[n] < of_bucket[0]]
        if len(nodes) > 1:
            _move_before(nodes[0], nodes[1:], made)
            given = ([n.args[0] for n in nodes], axis, *numbers_of(nodes))
            with graph.inserting_before(nodes[0]):
                together = graph.call_function(STEPS[f"{kind}_bucket"], given)
            _hand_out(graph, together, nodes)


def _readers(node: fx.Node) -> list[fx.Node]:
    """The ops that read a value, directly or through nodes that only pass it on."""
    return [user for user in walks.uses(node, hands_on) if user.op != "output" and not hands_on(user)]


def _begin(graph: fx.Graph, kind: str, tensors: object, axis: object, *numbers: object) -> fx.Node:
    """Begin one message of these tensors; their memory may be freed once they are packed."""
    packed = graph.call_function(PACK[kind], (tensors, axis, *numbers))
    return graph.call_function(BEGIN[kind], (packed, axis))


def _before(node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """The steps between a parameter and this node, the last first."""
    found = []
    while (node := node.all_input_nodes[0]) in made and node.op != "placeholder":
        found.append(node)
    return found


def _finish_before(graph: fx.Graph, begun: fx.Node, nodes: list[fx.Node], place: fx.Node) -> None:
    """Finish a collective before `place`, and replace these nodes by its results."""
    begun.meta["val"] = [n.meta["val"] for n in nodes]
    with graph.inserting_before(place):
        done = graph.call_function(finish, (begun,))
    _hand_out(graph, done, nodes)


def _hand_out(graph: fx.Graph, together: fx.Node, nodes: list[fx.Node]) -> None:
    """Replace these nodes by the parts of one result."""
    together.meta["val"] = [n.meta["val"] for n in nodes]
    with graph.inserting_after(together):
        for i, node in reversed(list(enumerate(nodes))):
            part = graph.call_function(operator.getitem, (together, i))
            part.meta["val"] = node.meta["val"]
            read_instead(node, part)
    for node in nodes:
        graph.erase_node(node)


def reduce_beside(half: Half) -> None:
    """Run each reduction of gradients beside the ops that follow it, up to the next one.

    before    g = all_reduce(d, "dp");  e = mm(...);  h = all_reduce(e, "dp");  return g, h
    after     a = begin_all_reduce(pack([d]), "dp");  e = mm(...);  g = finish(a)[0];  b = begin_all_reduce(pack([e]),
              "dp");  h = finish(b)[0];  return g, h

    Over one axis after another, a reduction goes on with its next step as the next reduction begins. Local steps on a
    reduced gradient before it leaves, such as a slice, move to where the reduction finishes.
    """
    if not half.is_backward:
        return
    graph = half.graph
    end = half.graph.output_node()
    under_way = list[_UnderWay]()
    later = set[fx.Node]()
    for node in list(graph.nodes):
        # A reduction that other ops of the step read stays where it is, because they need its result at once.
        if node.target not in _REDUCTIONS or node in later or not _leads_only_to(_results(node), end):
            continue
        under_way = [more for one in under_way for more in one.go_on(half, node)]
        under_way.append(_UnderWay.of(half, node))
        step = under_way[-1].then
        while step is not None:  # later steps of the chain are begun by `go_on`
            later.add(step)
            step = _next_step(half, step)
    while under_way:
        under_way = [more for one in under_way for more in one.go_on(half, end)]


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

    @staticmethod
    def of(half: Half, node: fx.Node, is_further: bool = False) -> _UnderWay:
        """Begin a step of a reduction where it stands."""
        is_bucket = isinstance(node.args[0], (list, tuple))
        results = _results(node)
        steps, readers = _uses_of(node, is_further)
        then = _next_step(half, node)
        begun = _begin_reduction(half.graph, _BEGUN_BY[node.target], node, results if is_bucket else None)
        if is_bucket:
            for r in results:  # the parts read the begun message until it is finished
                r.replace_input_with(node, begun)
            half.graph.erase_node(node)
        return _UnderWay(begun, results, steps, readers if then is None else [], then)

    def go_on(self, half: Half, place: fx.Node) -> list[_UnderWay]:
        """Finish before `place` or the first reader, and begin the step over the next axis there."""
        place = min([place, *self.readers])
        for node in self.steps:
            place.prepend(node)
        _finish_before(half.graph, self.begun, self.results, min([place, *self.steps]))
        if self.then is None:
            return []
        place.prepend(self.then)
        return [_UnderWay.of(half, self.then, is_further=True)]


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

            return _begin(graph, kind, of_read(tensors), axis, *map(of_read, numbers))
        return _begin(graph, kind, [tensors], axis, *numbers_of([node]))


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


PASSES: tuple[Callable[[Half], None], ...] = (
    repeat_in_passing,
    recompute_late,
    fetch_late,
    gather_ahead,
    reduce_beside,
    drop_idle_views,
    write_over,
)


def verify(half: Half, after: str) -> None:
    """Raise unless operands stand before their readers."""
    seen: set[fx.Node] = set()
    for node in half.graph.nodes:
        assert seen.issuperset(node.all_input_nodes), (after, node)
        seen.add(node)
