"""Let values that the plan has on the host leave forward, and come back in backward.

Which values, and behind and before which ops they travel, follows from the plan; where these ops stand is looked up in
each emitted half, once all else is in its place. A copy is no collective: ranks with uneven parts may differ in them.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from autopar.codegen.buffers import buffer_of, read_instead, shows, views_of
from autopar.codegen.halves import Joint
from autopar.codegen.joint_graph import BACK, OP, RECOMPUTED
from autopar.codegen.local import LocalProgram
from autopar.codegen.local_passes import is_kernel
from autopar.graph import walks
from autopar.graph.graph import Graph, info
from autopar.letters import BadPlan
from autopar.runtime.host import begin_from_host, begin_to_host, end_from_host, end_to_host
from autopar.sharding.costs import DURING_BACKWARD
from autopar.solver.plan import Plan
from autopar.space import timeline

Times = tuple[int, int]  # times of the ops behind which a value is gone, and before whose backward it comes


@dataclass(frozen=True, slots=True, order=True)
class Coming:
    """When a parameter that lies on the host comes up, and its gradient has gone down, by times of ops in forward."""

    ahead: int  # the op before which it begins to come up
    again: int  # the op before whose backward it does once more
    down: int  # the op before whose backward its gradient is on the host; -1: when backward ends


@dataclass(frozen=True, slots=True, eq=False)
class Offloaded:
    """Nodes of a local program whose values wait on the host, by their names, and parameters that lie there.

    A result of a kernel has its index beside the name; None stands for all that a node makes.
    """

    times: Mapping[str, int] = field(default_factory=dict)  # node of an op -> the time of the op in forward
    travels: Mapping[tuple[str, int | None], Times] = field(default_factory=dict)
    least: int = 0  # bytes below which a value stays
    parameters: Mapping[str, Coming] = field(default_factory=dict)  # parameters that lie on the host
    handed_over: frozenset[str] = frozenset()  # parameters that the host steps while backward goes on

    @property
    def key(self) -> Hashable:
        """A key that is equal where the same values travel at the same times."""
        parameters = tuple(sorted(self.parameters.items()))
        times = tuple(sorted(self.times.items())) if self.travels or parameters else ()
        return tuple(sorted(self.travels.items(), key=repr)), times, self.least, parameters, self.handed_over

    def travel(self, owner: fx.Node) -> Times | None:
        """The times at which the memory of an emitted node travels; None where it stays."""
        made: Any = owner
        index: Any = None
        if owner.target is operator.getitem:
            made, index = owner.args
        op = made.meta.get(OP, "")
        return self.travels.get((op, index)) or self.travels.get((op, None))


EVERYTHING_STAYS = Offloaded()


def offloaded_of(
    graph: Graph, plan: Plan, program: LocalProgram, parameters: Mapping[str, Coming] | None = None
) -> Offloaded:
    """The nodes of a local program that make what the plan has on the host, with parameters there."""
    handed_over = handed_over_of(plan)
    if not plan.offloaded and not parameters and not handed_over:
        return EVERYTHING_STAYS
    ops = [n for n in graph.nodes if info(n).kind == "op"]
    at = {info(op).key: time for time, op in enumerate(ops)}
    if lost := sorted({op for ops in plan.offloaded.values() for op in ops} - at.keys()):
        raise BadPlan(f"a value travels beside {lost[0]}, which is not an op of the model", advice="plan again")
    nodes = [n for n in program.fx.nodes if n.op == "call_function"]
    travels = {
        of: (at[plan.offloaded[name][0]], at[plan.offloaded[name][1]])
        for node in nodes
        for of, names in _values(node)
        for name in names
        if name in plan.offloaded
    }
    times = {n.name: at[info(n).key] for n in nodes if info(n).kind == "op"}
    return Offloaded(times, travels, timeline.SMALL, parameters or {}, handed_over)


def handed_over_of(plan: Plan) -> frozenset[str]:
    """The parameters that the host steps while backward goes on.

    Of several micro-batches gradients are final when the last one has ended.
    """
    is_alone = plan.accumulation == plan.microbatches == 1
    return plan.hosted if plan.optimizer == DURING_BACKWARD and is_alone else frozenset()


def _values(node: fx.Node) -> Iterator[tuple[tuple[str, int | None], Collection[str]]]:
    """The keys of a node's values with their names in the plan; results of a kernel have their own."""
    about = info(node)
    parts = walks.parts(node) if is_kernel(node) else []
    if parts:
        for part in parts:
            index: Any = part.args[1]
            yield (node.name, index), (info(part).key,)
    elif about.kind != "part":
        yield (node.name, None), (about.key, *about.names)


