"""Split the joint graph into a forward and a backward graph, and choose the values that forward saves for backward."""

from __future__ import annotations

import collections
import copy
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from autopar.codegen.buffers import COPIES, buffer_of, is_view, shows
from autopar.codegen.exchanges import SentByOps
from autopar.codegen.joint_graph import BACK, CONVERTED, EARLY, OP, RECOMPUTED, JointGraph
from autopar.codegen.recomputed import NOTHING, Recomputed
from autopar.graph import walks
from autopar.runtime.collectives import BEGIN, PACK, STEPS, Axis, part_start
from autopar.runtime.wires import EXCHANGING

_SENDING = frozenset(exchanging.run for exchanging in EXCHANGING.values())
COLLECTIVES = _SENDING.union((f for name, f in STEPS.items() if name not in ("slice", "lodge")), BEGIN.values())


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """`hold` in two: what earlier stages of a pipeline wait for, and the rest."""

    inward: fx.Graph  # saved, then tangents -> gradients of inputs, then what `weights` reads
    weights: fx.Graph  # these values -> gradients of parameters, unreduced
    inputs: int  # number of inputs that get a gradient


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """The two halves of a training step of one device. Primals are inputs, then parameters, then buffers."""

    forward: fx.Graph  # primals -> outputs, then what is saved
    backward: fx.Graph  # saved, then tangents -> a gradient for each name in `gradients`
    outputs: int
    differentiable: tuple[int, ...]  # outputs that have a tangent
    gradients: tuple[int, ...]  # primals that get a gradient
    hold: fx.Graph  # like `backward`, but gradients of parameters are not reduced yet
    settle: fx.Graph  # gradients of parameters as `hold` leaves them -> as `backward` does
    waits: tuple[int, ...]  # places in `gradients` of those that wait for their reduction
    settled_from: tuple[int, ...]  # operand of `settle` for each of `waits`; one operand may serve two gradients
    sent: SentByOps = field(default_factory=dict)  # messages inside ops
    # primals -> values that no turn changes, which forward takes behind the primals; None where there are none
    beginning: fx.Graph | None = None
    parts: Parts | None = None  # made for orders that run backward in two parts

    @property
    def collectives(self) -> tuple[str, ...]:
        """Text of all collectives in order, on which ranks must agree; sizes of uneven parts are left out."""
        first = () if self.beginning is None else (self.beginning,)
        return _described_in(*first, self.forward, self.backward)

    @property
    def collectives_of_waiting(self) -> tuple[str, ...]:
        """The same of the halves that run while micro-batches accumulate; empty where no gradient waits."""
        parts = () if self.parts is None else (self.parts.inward, self.parts.weights)
        return _described_in(self.hold, *parts, self.settle) if self.waits else ()


def split(
    joint: JointGraph,
    regathered: Iterable[fx.Node] = (),
    recomputed: Recomputed = NOTHING,
    once: Collection[str] = (),
) -> Joint:
    """Split the joint graph: forward makes the outputs, backward the gradients, and what crosses is saved.

    Two kinds of values do not cross, and are made again in backward: what collectives, casts, copies and views alone
    make of a regathered parameter, and the results of the `recomputed` ops of the local program. Copies count because
    only some ranks may need one: an uneven part of a single row is contiguous also after a transpose.

    What the nodes of the local program compute that run `once` is no part of forward: it is a graph of its own.
    """
    forward = _forward(joint)
    early = {n for n in _calls(forward) if n.meta.get(OP) in once and BACK not in n.meta}
    present = [g for g in joint.gradients if g is not None]
    backward = walks.ancestors(present) - forward
    late = _recomputed(joint, recomputed.wanted, forward) - early
    again = _made_again(joint, set(regathered), forward) - early | late
    wanted = [a for n in joint.graph.nodes if n in backward and n.op == "call_function" for a in n.all_input_nodes]
    exchanged = [
        n for n in late if n.target in _SENDING or (n.target in COLLECTIVES and n.meta.get(OP) in recomputed.exchanged)
    ]
    pending = wanted + present + sorted(exchanged)  # nodes compare by their place
    saved, extra = _crossing(pending, backward.union(joint.tangents), again)
    if late:  # Forward ops that only backward needs may read recomputed nodes, so they must move down with them.
        for node in (extra & late) | {n for n in _calls(backward) if OP in n.meta}:
            node.meta[RECOMPUTED] = True
    begun: list[fx.Node] = []
    if early:
        forward = _made_of(joint, [*_ends_of_forward(joint), *saved], early)
        leaves = {*joint.outputs, *saved}
        begun = [n for n in joint.graph.nodes if n in early and (n in leaves or not forward.isdisjoint(n.users))]
    first = extract(joint.graph, [*joint.primals, *begun], _calls(forward), [*joint.outputs, *saved])
    second = extract(joint.graph, [*saved, *joint.tangents], _calls(backward | extra), present)
    gets = tuple(i for i, g in zip(joint.wanted, joint.gradients, strict=True) if g is not None)
    return Joint(
        first,
        second,
        len(joint.outputs),
        joint.differentiable,
        gets,
        *_for_accumulation(joint, [*saved, *joint.tangents]),
        beginning=extract(joint.graph, joint.primals, _calls(walks.ancestors(begun)), begun) if begun else None,
    )


