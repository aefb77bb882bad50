"""Schedule an emitted half: when it recomputes, and when its collectives of parameters run, as `space/` prices them.

Each pass of `PASSES` has a before and an after; none changes what is computed.

Order of nodes is order of execution: a collective that has begun runs on its own while the ops after it compute, until
its `finish`.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.fx as fx

from autopar.codegen.buffer_reuse import write_over
from autopar.codegen.buffers import hands_on, is_view, numbers_of
from autopar.codegen.half import Half, Read, fetched
from autopar.codegen.halves import COLLECTIVES
from autopar.codegen.idle_views import drop_idle_views
from autopar.codegen.joint_graph import BACK, OP, RECOMPUTED, WANTED
from autopar.codegen.messages import begin, finish_before, hand_out
from autopar.codegen.reductions import reduce_beside
from autopar.graph import walks
from autopar.runtime.collectives import BEGIN, STEPS

_LOCAL = (STEPS["slice"], STEPS["lodge"])  # steps that do not communicate
_MOVES = {STEPS[kind]: kind for kind in BEGIN}  # steps of one tensor


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
    in backward. Over one axis after another, each step begins as its share of the neighbour does. A message is finished
    before others begin at that place, so that those of two windows are not in memory together.

    before    y = mm(x, u);  w = all_gather(p);  z = mm(y, w);  v = all_gather(q);  r = mm(z, v)   # p, q: next window
    after     g = begin_all_gather(pack([p, q]));  y = mm(x, u);  f = finish(g);  w = f[0];  v = f[1];  z = mm(y, w);  r
              = mm(z, v)
    """
    graph = half.graph
    made = fetched(half.graph, half.reads)
    places = _places(half, made)
    packed: dict[fx.Node, fx.Node] = {}  # place -> the first node of the messages that begin there
    for (number, count, window), gathers in sorted(_chains(half, made).items(), key=lambda item: item[0][0]):
        beside = places.get(window)
        if beside is None:
            _gather_together(graph, gathers, made)
            continue
        anchor = _at_share(beside, number / count)
        # A step must have finished before the chain's next step begins, and the last one as its own window does.
        own, _ = next(iter(gathers.values()))
        ends = [node for node, _ in places.get(own, ())[:1]]
        if number + 1 < count:
            ends = [_at_share(beside, (number + 1) / count)]
        groups: dict[tuple[str, object, torch.dtype], list[fx.Node]] = {}
        for node in gathers:
            if anchor < node:
                groups.setdefault((_MOVES[node.target], node.args[1], node.meta["val"].dtype), []).append(node)
        for (kind, axis, _), nodes in groups.items():
            _move_before(anchor, nodes, made)
            with graph.inserting_before(anchor):
                begun = begin(graph, kind, [n.args[0] for n in nodes], axis, *numbers_of(nodes))
            packed.setdefault(anchor, begun.all_input_nodes[0])
            place = min(nodes + [node for node in ends if begun < node])
            others = packed.get(place, place)
            finish_before(graph, begun, nodes, others if begun < others else place)


Gathers = dict[fx.Node, tuple[int, int]]  # the window and the bucket of each


def _places(half: Half, made: Mapping[fx.Node, fx.Node]) -> dict[int | None, list[tuple[fx.Node, int]]]:
    """First nodes of the ops that first read each window's parameters, with bytes, alike on all ranks."""
    first: dict[str, fx.Node] = {}
    reads: dict[str, Read] = {}
    begins = _begins(half, made)

    def note(name: str, read: Read, reader: fx.Node) -> None:
        first[name] = min(begins.get(reader, reader), first.get(name, reader))
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


def _begins(half: Half, made: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each node the first node of its op behind the last collective, a place that all ranks share.

    Backward of a product begins with the gradient of the weight, which does not read the weight.
    """
    mark = BACK if half.is_backward else OP
    begun: dict[str, fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for node in half.graph.nodes:
        if node.target in COLLECTIVES and node not in made:
            begun.clear()
        elif mark in node.meta and node not in made and not node.meta.get(RECOMPUTED):
            found[node] = begun.setdefault(node.meta[mark], node)
    return found


def _at_share(places: Sequence[tuple[fx.Node, int]], share: float) -> fx.Node:
    """The place before which about a share of all bytes is read: compute goes with them."""
    before = list(itertools.accumulate((nbytes for _, nbytes in places[:-1]), initial=0))
    goal = share * (before[-1] + places[-1][1])
    return places[min(range(len(places)), key=lambda i: abs(before[i] - goal))][0]


def _chains(half: Half, made: Mapping[fx.Node, fx.Node]) -> dict[tuple[int, int, int | None], Gathers]:
    """The steps that move parameters, by number in their chain, its length, and the window beside them."""
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
            hand_out(graph, together, nodes)


def _readers(node: fx.Node) -> list[fx.Node]:
    """The ops that read a value, directly or through nodes that only pass it on."""
    return [user for user in walks.uses(node, hands_on) if user.op != "output" and not hands_on(user)]


def _before(node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """The steps between a parameter and this node, the last first."""
    found = []
    while (node := node.all_input_nodes[0]) in made and node.op != "placeholder":
        found.append(node)
    return found


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