@dataclass(frozen=True, slots=True, eq=False)
class Trip:
    """A memory that waits on the host and comes back in backward, and the saved values that show it."""

    owner: fx.Node
    shown: Mapping[int, fx.Node]  # index of a saved value -> its node in forward
    gone: int
    comes: int


def wait_on_host(joint: Joint, offloaded: Offloaded) -> None:
    """Let values wait for backward on the host; views of what travels are taken again in backward.

    Where backward is in two parts, all of them return in the first, which hands on what the second reads.

    before    def forward(x):           a = gelu(x);  v = t(a);  y = mm(a, w);  z = relu(y);  return z, v
              def backward(v, g):       d = mul(g, 2);  e = mm(v, d)
    after     def forward(x):           a = gelu(x);  y = mm(a, w);  a_leaves = begin_to_host(a);  z = relu(y);
                                        a_host = end_to_host(a_leaves);  return z, a_host
              def backward(a_host, g):  a_returns = begin_from_host(a_host, "cuda");  d = mul(g, 2);
                                        a = end_from_host(a_returns);  v = t(a);  e = mm(v, d)
    """
    trips = list(_trips(joint, offloaded)) if offloaded.travels else []
    if not trips:
        return
    backwards = [joint.backward, joint.hold, *([] if joint.parts is None else [joint.parts.inward])]
    for half in backwards:
        come_back(half, trips, offloaded)
    _leave(joint, trips, offloaded)
    for half in (joint.forward, *backwards):
        half.lint()


def _trips(joint: Joint, offloaded: Offloaded) -> Iterator[Trip]:
    """The memories that travel: large, made in forward, kept for backward alone, and read by it."""
    results: Any = joint.forward.output_node().args[0]
    given = joint.backward.find_nodes(op="placeholder")
    leaving = {buffer_of(n) for n in results[: joint.outputs]}
    computing = {n.meta.get(OP) for n in joint.forward.nodes if n.op == "call_function" and not shows(n)}
    shown: dict[fx.Node, dict[int, fx.Node]] = {}
    for place, node in enumerate(results[joint.outputs :]):
        shown.setdefault(buffer_of(node), {})[place] = node
    for owner, places in shown.items():
        times = _times(owner, places.values(), offloaded, computing) if owner.op == "call_function" else None
        is_read = any(given[place].users for place in places)
        if times is not None and owner not in leaving and is_read and _bytes(owner) >= offloaded.least:
            yield Trip(owner, places, *times)


def _times(owner: fx.Node, shown: Iterable[fx.Node], offloaded: Offloaded, computing: Collection[Any]) -> Times | None:
    """The times at which a memory travels: those of what makes it, or of an op that only views it here.

    The plan counts a copy where such an op needs one for whole tensors: a part may be contiguous as it is, such as that
    of a single head.
    """
    views = itertools.chain.from_iterable(views_of(node) for node in shown)
    nodes = (owner, *(view for view in views if view.meta.get(OP) not in computing))
    return next((times for node in nodes if (times := offloaded.travel(node)) is not None), None)


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())


def come_back(
    backward: fx.Graph, trips: Sequence[Trip], offloaded: Offloaded, way: Callable[..., Any] = begin_from_host
) -> None:
    """Let each memory begin to return before the backward of its op, and end before its first reader."""
    given = backward.find_nodes(op="placeholder")
    begun = starts(backward, offloaded.times)
    times = sorted(begun)
    for trip in trips:
        arrived = {given[place]: node for place, node in trip.shown.items()}
        with backward.inserting_before(min(arrived)):
            host = backward.placeholder(f"{trip.owner.name}_host")
        host.meta["val"] = trip.owner.meta["val"]
        if readers := [user for value in arrived for user in value.users]:
            next_op = bisect.bisect_right(times, trip.comes) - 1
            begin = [begun[times[next_op]]] if next_op >= 0 else []
            with backward.inserting_before(min([*readers, *begin])):
                pending = called(backward, way, (host, host.meta["val"].device.type), f"{trip.owner.name}_returns")
            shown = _returned(backward, trip, pending, min(readers))
            for value, node in arrived.items():
                read_instead(value, shown[node])
        for value in arrived:
            backward.erase_node(value)


