"""Local program -> forward and backward.

Both traced together into straight-line ATen code, rewritten by passes, cut in two.

    trace                   the local program and its gradients, on fake tensors: codegen/trace.py
    PASSES                  rewrite the joint graph; each has a before and an after, `verify` runs after each
    split                   forward: what the outputs need; backward: the rest; saved: what crosses

Nothing here knows the rank's process groups: a collective names its mesh axis, and `bind` puts the axis in its place.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from autopar.codegen.local import LocalProgram
from autopar.codegen.schedule import COPIES, Read, fetch_late, fetched, gather_ahead, is_view, reduce_beside
from autopar.codegen.trace import trace
from autopar.runtime.collectives import BEGIN, PACK, STEPS, Axis, part_start
from autopar.runtime.private import TRACING, clean_room
from autopar.sharding.convert import LocalStep
from autopar.space.overlap import BUCKET, buckets

CONVERT, START = torch.ops.autopar.convert.default, torch.ops.autopar.start.default
COLLECTIVES = frozenset((*(f for name, f in STEPS.items() if name not in ("slice", "lodge")), *BEGIN.values()))


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """The two halves of a training step of one device. Primals are inputs, then parameters, then buffers."""

    forward: fx.Graph  # primals -> outputs, then what is saved
    backward: fx.Graph  # saved, then tangents -> a gradient for each name in `gradients`
    outputs: int
    differentiable: tuple[int, ...]  # outputs that have a tangent
    gradients: tuple[int, ...]  # primals that get a gradient
    hold: fx.Graph  # as `backward`, but gradients of parameters come before they are reduced
    settle: fx.Graph  # gradients of parameters as `hold` leaves them -> as `backward` does
    waits: tuple[int, ...]  # which of `gradients` are those,
    settled_from: tuple[
        int, ...
    ]  # and of each of those which operand of `settle` it is: one may be the gradient of two

    @property
    def collectives(self) -> tuple[str, ...]:
        """Every collective in order, without what may differ between ranks (the sizes of uneven parts).

        All ranks must agree on it.
        """
        return tuple(_described(n) for g in (self.forward, self.backward) for n in g.nodes if n.target in COLLECTIVES)


def lower_jointly(
    program: LocalProgram,
    differentiable: Sequence[int],
    regathered: Iterable[str] = (),
    scattered: Iterable[str] = (),
    reads: Mapping[str, Read] | None = None,
    device: str = "cpu",
) -> Joint:
    """Trace, rewrite, split, schedule.

    The same program is lowered once in a process. Gradients of `scattered` parameters are reduced in every micro-batch;
    `reads` say of a parameter where it is first read.
    """
    key = (
        program.fingerprint,
        tuple(differentiable),
        tuple(sorted(regathered)),
        tuple(sorted(scattered)),
        tuple(sorted((reads or {}).items())),
        device,
    )
    with TRACING:
        if key not in _LOWERED:
            while len(_LOWERED) >= 64:
                _LOWERED.pop(next(iter(_LOWERED)))
            _LOWERED[key] = _lower(program, differentiable, set(regathered), set(scattered), reads or {}, device)
        return _LOWERED[key]


_LOWERED: dict[Any, Joint] = {}


def _lower(
    program: LocalProgram,
    differentiable: Sequence[int],
    regathered: set[str],
    scattered: set[str],
    reads: Mapping[str, Read],
    device: str,
) -> Joint:
    with clean_room():
        graph, primals, tangents, outputs, gradients, wanted = trace(program, differentiable, device)
    joint = JointGraph(graph, primals, tangents, outputs, gradients, wanted, tuple(differentiable), len(program.inputs))
    first = len(program.inputs)
    at = {
        joint.primals[first + i]: reads.get(name) or Read(0, 0, program.types[joint.primals[first + i].name].nbytes)
        for i, name in enumerate(program.parameters)
    }
    joint.whole = {primal: read.nbytes for primal, read in at.items()}
    joint.reduced_at_once = {joint.primals[first + i] for i, name in enumerate(program.parameters) if name in scattered}
    for one in PASSES:
        one(joint)
        verify(joint, one.__name__)
    named = {primal.name: read for primal, read in at.items()}
    halves = split(joint, {joint.primals[first + i] for i, name in enumerate(program.parameters) if name in regathered})
    kept = {
        node.name: named[p.name].window for node, p in fetched(halves.forward, named).items() if named[p.name].stays
    }
    for half, ahead in ((halves.forward, -1), (halves.backward, 1), (halves.hold, 1)):
        fetch_late(half, named)
        gather_ahead(half, named, ahead, kept if ahead > 0 else {})
        if ahead > 0:
            reduce_beside(half)
        half.lint()
    return halves


@dataclass(slots=True, eq=False)
class JointGraph:
    """Forward and backward in one graph, while passes rewrite it."""

    graph: fx.Graph
    primals: list[fx.Node]
    tangents: list[fx.Node]
    outputs: list[fx.Node]
    gradients: list[fx.Node | None]  # of `wanted`, None where the outputs do not depend on it
    wanted: list[int]  # primals that want a gradient
    differentiable: tuple[int, ...]
    inputs: int  # so many primals are inputs: their gradients are nobody's but the caller's
    whole: dict[fx.Node, int] = field(default_factory=dict)  # of each parameter the bytes of all its parts
    reduced_at_once: set[fx.Node] = field(default_factory=set)  # parameters whose gradients never wait
    held: list[fx.Node | None] = field(
        default_factory=list
    )  # of each gradient of a parameter: what waits while micro-batches accumulate,
    cuts: list[fx.Node | None] = field(default_factory=list)  # and where it stands in the way to that gradient

    def write_output(self) -> None:
        """Put outputs and gradients back as the graph's output, after a pass has changed them."""
        node = self.graph.output_node()
        node.args = ((*self.outputs, *self.gradients, *self.held),)

    def read_output(self) -> None:
        values = list(self.graph.output_node().args[0])
        first, last = len(self.outputs), len(self.outputs) + len(self.gradients)
        self.outputs, self.gradients, self.held = values[:first], values[first:last], values[last:]


