"""Rewrite the joint graph: passes with a before and an after, in the order of PASSES."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from autopar.codegen.buffers import buffer_of, hands_on, numbers_of, own, read_instead
from autopar.codegen.chunks import write_out_chunks
from autopar.codegen.convolutions import part_convolutions
from autopar.codegen.joint_graph import BACK, CONVERT, CONVERTED, MEMBERS, OP, JointGraph
from autopar.runtime.collectives import STEPS, part_start
from autopar.runtime.private import ATTENTION_BACKWARD_ON_CPU, ATTENTION_ON_CPU, TO_COPY, UNSAFE_VIEW
from autopar.runtime.wires import on_axes
from autopar.sharding.convert import LocalStep
from autopar.space.windows import buckets_by_window

START = torch.ops.autopar.start.default
_GATHERING = ("all_gather", "all_to_all")  # along the first of their dims
_TURN = torch.ops.aten.transpose.int
_COPY = torch.ops.aten.clone.default
_THE_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)  # torch 2.14 traces the second for the first


def write_out_conversions(joint: JointGraph) -> None:
    """Replace each conversion by its steps: collectives and slices, after a cast where it has one.

    before    y = convert(x, "reduce_scatter(0:64)@dp; all_gather(0:64)@dp", "", [64, 8])
    after     a = reduce_scatter(x, "dp", 0, 64);  y = all_gather(a, "dp", 0, 64)

    before    y = convert(x, "all_gather(0:64)@dp", "reduce_scatter(0:64)@dp", [64, 8], "bfloat16")
    after     a = _to_copy(x, dtype=bfloat16);  y = all_gather(a, "dp", 0, 64)
    """
    for node in joint.graph.find_nodes(op="call_function", target=CONVERT):
        before = node.prev
        with joint.graph.inserting_before(node):
            value = _written_out(joint.graph, node)
        while (before := before.next) is not node:  # the conversion's steps inherit its marks
            before.meta.update((key, node.meta[key]) for key in (OP, BACK, CONVERTED) if key in node.meta)
        read_instead(node, value)
        joint.graph.erase_node(node)
    for node in joint.graph.find_nodes(op="call_function", target=START):
        node.target = part_start
    joint.read_output()


def _written_out(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Insert the cast and the steps of a conversion before it; returns the last of them."""
    value, steps, _, _, *dtypes = node.args
    if dtypes and dtypes[0]:
        value = _cast(graph, value, getattr(torch, dtypes[0]))
    way = LocalStep.parse_all(steps)
    for step, shape in zip(way, _shapes_on(way, value.meta["val"].shape, node.meta["val"].shape), strict=True):
        numbers = [number for dim in step.dims for number in dim]
        value = graph.call_function(STEPS[step.kind], (value, step.axis, *numbers))
        value.meta["val"] = node.meta["val"] if step is way[-1] else node.meta["val"].new_empty(shape)
    if value is node.args[0]:
        # No step made the value contiguous, but later ops were traced on a contiguous one.
        value = _in_memory_order(graph, value, node)
    return value


def _shapes_on(way: Sequence[LocalStep], given: Sequence[int], made: Sequence[int]) -> Iterator[list[int]]:
    """The local shape after each step of a conversion.

    A dim that a step gathers has the size that the step names. The size of a dim that a step cuts is that of the next
    step which takes this dim, or of the result.
    """
    shape = list(given)
    for k, step in enumerate(way):
        for d, size, _ in step.dims[:1] if step.kind in _GATHERING else ():
            shape[d] = size
        for d, _, _ in step.dims[1:] if step.kind in _GATHERING else step.dims:
            shape[d] = next((size for later in way[k + 1 :] for dim, size, _ in later.dims if dim == d), made[d])
        yield list(shape)


