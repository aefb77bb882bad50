"""When collectives of parameters begin and end in an emitted half: what `space/windows.py` specifies.

Each pass has a before and an after; none changes what is computed.

    fetch_late          what is made of a parameter alone stands where it is first read
    gather_ahead        the gathers of a window travel together, and begin where the window beside which they move
                        begins
    reduce_beside       reductions of gradients begin where they stand, and end before the next begins or where they are
                        read

Order of nodes is order of execution: a collective that has begun runs on its own while the ops after it compute, until
its `finish`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx

from autopar.runtime.collectives import BEGIN, PACK, STEPS, finish

COPIES = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.clone.default})
_LOCAL = (STEPS["slice"], STEPS["lodge"])  # steps that wait for nobody
_BEGUN_BY = {
    STEPS["all_reduce"]: "all_reduce",
    STEPS["all_reduce_bucket"]: "all_reduce",
    STEPS["reduce_scatter"]: "reduce_scatter",
    STEPS["reduce_scatter_bucket"]: "reduce_scatter",
}


@dataclass(frozen=True, slots=True, order=True)
class Read:
    """Where the forward first reads a parameter: in which window, in which bucket of it.

    The bytes of the whole parameter; and whether what is gathered of it is still there as backward begins.
    """

    window: int
    bucket: int
    nbytes: int
    stays: bool = False


def is_view(node: fx.Node) -> bool:
    """Does it show its operand's memory?"""
    target = node.target
    if target is torch.ops.aten._unsafe_view.default:  # its schema says fresh; it shows its operand's memory
        return True
    return isinstance(target, torch._ops.OpOverload) and any(r.alias_info is not None for r in target._schema.returns)


def hands_on(node: fx.Node) -> bool:
    """A step, cast, copy or view of one tensor: of a parameter alone, it is the parameter in another form."""
    return (
        node.op == "call_function"
        and (node.target in STEPS.values() or node.target in COPIES or is_view(node))
        and len(node.all_input_nodes) == 1
    )


def fetched(graph: fx.Graph, reads: Mapping[str, Read]) -> dict[fx.Node, fx.Node]:
    """What is made of one parameter alone, and that parameter."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in reads:
            found[node] = node
        elif hands_on(node) and node.all_input_nodes[0] in found:
            found[node] = found[node.all_input_nodes[0]]
    return found


def fetch_late(graph: fx.Graph, reads: Mapping[str, Read]) -> None:
    """Move what is made of a parameter alone to its first reader.

    before    w = all_gather(p);  v = all_gather(q);  y = mm(x, w);  z = mm(y, v)
    after     w = all_gather(p);  y = mm(x, w);  v = all_gather(q);  z = mm(y, v)
    """
    for node in reversed([n for n in fetched(graph, reads) if n.op != "placeholder"]):  # its readers have moved before
        if readers := [u for u in node.users if u.op != "output"]:
            min(readers).prepend(node)  # nodes compare by their place


def gather_ahead(graph: fx.Graph, reads: Mapping[str, Read], ahead: int, kept: Mapping[str, int]) -> None:
    """Gather the parameters of a window in one message that moves beside another.

    The one before it in forward (`ahead` is -1), the one after it in backward (1). Of what was `kept` from forward, by
    the names of placeholders, the window is told.

    before    y = mm(x, u);   w = all_gather(p);  z = mm(y, w);  v = all_gather(q);  r = mm(z, v)          # u is of
              window 0, p and q of window 1
    after     g = begin_all_gather(pack([p, q]));  y = mm(x, u);  f = finish(g);  w = f[0];  v = f[1];  z = mm(y, w);  r
              = mm(z, v)
    """
    made = fetched(graph, reads)
    begins: dict[int, fx.Node] = {}  # of each window its first reader of a parameter
    gathers: dict[
        int, dict[fx.Node, fx.Node]
    ] = {}  # of each window the first gather of each parameter, and what it gathers
    rounds: dict[
        int, dict[fx.Node, tuple[int, int]]
    ] = {}  # of each further round the gathers, with their window and bucket
    for node, parameter in made.items():
        w = reads[parameter.name].window
        for user in node.users:
            if user not in made and user.op != "output" and (w not in begins or user < begins[w]):
                begins[w] = user
        if node.target is STEPS["all_gather"]:
            earlier = [n.target for n in _before(node, made) if n.target in STEPS.values() and n.target not in _LOCAL]
            if not earlier:
                gathers.setdefault(w, {})[node] = parameter
            elif set(earlier) == {STEPS["all_gather"]}:
                rounds.setdefault(len(earlier), {})[node] = (w, reads[parameter.name].bucket)
    for node in graph.find_nodes(op="placeholder"):
        for reader in _readers(node) if node.name in kept else ():
            begins[kept[node.name]] = min(reader, begins.get(kept[node.name], reader))
    for w, of_window in gathers.items():
        anchor = begins.get(w + ahead)
        if anchor is None:
            _gather_together(
                graph, {node: (w, reads[parameter.name].bucket) for node, parameter in of_window.items()}, made
            )
            continue
        groups: dict[tuple[object, torch.dtype], list[fx.Node]] = {}
        for node in of_window:
            if anchor < node:
                groups.setdefault((node.args[1], node.meta["val"].dtype), []).append(node)
        for (axis, _), nodes in groups.items():
            for node in nodes:
                for before in reversed(_before(node, made)):
                    if anchor < before:
                        anchor.prepend(before)
            with graph.inserting_before(anchor):
                begun = _begin(graph, "all_gather", [n.args[0] for n in nodes], axis, *_numbers(nodes))
            _finish_before(graph, begun, nodes, min(nodes))
    for _, further in sorted(rounds.items()):  # over one axis after another: where the window is first read
        _gather_together(graph, further, made)


def _gather_together(
    graph: fx.Graph, gathers: Mapping[fx.Node, tuple[int, int]], made: Mapping[fx.Node, fx.Node]
) -> None:
    """Gathers that do not move beside compute travel a bucket at a time; of each gather its window and bucket are told.

    before    w = all_gather(p);  y = mm(x, w);  v = all_gather(q);  z = mm(y, v)
    after     g = all_gather_bucket([p, q]);  w = g[0];  v = g[1];  y = mm(x, w);  z = mm(y, v)
    """
    groups: dict[tuple[object, torch.dtype, tuple[int, int]], list[fx.Node]] = {}
    for node in sorted(gathers):
        groups.setdefault((node.args[1], node.meta["val"].dtype, gathers[node]), []).append(node)
    for (axis, _, _), of_bucket in groups.items():
        nodes = [
            n for n in of_bucket if [n, *_before(n, made)][-1].all_input_nodes[0] < of_bucket[0]
        ]  # what has arrived by then
        if len(nodes) > 1:
            for node in nodes[1:]:
                for before in reversed(_before(node, made)):
                    if nodes[0] < before:
                        nodes[0].prepend(before)
            with graph.inserting_before(nodes[0]):
                together = graph.call_function(
                    STEPS["all_gather_bucket"], ([n.args[0] for n in nodes], axis, *_numbers(nodes))
                )
            _hand_out(graph, together, nodes)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The ops that read a value, or what hands it on."""
    for user in node.users:
        if hands_on(user):
            yield from _readers(user)
        elif user.op != "output":
            yield user