# -- passes


def write_out_conversions(joint: JointGraph) -> None:
    """Turn each conversion into its steps.

    before    y = convert(x, "reduce_scatter(0:64)@dp; all_gather(0:64)@dp", "", [64, 8])
    after     a = reduce_scatter(x, "dp", 0, 64);  y = all_gather(a, "dp", 0, 64)

    before    y = convert(x, "all_gather(0:64)@dp", "reduce_scatter(0:64)@dp", [64, 8], "bfloat16")
    after     a = _to_copy(x, dtype=bfloat16);  y = all_gather(a, "dp", 0, 64)
    """
    for node in joint.graph.find_nodes(op="call_function", target=CONVERT):
        value = node.args[0]
        with joint.graph.inserting_before(node):
            if len(node.args) > 4 and node.args[4]:
                dtype, given = getattr(torch, node.args[4]), value.meta["val"]
                value = joint.graph.call_function(
                    torch.ops.aten._to_copy.default,
                    (value,),
                    {"dtype": dtype, **({} if given.is_contiguous() else {"memory_format": torch.contiguous_format})},
                )
                value.meta["val"] = torch.empty_like(given, dtype=dtype, memory_format=torch.contiguous_format)
            for step in LocalStep.parse_all(node.args[1]):
                value = joint.graph.call_function(
                    STEPS[step.kind], (value, step.axis, *(number for dim in step.dims for number in dim))
                )
                value.meta["val"] = node.meta["val"]
            if (
                value is node.args[0] and not value.meta["val"].is_contiguous()
            ):  # what follows was traced on memory order
                value = joint.graph.call_function(
                    torch.ops.aten.clone.default, (value,), {"memory_format": torch.contiguous_format}
                )
                value.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(value)
        joint.graph.erase_node(node)
    for node in joint.graph.find_nodes(op="call_function", target=START):
        node.target = part_start
    joint.read_output()


def drop_round_trips(joint: JointGraph) -> None:
    """Forward a value past a slice and the gather that puts it back.

    before    y = slice(x, "dp", 0, 64);  z = all_gather(y, "dp", 0, 64);  return relu(z)
    after     return relu(x)

    A gather gives memory order, so what is forwarded is copied into it. Whether it lies so already may differ between
    ranks, the collective must not.
    """
    for node in joint.graph.find_nodes(op="call_function", target=STEPS["all_gather"]):
        middle = node.args[0]
        if middle.target is STEPS["slice"] and middle.args[1:] == node.args[1:]:
            value = middle.args[0]
            if not value.meta["val"].is_contiguous():
                with joint.graph.inserting_before(node):
                    value = joint.graph.call_function(
                        torch.ops.aten.clone.default, (value,), {"memory_format": torch.contiguous_format}
                    )
                value.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(value)
            joint.graph.erase_node(node)
    joint.read_output()


def drop_noise(joint: JointGraph) -> None:
    """Remove what only tracing needed.

    before    b = detach(a);  c = mul(b, b);  d = relu(a)          # nobody uses d
    after     c = mul(a, a)
    """
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        joint.graph.erase_node(node)
    joint.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    joint.read_output()