def _cast(graph: fx.Graph, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Insert a cast whose result is contiguous."""
    given = value.meta["val"]
    how = {"dtype": dtype}
    if not given.is_contiguous():
        how["memory_format"] = torch.contiguous_format
    made = graph.call_function(TO_COPY, (value,), how)
    made.meta["val"] = torch.empty_like(given, dtype=dtype, memory_format=torch.contiguous_format)
    return made


def _in_memory_order(graph: fx.Graph, value: fx.Node, like: fx.Node) -> fx.Node:
    """The value itself where it is contiguous, else a contiguous copy with the metadata of `like`."""
    if value.meta["val"].is_contiguous():
        return value
    copy = graph.call_function(torch.ops.aten.clone.default, (value,), {"memory_format": torch.contiguous_format})
    copy.meta["val"] = like.meta["val"]
    copy.meta[OP] = like.meta.get(OP, "")
    return copy


def send_rows(joint: JointGraph) -> None:
    """Replace ops whose rows travel by functions of axes, which are bound as those of collectives are.

    before    y = autopar.experts(x, ids, ..., hops="tp", 40)
    after     y = experts_forward(x, ("tp",), ids, ..., hops="tp", 40)
    """
    for node in joint.graph.nodes:
        found = on_axes(node.target, node.args)
        if found is not None:
            node.target, node.args = found


def drop_round_trips(joint: JointGraph) -> None:
    """Forward a value past a slice and the gather that undoes it.

    before    y = slice(x, "dp", 0, 64);  z = all_gather(y, "dp", 0, 64);  return relu(z)
    after     return relu(x)

    A gather gives a contiguous result, so the forwarded value is copied where it is not contiguous. Ranks may differ in
    that, but not in their collectives.
    """
    for node in joint.graph.find_nodes(op="call_function", target=STEPS["all_gather"]):
        middle = node.args[0]
        if middle.target is STEPS["slice"] and middle.args[1:] == node.args[1:]:
            with joint.graph.inserting_before(node):
                value = _in_memory_order(joint.graph, middle.args[0], node)
            read_instead(node, value)
            joint.graph.erase_node(node)
    joint.read_output()


def drop_noise(joint: JointGraph) -> None:
    """Remove nodes that only tracing needed: views that are the whole tensor, and ops that nothing reads.

    before    b = detach(a);  c = mul(b, b);  d = relu(a)          # nobody uses d
    after     c = mul(a, a)
    """
    for same in _THE_SAME:
        for node in joint.graph.find_nodes(op="call_function", target=same):
            read_instead(node, node.args[0])
            joint.graph.erase_node(node)
    joint.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    joint.read_output()


def join_sums_of_numbers(joint: JointGraph) -> None:
    """Put all-reduces of scalars, such as a loss and its count, in one message where none needs another.

    before    a = all_reduce(s, "dp");  b = all_reduce(n, "dp");  c = div(a, b)
    after     t = all_reduce_bucket([s, n], "dp");  c = div(t[0], t[1])
    """
    alone = {node for i, gradient in zip(joint.wanted, joint.gradients) for node in _steps_of(joint, i, gradient)}
    alone |= {buffer_of(output) for output in joint.outputs}  # a caller may write to an output in place
    groups: dict[Any, list[list[list[fx.Node]]]] = {}  # chains that share messages, by axes and dtype
    # Nodes that depend on tangents share no message with forward.
    backward = set(joint.tangents)
    for node in joint.graph.nodes:
        if not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
        goes_on = any(user.target is STEPS["all_reduce"] and _goes_on_in(node, user) for user in node.users)
        is_end = node.target is STEPS["all_reduce"] and not goes_on
        if is_end and node not in alone and not node.meta["val"].dim():
            way = _way_to(node)
            alike = groups.setdefault((node in backward, _ways_alike(way)), [])
            if alike and _may_share([*alike[-1], way]):
                alike[-1].append(way)
            else:
                alike.append([way])
    for ways in itertools.chain.from_iterable(groups.values()):
        shared: list[list[fx.Node]] = []
        for way in ways:  # a message that reads some of them may have moved up since
            if shared and not _may_share([*shared, way]):
                _travel_together(joint.graph, shared, _first_reader(shared).prev)
                shared = []
            shared.append(way)
        _travel_together(joint.graph, shared, _first_reader(shared).prev)
    joint.read_output()


def _may_share(ways: Sequence[Sequence[fx.Node]]) -> bool:
    """Whether all that these chains of steps read is made before the first reader of any of their results."""
    first = _first_reader(ways)
    return all(way[0].args[0] < first for way in ways)


def _first_reader(ways: Sequence[Sequence[fx.Node]]) -> fx.Node:
    return min(user for way in ways for user in way[-1].users)  # nodes compare by their place


def mark_what_waits(joint: JointGraph) -> None:
    """Return with each parameter's gradient its unreduced value, which micro-batches add up.

    before    h = to(g, f32);  a = all_reduce(h, "dp");  return loss, a
    after     h = to(g, f32);  a = all_reduce(h, "dp");  return loss, a, h
    """
    held: list[fx.Node | None] = []
    for i, gradient in zip(joint.wanted, joint.gradients, strict=True):
        cut = gradient if i >= joint.inputs else None
        read = joint.reads.get(joint.primals[i])
        for node in () if read is not None and read.is_reduced_at_once else _steps_of(joint, i, cut):
            cut = node.args[0] if node.target in _REDUCTIONS else cut
        held.append(cut)
    joint.held = held
    joint.write_output()


def _steps_of(joint: JointGraph, primal: int, gradient: fx.Node | None) -> Iterator[fx.Node]:
    """The chain of steps, casts and views that leads to the gradient of a primal, the last step first.

    They are the backward of what stands between the primal and all its readers, on every rank the same reductions.
    """
    way = joint.ways.get(joint.primals[primal], frozenset())
    while gradient is not None and gradient.meta.get(BACK) in way and hands_on(gradient):
        yield gradient
        gradient = gradient.args[0]


_REDUCTIONS = (STEPS["all_reduce"], STEPS["reduce_scatter"])
_MOVES = (*_REDUCTIONS, STEPS["all_to_all"], STEPS["all_gather"])  # steps over one axis after another


def bucket_gradient_reductions(joint: JointGraph) -> None:
    """Reduce gradients of one window over the same axes in buckets, one message each.

    Gradients that micro-batches accumulate before their reduction share no bucket with those that are reduced in every
    micro-batch. The gradient of a large table whose rows are looked up has no bucket.

    before    a = all_reduce(g, "dp");  b = all_reduce(h, "dp");  return loss, a, slice(b, "dp", 0, 64)
    after     c = all_reduce_bucket([g, h], "dp");  return loss, c[0], slice(c[1], "dp", 0, 64)
    """
    waits = {g for g, held in zip(joint.gradients, joint.held, strict=True) if held is not g}
    place = {node: i for i, node in enumerate(joint.graph.nodes)}
    whole: dict[fx.Node, int] = {}  # bytes of each gradient's whole parameters
    window: dict[fx.Node, int] = {}
    alone = set[fx.Node]()
    for i, g in zip(joint.wanted, joint.gradients, strict=True):
        if g is not None and i >= joint.inputs:
            read = joint.reads[joint.primals[i]]
            whole[g] = whole.get(g, 0) + read.nbytes
            window.setdefault(g, read.window)
            if read.is_alone:
                alone.add(g)
    behind = _behind_reductions(joint, whole)
    gradient = {reduction: [reduction, *steps][-1] for reduction, steps in behind.items()}
    full = _closing(sorted(whole.keys() - alone, key=place.__getitem__), whole, window)
    waiting: dict[Any, list[list[fx.Node]]] = {}
    for node in joint.graph.nodes:
        if node in gradient and gradient[node] not in alone:
            way = _way_to(node)
            of = gradient[node]
            # A gradient that is cut after its reduction is much larger before it, so it waits for one bucket at most.
            key = of in waits, _ways_alike(way), full[of] if behind[node] else -1
            waiting.setdefault(key, []).append(way)
    for ways in waiting.values():
        of_ways = [gradient[way[-1]] for way in ways]
        for places in buckets_by_window([whole[g] for g in of_ways], [window[g] for g in of_ways]):
            bucket = [ways[k] for k in places]
            last = _travel_together(joint.graph, bucket, max((way[-1] for way in bucket), key=place.__getitem__))
            for way in bucket if len(bucket) > 1 else ():  # steps on a reduced gradient go behind the bucket
                for node in reversed(behind[way[-1]]):
                    last.append(node)
    joint.read_output()


def _behind_reductions(joint: JointGraph, gradients: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The local steps behind the last communicating step of each gradient, by that step.

    Left out are gradients that no reduction makes, and those that another node reads.
    """
    left = [_since_moved(g) for g in gradients if set(g.users) == {joint.graph.output_node()}]
    return {end: steps for end, *steps in filter(None, left) if _way_to(end)}


def _closing(
    made: Sequence[fx.Node], sizes: Mapping[fx.Node, int], window: Mapping[fx.Node, int]
) -> dict[fx.Node, int]:
    """The bucket number of each gradient, if all of them, in this order, shared one sequence of buckets."""
    filled = buckets_by_window([sizes[g] for g in made], [window[g] for g in made])
    return {made[k]: i for i, places in enumerate(filled) for k in places}


def _since_moved(gradient: fx.Node) -> list[fx.Node]:
    """The last communicating step that leads to a gradient, and the local steps behind it.

    The list is empty if no step communicates. All steps belong to the parameter's own conversion: a reduction inside an
    op is not delayed for a bucket.
    """
    steps = [gradient]
    while steps[0].target not in _MOVES:
        if not hands_on(steps[0]) or steps[0].args[0].meta.get(BACK) != gradient.meta.get(BACK):
            return []
        steps.insert(0, steps[0].args[0])
    return steps


def _way_to(end: fx.Node) -> list[fx.Node]:
    """The chain of one conversion's steps over several axes, from its first reduction to `end`.

    What stands between two conversions may be left out on some ranks, so that their steps may only seem to meet.
    """
    way = [end]
    while _goes_on_in(way[0].args[0], way[0]) and len(way[0].args[0].users) == 1:
        way.insert(0, way[0].args[0])
    return list(itertools.dropwhile(lambda n: n.target not in _REDUCTIONS, way))


def _goes_on_in(node: fx.Node, step: fx.Node) -> bool:
    """Whether the node is a step of which `step` is the next, in the same conversion."""
    marks = [(n.meta.get(BACK), n.meta.get(OP)) for n in (node, step)]
    return node.target in _MOVES and marks[0] == marks[1]


def _ways_alike(way: Sequence[fx.Node]) -> tuple[Any, ...]:
    """A key that is equal for chains of reductions which may share messages: by kind, axis and dtype."""
    return tuple((n.target, n.args[1], n.meta["val"].dtype) for n in way)


def _travel_together(graph: fx.Graph, ways: Sequence[Sequence[fx.Node]], last: fx.Node) -> fx.Node:
    """Replace chains of reductions by buckets placed after `last`; returns the last node of the buckets."""
    if len(ways) < 2:
        return last
    parts: list[Any] = [way[0].args[0] for way in ways]
    for nodes in zip(*ways, strict=True):  # one message for each axis of the chains
        target: Any = nodes[0].target
        with graph.inserting_after(last):
            given = (parts, nodes[0].args[1], *numbers_of(nodes))
            last = together = graph.call_function(STEPS[f"{target.__name__}_bucket"], given)
        together.meta["val"] = [n.meta["val"] for n in nodes]
        parts = []
        if BACK in nodes[-1].meta:
            # `recompute_late` finds the place of recomputed nodes by this mark.
            together.meta[BACK] = nodes[-1].meta[BACK]
        together.meta[MEMBERS] = [n.meta.get(BACK) for n in nodes]
        for i, node in enumerate(nodes):
            with graph.inserting_after(last):
                last = graph.call_function(operator.getitem, (together, i))
            last.meta["val"] = node.meta["val"]
            parts.append(last)
    for way, part in zip(ways, parts, strict=True):
        read_instead(way[-1], part)
        for node in reversed(way):
            graph.erase_node(node)
    return last


def own_gradients(joint: JointGraph) -> None:
    """Give each gradient a contiguous buffer of its own, as users add into `.grad` in place.

    before    return loss, g, g                                    # one buffer handed out twice
    after     h = clone(g);  return loss, g, h
    """
    buffers = (*joint.primals, *joint.tangents, *joint.outputs)
    joint.cuts = list(joint.held)
    joint.gradients = own(joint.graph, joint.gradients, buffers)
    given_out = [g for g, held in zip(joint.gradients, joint.held, strict=True) if held is None and g is not None]
    joint.held = own(joint.graph, joint.held, (*buffers, *given_out))  # sums are added to in place
    joint.write_output()


def turn_queries(joint: JointGraph) -> None:
    """Copy CPU attention's queries into the order rows, positions, heads where its result is copied so.

    The result takes the memory layout of the queries. Queries that come by a conversion have heads before positions, so
    that the result would be copied when it is transposed, and be in memory twice.

    before    o = attention(q, k, v);  y = clone(transpose(o, 1, 2))
    after     r = transpose(clone(transpose(q, 1, 2)), 1, 2);  o = attention(r, k, v);  y = transpose(o, 1, 2)
    """
    for node in joint.graph.find_nodes(op="call_function", target=ATTENTION_ON_CPU):
        results = [part for part in node.users if part.args[1] == 0]
        turned = [(o, t) for o in results for t in o.users if t.target is _TURN and set(t.args[1:]) == {1, 2}]
        copies = [(o, t, y) for o, t in turned for y in t.users if y.target is _COPY]
        if not copies or node.args[0].meta["val"].transpose(1, 2).is_contiguous():
            continue
        query = node.args[0]
        value = node.args[0]
        for target, more in ((_TURN, (1, 2)), (_COPY, ()), (_TURN, (1, 2))):
            how = {} if more else {"memory_format": torch.contiguous_format}
            with joint.graph.inserting_before(node):
                made = joint.graph.call_function(target, (value, *more), how)
            made.meta.update({key: node.meta[key] for key in (OP, BACK) if key in node.meta})
            made.meta["val"] = target(value.meta["val"], *more, **how)
            value = made
        for reader in (node, *(u for u in query.users if u.target is ATTENTION_BACKWARD_ON_CPU)):
            reader.replace_input_with(query, value)
        for o, t, y in copies:
            o.meta["val"] = _COPY(o.meta["val"].transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
            t.meta["val"] = o.meta["val"].transpose(1, 2)
            read_instead(y, t)
            joint.graph.erase_node(y)
    joint.read_output()


def let_views_copy(joint: JointGraph) -> None:
    """Replace views by reshapes, as a kernel may lay out its result otherwise than fake tensors say.

    before    y = batch_norm(x);  z = view(y, [32, 16])
    after     y = batch_norm(x);  z = reshape(y, [32, 16])
    """
    for node in joint.graph.nodes:
        if node.target in (torch.ops.aten.view.default, UNSAFE_VIEW):
            node.target = torch.ops.aten.reshape.default


PASSES: tuple[Callable[[JointGraph], None], ...] = (
    write_out_conversions,
    send_rows,
    drop_round_trips,
    drop_noise,
    write_out_chunks,
    join_sums_of_numbers,
    mark_what_waits,
    bucket_gradient_reductions,
    own_gradients,
    turn_queries,
    let_views_copy,
    part_convolutions,
)