def _begin(graph: fx.Graph, kind: str, tensors: object, axis: object, *numbers: object) -> fx.Node:
    """Let one message of these tensors begin. They may end when it is packed."""
    packed = graph.call_function(PACK[kind], (tensors, axis, *numbers))
    return graph.call_function(BEGIN[kind], (packed, axis))


def _numbers(gathers: list[fx.Node]) -> list[list[object]]:
    """Dims, sizes and blocks of several gathers."""
    return [[n.args[2 + k] if len(n.args) > 2 + k else () for n in gathers] for k in range(3)]


def _before(node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """What leads from a parameter to a node, the last first."""
    found = []
    while (node := node.all_input_nodes[0]) in made and node.op != "placeholder":
        found.append(node)
    return found


def _finish_before(graph: fx.Graph, begun: fx.Node, nodes: list[fx.Node], place: fx.Node) -> None:
    """Take the results of what has begun at a place, in the stead of these nodes."""
    begun.meta["val"] = [n.meta["val"] for n in nodes]
    with graph.inserting_before(place):
        done = graph.call_function(finish, (begun,))
    _hand_out(graph, done, nodes)


def _hand_out(graph: fx.Graph, together: fx.Node, nodes: list[fx.Node]) -> None:
    """Put the parts of one result in the stead of these nodes."""
    together.meta["val"] = [n.meta["val"] for n in nodes]
    with graph.inserting_after(together):
        for i, node in reversed(list(enumerate(nodes))):
            part = graph.call_function(operator.getitem, (together, i))
            part.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(part)
    for node in nodes:
        graph.erase_node(node)


def reduce_beside(graph: fx.Graph) -> None:
    """Let a reduction of gradients run beside the ops that follow it; one is under way at a time.

    before    g = all_reduce(d, "dp");  e = mm(...);  h = all_reduce(e, "dp");  return g, h
    after     a = begin_all_reduce(pack([d]), "dp");  e = mm(...);  g = finish(a)[0];  b = begin_all_reduce(pack([e]),
              "dp");  h = finish(b)[0];  return g, h
    """
    end = graph.output_node()
    under_way: tuple[fx.Node, list[fx.Node], fx.Node] | None = (
        None  # what has begun, whose results it makes, and their first reader
    )

    def take(place: fx.Node) -> None:
        nonlocal under_way
        if under_way is not None:
            begun, nodes, reader = under_way
            _finish_before(graph, begun, nodes, min(place, reader))
            under_way = None

    for node in list(graph.nodes):
        kind = _BEGUN_BY.get(node.target)
        if kind is None:
            continue
        is_bucket = isinstance(node.args[0], (list, tuple))
        results = [u for u in node.users if u.target is operator.getitem] if is_bucket else [node]
        if not _leads_only_to(results, end):  # what the step itself reads is waited for where it is
            continue
        take(node)
        with graph.inserting_before(node):
            numbers = (
                node.args[2:]
                if is_bucket
                else tuple([n] for n in (*node.args[2:], *([()] if len(node.args) == 4 else [])))
            )
            begun = _begin(graph, kind, node.args[0] if is_bucket else [node.args[0]], node.args[1], *numbers)
        readers = [u for r in results for u in r.users]
        if is_bucket:
            results = sorted(results, key=lambda r: r.args[1])
        under_way = begun, results, min(readers)
        if is_bucket:
            for r in results:  # they read what has begun, until it is finished
                r.replace_input_with(node, begun)
            graph.erase_node(node)
    take(end)


def _leads_only_to(nodes: list[fx.Node], end: fx.Node) -> bool:
    """Do they, through steps and views of their own, only reach the end?"""
    pending, seen = list(nodes), set[fx.Node]()
    while pending:
        node = pending.pop()
        for user in node.users:
            if user is not end and user not in seen:
                if not hands_on(user):
                    return False
                seen.add(user)
                pending.append(user)
    return True