def join_sums_of_numbers(joint: JointGraph) -> None:
    """Sums of one number each travel together where none waits for another: of a loss and of its targets, say.

    before    a = all_reduce(s, "dp");  b = all_reduce(n, "dp");  c = div(a, b)
    after     t = all_reduce_bucket([s, n], "dp");  c = div(t[0], t[1])
    """
    alone = {node for gradient in joint.gradients for node in _steps_of(gradient)} | {
        _buffer_of(output) for output in joint.outputs
    }  # whoever writes to an output touches nothing else
    groups: dict[Any, list[list[list[fx.Node]]]] = {}  # of axes and dtype, ways that travel together
    for node in joint.graph.nodes:
        is_end = node.target is STEPS["all_reduce"] and not any(
            user.target is STEPS["all_reduce"] for user in node.users
        )
        if is_end and node not in alone and not node.meta["val"].dim():
            way = _way_to(node)
            alike = groups.setdefault(_ways_alike(way), [])
            if alike and way[0].args[0] < _first_reader(alike[-1]):
                alike[-1].append(way)
            else:
                alike.append([way])
    for ways in itertools.chain.from_iterable(groups.values()):
        _travel_together(joint.graph, ways, _first_reader(ways).prev)
    joint.read_output()


def _first_reader(ways: Sequence[Sequence[fx.Node]]) -> fx.Node:
    return min(user for way in ways for user in way[-1].users)  # nodes compare by their place


def mark_what_waits(joint: JointGraph) -> None:
    """Of each gradient of a parameter, put what it is before its first reduction beside it.

    That is what micro-batches add up.

    before    h = to(g, f32);  a = all_reduce(h, "dp");  return loss, a
    after     h = to(g, f32);  a = all_reduce(h, "dp");  return loss, a, h
    """
    held: list[fx.Node | None] = []
    for i, gradient in zip(joint.wanted, joint.gradients, strict=True):
        cut = gradient if i >= joint.inputs else None
        for node in _steps_of(cut) if joint.primals[i] not in joint.reduced_at_once else ():
            cut = node.args[0] if node.target in _REDUCTIONS else cut
        held.append(cut)
    joint.held = held
    joint.write_output()


def _steps_of(gradient: fx.Node | None) -> Iterator[fx.Node]:
    """The steps of a gradient alone that lead to it, the last first."""
    while gradient is not None and _settles(gradient):
        yield gradient
        gradient = gradient.args[0]


def _settles(node: fx.Node) -> bool:
    """Is this a step of a gradient alone, linear in it, that nothing else reads?"""
    is_step = (
        node.target in STEPS.values()
        or node.target in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
        or is_view(node)
    )
    return (
        node.op == "call_function"
        and is_step
        and len(node.all_input_nodes) == 1
        and isinstance(node.args[0], fx.Node)
        and len(node.args[0].users) == 1
    )


_REDUCTIONS = (STEPS["all_reduce"], STEPS["reduce_scatter"])


def bucket_gradient_reductions(joint: JointGraph) -> None:
    """Gradients that are reduced over the same axes travel together, a bucket at a time.

    before    a = all_reduce(g, "dp");  b = all_reduce(h, "dp");  return loss, a, b
    after     c = all_reduce_bucket([g, h], "dp");  return loss, c[0], c[1]
    """
    place = {node: i for i, node in enumerate(joint.graph.nodes)}
    whole: dict[fx.Node, int] = {}  # of each gradient of parameters, the bytes of those
    for i, g in zip(joint.wanted, joint.gradients, strict=True):
        if g is not None and i >= joint.inputs:
            whole[g] = whole.get(g, 0) + joint.whole[joint.primals[i]]
    waiting: dict[Any, list[list[fx.Node]]] = {}
    for node in joint.graph.nodes:
        if node.target in _REDUCTIONS and node in whole and set(node.users) == {joint.graph.output_node()}:
            way = _way_to(node)
            waiting.setdefault(_ways_alike(way), []).append(way)
    for ways in waiting.values():
        for places in buckets([whole[way[-1]] for way in ways], BUCKET):
            bucket = [ways[k] for k in places]
            _travel_together(joint.graph, bucket, max((way[-1] for way in bucket), key=place.__getitem__))
    joint.read_output()


def _way_to(end: fx.Node) -> list[fx.Node]:
    """The reductions that lead to this one, over several axes one after the other."""
    way = [end]
    while way[0].args[0].target in _REDUCTIONS and len(way[0].args[0].users) == 1:
        way.insert(0, way[0].args[0])
    return way