def _forward(joint: JointGraph) -> set[fx.Node]:
    """The nodes of forward: those that outputs need, and gradients that forward makes early."""
    return _made_of(joint, _ends_of_forward(joint))


def _ends_of_forward(joint: JointGraph) -> list[fx.Node]:
    return [*joint.outputs, *(n for n in joint.graph.nodes if n.meta.get(EARLY))]


def _made_of(joint: JointGraph, ends: Iterable[fx.Node], stops: Collection[fx.Node] = ()) -> set[fx.Node]:
    """The nodes that these ends are made of, up to those at which the walk stops."""
    found = walks.ancestors(ends, stops.__contains__)
    for node in joint.graph.nodes:  # the parts of an op with several results live with it
        if node.target is operator.getitem and node.args[0] in found:
            found.add(node)
    return found


def _crossing(
    wanted: Iterable[fx.Node], there: Collection[fx.Node], again: Collection[fx.Node]
) -> tuple[list[fx.Node], set[fx.Node]]:
    """The values that are saved for backward, and the nodes that backward makes again."""
    saved: dict[fx.Node, None] = {}
    extra: set[fx.Node] = set()
    pending = collections.deque(wanted)
    while pending:
        node = pending.popleft()
        if node in there or node in extra or node in saved:
            continue
        if node in again:
            extra.add(node)
            pending += node.all_input_nodes
        else:
            saved[node] = None
    return list(saved), extra