def _returned(backward: fx.Graph, trip: Trip, pending: fx.Node, first: fx.Node) -> dict[fx.Node, fx.Node]:
    """End the copy of a memory; returns the values of backward that show it, by those of forward."""
    value = trip.owner.meta["val"]
    shown: dict[fx.Node, fx.Node] = {}
    with backward.inserting_before(first):
        shown[trip.owner] = called(backward, end_from_host, (pending,), trip.owner.name)
        for view in _views(trip):
            shown[view] = backward.node_copy(view, shown.__getitem__)
    pending.meta["val"] = shown[trip.owner].meta["val"] = value
    return shown


def _views(trip: Trip) -> list[fx.Node]:
    """The views through which forward's saved values show a memory, operands first."""
    return list(dict.fromkeys(view for node in trip.shown.values() for view in views_of(node)))


def save_owners(joint: Joint, trips: Sequence[Trip]) -> None:
    """Save each memory as its owner has it, once, in the place of all values that show it."""
    forward = joint.forward
    output = forward.output_node()
    given: Any = output.args[0]
    results: list[fx.Node | None] = list(given)
    for trip in trips:
        first, *others = (joint.outputs + place for place in sorted(trip.shown))
        results[first] = trip.owner
        for place in others:
            results[place] = None
    output.args = (tuple(node for node in results if node is not None),)
    for view in (view for trip in trips for view in reversed(_views(trip))):
        if not view.users:
            forward.erase_node(view)


def _leave(joint: Joint, trips: Sequence[Trip], offloaded: Offloaded) -> None:
    """Copy each memory behind its last reader, and save the copy in the place of all values that show it."""
    save_owners(joint, trips)
    forward = joint.forward
    output = forward.output_node()
    saved: Any = output.args[0]
    left = list(saved)
    readers = _readers(forward)
    ends = _ends(forward, offloaded.times)
    times = sorted(ends)
    for trip in trips:
        with forward.inserting_after(with_its_parts(max([trip.owner, *readers[trip.owner]]))):
            pending = called(forward, begin_to_host, (trip.owner,), f"{trip.owner.name}_leaves")
        next_op = bisect.bisect_left(times, trip.gone)
        last = ends[times[next_op]] if next_op < len(times) else output.prev
        with forward.inserting_after(with_its_parts(max(pending, last))):
            host = called(forward, end_to_host, (pending,), f"{trip.owner.name}_host")
        pending.meta["val"] = host.meta["val"] = trip.owner.meta["val"]
        left[left.index(trip.owner)] = host
    output.args = (tuple(left),)


def called(graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], name: str) -> fx.Node:
    return graph.create_node("call_function", target, args, name=name)


def _readers(forward: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The nodes of forward that read or show each memory, by its owner."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in forward.nodes:
        found.setdefault(buffer_of(node), []).extend(user for user in node.users if user.op != "output")
    return found


def _ends(forward: fx.Graph, times: Mapping[str, int]) -> dict[int, fx.Node]:
    """The last node of each op that forward has, by the op's time."""
    return {times[node.meta[OP]]: node for node in forward.nodes if node.meta.get(OP) in times}


def starts(backward: fx.Graph, times: Mapping[str, int]) -> dict[int, fx.Node]:
    """The first node of the backward of each op, or of the op where it is recomputed, by the op's time."""
    found: dict[int, fx.Node] = {}
    for node in backward.nodes:
        op = node.meta.get(OP) if node.meta.get(RECOMPUTED) else node.meta.get(BACK)
        if op in times:
            found.setdefault(times[op], node.args[0] if node.target is operator.getitem else node)
    return found


def with_its_parts(node: fx.Node) -> fx.Node:
    """The last of the results that are taken behind an op with several; else the node itself."""
    made = node.args[0] if node.target is operator.getitem else node
    while node.next.target is operator.getitem and node.next.args[0] is made:
        node = node.next
    return node