def _ways_alike(way: Sequence[fx.Node]) -> tuple[Any, ...]:
    """What ways that may travel together share."""
    return tuple((n.target, n.args[1], n.meta["val"].dtype) for n in way)


def _travel_together(graph: fx.Graph, ways: Sequence[Sequence[fx.Node]], last: fx.Node) -> None:
    """One bucket in the stead of several ways, after the last of them."""
    if len(ways) < 2:
        return
    parts: list[Any] = [way[0].args[0] for way in ways]
    for nodes in zip(*ways, strict=True):  # on one axis after the other
        target: Any = nodes[0].target
        numbers = (
            ()
            if target is STEPS["all_reduce"]
            else tuple([n.args[2 + k] if len(n.args) > 2 + k else () for n in nodes] for k in range(3))
        )
        with graph.inserting_after(last):
            last = together = graph.call_function(
                STEPS[f"{target.__name__}_bucket"], (parts, nodes[0].args[1], *numbers)
            )
        together.meta["val"], parts = [n.meta["val"] for n in nodes], []
        for i, node in enumerate(nodes):
            with graph.inserting_after(last):
                last = graph.call_function(operator.getitem, (together, i))
            last.meta["val"] = node.meta["val"]
            parts.append(last)
    for way, part in zip(ways, parts, strict=True):
        way[-1].replace_all_uses_with(part)
        for node in reversed(way):
            graph.erase_node(node)


def own_gradients(joint: JointGraph) -> None:
    """Give each gradient a buffer of its own, laid out like its parameter: users add into `.grad` in place.

    before    return loss, g, g                                    # one buffer handed out twice
    after     h = clone(g);  return loss, g, h
    """
    buffers = (*joint.primals, *joint.tangents, *joint.outputs)
    joint.cuts = list(joint.held)
    joint.gradients, joint.held = own(joint.graph, joint.gradients, buffers), own(joint.graph, joint.held, buffers)
    joint.write_output()


def own(graph: fx.Graph, gradients: Sequence[fx.Node | None], others: Iterable[fx.Node]) -> list[fx.Node | None]:
    """The gradients, with a copy of each whose buffer is another's: of the gradients before it, or of `others`."""
    seen, found = {_buffer_of(n) for n in others}, list[fx.Node | None]()
    for value in gradients:
        if value is not None:
            if _buffer_of(value) in seen or not value.meta["val"].is_contiguous():
                with graph.inserting_before(graph.output_node()):
                    clone = graph.call_function(
                        torch.ops.aten.clone.default, (value,), {"memory_format": torch.contiguous_format}
                    )
                clone.meta["val"] = (
                    value.meta["val"].contiguous() if not value.meta["val"].is_contiguous() else value.meta["val"]
                )
                value = clone
            seen.add(_buffer_of(value))
        found.append(value)
    return found


def let_views_copy(joint: JointGraph) -> None:
    """A view of what cannot be viewed becomes a copy.

    Kernels may lay out their results otherwise than they do on fakes.

    before    y = batch_norm(x);  z = view(y, [32, 16])
    after     y = batch_norm(x);  z = reshape(y, [32, 16])
    """
    for node in joint.graph.nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default


def _buffer_of(node: fx.Node) -> fx.Node:
    """The node whose memory this one shows: views are followed to what they view."""
    while node.op == "call_function" and node.all_input_nodes and (node.target is operator.getitem or is_view(node)):
        if node.target is operator.getitem and not is_view(node.all_input_nodes[0]):
            return node  # a part of an op with several results is a buffer of its own
        node = node.all_input_nodes[0]
    return node


def _is_on_an_axis(node: fx.Node) -> bool:
    """A call whose second argument names a mesh axis."""
    return node.target is part_start or any(node.target in calls.values() for calls in (STEPS, PACK, BEGIN))


PASSES: tuple[Callable[[JointGraph], None], ...] = (
    write_out_conversions,
    drop_round_trips,
    drop_noise,
    join_sums_of_numbers,
    mark_what_waits,
    bucket_gradient_reductions,
    own_gradients,
    let_views_copy,
)


def verify(joint: JointGraph, after: str) -> None:
    """Raise unless the joint graph is well-formed and whole, with outputs and gradients where they are said to be."""
    joint.graph.lint()
    assert not joint.graph.find_nodes(op="call_function", target=CONVERT), after
    assert tuple(joint.graph.output_node().args[0]) == (*joint.outputs, *joint.gradients, *joint.held), after
    assert len(joint.gradients) == len(joint.wanted), after


# -- the two halves