def _calls(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {n for n in nodes if n.op == "call_function"}


def _for_accumulation(
    joint: JointGraph, inputs: Sequence[fx.Node]
) -> tuple[fx.Graph, fx.Graph, tuple[int, ...], tuple[int, ...]]:
    """Split backward for micro-batches: one graph makes gradients to add up, the other reduces the sums.

    Returns both graphs, the places of the accumulated gradients among all, and which operand of the second graph each
    of those is.
    """
    every = zip(joint.gradients, joint.held, joint.cuts or joint.held, strict=True)
    rows = [(gradient, held, cut) for gradient, held, cut in every if gradient is not None]
    waits = tuple(i for i, (_, h, _) in enumerate(rows) if h is not None)
    ends = [g if h is None else h for g, h, _ in rows]
    cuts = [rows[i][2] for i in waits]
    distinct = list(dict.fromkeys(cuts))
    settled = [rows[i][0] for i in waits]
    hold = extract(joint.graph, inputs, walks.ancestors(ends, set(inputs).__contains__), ends)
    settle = extract(joint.graph, distinct, walks.ancestors(settled, set(cuts).__contains__), settled)
    return hold, settle, waits, tuple(distinct.index(c) for c in cuts)


def _made_again(joint: JointGraph, parameters: set[fx.Node], forward: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in joint.graph.nodes:
        is_cheap = (
            node in forward
            and node.op == "call_function"
            and (_is_on_axes(node) or is_view(node) or node.target in COPIES)
        )
        if is_cheap and all(a in parameters or a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def _recomputed(joint: JointGraph, ops: Collection[str], forward: set[fx.Node]) -> set[fx.Node]:
    """The nodes of recomputed ops and conversions, and all views of these nodes.

    A saved view would keep its base in memory. Outputs are not recomputed, as they are in memory anyway, and neither
    are the collectives inside an op: only those of conversions are repeated. The set is the same on every rank,
    whatever the sizes of parts: a copy that only some ranks need goes with its source, unless the op is nothing but
    that copy.
    """
    found: set[fx.Node] = set()
    if not ops:
        return found
    there = {buffer_of(output) for output in joint.outputs}
    computing = {n.meta.get(OP) for n in forward if n.op == "call_function" and not (shows(n) or n.target in COPIES)}
    for node in joint.graph.nodes:
        if node not in forward or node.op != "call_function":
            continue
        op = node.meta.get(OP, "")
        if shows(node) or (node.target is torch.ops.aten.clone.default and op in computing):
            comes = node.all_input_nodes[0] in found or (op in ops and not shows(node))
        else:
            is_repeated = node.target not in COLLECTIVES or node.target in _SENDING or node.meta.get(CONVERTED)
            comes = op in ops and is_repeated
        if comes and buffer_of(node) not in there:
            found.add(node)
    return found


def extract(source: fx.Graph, inputs: Sequence[fx.Node], nodes: set[fx.Node], outputs: Sequence[fx.Node]) -> fx.Graph:
    """Copy some nodes of a graph into a graph of their own, with these inputs and outputs."""
    graph = fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in inputs}
    for node in source.nodes:
        if node in nodes and node not in copies:
            copies[node] = graph.node_copy(node, lambda a: copies[a])
    for node, made in copies.items():
        made.meta["val"] = node.meta.get("val")
    graph.output(tuple(copies[n] for n in outputs))
    graph.lint()
    return graph


def _is_on_axes(node: fx.Node) -> bool:
    """Whether the second argument of the call names a mesh axis, or several."""
    calls = (STEPS.values(), PACK.values(), BEGIN.values(), _SENDING, (part_start,))
    return any(node.target in of for of in calls)


def bind(graph: fx.Graph, axes: dict[str, Axis]) -> fx.GraphModule:
    """The graph as a module of this rank, in which every collective reads its axis from an attribute."""
    bound = copy.deepcopy(graph)
    given: dict[str, fx.Node] = {}
    for node in list(bound.nodes):
        if _is_on_axes(node):
            named = node.args[1]
            for name in (named,) if isinstance(named, str) else named:
                if name not in given:
                    attribute = "axis_" + "".join(c if c.isalnum() else "_" for c in name)
                    with bound.inserting_before(next(iter(bound.nodes))):
                        given[name] = bound.get_attr(attribute)
            bound_to = given[named] if isinstance(named, str) else tuple(given[name] for name in named)
            node.args = (node.args[0], bound_to, *node.args[2:])
    module = fx.GraphModule({n.target: axes[name] for name, n in given.items()}, bound)
    return module


def _described_in(*graphs: fx.Graph) -> tuple[str, ...]:
    return tuple(_described(n) for graph in graphs for n in graph.nodes if n.target in COLLECTIVES)


def _described(node: fx.Node) -> str:
    """A collective as it travels: begun beside others or not, and as one message of one tensor or alone."""
    if node.target in _SENDING:
        return f"{node.target.__name__}@{','.join(node.args[1])} {node.meta['val'][0].dtype}"
    operands, axis, *numbers = node.args[0].args if node.target in BEGIN.values() else node.args
    values = node.meta["val"] if isinstance(operands, (list, tuple)) else [node.meta["val"]]
    name = node.target.__name__.removeprefix("begin_").removesuffix("_bucket")
    dims = [dim for given in numbers[::3] for dim in (given if isinstance(given, (list, tuple)) else [given])]
    return f"{name}({', '.join(map(str, dims))})@{axis} {[str(v.dtype) for v in values]}"