def split(joint: JointGraph, regathered: Iterable[fx.Node] = ()) -> Joint:
    """Cut the joint graph: forward is what the outputs need, backward the rest, saved is what crosses.

    What is made from a regathered parameter by collectives, casts, copies and views alone does not cross: backward
    makes it again. Copies count because only some ranks may need one: an uneven part of one row is in memory order
    however it is turned.
    """
    forward = _needed(joint.outputs)
    for node in joint.graph.nodes:  # the parts of an op with several results live with it
        if node.target is operator.getitem and node.args[0] in forward:
            forward.add(node)
    backward = _needed([g for g in joint.gradients if g is not None]) - forward
    again = _made_again(joint, set(regathered), forward)
    saved: dict[fx.Node, None] = {}
    extra: set[fx.Node] = set()
    wanted = [a for n in joint.graph.nodes if n in backward and n.op == "call_function" for a in n.all_input_nodes]
    pending = wanted + [g for g in joint.gradients if g is not None]
    while pending:
        node = pending.pop(0)
        if node in backward or node in joint.tangents or node in extra or node in saved:
            continue
        if node in again:
            extra.add(node)
            pending += node.all_input_nodes
        else:
            saved[node] = None
    present = [g for g in joint.gradients if g is not None]
    first = extract(
        joint.graph, joint.primals, {n for n in forward if n.op == "call_function"}, [*joint.outputs, *saved]
    )
    second = extract(
        joint.graph, [*saved, *joint.tangents], {n for n in backward | extra if n.op == "call_function"}, present
    )
    gets = tuple(i for i, g in zip(joint.wanted, joint.gradients, strict=True) if g is not None)
    return Joint(
        first,
        second,
        len(joint.outputs),
        joint.differentiable,
        gets,
        *_for_accumulation(joint, [*saved, *joint.tangents]),
    )


def _for_accumulation(
    joint: JointGraph, inputs: Sequence[fx.Node]
) -> tuple[fx.Graph, fx.Graph, tuple[int, ...], tuple[int, ...]]:
    """The backward up to what waits, the rest of it, which of the gradients wait, and which operand of the rest each of
    those is.
    """
    rows = [
        (g, h, c)
        for g, h, c in zip(joint.gradients, joint.held, joint.cuts or joint.held, strict=True)
        if g is not None
    ]
    waits = tuple(i for i, (_, h, _) in enumerate(rows) if h is not None)
    ends = [g if h is None else h for g, h, _ in rows]
    cuts = [rows[i][2] for i in waits]
    distinct = list(dict.fromkeys(cuts))
    settled = [rows[i][0] for i in waits]
    hold = extract(joint.graph, inputs, _between(inputs, ends), ends)
    settle = extract(joint.graph, distinct, _between(cuts, settled), settled)
    return hold, settle, waits, tuple(distinct.index(c) for c in cuts)


def _between(inputs: Sequence[fx.Node | None], outputs: Sequence[fx.Node]) -> set[fx.Node]:
    """What leads from the inputs to the outputs."""
    found, stop, pending = set[fx.Node](), set(inputs), list(outputs)
    while pending:
        node = pending.pop()
        if node not in found and node not in stop:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _needed(of: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(of)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _made_again(joint: JointGraph, parameters: set[fx.Node], forward: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in joint.graph.nodes:
        is_cheap = (
            node in forward
            and node.op == "call_function"
            and (_is_on_an_axis(node) or is_view(node) or node.target in COPIES)
        )
        if is_cheap and all(a in parameters or a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def extract(source: fx.Graph, inputs: Sequence[fx.Node], nodes: set[fx.Node], outputs: Sequence[fx.Node]) -> fx.Graph:
    """A part of a graph as a graph of its own."""
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


def bind(graph: fx.Graph, axes: dict[str, Axis]) -> fx.GraphModule:
    """The graph as a module of this rank: every collective gets the axis that it names."""
    bound = copy.deepcopy(graph)
    given: dict[str, fx.Node] = {}
    for node in list(bound.nodes):
        if _is_on_an_axis(node):
            name = node.args[1]
            attribute = "axis_" + "".join(c if c.isalnum() else "_" for c in name)
            if name not in given:
                with bound.inserting_before(next(iter(bound.nodes))):
                    given[name] = bound.get_attr(attribute)
            node.args = (node.args[0], given[name], *node.args[2:])
    module = fx.GraphModule({n.target: axes[name] for name, n in given.items()}, bound)
    return module


def _described(node: fx.Node) -> str:
    operands, axis, *numbers = node.args[0].args if node.target in BEGIN.values() else node.args
    values = node.meta["val"] if isinstance(operands, (list, tuple)) else [node.meta["val"]]
    return f"{node.target.__name__}({', '.join(map(str, numbers[::3]))})@{axis} {[str(v.dtype) for v in values]}"
